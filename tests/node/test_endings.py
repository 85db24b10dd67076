"""The official clients for Node.js raise where a stream breaks; `make test-node` installs them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.http.wire import Wire
from tests.proxy.test_endings import CHAT, COMPLETIONS, FAULTS, KILLS, MESSAGES, RESPONSES, STREAMS, begun, faulty

pytestmark = pytest.mark.promise("A partial answer never passes for a complete one: official clients raise.", "faults")

HERE = Path(__file__).parent


async def read_streams(url: str, path: str, count: int, wish: str = "") -> list[dict[str, Any]]:
    """What the client of that path makes of so many streams, one after the other. `wish` is how they are to go on
    elsewhere."""
    node = await asyncio.create_subprocess_exec(
        "node", "read_streams.mjs", url, path, str(count), wish, cwd=HERE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await node.communicate()
    assert node.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.node
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_official_clients_raise(monkeypatch: pytest.MonkeyPatch, path: str, fault: str) -> None:
    """Whatever the fault and wherever it strikes, the client raises its API's error and names ours."""
    rng = random.Random(f"{path} {fault}")
    async with faulty(monkeypatch, fault) as (faults, app):
        plays = faults.play

        async def play(wire: Wire) -> None:
            faults.events = begun(path, rng)
            await plays(wire)

        faults.engine.play = play
        read = await read_streams(app.url, path, KILLS)
        assert len(read) == KILLS
        for each in read:
            assert each["error"], each
            assert each["error"]["official"], each
            assert "stream_" in each["error"]["said"], each


@pytest.mark.node
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_official_clients_read_whole_answers(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A whole answer raises nothing, and all of its events come."""
    async with faulty(monkeypatch, "clean end") as (faults, app):
        faults.events = STREAMS[path][0]()
        (read,) = await read_streams(app.url, path, 1)
        assert read["error"] is None
        assert read["events"] == len([event for event in faults.events if b"[DONE]" not in event])
