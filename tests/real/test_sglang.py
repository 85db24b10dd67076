"""What the router foretells from SGLang's KV events is what SGLang finds, under eviction and across restarts.

The replicas are SGLang's own scheduler, radix cache and HTTP server on the CPU (install_sglang.py), with pools so
small that they evict all the time. One request at a time nothing is left to chance, and that is asserted; two at a
time race for what is evicted between a placement and the engine's next step, and that is reported.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.real import install_sglang
from tests.real.exact_drive import Seen
from tests.real.exact_workload import Call, Script
from tests.real.processes import wait_until
from tests.real.router_process import LISTENING, Router, routing
from tests.real.sglang_server import PAGE_TOKENS, SGLangReplica
from tests.real.sglang_workload import SGLangDrive, bias_for, scripts
from tests.real.test_exact import Overheard, grades, new_router, talking_to
from tests.real.test_exact import running as router_of
from tests.real.test_exact import verdict as shares
from tests.real.vllm_server import serving
from tests.support.figures import figure

KV_PAGES = 384  # 6,144 tokens each
# So many that much of what they come back for was evicted, and so few that it is still there, in both pools.
OPEN_MANY, OPEN_FEW = 40, 12
REQUESTS, BESIDE = 200, 100  # one at a time, two at a time
AROUND_A_RESTART = 40
READY_TIMEOUT_S = 120.0
EXACT_SHARE_MIN, EQUAL_SHARE_MIN, FALSE_SHARE_MAX = 0.98, 0.99, 0.005
EXACT_OF_FEW_MIN = 0.95  # of 40 or 60: an event or two that a busy machine delivers late

Figures = Callable[[str], None]


@pytest.fixture(scope="module")
def started_replicas(folder: Path, figures: Figures) -> Iterator[list[SGLangReplica]]:
    """Two SGLang replicas with small pools, in place of the folder's own."""
    if not install_sglang.installed():
        pytest.skip("SGLang is not installed: python -m tests.real.install_sglang")
    both = [SGLangReplica(name, folder, KV_PAGES) for name in ("sgl-left", "sgl-right")]
    yield from serving(both, figures)


@pytest.fixture(scope="module")
def module_router(started_replicas: list[SGLangReplica], folder: Path) -> Iterator[Router]:
    """One router for this file, with a tokenizer, in place of the folder's own."""
    yield from routing(new_router([*started_replicas], folder, "router-sglang"))


@asynccontextmanager
async def running(
    replicas: list[SGLangReplica], folder: Path, name: str
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """A router of a test's own that knows all its replicas, and a client of it."""
    async with router_of([*replicas], folder, name) as (router, client):
        await asyncio.to_thread(wait_until, "exact", lambda: ready_and_exact(router) == len(replicas), READY_TIMEOUT_S)
        yield router, client


def ready_and_exact(router: Router) -> int:
    """How many replicas take requests and are graded exact: the grade is only meant together with readiness."""
    return sum(row["ready"] and row["grade"] == "exact" for row in router.replica_rows())


def false_credit(seen: Seen) -> bool:
    """The router believed in more than a page that was not there."""
    return (seen.answer.predicted_tokens or 0) > seen.answer.cached_tokens + PAGE_TOKENS


def verdict(name: str, seen: list[Seen], figures: Figures) -> tuple[float, float, float]:
    """The shares of test_exact.py, with false credit as it is meant here."""
    return shares(f"SGLang, {name}", seen, figures, false_credit)


async def test_predictions_equal_what_sglang_finds(
    replicas: list[SGLangReplica], router: Router, client: httpx.AsyncClient, allowed: list[int], figures: Figures
) -> None:
    """300 mixed requests: nearly all are graded exact, and nearly all of these are foretold to the token."""
    assert allowed, "no word is one token: the answers would be noise"
    # Nothing was sent yet: that its cache is empty is the first thing SGLang says.
    joined_s = await asyncio.to_thread(
        wait_until, "exact", lambda: ready_and_exact(router) == len(replicas), READY_TIMEOUT_S
    )
    figures(f"SGLang: exact {joined_s:.2f} s after the router was ready")
    overheard = Overheard([*replicas])
    drive = SGLangDrive(client, scripts("sglang", bias_for(allowed)), "sglang", OPEN_MANY)
    seen = await drive.run(REQUESTS, 1)
    exact, equal, false = verdict("1 at a time", seen, figures)
    verdict("2 at a time", await drive.run(BESIDE, 2), figures)
    events = await asyncio.to_thread(overheard.count)
    figures(f"SGLang: kinds {dict(Counter(each.call.kind for each in drive.seen))}")
    pool = KV_PAGES * len(replicas)
    figures(
        f"SGLang: pages stored {events['BlockStored']}, evicted {events['BlockRemoved']}, of pools of {pool} in all"
    )

    assert len({each.answer.replica for each in seen}) == len(replicas)
    assert events["BlockRemoved"] > pool, "they hardly evict: the test sees nothing"
    assert exact >= EXACT_SHARE_MIN
    assert equal >= EQUAL_SHARE_MIN
    assert false <= FALSE_SHARE_MAX


@pytest.mark.figures
async def test_a_restarted_router_knows_sglang_again_at_once(
    replicas: list[SGLangReplica], folder: Path, allowed: list[int], figures: Figures
) -> None:
    """A router started anew serves, and knows both replicas from their replays before anybody asks it anything."""
    async with running(replicas, folder, "router-sglang-first") as (first, client):
        drive = SGLangDrive(client, scripts("router", bias_for(allowed)), "router", OPEN_FEW)
        await drive.run(AROUND_A_RESTART, 1)
        first.server.kill()
    again = new_router([*replicas], folder, "router-sglang-again")
    try:
        took_s = await asyncio.to_thread(exact_after_listening_s, again, len(replicas))
        async with talking_to(again.url) as drive.client:
            seen = await drive.run(AROUND_A_RESTART, 1)
    finally:
        again.server.kill()
    figures(f"SGLang: a router started anew is ready and exact {took_s * 1e3:.0f} ms after it listened")
    exact, equal, _ = verdict("after the router's restart", seen, figures)
    figure("SGLang: a restarted router is exact behind its first word, s", 2.0, took_s)
    assert sum(each.answer.cached_tokens > 0 for each in seen) > AROUND_A_RESTART / 4, "nothing was there to be known"
    assert exact >= EXACT_OF_FEW_MIN
    assert equal >= EQUAL_SHARE_MIN


def exact_after_listening_s(router: Router, count: int) -> float:
    """Seconds from the line that says it listens to the moment when all replicas are ready and graded exact."""
    wait_until("listening", lambda: LISTENING.search(router.server.log_text()) is not None, READY_TIMEOUT_S)
    began_s = time.monotonic()
    found = LISTENING.search(router.server.log_text())
    assert found is not None
    router.url, router.admin_url = found.groups()
    wait_until("exact", lambda: ready_and_exact(router) == count, READY_TIMEOUT_S)
    return time.monotonic() - began_s


async def test_a_restarted_sglang_gets_no_stale_credit(
    replicas: list[SGLangReplica], folder: Path, allowed: list[int], figures: Figures
) -> None:
    """Killed and started again in place, a replica is credited with nothing of its first life, and exact at once."""
    victim = replicas[0]
    # With no other replica to go to, every repeated prompt shows what the router believes of this one.
    async with running([victim], folder, "router-sglang-alone") as (router, client):
        drive = SGLangDrive(client, scripts("restart", bias_for(allowed)), "restart", OPEN_FEW)
        before = await drive.run(AROUND_A_RESTART, 1)
        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(wait_until, "the loss is noticed", lambda: not ready_and_exact(router), READY_TIMEOUT_S)
        noticed = grades(router)[victim.url]
        victim.start()
        down_s = await asyncio.to_thread(victim.wait_ready)
        exact_s = await asyncio.to_thread(wait_until, "exact", lambda: ready_and_exact(router) == 1, READY_TIMEOUT_S)
        calls = [each.call for each in before[-AROUND_A_RESTART // 2 :]]
        repeats = SGLangDrive(client, repeated(calls), "repeats", 1)
        seen = [*await repeats.run(len(calls), 1), *await drive.run(AROUND_A_RESTART, 1)]
    figures(
        f"SGLang, restart in place: {victim.name} graded '{noticed}' when it was gone, back after {down_s:.0f} s, "
        f"exact {exact_s:.2f} s later; of {len(calls)} prompts sent again it held "
        f"{sum(each.answer.cached_tokens > 0 for each in before[-len(calls) :])} at least in part before, "
        f"{sum(each.answer.cached_tokens > 0 for each in repeats.seen)} after"
    )
    exact, equal, _ = verdict("after a replica's restart", seen, figures)
    assert not [each.line() for each in seen if false_credit(each)]
    assert exact >= EXACT_OF_FEW_MIN
    assert equal >= EQUAL_SHARE_MIN


def repeated(calls: list[Call]) -> Iterator[Script]:
    """One script of these calls, then empty ones."""

    def script() -> Script:
        for call in [*calls, calls[-1]]:  # noqa: UP028 - a list takes no answers
            yield call

    while True:
        yield script()
