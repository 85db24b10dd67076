"""The picker away, as a gateway that fails closed sees it; Envoy itself is in tests/envoy/test_away.py."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from loadtest.common.processes import free_port
from tests.away.cells import REQUESTS, SERVED, Cell
from tests.away.questions import of_picker
from tests.away.rig import World, world
from tests.support.waiting import until

PART = "Picker"
NOTHING_PLACED = "A gateway that fails closed passes no request that no picker has placed."
RESTARTED = (
    "The use of rates and the owners of responses are in the store alone. "
    "Each rate is granted once more, and an unknown id is refused to all tenants."
)
CELLS = {
    "killed": Cell("SIGKILL.", serves=(), why=NOTHING_PLACED),
    "frozen": Cell("SIGSTOP. The gateway waits for 0.3 s.", serves=(), why=NOTHING_PLACED),
    "slow": Cell("SIGSTOP for 1 s during a request. The gateway waits for a minute."),
    "lying": Cell(
        "It closes its streams without an answer.",
        serves=(),
        why="Envoy passes requests that are not refused, and its routes pass none without a destination. "
        "Envoy cannot detect a picker that names a wrong replica.",
        elsewhere="tests/envoy/test_away.py",
    ),
    "emptied": Cell("SIGKILL, and a start without a store and a state file.", ("rate",), (REQUESTS,), RESTARTED),
    "old": Cell("SIGKILL, and a start with the state file of a moment before.", ("rate",), (REQUESTS,), RESTARTED),
}
ANSWER_S_MAX = 0.3  # Envoy's own limit is 0.2 s
SLOW_S = 1.0


@asynccontextmanager
async def picked(folder: Path, **more: str) -> AsyncIterator[tuple[World, int]]:
    """A router with both frontends and everything set up, and the picker's port."""
    port = free_port()
    settings = {"listen__mode": "both", "extproc__port": str(port), "extproc__health_port": "0", **more}
    async with world(folder, **settings) as it:
        yield it, port


async def again(it: World, state: str, stack: AsyncExitStack) -> None:
    """Kill the picker and start it anew, for an old one with its state file."""
    await it.router.kill()
    settings = {key: value for key, value in it.settings.items() if state == "old" or key != "snapshot__path"}
    it.routers = [await stack.enter_async_context(it.start(settings))]


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", [state for state, cell in CELLS.items() if not cell.elsewhere])
async def test_away(tmp_path: Path, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    file, cell = tmp_path / "state", CELLS[state]
    keeps = {"snapshot__path": str(file), "snapshot__interval_s": "0.1"} if state == "old" else {}
    async with AsyncExitStack() as stack:
        it, port = await stack.enter_async_context(picked(tmp_path, **keeps))
        ask = of_picker(port)
        assert await it.state([ask]) == (set(), {*SERVED})
        if state == "killed":
            await it.router.kill()
        elif state == "frozen":
            it.router.process.send_signal(signal.SIGSTOP)
            it.answer_s_max = ANSWER_S_MAX
            ask = of_picker(port, ANSWER_S_MAX)
        elif state == "slow":
            it.router.process.send_signal(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            loop.call_later(SLOW_S, it.router.process.send_signal, signal.SIGCONT)
        else:
            await until(lambda: state != "old" or file.exists())
            await again(it, state, stack)
        await it.holds(cell, [ask])
