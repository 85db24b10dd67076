"""Goals 1, 2 and 3: failures before the first byte, the number of retries, and replicas that send Retry-After."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from loadtest.common.report import Row, percentile
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, row, send_at_rate, send_concurrently

REPLICAS = 4
BUDGET, FLOOR_PER_S = 1.2, 10.0
SHED_P99_MAX_MS = 20.0
RETRY_AFTER_S = (70, 60, 50, 40)  # longer than any row: a second attempt at a replica violates its Retry-After


async def early_deaths(bench: Bench) -> list[Row]:
    """Goal 1: one of four replicas dies before the first byte of an answer, each time another."""
    found = []
    for fault in ("rst", "fin", "garbage_http"):
        async with bench.run_cluster(REPLICAS) as run:
            found += await _deaths(run, fault, bench.scale.pick_count(400, 4_000))
    async with bench.run_cluster(REPLICAS) as run:
        found.append(await _measure_refusals(run, bench.scale.pick_count(400, 4_000)))
    return found


async def _deaths(run: Run, fault: str, requests: int) -> list[Row]:
    await run.send_to_all("clear")

    async def ask(i: int) -> FaultAnswer:
        return await run.ask(stream=i % 2 == 0, fault=fault, at=f"r{i % REPLICAS}")

    asked = await send_concurrently(8, requests, ask)
    attempts: dict[str, list[dict[str, Any]]] = {}
    for record in await run.fetch_requests():
        attempts.setdefault(record["id"], []).append(record)
    faults = sum(record["fault"] == fault for records in attempts.values() for record in records)
    repeats = sum(n - 1 for records in attempts.values() for n in Counter(r["at"] for r in records).values())
    name = f"{fault} before the first byte, 1 of {REPLICAS} replicas"
    return [
        failures(1, f"{name}: client errors", asked, note=f"{faults} faults"),
        row(1, f"{name}: attempts of a request", 2, max(map(len, attempts.values()), default=None)),
        row(1, f"{name}: same replica again", 0, repeats, ok=repeats == 0 and faults > 0),
    ]


async def _measure_refusals(run: Run, requests: int) -> Row:
    """Close and reopen the listener of one replica after another, continuously."""
    done = asyncio.Event()

    async def flap() -> None:
        while not done.is_set():
            for upstream in run.upstreams:
                await upstream.tell("refuse")
                await asyncio.sleep(0.3)
                await upstream.tell("open")
                await asyncio.sleep(0.1)

    flapping = asyncio.create_task(flap())
    asked = await send_at_rate(100, requests, lambda i: run.ask(stream=i % 2 == 0))
    done.set()
    await flapping
    return failures(1, "refused, one replica after another: client errors", asked)


async def retry_budget(bench: Bench) -> list[Row]:
    """Goal 2: all replicas reset every request."""
    rate_per_s, seconds_s = 200, 30 if bench.scale.full else 5
    found = []
    for fault in ("rst", "503") if bench.scale.full else ("rst",):
        async with bench.run_cluster(REPLICAS) as run:
            await run.send_to_all("behave", fault=fault, retry_after="0")
            asked = await send_at_rate(rate_per_s, rate_per_s * seconds_s, lambda _: run.ask(stream=False))
            attempts = Counter(record["id"] for record in await run.fetch_requests())
            # The floor is a number of retries per second: a machine that takes longer for the same requests allows
            # more.
            took_s = max(a.ended_s for a in asked) - asked[0].began_s
            limit = BUDGET + FLOOR_PER_S * max(seconds_s, took_s) / len(asked)
            name = f"all replicas {fault} at {rate_per_s} requests/s: attempts per request"
            found.append(row(2, name, limit, attempts.total() / len(asked), found=asked))
            found.append(row(2, "... attempts of one request", 2, max(attempts.values(), default=None)))
    return found


async def retry_after(bench: Bench) -> list[Row]:
    """Goal 3: replicas that send Retry-After, and clients that send invalid requests."""
    found = []
    for status in ("429", "503"):
        async with bench.run_cluster(REPLICAS) as run:
            found += await _one_rests(run, status)
        async with bench.run_cluster(REPLICAS) as run:
            found += await _measure_all_cooldown(run, status, bench.scale.slack)
    async with bench.run_cluster(REPLICAS) as run:
        found.append(await _bad_requests(run, bench.scale.pick_count(1_000, 10_000)))
    return found


async def _one_rests(run: Run, status: str) -> list[Row]:
    await run.upstreams[0].tell("behave", fault=status, retry_after=str(RETRY_AFTER_S[-1]))
    # One after the other until one was tried there: others that are sent before its answer would be tried there, too.
    asked = list[FaultAnswer]()
    while len(asked) < 20 and not await run.upstreams[0].fetch_requests():
        asked.append(await run.ask(stream=len(asked) % 2 == 0))
    asked += await send_at_rate(40, 100 - len(asked), lambda i: run.ask(stream=i % 2 == 0))
    tries = len(await run.upstreams[0].fetch_requests())
    name = f"1 of {REPLICAS} returns {status} with Retry-After {RETRY_AFTER_S[-1]}"
    asked_there = row(3, f"{name}: tries there in 2.5 s", 1, tries)
    if not tries:
        asked_there.ok, asked_there.note = None, "n/a: nothing was placed there"
    return [asked_there, failures(3, f"{name}: client errors", asked)]


async def _measure_all_cooldown(run: Run, status: str, slack: float) -> list[Row]:
    for upstream, seconds in zip(run.upstreams, RETRY_AFTER_S, strict=True):
        await upstream.tell("behave", fault=status, retry_after=str(seconds))
    first = [await run.ask(stream=False) for _ in range(4)]
    asked = await send_at_rate(40, 60, lambda _: run.ask(stream=False))
    attempts = Counter(record["id"] for record in await run.fetch_requests())
    rested = [a for a in asked if a.id not in attempts]
    name = f"all return {status} with Retry-After {RETRY_AFTER_S[-1]} to {RETRY_AFTER_S[0]}"
    smallest = min(RETRY_AFTER_S)
    right = sum(
        a.status == 429 and a.headers.get("retry-after", "").isdigit() and 0 < int(a.headers["retry-after"]) <= smallest
        for a in asked
    )
    said = Counter((a.kind, a.headers.get("retry-after")) for a in asked)
    p99_ms, shed = percentile([1e3 * (a.ended_s - a.began_s) for a in rested], 99), "" if rested else "none was shed"
    return [
        row(3, f"{name}: attempts of {len(first) + len(asked)} requests", REPLICAS, attempts.total()),
        row(3, f"{name}: attempts of one request", 2, max(attempts.values(), default=0)),
        row(3, f"{name}: not 429 with at most {smallest} s", 0, len(asked) - right, note=f"{dict(said)}"),
        row(3, f"{name}: p99 of the answer, ms", SHED_P99_MAX_MS, p99_ms, slack=slack, note=shed),
    ]


async def _bad_requests(run: Run, requests: int) -> Row:
    """No replica is ejected because of a client's mistakes."""
    wrong = await send_concurrently(16, requests, lambda _: run.ask(stream=False, fault="400"))
    odd = sum(a.status != 400 for a in wrong)
    await run.send_to_all("clear")
    fine = await send_concurrently(8, 100, lambda _: run.ask(stream=False, token_s=0.01))
    serving = {record["at"] for record in await run.fetch_requests()}
    lost = REPLICAS - len(serving) + odd + sum(not a.ok for a in fine)
    return row(3, f"{requests} x 400: replicas ejected, answers that were not the engine's", 0, lost, found=fine)
