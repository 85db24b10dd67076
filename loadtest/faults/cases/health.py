"""Goals 8, 9 and 10. Replicas that hang, crawl, die and come back, alone or all together."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from loadtest.common.report import Row
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, row, send_at_rate, send_concurrently
from loadtest.faults.judge import verdict

TOUCH_MAX = 0.02
PATIENCE_S = 4.0  # timeout of clients for a hung replica, as in the measurements that we compare with
LONG_TEXT_BYTES, LONG_PREFILL_S = 800_000, 10.0  # about 200,000 tokens
SHARE_MIN = 0.05
BACK_MAX_S, RECOVERY_MAX_S = 3.0, 1.0


async def gray(bench: Bench) -> list[Row]:
    """Goal 8: /health returns 200 all the time."""
    found = []
    for fault, replicas, seconds_s in (("hang", 2, 6.0), ("hang_headers", 2, 6.0), ("rst", 4, 3.0), ("slow", 4, 6.0)):
        async with bench.run_cluster(replicas) as run:
            # The share of failed requests after detection depends on time: with --counts it is not judged.
            found += await _measure_shunning(bench, run, fault, seconds_s / 2 if bench.scale.counts else seconds_s)
    async with bench.run_cluster(2) as run:
        found += await _long_prefill(run)
    return found


async def _measure_shunning(bench: Bench, run: Run, fault: str, seconds_s: float) -> list[Row]:
    """Return the rows for one replica that turns bad: the requests that reach it after the time for detection."""
    bad = run.upstreams[0]
    normal_s = 0.05
    await run.send_to_all("behave", ttft_s=normal_s)
    await send_concurrently(4, 60, lambda _: run.ask())
    if fault == "slow":
        await bad.tell("behave", ttft_s=10 * normal_s)
    else:
        await bad.tell("behave", fault=fault, ttft_s=normal_s)
    first = await send_at_rate(20, int(20 * seconds_s), lambda _: run.ask(timeout_s=PATIENCE_S))
    await run.send_to_all("clear")
    asked = await send_at_rate(50, bench.scale.pick_count(200, 1_000), lambda _: run.ask(timeout_s=8.0))
    touched = len({record["id"] for record in await bad.fetch_requests()}) / len(asked)
    failed = sum(not a.ok for a in asked)
    name = {"hang": "accepts and never answers", "hang_headers": "sends headers, then nothing"}
    name |= {"rst": "resets all, /health is green", "slow": "ten times slower"}
    # The time until detection depends on the machine, and so does the number of later tries.
    timed = bench.scale.slack if bench.scale.counts else None
    before = f"of {len(first)} in the {seconds_s:g} s before, {sum(not a.ok for a in first)} failed"
    most, slack = (0, None) if fault in ("rst", "slow") else (TOUCH_MAX, timed)
    case = f"1 of {len(run.upstreams)} {name[fault]}: part of requests that touch it"
    return [
        row(8, case, TOUCH_MAX, touched, slack=timed, note=before),
        row(8, "... part of requests that fail", most, failed / len(asked), slack=slack, found=asked),
    ]


async def _long_prefill(run: Run) -> list[Row]:
    """Goal 8: a replica that prefills 200,000 tokens is busy, not stalled."""
    await send_concurrently(4, 40, lambda _: run.ask(ttft_s=0.02))
    await run.send_to_all("clear")
    text = "long words " * (LONG_TEXT_BYTES // 11)
    long = asyncio.create_task(run.ask(text=text, timeout_s=60.0, ttft_s=LONG_PREFILL_S))
    await asyncio.sleep(0.3)
    short = await send_at_rate(10, int(10 * LONG_PREFILL_S), lambda _: run.ask(ttft_s=0.02))
    answer = await long
    records = [record for record in await run.fetch_requests() if record["id"] == answer.id]
    await run.send_to_all("clear")
    after = await send_concurrently(8, 80, lambda _: run.ask(ttft_s=0.1))
    there = [record for record in await run.fetch_requests() if record["at"] == (records[0]["at"] if records else "")]
    share = len(there) / len(after)
    return [
        row(8, f"prefill of {LONG_PREFILL_S:g} s: attempts", 1, len(records), found=[answer]),
        row(8, "... its replica afterwards: part of requests, at least", SHARE_MIN, share, ok=share >= SHARE_MIN),
        failures(8, "... short requests that fail meanwhile", short),
    ]


async def killed(bench: Bench) -> list[Row]:
    """Goal 9: kill -9 under load, and back two seconds later."""
    rate_per_s, after_s, away_s, rest_s = 50, 2.0, 2.0, 8.0
    async with bench.run_cluster(4) as run:
        victim = run.upstreams[0]
        requests = int(rate_per_s * (after_s + away_s + rest_s))
        load = asyncio.create_task(send_at_rate(rate_per_s, requests, lambda _: run.ask(token_s=0.02)))
        await asyncio.sleep(after_s)
        await victim.kill()
        killed_s = time.monotonic()  # it no longer responds at this time: earlier requests may have been cut
        await asyncio.sleep(away_s)
        await victim.start()
        back_s = time.monotonic()
        asked = await load
        again = [record["came_s"] for record in await victim.fetch_requests()]
        deadline_s = back_s + bench.scale.patience_s(rest_s)
        while not again and time.monotonic() < deadline_s:
            asked.append(await run.ask())
            again = [record["came_s"] for record in await victim.fetch_requests()]
    broken = [a for a in asked if not a.ok or verdict("chat", a.body, a.error) == "honest"]
    cut = [a for a in broken if a.status == 200 and a.body and a.began_s <= killed_s + 0.1]
    silent = sum(verdict("chat", a.body, a.error) != "honest" for a in cut)
    case = f"kill -9 of 1 of 4 under {rate_per_s}/s: failures but for streams in flight"
    first_s = min(again) - back_s if again else None
    return [
        row(9, case, 0, len(broken) - len(cut), found=asked),
        row(9, f"... of {len(cut)} streams in flight not ended in the error event", 0, silent),
        row(9, "... back: seconds until its first request", BACK_MAX_S, first_s, slack=bench.scale.slack),
    ]


async def outage(bench: Bench) -> list[Row]:
    """Goal 10: half of the fleet fails, all of it fails, no replica is available."""
    found = []
    slack = bench.scale.slack
    async with bench.run_cluster(4) as run:
        for i in range(2):
            await run.upstreams[i].tell("behave", fault="rst")
        await send_concurrently(8, 100, lambda _: run.ask(stream=False))
        asked = await send_at_rate(50, 200, lambda _: run.ask(stream=False))
        found.append(failures(10, "half of the fleet resets all: client errors", asked))
    async with bench.run_cluster(4) as run:
        await run.send_to_all("behave", fault="rst")
        asked = await send_at_rate(40, 120, lambda _: run.ask(stream=False))
        nobody = sum(a.status == 503 for a in asked)
        found.append(row(10, "all reset all: answers `none is there` instead of a try", 0, nobody, found=asked))
        await run.send_to_all("behave")
        first_s = await _first_s(run, time.monotonic())
        found.append(row(10, "... cured: seconds until an answer", RECOVERY_MAX_S, first_s, slack=slack))
    async with bench.run_cluster(4) as run:
        await run.send_to_all("refuse")
        await send_at_rate(20, 60, lambda _: run.ask(stream=False, timeout_s=2.0))
        await run.send_to_all("open")
        opened_s = time.monotonic()
        first_s = await _first_s(run, opened_s)
        healthy = [h for u in run.upstreams if (h := (await u.tell("figures"))["healthy_s"]) is not None]
        got = None if first_s is None else max(0.0, opened_s + first_s - min([*healthy, opened_s + first_s]))
        note = "" if first_s is None else f"{first_s:.2f} s after the first could be reached"
        name = "all were away: seconds from the first good /health to an answer"
        found.append(row(10, name, RECOVERY_MAX_S, got, slack=slack, note=note))
    return found


async def _first_s(run: Run, since_s: float) -> float | None:
    """Return the seconds until a request is answered, one every 50 ms; None if no answer comes within 20 s."""
    answered = asyncio.get_running_loop().create_future()

    async def ask() -> FaultAnswer:
        answer = await run.ask(stream=False, timeout_s=5.0)
        if answer.ok and not answered.done():
            answered.set_result(answer.ended_s - since_s)
        return answer

    tasks = set()
    with suppress(TimeoutError):
        async with asyncio.timeout(20.0):
            while not answered.done():
                tasks.add(asyncio.create_task(ask()))
                await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    return float(answered.result()) if answered.done() else None
