"""Goals 18, 19 and 27. More load than capacity, by all clients, by one prompt, by one tenant.

The replicas are simulated engines (`loadtest engine`), so that a queue in front of them costs the same as on a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loadtest.common.processes import READY, run_process
from loadtest.common.report import Row, percentile
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, row, send_at_rate, send_concurrently
from loadtest.faults.upstream import answers
from loadtest.proxy_cost.extremes import HEALTH_P99_MAX_MS, health_beside_long_prompts

REPLICAS, SEQUENCES = 2, 8
TOKENS = 40
OVERLOAD, GOODPUT_MIN = 5, 0.9
QUEUE, QUEUE_WAIT_S, TTFT_MAX_S = 32, 2.0, 3.0
SHED_P99_MAX_MS = 10.0
LONG_PROMPTS_S = 4.0
SHARE, SOLO_TIMES_MAX = 20, 1.2
QUIET_PER_S = 4.0
ADMISSION = (
    *("--set", f"admission.in_flight_max={SEQUENCES}", "--set", f"admission.queue_requests_max={QUEUE}"),
    *("--set", f"admission.queue_timeout_s={QUEUE_WAIT_S:g}"),
)


@asynccontextmanager
async def _engines(bench: Bench) -> AsyncIterator[Sequence[str]]:
    """Run simulated engines with a small batch limit."""
    words = [sys.executable, "-m", "loadtest", "engine", "--port", "0", "--replicas", str(REPLICAS)]
    words += ["--model", answers.MODEL, "--max-num-seqs", str(SEQUENCES)]
    async with run_process("engines", words, bench.folder) as process:
        yield [said[1] for said in await process.wait_for_output(READY, REPLICAS)]


async def overload(bench: Bench) -> list[Row]:
    """Goal 18: five times the capacity of the engines."""
    slack = bench.scale.slack
    peak_s, over_s = (4.0, 6.0) if not bench.scale.full else (15.0, 30.0)
    async with _engines(bench) as urls, bench.run_cluster(0, ADMISSION, urls) as run:
        peak = await _peak_per_s(run, peak_s)
        began_s = time.monotonic()
        rate = peak * OVERLOAD
        asked = await send_at_rate(rate, int(rate * over_s), lambda _: run.ask(max_tokens=TOKENS, timeout_s=30.0))
    good = [a for a in asked if a.ok and a.first_s - a.began_s <= TTFT_MAX_S and began_s + 1 <= a.ended_s]
    within = [a for a in good if a.ended_s <= began_s + over_s]
    goodput = len(within) / (over_s - 1) / peak
    shed = [a for a in asked if a.status == 429]
    other = [a for a in asked if not a.ok and a.status != 429]
    p99_ms = percentile([1e3 * (a.ended_s - a.began_s) for a in shed], 99)
    name = f"{OVERLOAD} x {peak:.0f} requests/s: goodput as a part of the peak, at least"
    late = f"... {len(shed)} shed: p99 of the 429, ms"
    later = sum("retry-after" not in a.headers for a in shed)
    return [
        row(18, name, GOODPUT_MIN, goodput, ok=goodput >= GOODPUT_MIN / slack, slack=slack),
        row(18, late, SHED_P99_MAX_MS, p99_ms, slack=slack, note="" if shed else "nobody was"),
        row(18, "... 429 without Retry-After", 0, later, ok=bool(shed) and not later),
        row(18, "... failed in any other way", 0, len(other), found=other),
    ]


async def _peak_per_s(run: Run, seconds_s: float) -> float:
    """Return the engines' peak rate without queueing."""
    end_s, done = time.monotonic() + seconds_s, 0

    async def lane() -> None:
        nonlocal done
        while time.monotonic() < end_s:
            answer = await run.ask(max_tokens=TOKENS)
            done += answer.ok and answer.ended_s <= end_s

    await asyncio.gather(*(lane() for _ in range(REPLICAS * SEQUENCES)))
    return max(1.0, done / seconds_s)


async def long_prompts(bench: Bench) -> list[Row]:
    """Goal 19: sixteen prompts of 8 MB at a time."""
    bench.only_ours("its /healthz is asked")
    words = [sys.executable, "-m", "loadtest.proxy_cost.upstream", "--replicas", str(REPLICAS)]
    async with run_process("upstream", words, bench.folder) as process:
        urls = [said[1] for said in await process.wait_for_output(READY, REPLICAS)]
        async with bench.run_cluster(0, urls=urls, asked=False) as run:
            address = ("127.0.0.1", run.port)
            times_s, done, errors = await health_beside_long_prompts(address, bench.folder, LONG_PROMPTS_S)
    p99_ms, slack = 1e3 * (percentile(times_s, 99) or 0.0), bench.scale.slack
    name, note = "16 prompts of 8 MB: p99 of /healthz, ms", f"{done} prompts"
    longest, longest_ms = "... the longest /healthz, ms: nothing holds the event loop longer", 1e3 * max(times_s)
    failed = row(19, "... prompts and pages that fail", 0, sum(errors.values()), ok=not errors and done > 0)
    failed.errors_by_kind = errors
    return [
        row(19, name, HEALTH_P99_MAX_MS, p99_ms, slack=slack, note=note),
        row(19, longest, HEALTH_P99_MAX_MS, longest_ms, slack=slack),
        failed,
    ]


# One tenant against another


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name and its key."""

    name: str

    @property
    def key(self) -> str:
        """A key for the single run that it is made for."""
        return f"wr-{hashlib.sha256(self.name.encode()).hexdigest()}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its requests."""
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def entry(self) -> str:
        """Its entry in the keys file."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return f'- {{name: {self.name}, sha256: "{digest}", tenant: {self.name}}}\n'


async def neighbours(bench: Bench) -> list[Row]:
    """Goal 27: A sends twenty times its share, B is unaffected."""
    bench.only_ours("it needs tenants")
    loud, quiet = Tenant("loud"), Tenant("quiet")
    file = bench.folder / "keys.yaml"
    file.write_text(loud.entry + quiet.entry)
    seconds_s = bench.scale.pick_count(8, 60)
    flags = (*ADMISSION, "--set", f"auth.keys_file={file}")

    async def one(tenant: Tenant) -> FaultAnswer:
        return await run.ask(max_tokens=TOKENS, timeout_s=30.0, headers=tenant.headers)

    async with _engines(bench) as urls, bench.run_cluster(0, flags, urls, key=quiet.key) as run:
        await send_concurrently(4, 20, lambda _: one(quiet))
        solo = await send_at_rate(QUIET_PER_S, int(QUIET_PER_S * seconds_s), lambda _: one(quiet))
        per_s = QUIET_PER_S * SHARE
        noise = asyncio.create_task(send_at_rate(per_s, int(per_s * (seconds_s + 1)), lambda _: one(loud)))
        await asyncio.sleep(1.0)
        beside = await send_at_rate(QUIET_PER_S, int(QUIET_PER_S * seconds_s), lambda _: one(quiet))
        noisy = await noise
    before_s, after_s = (percentile([a.first_s - a.began_s for a in some if a.ok], 99) for some in (solo, beside))
    times = after_s / before_s if after_s and before_s else None
    shed = sum(a.status == 429 for a in noisy)
    note = f"{1e3 * (before_s or 0):.0f} ms alone, {1e3 * (after_s or 0):.0f} ms beside"
    case = f"tenant A at {SHARE} x B's: B's p99 TTFT relative to a run without A"
    return [
        row(27, case, SOLO_TIMES_MAX, times, slack=bench.scale.slack, note=note),
        failures(27, "... B's errors", beside),
        row(27, "... of A's requests shed, at least one", 1, shed, ok=shed > 0),
    ]
