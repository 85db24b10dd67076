"""Through Envoy and the picker a fleet's caches are found as well as through the edge."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from loadtest.common.processes import engines, free_ports, started
from loadtest.common.report import Row
from loadtest.common.traces import shipped_trace
from loadtest.replay.demo import CALIBRATION, MODEL, REPLICAS, WORKLOADS, DemoWorkload
from loadtest.replay.run import run_replay
from tests.envoy.envoy import front
from tests.support.figures import figure


@asynccontextmanager
async def faces(folder: Path, workload: DemoWorkload) -> AsyncIterator[tuple[list[str], str, str]]:
    """Fresh replicas, a router with both faces, and an Envoy: the replicas' URLs, the edge's, and Envoy's."""
    edge, picker = free_ports(2)
    async with engines(REPLICAS, MODEL, CALIBRATION, workload.kv_tokens, workload.replay.time_scale) as urls:
        command = [sys.executable, "-m", "router", "serve", "--face", "both", "--port", str(edge), "--admin-port", "0"]
        for setting in (f"gateway.port={picker}", "gateway.health_port=0", "listen.lame_duck_s=0"):
            command += ["--set", setting]
        command += [word for url in urls for word in ("--replica", url)]
        async with started("the router", command), aiohttp.ClientSession() as session:
            ready = False
            while not ready:
                await asyncio.sleep(0.05)
                with suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{edge}/readyz") as answer:
                        ready = answer.status == 200
            ports = [int(url.rpartition(":")[2]) for url in urls]
            async with front(folder, picker, ports) as envoy:
                yield urls, f"http://127.0.0.1:{edge}", envoy.url


@pytest.mark.figures
@pytest.mark.parametrize("workload", WORKLOADS[:2], ids=lambda workload: workload.replay.workload)
async def test_hits_are_those_of_the_edge(tmp_path: Path, workload: DemoWorkload) -> None:
    """The demo's workloads, a part of each: the token hit rate through Envoy is within 3 points of the edge's, though
    no answer is seen; the ninetieth percentile of first tokens is told beside it."""
    part = workload.replayed(requests_max=200, time_scale=60.0)
    trace, found = shipped_trace(part.trace, 200), list[Row]()
    for face in (0, 1):
        folder = tmp_path / str(face)
        folder.mkdir()
        async with faces(folder, part) as (urls, *ways):
            settings = replace(part.replay, url=ways[face], replicas=tuple(urls), timeout_s=60 * part.replay.time_scale)
            found.append(await run_replay(trace, settings))
    edge, gateway = found
    assert (edge.errors, gateway.errors) == (0, 0)
    assert edge.token_hit_rate is not None
    assert gateway.token_hit_rate is not None
    assert gateway.token_hit_rate > edge.token_hit_rate - 0.03
    assert edge.ttft_p90_s is not None
    assert gateway.ttft_p90_s is not None
    figure(f"gateway_ttft_p90_of_edge_{part.replay.workload}", 1.03, gateway.ttft_p90_s / edge.ttft_p90_s)
