"""One of two engines away."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.away.cells import Cell
from tests.away.engines import STORED, EngineProcess, StoringEngine, engine_process
from tests.away.questions import CHAT, chat
from tests.away.rig import World, before, eventually

PART = "Engine"
LOST = "Responses that it stored are lost with it."
ANSWERS = f"A response passes unchanged. {LOST}"
CELLS = {
    "killed": Cell("SIGKILL for one of two.", why=LOST),
    "frozen": Cell("SIGSTOP for one of two.", why=LOST),
    "slow": Cell("Each answer of one of two is 1 s late."),
    "lying": Cell(
        "One of two reuses a response id of another tenant, and returns web pages, also as its list of models.",
        why=ANSWERS,
    ),
    "emptied": Cell("One of two answers every request with 200 and an empty body.", why=ANSWERS),
    "old": Cell("One of two is an earlier process, with yesterday's model and without today's responses.", why=LOST),
}
PAGE = "<html><body>502 Bad Gateway</body></html>"


@asynccontextmanager
async def two(folder: Path, state: str) -> AsyncIterator[tuple[World, StoringEngine | EngineProcess]]:
    """A router before an engine that stays and one that goes away, in a process of its own where that is killed."""
    async with AsyncExitStack() as stack:
        stays = await stack.enter_async_context(StoringEngine())
        settings = {"probe__models_interval_s": "0.1"}
        if state in ("killed", "frozen"):
            process = await stack.enter_async_context(engine_process())
            settings |= {"probe__timeout_s": "1"} if state == "frozen" else {}
            it = await stack.enter_async_context(before(folder, [stays], process.url, **settings))
            yield it, process
        else:
            goes = await stack.enter_async_context(StoringEngine())
            it = await stack.enter_async_context(before(folder, [stays, goes], **settings))
            yield it, goes


async def out(it: World, url: str) -> None:
    """Return when the replica gets no requests."""

    async def unready() -> bool:
        rows = json.loads(await it.page("/admin/replicas"))["replicas"]
        return not next(row["ready"] for row in rows if row["id"] == url)

    await eventually(unready)


async def lists(it: World, url: str, model: str) -> None:
    """Return when the router knows that the replica has this model."""

    async def listed() -> bool:
        rows = json.loads(await it.page("/admin/replicas"))["replicas"]
        return next(model in row["models"] for row in rows if row["id"] == url)

    await eventually(listed)


async def put(it: World, goes: StoringEngine | EngineProcess, state: str) -> None:
    """Put the engine into the state, and wait until the router has noticed."""
    if isinstance(goes, EngineProcess):
        if state == "killed":
            await goes.kill()
        else:
            goes.freeze()
        await out(it, goes.url)
        return
    it.ids = [id_ for id_ in it.ids if id_ not in goes.made]  # Its own responses are lost with it.
    if state == "slow":
        goes.delay_s = 1.0
    elif state == "lying":
        goes.text = PAGE
        (known,) = it.ids
        while known not in goes.made:  # one of two of rival's requests
            goes.next_id = known
            assert await it.post(STORED, "rival", {"model": "m", "input": "x"}) == 200
    elif state == "emptied":
        goes.text = ""
        await it.post(CHAT, "acme", chat())
    else:
        goes.models, goes.made = ("yesterday",), []
        await lists(it, goes.url, "yesterday")


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    async with two(tmp_path, state) as (it, goes):
        await put(it, goes, state)
        await it.holds(CELLS[state])
