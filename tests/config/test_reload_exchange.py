"""Reloads that put other replicas in place of all."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.config.reloaded import running
from tests.config.test_reload_running import CHAT, body
from tests.support.fakes import FakeEngine, events


@pytest.mark.finding("2026-11-28/18")
@pytest.mark.promise("A reload that exchanges all replicas loses no request.", "faults")
async def test_a_reload_that_exchanges_all_replicas_loses_no_request(tmp_path: Path, client: ClientSession) -> None:
    """Twelve times over, while requests run: each is answered in full, without a retry, though newcomers answer their
    first probe late."""
    async with AsyncExitStack() as stack:
        pairs = [[await stack.enter_async_context(FakeEngine()) for _ in range(2)] for _ in range(2)]
        router = await stack.enter_async_context(running(tmp_path / "file", *pairs[0], upstream__retries_max=0))
        over, said = asyncio.Event(), list[int]()

        async def ask(number: int) -> None:
            for n in itertools.count():
                async with client.post(router.app.url + CHAT, json=body(f"{number} {n}")) as response:
                    said.append(response.status)
                    assert await response.read() == b"".join(events())
                if over.is_set():
                    return

        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        for n in range(12):
            there, enough = pairs[(n + 1) % 2], len(said) + 20
            for engine in there:
                engine.health_after_s = 0.05
            await router.set(*there, upstream__retries_max=0)
            while len(said) < enough and not any(task.done() for task in asking):
                await asyncio.sleep(0)
            await router.replicas_are(*there)
        over.set()
        await asyncio.gather(*asking)
        assert set(said) == {200}
        assert len(said) >= 240


async def test_replicas_that_none_replaces_leave_in_the_end(
    tmp_path: Path, engine: FakeEngine, client: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Newcomers that do not answer keep those that left for twice a probe's time, which the log says."""
    async with running(tmp_path / "file", engine, probe__timeout_s=0.2) as router:
        await router.set("http://127.0.0.1:1", probe__timeout_s=0.2)
        begun_s = time.monotonic()
        async with client.post(router.app.url + CHAT, json=body()) as response:
            assert response.status == 200
        while engine.url in router.app.router.fleet.members:
            await asyncio.sleep(0.01)
        assert time.monotonic() - begun_s >= 0.3
        assert [each for each in caplog.records if getattr(each, "event", "") == "left_unreplaced"]
