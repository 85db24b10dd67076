"""JSON that nests too deep, on every path and in every field."""

from __future__ import annotations

import random
from io import BytesIO

import pytest
from aiohttp import ClientSession

from router.core.dialects import PATHS
from tests.support.fakes import FakeEngine, running

OTHERS = ("/tokenize", "/v1/rerank", "/v1/messages/count_tokens")
FIELDS = ("messages", "prompt", "input", "tools", "metadata", "model", "stream", "text", "system", "cache_salt", "zzz")
OPENS = {"[": "]", '{"a":': "}", '[{"a":': "}]", " [ ": "]", '[{"role":"user","content":': "}]"}
LEVELS = (257, 1_001, 5_000, 100_000)
KNOWN = '"model":"m","max_tokens":1,"messages":[],"prompt":"x","input":"x"'


@pytest.mark.promise("JSON of any depth ends in 400, never in a crash of the router or an engine.", "clients")
@pytest.mark.parametrize("path", [*PATHS, *OTHERS])
@pytest.mark.parametrize("offload_bytes_min", [0, 1 << 30])
async def test_deep_json(client: ClientSession, engine: FakeEngine, path: str, offload_bytes_min: int) -> None:
    """More levels than `limits.json_depth_max`, up to a hundred thousand, are 400 in fields that are read and in those
    that are only passed on, whole and cut off: no crash, no 500, and no engine hears of it."""
    choose = random.Random(path)
    async with running(engine, limits__offload_bytes_min=offload_bytes_min) as app:
        for field in (*FIELDS, ""):
            opens, levels = choose.choice(list(OPENS)), choose.choice(LEVELS)
            value = opens * levels + "1" + OPENS[opens] * levels * choose.randint(0, 1)
            body = f'{{{KNOWN},"{field}":{value}}}' if field else value
            async with client.post(app.url + path, data=BytesIO(body.encode())) as response:
                said = await response.json()
                assert (response.status, bool(said.get("error", said)["message"])) == (400, True), (
                    field,
                    opens,
                    levels,
                )
        assert not engine.seen
        allowed = f'{{{KNOWN},"zzz":{"[" * 255}{"]" * 255}}}'.encode()
        async with client.post(app.url + path, data=allowed) as response:
            assert response.status == 200 or path in OTHERS
        assert engine.seen[0].body == allowed
