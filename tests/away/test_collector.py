"""The collector of traces away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.away.cells import Cell
from tests.away.engines import StoringEngine
from tests.away.rig import before
from tests.support.fakes import listening
from tests.support.waiting import until

PART = "Collector"
CELLS = {
    "killed": Cell("Its listener and all connections are closed."),
    "frozen": Cell("It takes requests and answers none."),
    "slow": Cell("Each answer is 1 s late."),
    "lying": Cell("It redirects (307) requests to `/sleep` of an engine."),
    "emptied": Cell("It returns 200 with an empty body."),
    "old": Cell("It has no OTLP over HTTP: 404 on all paths."),
}


class Collector:
    """Takes everything, and answers by its state."""

    def __init__(self) -> None:
        self.state, self.elsewhere = "", ""
        self.asked = 0
        self.go_on = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        """Answer one push."""
        await request.read()
        self.asked += 1
        match self.state:
            case "frozen":
                await self.go_on.wait()
            case "slow":
                await asyncio.sleep(1.0)
            case "lying":
                raise web.HTTPTemporaryRedirect(self.elsewhere)
            case "old":
                raise web.HTTPNotFound
        return web.Response(body=b"")


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, web.AppRunner, str]]:
    """A collector, its runner and its URL."""
    it, app = Collector(), web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", it.take)
    runner, port = await listening(app)
    try:
        yield it, runner, f"http://127.0.0.1:{port}"
    finally:
        it.go_on.set()
        await runner.cleanup()


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(StoringEngine()) for _ in range(2)]
        collector, runner, url = await stack.enter_async_context(collecting())
        settings = {
            "tracing__endpoint": url,
            "tracing__sample_ratio": "1",
        }
        it = await stack.enter_async_context(before(tmp_path, engines, **settings))
        await until(lambda: collector.asked)
        collector.state, collector.elsewhere = state, f"{engines[0].url}/sleep"
        asked = collector.asked
        if state == "killed":
            await runner.cleanup()
        await it.holds(CELLS[state])
        if state != "killed":  # A push has failed meanwhile.
            await until(lambda: collector.asked > asked)
        await it.holds(CELLS[state])
