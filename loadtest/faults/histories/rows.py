"""Goal 30, `python -m loadtest faults --histories S`: a history of S seconds, and the rows with the model's
findings."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from loadtest.common.report import Row
from loadtest.faults.bench import Bench, poll_until, row
from loadtest.faults.histories.engines import StoringEngine
from loadtest.faults.histories.fleet import HistoryRouter, fleet
from loadtest.faults.histories.model import HOUR_S, excess
from loadtest.faults.histories.run import OWNERS, PER_MIN, RATED, TIMEOUT_S, History
from loadtest.faults.soak import BUGS
from router.peering.message_receiver import STATE_EVERY_S
from router.peering.persistence import FILL_S, FILL_TURNS, REWRITE_S

GOAL = 30
SKEWS_S = (0.0, 5.0, -5.0, 2.5)
HOUR_EXCESS_MAX = 0.05
WHOLE_S, END_S = 30.0, 120.0
# Time limit for rewriting the data that a store has lost.
SETTLE_S = REWRITE_S + FILL_S + FILL_TURNS * STATE_EVERY_S + 4.0
ANOMALIES = (
    "a response in another tenant's hands",
    "another response than the one asked for",
    "an id of two responses",
    "a response unknown to a router that knew it",
    "a response that a router does not know in the end",
)


async def histories(bench: Bench, seconds_s: float, seed: int) -> list[Row]:
    """Return the rows of one history."""
    bench.only_ours("its routers share a store")
    keys = bench.folder / "keys.yaml"
    rated = [each.entry.replace("}", f", requests_per_min: {PER_MIN}}}") for each in RATED]
    keys.write_text("".join([*(each.entry for each in OWNERS), *rated]))
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(StoringEngine()) for _ in range(2)]
        routers, stores = await stack.enter_async_context(
            fleet(bench.folder, [engine.url for engine in engines], keys, SKEWS_S)
        )
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=limit))
        history = History(routers, stores, engines, http, seed)
        await poll_until(lambda: _is_fully_connected(history, routers), WHOLE_S)
        async with asyncio.timeout(seconds_s + END_S):
            await history.go(seconds_s)
        whole = await poll_until(lambda: _is_fully_connected(history, routers), bench.scale.patience_s(WHOLE_S))
        closed = await poll_until(lambda: _has_closed_breakers(history, routers), bench.scale.patience_s(WHOLE_S))
        asked = await history.judge_stored(bench.scale.patience_s(SETTLE_S))
        bugs = Counter(found.decode() for router in routers for found in router.logs(BUGS))
        blamed = _count_false_openings(routers, engines[0].url)
    return _judge_history(history, seconds_s, seed, asked=asked, whole=whole, closed=closed, bugs=bugs, blamed=blamed)


def _count_false_openings(routers: Sequence[HistoryRouter], url: str) -> int:
    """Return the number of times that a breaker opened for an engine that was always healthy."""
    pattern = re.compile(rb'"event":"breaker_open"[^\n]*"' + re.escape(url.encode()) + rb'"')
    return sum(len(router.logs(pattern)) for router in routers)


async def _is_fully_connected(history: History, routers: Sequence[HistoryRouter]) -> bool:
    """True if each router is connected to all others."""
    for router in routers:
        sharing: Any = (await history.page(router)).get("sharing") or {}
        if not sharing.get("whole") or len(sharing.get("routers", ())) != len(routers) - 1:
            return False
    return True


async def _has_closed_breakers(history: History, routers: Sequence[HistoryRouter]) -> bool:
    """True if every breaker of every router is closed."""
    for router in routers:
        replicas: Any = (await history.page(router)).get("replicas") or [{}]
        if any((each.get("breaker") or {}).get("state") != "closed" for each in replicas):
            return False
    return True


def _judge_history(
    history: History,
    seconds_s: float,
    seed: int,
    *,
    asked: int,
    whole: bool,
    closed: bool,
    bugs: Counter[str],
    blamed: int,
) -> list[Row]:
    model = history.model
    note = f"{dict(history.faults)}; answers {dict(history.requests)}; {asked} responses asked for in the end"
    failed = {what: count for what, count in model.anomalies.items() if what not in ANOMALIES}
    found = [
        row(GOAL, f"history of {seconds_s:g} s, seed {seed}: faults", 0, history.faults.total(), ok=True, note=note)
    ]
    found += [
        row(GOAL, f"... {what}", 0, model.anomalies[what], note=model.examples.get(what, "")) for what in ANOMALIES
    ]
    found.append(row(GOAL, "... requests that failed", 0, sum(failed.values()), note=_examples(history, failed)))
    for tenant in RATED:
        served = sorted(model.served_s.get(tenant.name, []))
        beyond, run = excess(served, PER_MIN), excess(served, PER_MIN, min(HOUR_S, seconds_s))
        said = f"{len(served)} requests; {run:.1%} beyond bucket and rate over {min(HOUR_S, seconds_s):g} s"
        name = f"... {tenant.name}: beyond its rate over any hour, in parts of it"
        found.append(row(GOAL, name, HOUR_EXCESS_MAX, beyond, note=said))
    found.append(row(GOAL, "... breakers that open for an engine which is well", 0, blamed))
    found.append(
        row(GOAL, "... routers whole, and breakers closed, in the end", 1, int(whole and closed), ok=whole and closed)
    )
    found.append(row(GOAL, "... bugs and unretrieved exceptions in logs", 0, bugs.total(), note=str(dict(bugs) or "")))
    return found


def _examples(history: History, failed: dict[str, int]) -> str:
    return "; ".join(f"{count} of {what}, as {history.model.examples[what]}" for what, count in failed.items())
