"""The comment behind a stream with the engine's own counts: only for who asks; nothing else of the stream changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientSession, HttpVersion10

from router.router_server import RouterServer
from tests.support.fakes import USAGE, FakeEngine, breaks_midway, events, running, stream
from tests.support.keyring import Keyring

CHAT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"
ASKS = {"x-warmroute-final-receipt": "1"}
TALK = [{"role": "user", "content": "tell me more " * 300}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": TALK, "stream_options": {"include_usage": True}},
    MESSAGES: {"model": "m", "max_tokens": 8, "messages": TALK},
    RESPONSES: {"model": "m", "input": TALK},
    GENERATE: {"text": TALK[0]["content"]},
}


async def streamed(
    client: ClientSession, app: RouterServer, path: str = CHAT, headers: dict[str, str] | None = None, **more: Any
) -> tuple[bytes, dict[str, str]]:
    """The bytes of a stream, and its headers."""
    async with client.post(app.url + path, json={**BODIES[path], "stream": True, **more}, headers=headers) as answer:
        return await answer.read(), dict(answer.headers)


@pytest.mark.parametrize("path", BODIES)
async def test_counts_come_behind_the_stream(client: ClientSession, engine: FakeEngine, path: str) -> None:
    """A client that asks gets all bytes of the stream as ever, and behind them one comment: where it went, and tokens
    that add up to what the engine counted. The engine does not see the header."""
    async with running(engine) as app:
        plain, _ = await streamed(client, app, path)
        told, headers = await streamed(client, app, path, ASKS | {"x-request-id": "mine"})
    assert told.startswith(plain)
    comment = told.removeprefix(plain)
    assert comment.startswith(b": warmroute {")
    assert comment.endswith(b"}\n\n")
    assert comment.count(b"\n") == 2
    receipt = json.loads(comment.removeprefix(b": warmroute "))
    assert receipt["request_id"] == "mine"
    for name in ("replica", "reason", "grade"):
        assert receipt[name] == headers[f"x-warmroute-{name}"]
    assert (receipt["prompt_tokens"], receipt["cached_tokens"], receipt["completion_tokens"]) == (100, 32, 3)
    misses = [int(each.partition("=")[2]) for each in receipt["miss"].split(",")]
    assert receipt["cached_tokens"] + sum(misses) == receipt["prompt_tokens"]
    assert all("x-warmroute-final-receipt" not in seen.headers for seen in engine.seen)


async def test_usage_that_only_we_asked_for_is_in_the_comment_alone(client: ClientSession, engine: FakeEngine) -> None:
    """Where the router asks for usage and takes it out again, the comment has it."""
    async with running(engine, api__ask_usage=True) as app:
        await streamed(client, app, stream_options=None)  # shows that the engine sends none unasked
        told, _ = await streamed(client, app, headers=ASKS, stream_options=None)
    body, _, comment = told.partition(b": warmroute ")
    assert b"usage" not in body
    assert json.loads(comment)["cached_tokens"] == 32


async def test_who_gets_none(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """No comment for a tenant whose answers carry no receipts, where receipts are off, behind a stream that broke, that
    ends within a line, or that is not chunked, and none behind an answer that does not stream."""
    ring = Keyring(tmp_path, acme={})
    async with running(engine, **ring.settings) as app:
        assert b": warmroute" not in (await streamed(client, app, headers=ASKS | ring.of("acme")))[0]
    async with running(engine, api__receipts=False) as app:
        assert b": warmroute" not in (await streamed(client, app, headers=ASKS))[0]
    async with running(engine, upstream__retries_max=0) as app:
        engine.script.append(breaks_midway)
        assert b": warmroute" not in (await streamed(client, app, headers=ASKS))[0]
        pieces = events(usage=USAGE)
        engine.script.append(lambda _, request: stream(request, [*pieces[:-1], pieces[-1].rstrip(b"\n")]))
        cut, _ = await streamed(client, app, headers=ASKS)
        assert cut.endswith(b"data: [DONE]")
        async with client.post(app.url + CHAT, json=BODIES[CHAT], headers=ASKS) as answer:
            assert b": warmroute" not in await answer.read()
        async with ClientSession(version=HttpVersion10) as old:
            whole, headers = await streamed(old, app, headers=ASKS)
            assert "Transfer-Encoding" not in headers
            assert whole.endswith(b"data: [DONE]\n\n")


async def test_official_clients_pass_over_it(engine: FakeEngine) -> None:
    """OpenAI's and Anthropic's clients read streams with the comment as those without, twice on one connection."""
    async with running(engine) as app:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, headers=ASKS)
        async with openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x", max_retries=0, http_client=http) as gpt:
            for _ in range(2):
                pieces = [piece async for piece in await gpt.chat.completions.create(**BODIES[CHAT], stream=True)]
                text = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
                assert text == "w0 w1 w2 "
                assert [each.usage.prompt_tokens for each in pieces if each.usage] == [100]
            async with gpt.responses.stream(model="m", input="hi") as stream_:
                assert (await stream_.get_final_response()).usage.input_tokens == 100
        http_ = anthropic.DefaultAsyncHttpxClient(trust_env=False, headers=ASKS)
        async with anthropic.AsyncAnthropic(base_url=app.url, api_key="x", max_retries=0, http_client=http_) as claude:
            for _ in range(2):
                async with claude.messages.stream(**BODIES[MESSAGES]) as said:
                    assert (await said.get_final_message()).usage.output_tokens == 3
        assert app.http.proxy.in_flight == 0
