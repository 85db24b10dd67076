"""`--workers 2` with traces: every process sends its own spans."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import pytest

from tests.multiprocess.test_processes import CHAT, body, command
from tests.support.fakes import FakeEngine
from tests.telemetry.collector import Collector


@pytest.mark.long
async def test_each_worker_sends_its_own_spans(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever worker answers, its requests are traced, each process under an instance of its own, with the hub's
    placement in them; what waits at the end is sent."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    async with Collector() as collector:
        more = {"tracing__endpoint": collector.url, "tracing__sample_ratio": "1"}
        async with command(engine, workers=2, **more) as running:
            asked = 0
            async with asyncio.timeout(60):
                while len({got.resource["service.instance.id"] for got in collector.spans}) < 2:
                    async with aiohttp.ClientSession() as session, session.post(running.url + CHAT, json=body()) as r:
                        assert r.status == 200
                    asked += 1
            async with aiohttp.ClientSession() as session, session.post(running.url + CHAT, json=body()) as r:
                assert r.status == 200
            running.process.send_signal(signal.SIGINT)
            await running.process.wait()
        roots = collector.named(f"POST {CHAT}")
        assert len(roots) == asked + 1
        assert len({got.trace for got in roots}) == asked + 1
        assert len({got.id for got in collector.spans}) == len(collector.spans)
        assert {got.about["warmroute.policy"] for got in roots} == {"warm"}


@pytest.mark.long
async def test_spans_that_workers_drop_are_counted(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's metrics have what all workers dropped."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with Collector() as collector:
        collector.statuses.extend([400] * 1_000)
        more = {"tracing__endpoint": collector.url, "tracing__sample_ratio": "1"}
        async with command(engine, workers=2, **more) as running, aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.post(running.url + CHAT, json=body()) as r:
                    assert r.status == 200
            async with asyncio.timeout(60):
                page = ""
                while "\nwarmroute_spans_dropped_total 20.0\n" not in page:
                    async with session.get(running.admin_url + "/metrics") as r:
                        page = await r.text()
            assert running.said("the collector accepts no spans") >= 1
