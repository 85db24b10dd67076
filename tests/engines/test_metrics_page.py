"""The one reader of `/metrics`: at most one request at a time, a pause after late pages, as seldom as is set; and what
probes conclude from a page of an engine that sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.config.schema import ProbeSettings
from router.core.fleet.metrics_lines import SLICE_BYTES
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica, Sleep
from router.engines.metrics_page import BYTES_PER_S, MetricsPages
from router.engines.probe import Prober
from router.engines.ranks import RankExpander
from tests.support.fakes import FakeEngine

DATA = Path(__file__).parents[1] / "data" / "metrics"
TWO = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 1\n'


class SlowPage(FakeEngine):
    """Renders its metrics only when it is told to go on."""

    rendering = most = 0

    async def _metrics(self, request: web.Request) -> web.Response:
        self.rendering += 1
        self.most = max(self.most, self.rendering)
        try:
            await self.go_on.wait()
            return await super()._metrics(request)
        finally:
            self.rendering -= 1


@asynccontextmanager
async def reading(**given: Any) -> AsyncIterator[MetricsPages]:
    """A reader."""
    pages = MetricsPages(ProbeSettings(**given))
    try:
        async with asyncio.timeout(60):
            yield pages
    finally:
        await pages.close()


@asynccontextmanager
async def probing(engine: FakeEngine, **given: Any) -> AsyncIterator[tuple[Router, Callable[[], Any]]]:
    """A router that knows the engine, and one round of probes."""
    router = Router(POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=100, default_cache_blocks=100)
    router.replace([Replica(engine.url)])
    settings = ProbeSettings(**given)
    async with reading(**given) as pages:
        prober = Prober(router, lambda _: None, settings=settings, pages=pages, kv_tokens_max=0)
        try:
            yield router, lambda: prober.probe(engine.url, models=True)
        finally:
            await prober.close()


async def test_one_request_at_a_time() -> None:
    """Probes and ranks wait for the same page."""
    async with SlowPage(metrics=TWO) as engine, reading() as pages:
        ranks = RankExpander(ProbeSettings(), pages)
        waiting = [asyncio.ensure_future(pages.read(engine.url)) for _ in range(3)]
        counting = asyncio.ensure_future(ranks.count(engine.url))
        while not engine.rendering:
            await asyncio.sleep(0.01)
        engine.go_on.set()
        assert await asyncio.gather(*waiting) == [TWO] * 3
        assert await counting == 2
        assert engine.most == 1
        await ranks.close()


async def test_the_page_that_ranks_read_is_the_first_probe_s() -> None:
    """A server that joins is asked once."""
    async with FakeEngine(metrics=TWO) as engine, reading(metrics_interval_s=3_600.0) as pages:
        assert await pages.engines(engine.url) == 2
        assert await pages.read(engine.url) == TWO
        assert await pages.read(engine.url) is None
        assert await pages.engines(engine.url) == 2
        assert engine.probes["metrics"] == 1


async def test_a_late_page_is_not_asked_for_again_at_once() -> None:
    """The pause is longer than what was waited, and the number of ranks is unknown in the meantime."""
    async with SlowPage(metrics=TWO) as engine, reading(timeout_s=0.2) as pages:
        assert await pages.read(engine.url) is None
        for _ in range(5):
            assert await pages.read(engine.url) is None
            assert await pages.engines(engine.url) is None
        assert engine.most == 1
        engine.go_on.set()
        while await pages.read(engine.url) is None:
            await asyncio.sleep(0.05)
        assert engine.most == 1


@pytest.mark.parametrize(
    ("given", "expected", "asked"),
    [({"metrics": False}, "", 0), ({"metrics_interval_s": 3_600.0}, None, 1), ({}, TWO, 2)],
)
async def test_how_often_is_a_setting(given: dict[str, Any], expected: str | None, asked: int) -> None:
    """Never, seldom, or with every round."""
    async with FakeEngine(metrics=TWO) as engine, reading(**given) as pages:
        await pages.read(engine.url)
        assert await pages.read(engine.url) == expected
        assert engine.probes["metrics"] == asked


async def test_a_page_that_is_switched_off_is_empty() -> None:
    """404 says that there is none, and one engine; anything else says nothing."""
    async with FakeEngine() as engine, reading() as pages:
        assert await pages.read(engine.url) == ""
        assert await pages.engines(engine.url) == 1
        pages.forget(engine.url)
        await engine.stop()
        assert await pages.read(engine.url) is None


@pytest.mark.parametrize("own_page", [True, False])
async def test_a_sleeping_engine_is_not_ready(own_page: bool) -> None:
    """Out with the first page that shows it, back with the first that does not; by vLLM's metrics, or by its page of
    its own where the metrics do not state it."""
    awake, asleep = (DATA / "vllm_dense.txt").read_text(), (DATA / "vllm_asleep.txt").read_text()
    async with FakeEngine(metrics=TWO if own_page else awake) as engine, probing(engine) as (router, probe):
        for sleeps in (False, True, False):
            if own_page:
                engine.sleeping = {"is_sleeping": sleeps}
            else:
                engine.metrics = asleep if sleeps else awake
            await probe()
            member = router.fleet.members[engine.url]
            assert member.ready is not sleeps
            assert member.load.sleep is (Sleep.ASLEEP if sleeps else Sleep.AWAKE)
            assert member.health.why == ("asleep" if sleeps else "healthy")
            assert bool(router.fleet.usable()) is not sleeps
        assert bool(engine.probes["is_sleeping"]) is own_page


async def test_an_engine_without_a_page_of_its_sleep_is_asked_once() -> None:
    """Outside of vLLM's development mode there is no such page."""
    async with FakeEngine(metrics=TWO) as engine, probing(engine) as (router, probe):
        for _ in range(3):
            await probe()
        assert router.fleet.members[engine.url].ready
        assert engine.probes["is_sleeping"] == 1


class LongPage(FakeEngine):
    """Has a page of so many bytes of other metrics behind its own."""

    noise_bytes = 0

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await super()._metrics(request)
        line = 'vllm:request_success_total{engine="0",finished_reason="stop"} 1.0\n'
        page.text = (page.text or "") + line * (self.noise_bytes // len(line))
        return page


def told(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The fields of warnings of long pages."""
    return [line.fields for line in caplog.records if getattr(line, "event", "") == "metrics_page_long"]


async def test_a_long_page_is_read_less_often_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """All of it is read, in slices; then there is a pause as long as it is."""
    async with LongPage(metrics=TWO) as engine, reading(metrics_interval_s=0.0) as pages:
        engine.noise_bytes = 6_500_000
        assert await pages.read(engine.url) == TWO
        assert await pages.read(engine.url) is None
        server = pages._servers[engine.url]
        assert server.due_s - server.read_s >= 6_500_000 // BYTES_PER_S
        server.due_s = 0.0
        assert await pages.read(engine.url) == TWO
        assert engine.probes["metrics"] == 2
        engine.noise_bytes, server.due_s = 0, 0.0
        assert await pages.read(engine.url) == TWO
        assert await pages.read(engine.url) == TWO
    [fields] = told(caplog)
    assert fields["replica"] == engine.url
    assert fields["bytes"] > 6_000_000


@pytest.mark.parametrize("lines", ["too many", "too long"])
async def test_a_page_that_is_too_long_says_nothing(lines: str, caplog: pytest.LogCaptureFixture) -> None:
    """Too many lines that matter, or too many bytes: there is a pause as behind late pages."""
    page = (
        TWO if lines == "too long" else "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(20_000))
    )
    async with LongPage(metrics=page) as engine, reading(page_bytes_max=1_000_000) as pages:
        engine.noise_bytes = 1_100_000 if lines == "too long" else 0
        for _ in range(3):
            assert await pages.read(engine.url) is None
        assert engine.probes["metrics"] == 1
        server = pages._servers[engine.url]
        server.due_s = 0.0
        assert await pages.read(engine.url) is None
        assert server.late == 2
    assert len(told(caplog)) == 1


@pytest.mark.promise("A page of metrics is read in slices, and only lines of known names are kept.", "engines")
@pytest.mark.finding("2026-11-28/21")
async def test_others_have_their_turns_while_a_page_is_read() -> None:
    """Between two slices the loop runs whatever else is due."""
    async with LongPage(metrics=TWO) as engine, reading() as pages:
        engine.noise_bytes = 4_000_000
        turns, reader = 0, asyncio.ensure_future(pages.read(engine.url))
        while not reader.done():
            await asyncio.sleep(0)
            turns += 1
        assert await reader == TWO
        assert turns >= 4_000_000 // SLICE_BYTES
