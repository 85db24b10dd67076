"""Goal 27: eight tenants, one of them hostile, in one way after the other; and two attacks on neighbours.

The replicas answer at once, so that the waiting time of others is the router's.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence

from loadtest.common.processes import ProcessError, run_process
from loadtest.common.report import Row, percentile
from loadtest.common.usage import rss_mb
from loadtest.faults.abusive_client import WAYS, chat
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, row, send_at_rate
from loadtest.faults.cases.overload import Tenant

REPLICAS, TENANTS = 2, 8
PER_S = 14.0  # requests a second of the seven others together
TTFT_TIMES_MAX, MEMORY_MAX_MB = 1.2, 256.0 * 1.048576
RATED = "a used-up rate"
SETTLE_S = 1.0
_ORACLE = ("The merger price is ", "73.5 per share")


def hostile_by(way: str) -> Callable[[Bench], Awaitable[list[Row]]]:
    """Return the rows of one hostile way as a separate function, so that each has its own time and its own tries."""

    async def rows(bench: Bench) -> list[Row]:
        bench.only_ours("it needs tenants")
        return await _one_hostile(bench, way)

    rows.__name__ = f"hostile by {way}"
    return rows


HOSTILE = tuple(map(hostile_by, WAYS))


async def _one_hostile(bench: Bench, way: str) -> list[Row]:
    hostile, *others = (Tenant(f"t{number}") for number in range(TENANTS))
    file = bench.folder / "tenants.yaml"
    rate = ", requests_per_min: 1}" if way == RATED else "}"
    file.write_text(hostile.entry.replace("}", rate) + "".join(each.entry for each in others))
    seconds_s = float(bench.scale.pick_count(6, 60))
    requests = int(PER_S * seconds_s)
    flags = ("--set", f"auth.keys_file={file}")

    async with bench.run_cluster(REPLICAS, flags, key=others[0].key) as run:

        async def ask(number: int) -> FaultAnswer:
            return await run.ask(timeout_s=30.0, headers=others[number % len(others)].headers)

        await send_at_rate(PER_S, int(PER_S), ask)
        if way == RATED:
            await run.ask(headers=hostile.headers)
        alone = await send_at_rate(PER_S, requests, ask)
        before_mb, grown_mb = rss_mb(run.process.pid), [0.0]
        words = [sys.executable, "-m", "loadtest.faults.abusive_client", way, str(run.port), hostile.key]
        async with run_process("hostile", [*words, f"{seconds_s + SETTLE_S:g}"], bench.folder) as process:
            await process.wait_for_output(re.compile("begins"))
            watching = asyncio.create_task(_watch(run, before_mb, grown_mb))
            await asyncio.sleep(SETTLE_S)
            beside = await send_at_rate(PER_S, requests, ask)
            await process.wait_for_exit(bench.scale.patience_s(60.0))
            watching.cancel()
            became = json.loads(process.output.read_text().splitlines()[-1])
        log = run.process.output.read_text(errors="replace")
    return _judge_way(bench, way, alone, beside, max(grown_mb), log, {int(k): v for k, v in became.items()})


async def _watch(run: Run, before_mb: float, grown_mb: list[float]) -> None:
    while True:
        grown_mb.append(rss_mb(run.process.pid) - before_mb)
        await asyncio.sleep(0.05)


def _judge_way(
    bench: Bench,
    way: str,
    alone: Sequence[FaultAnswer],
    beside: Sequence[FaultAnswer],
    grown_mb: float,
    log: str,
    became: dict[int, int],
) -> list[Row]:
    """Return the rows of one way: the effect on others, and the cost. With `--counts` neither times nor memory are
    judged."""
    alone_s, beside_s = (percentile([a.first_s - a.began_s for a in some if a.ok], 99) for some in (alone, beside))
    times = beside_s / alone_s if alone_s and beside_s else None
    note = f"{1e3 * (alone_s or 0):.1f} ms alone, {1e3 * (beside_s or 0):.1f} ms beside; it got {became}"
    case = f"one tenant of {TENANTS} hostile by {way}: others' p99 TTFT relative to a run without it"
    memory = row(27, "... memory, MB more", round(MEMORY_MAX_MB, 1), grown_mb)
    breakers = log.count('"event":"breaker_open"') + log.count('"event":"replica_down"')
    found = [
        row(27, case, TTFT_TIMES_MAX, times, slack=bench.scale.slack, note=note),
        failures(27, "... others' errors", beside),
        row(27, "... breakers that open, and replicas that are taken out", 0, breakers),
        *([] if bench.scale.counts else [memory]),
    ]
    if way == RATED:
        passed = sum(number for status, number in became.items() if status not in (0, 429))
        found.append(row(27, "... of its requests answered by anything but 429", 0, passed))
    return found


async def oracle(bench: Bench) -> list[Row]:
    """Goal 27: information that `history_policy` leaks to a tenant about a prompt of another tenant.

    The figure is the number of guesses with a different response if the other tenant sent a different prompt. A
    tenant's own earlier guesses count as its own conversation in both cases.
    """
    bench.only_ours("it needs tenants")
    victim, attacker = Tenant("victim"), Tenant("attacker")
    file = bench.folder / "oracle.yaml"
    file.write_text(victim.entry + attacker.entry)
    flags = ("--set", f"auth.keys_file={file}", "--set", "insights.history_policy=reject")
    name = "append_only: guesses at another tenant's prompt with answers that depend on it"
    secret = "".join(_ORACLE)
    guesses = ("gamma", "The", _ORACLE[0], secret[:-4], secret)

    async def answers_beside(said: str) -> list[tuple[int, str]]:
        async with bench.run_cluster(1, flags, key=victim.key) as run:
            await _send_guess(run, victim, said)
            return [await _send_guess(run, attacker, guess) for guess in guesses]

    try:
        worlds = [await answers_beside(said) for said in (secret, "x" * len(secret))]
    except ProcessError as error:
        return [row(27, name, 0, 0, note=f"the router does not start so: {error}"[:200])]
    differ = [one for one, other in zip(*worlds, strict=True) if one != other]
    return [row(27, name, 0, len(differ), note=str(differ)[:160] if differ else "")]


async def _send_guess(run: Run, tenant: Tenant, guess: str) -> tuple[int, str]:
    """Return the status and any response text for a conversation in which only the first message is unknown."""
    system, answer, more = "You are a helpful assistant. " * 40, "I see. " * 100, "go on"
    said = (("system", system), ("user", guess + "." * 600), ("assistant", answer), ("user", more))
    body = chat(messages=[{"role": role, "content": content} for role, content in said])
    headers = {**tenant.headers, "content-type": "application/json"}
    async with run.http.post(f"{run.url}/v1/chat/completions", data=body, headers=headers) as response:
        text = await response.text() if response.status != 200 else ""
        return response.status, text + response.headers.get("x-warmroute-warning", "")
