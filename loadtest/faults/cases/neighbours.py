"""Goal 29: one tenant beside one hostile party at a time: another tenant, an engine of another model, the store.

The tenant's requests are short streams to a dedicated engine, first alone and then beside the hostile party. Requests
to an idle server alternate with them. The increase of the idle server's times is caused by the machine, and is
subtracted. Refusals and lost tokens are counts and must be 0. The ratio of times is judged only if times are judged.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from loadtest.common.processes import Process, run_process
from loadtest.common.report import Row, percentile
from loadtest.faults.abusive_client import FLOOD_MODEL
from loadtest.faults.bench import Bench, FaultAnswer, Run, Upstream, failures, poll_until, row, send_at_rate
from loadtest.faults.cases.overload import Tenant
from loadtest.faults.upstream.answers import MODEL
from loadtest.faults.upstream.floods import FLOODS

GOAL = 29
PER_S, TOKENS = 40.0, 8
TTFT_TIMES_MAX = 1.2
SETTLE_S = 1.0
STORE = "messages"
PARTIES = {
    **dict.fromkeys(("bytes", "ids", "strings", "sessions", "cancels", "deadlines"), "tenant"),
    **{f"flood of {kind}": "engine" for kind in FLOODS},
    STORE: "store",
}
"""Hostile way -> its party."""
_BEGINS, _PORT = re.compile("begins"), re.compile(r"ready (\d+)")
_FORGED = re.compile(
    r'^warmroute_peering_messages_total\{[^}]*kind="(?:bad|unauthenticated)"[^}]*\} (\S+)', re.MULTILINE
)


@dataclass(slots=True)
class Seen:
    """Observations of one tenant in a period: its responses, and the response times of an idle server, in seconds."""

    answers: list[FaultAnswer] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float | None:
        """The 99th percentile of times to the first byte; None if no response was complete."""
        return percentile([answer.first_s - answer.began_s for answer in self.answers if answer.ok], 99)

    @property
    def lost(self) -> int:
        """Tokens that are missing in responses with status 200."""
        words = [b" w%d" % number for number in range(TOKENS)]
        return sum(word not in answer.body for answer in self.answers if answer.status == 200 for word in words)


def make_party_rows(way: str) -> Callable[[Bench], Awaitable[list[Row]]]:
    """Return the rows of one hostile party as a separate function, so that each has its own time and its own tries."""

    async def rows(bench: Bench) -> list[Row]:
        bench.only_ours("it needs tenants")
        return await _measure_party(bench, way)

    rows.__name__ = f"beside {PARTIES[way]} {way}"
    return rows


ROWS = tuple(map(make_party_rows, PARTIES))


@dataclass(slots=True)
class Scene:
    """A router in front of one tenant's engine and a possibly hostile engine, and an idle server."""

    run: Run
    engine: Upstream
    hostile: Upstream
    idle: Upstream
    loud: Tenant
    store: Process | None

    async def came(self) -> float:
        """Return the effect of the hostile party so far.

        Its unit is requests that reached the engine, bytes of its floods, or messages that the router has refused.
        """
        if self.store is not None:
            _, text = await self.run.page("/metrics", admin=True)
            return sum(float(found[1]) for found in _FORGED.finditer(text))
        flooded = (await self.hostile.tell("figures"))["flooded_bytes"]
        return float(flooded or sum(not record["id"] for record in await self.engine.fetch_requests()))


async def _measure_party(bench: Bench, way: str) -> list[Row]:
    seconds_s = float(bench.scale.pick_count(6, 60))
    async with _scene(bench, way) as scene:
        await _observe_tenant(scene, SETTLE_S)
        alone, before = await _observe_tenant(scene, seconds_s), await scene.came()
        async with _hostile(bench, scene, way, 2 * seconds_s + SETTLE_S):
            await _observe_tenant(scene, SETTLE_S)
            after = await _observe_tenant(scene, seconds_s)

            async def has_come() -> bool:
                return await scene.came() > before

            is_hostile = await poll_until(has_come, bench.scale.patience_s(30.0))
    return _judge_party(bench, way, alone, after, is_hostile=is_hostile)


@asynccontextmanager
async def _scene(bench: Bench, way: str) -> AsyncIterator[Scene]:
    quiet, loud = Tenant("quiet"), Tenant("loud")
    file = bench.folder / "neighbours.yaml"
    file.write_text(quiet.entry + loud.entry)
    flags = ["--set", f"auth.keys_file={file}"]
    async with AsyncExitStack() as stack:
        models = {"engine": MODEL, "hostile-engine": FLOOD_MODEL, "idle": MODEL}
        engine, hostile, idle = (Upstream(name, bench.folder, model) for name, model in models.items())
        for upstream in (engine, hostile, idle):
            stack.push_async_callback(upstream.stop)
            await upstream.start()
        store: Process | None = None
        if way == STORE:
            words = [sys.executable, "-m", "loadtest.faults.hostile_store"]
            store = await stack.enter_async_context(run_process("store", words, bench.folder))
            (said,) = await store.wait_for_output(_PORT)
            flags += ["--set", f"peering.redis_url=redis://127.0.0.1:{said[1]}", "--set", "peering.router_id=a"]
        run = await stack.enter_async_context(bench.run_cluster(0, flags, [engine.url, hostile.url], key=quiet.key))
        yield Scene(run, engine, hostile, idle, loud, store)


@asynccontextmanager
async def _hostile(bench: Bench, scene: Scene, way: str, seconds_s: float) -> AsyncIterator[None]:
    """Start the hostile party, and end it after the block."""
    if scene.store is not None:
        os.kill(scene.store.pid, signal.SIGUSR1)
        yield
        return
    words = [sys.executable, "-m", "loadtest.faults.abusive_client", way, str(scene.run.port), scene.loud.key]
    async with run_process("hostile", [*words, f"{bench.scale.patience_s(seconds_s):g}"], bench.folder) as process:
        await process.wait_for_output(_BEGINS)
        yield


async def _observe_tenant(scene: Scene, seconds_s: float) -> Seen:
    """Send requests for `seconds_s`, with a request to the idle server before each."""
    seen = Seen()

    async def ask(_: int) -> FaultAnswer:
        began_s = time.monotonic()
        async with scene.run.http.get(
            f"{scene.idle.url}/health", timeout=aiohttp.ClientTimeout(total=30.0)
        ) as response:
            await response.read()
        seen.idle_s.append(time.monotonic() - began_s)
        return await scene.run.ask(timeout_s=30.0, max_tokens=TOKENS)

    seen.answers = await send_at_rate(PER_S, int(PER_S * seconds_s), ask)
    return seen


def _judge_party(bench: Bench, way: str, alone: Seen, after: Seen, *, is_hostile: bool) -> list[Row]:
    """Return the rows of one party: times, refusals and losses of the other tenant."""
    before_s, beside_s = alone.p99_s, after.p99_s
    machine_s = max(0.0, (percentile(after.idle_s, 99) or 0.0) - (percentile(alone.idle_s, 99) or 0.0))
    times = max(0.0, beside_s - machine_s) / before_s if before_s and beside_s else None
    note = f"{1e3 * (before_s or 0):.1f} ms alone, {1e3 * (beside_s or 0):.1f} ms beside, of which the machine's own"
    note += f" {1e3 * machine_s:.1f} ms"
    case = f"beside a hostile {PARTIES[way]}, {way}: others' p99 TTFT relative to a run without it"
    return [
        row(GOAL, case, TTFT_TIMES_MAX, times, slack=bench.scale.slack, note=note),
        failures(GOAL, "... others' refusals and errors", after.answers),
        row(GOAL, "... tokens lost", 0, after.lost),
        row(GOAL, "... nothing came of it", 0, int(not is_hostile)),
    ]
