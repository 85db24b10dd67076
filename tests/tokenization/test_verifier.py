"""Which models' prompts can be turned into token ids, in a whole router with a replica that publishes events."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.core.types.placements import Confidence
from tests.engines.event_world import Publisher, stored
from tests.http.wire import CHAT
from tests.support.fakes import FakeEngine, running
from tests.support.waiting import until

tokenizers = pytest.importorskip("tokenizers")


@dataclass
class Tokenizing(FakeEngine):
    """An engine whose /tokenize renders chats by code of its own, and encodes by this file."""

    tokenizer_json: str = ""
    refuses: bool = False

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/tokenize":
            return await super()._generate(request)
        body = json.loads(await request.read())
        if self.refuses:
            return web.json_response({"error": "no"}, status=404)
        text = body.get("prompt") or "".join(str(message["content"]) for message in body["messages"])
        made = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        special = body.get("add_special_tokens", True) and "prompt" in body
        return web.json_response({"tokens": made.encode(text, add_special_tokens=special).ids})


@pytest.mark.parametrize(
    ("how", "grade", "why"),
    [
        ("asked", Confidence.EXACT, "joined at batch 0"),
        (
            "not allowed",
            Confidence.ESTIMATED,
            "the model has no chat template, and /tokenize of its replicas is turned off",
        ),
        ("refused", Confidence.ESTIMATED, "the model has no chat template, and /tokenize rejects requests"),
    ],
)
async def test_a_tokenizer_without_a_chat_template(
    tmp_path: Path, tokenizer_json: str, caplog: pytest.LogCaptureFixture, how: str, grade: Confidence, why: str
) -> None:
    """It is no worse than none: a replica is asked for chats, and where it cannot be, the reason is said."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    publisher = Publisher()
    await publisher.say(stored(0, 2) | {"block_size": 16, "token_ids": list(range(32))})
    port, replay_port = publisher.ports
    source = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}", "topic": ""}
    overrides: dict[str, Any] = {"tokens__sources": (f"m={tmp_path}",), "tokens__ask_replicas": how != "not allowed"}
    overrides |= {"tokens__deadline_s": 20.0}
    engine = Tokenizing(
        kv_event_sources={"0": source}, owned_by="vllm", tokenizer_json=tokenizer_json, refuses=how == "refused"
    )
    try:
        with caplog.at_level(logging.WARNING):
            async with engine, running(engine, **overrides) as app:
                knowledge = app.control.router.knowledge
                await until(lambda: knowledge.grade_of(engine.url) == (grade, why))
                if how == "asked":
                    prompt = {"model": "m", "messages": [{"role": "user", "content": "a few words " * 20}]}
                    for _ in range(2):
                        async with ClientSession() as client, client.post(app.url + CHAT, json=prompt) as response:
                            assert response.headers["x-warmroute-grade"] == "exact"
                    assert app.control.prompts is not None
                    assert app.control.prompts.counts()["asked"] == 1
    finally:
        await publisher.stop()
    said = [record.fields for record in caplog.records if getattr(record, "event", "") == "chats_asked"]  # type: ignore[attr-defined]
    assert said == ([{"model": "m", "why": "the model has no chat template"}] if how == "asked" else [])
