"""Goal 19, `python -m loadtest faults --soak S`: chaos for S seconds; afterwards the state is the same as before.

All is drawn from one seed:

- Replicas fail in every way of the fault upstream, die and come back.
- Clients use four APIs; some disconnect and some do not read.
- SIGHUP comes every few seconds.

Every second the router is sampled from outside (/proc): file descriptors, threads, memory. Then all faults end, and the
router gets time to recover. After that:

- Gauges of requests in progress are zero.
- The number of descriptors is the same as at first.
- Memory no longer grows.
- The log has no bug.
- The router answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

from loadtest.common.report import Row
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, FaultAnswer, Run, Upstream, failures, poll_until, row, send_at_rate
from loadtest.faults.cases.disconnects import gauges, request, wait_until_idle
from loadtest.faults.upstream import answers
from loadtest.faults.upstream.connection import EARLY, MID

REPLICAS = 4
RATE_PER_S = 30.0
CHAOS_EVERY_S, RELOAD_EVERY_S, LOOK_EVERY_S = 0.7, 5.0, 1.0
IDLE_S = 2.0
LEAVE, DEAF = 0.2, 0.02
HEAL_S = 6.0
WARM_PART, FDS_MAX, THREADS_MAX = 0.25, 16, 4
RSS_SLOPE_MAX_MB, RSS_SLOPE_PER_S = 8.0, 180.0
BUGS = re.compile(rb"bug:|never retrieved|Task was destroyed|Traceback|never awaited|Unclosed")
# Capacity for learned state is so small that it is full by the end of the warm-up: all later growth is a leak.
LEARNED = {"routing.index_bytes_max": 1 << 20, "routing.remembered_prompts_max": 1_024, "limits.response_ids_max": 256}
LEARNED |= {"insights.memory_bytes_max": 1 << 20, "insights.blocks_max": 4_096}
SETTINGS = {"upstream.idle_timeout_s": IDLE_S, "upstream.first_byte_timeout_s": 10, "listen.send_timeout_s": IDLE_S}
FLAGS = tuple(word for name, value in (SETTINGS | LEARNED).items() for word in ("--set", f"{name}={value}"))


class Soak:
    """One soak run."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run, self._seed = run, seed
        self.fds: list[int] = []
        self.threads: list[int] = []
        self.rss_mb: list[float] = []
        self.reloads = 0
        self.faults: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._dead: set[Upstream] = set()

    async def go(self, seconds_s: float) -> None:
        """Run load and chaos together for `seconds_s`; then heal the replicas."""
        end_s = time.monotonic() + seconds_s
        async with asyncio.TaskGroup() as group:
            for part in (self._load, self._chaos, self._look, self._reload):
                group.create_task(part(end_s))
        for upstream in self._run.upstreams:
            await self._heal(upstream)
        await asyncio.sleep(HEAL_S)

    async def _load(self, end_s: float) -> None:
        chance = random.Random(self._seed)
        tasks: set[asyncio.Task[None]] = set()
        while time.monotonic() < end_s:
            task = asyncio.create_task(self._one(chance))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(chance.expovariate(RATE_PER_S))
        await asyncio.gather(*tasks)

    async def _one(self, chance: random.Random) -> None:
        draw = chance.random()
        if draw < DEAF:
            await self._deaf(f"deaf{chance.getrandbits(40)}")
            return
        answer: FaultAnswer = await self._run.ask(
            api=chance.choice(list(answers.APIS)),
            stream=chance.random() < 0.7,
            text="words " * chance.choice((5, 50, 5_000)),
            timeout_s=chance.uniform(0.01, 0.3) if draw < DEAF + LEAVE else 20.0,
            tokens=chance.choice((1, 8, 100)),
            token_s=0.01,
        )
        self.ended[answer.kind] += 1

    async def _deaf(self, id_: str) -> None:
        """Run a client that does not read."""
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._run.port, limit=1_024)
            writer.write(request(id_, "flood_bytes=20000000", stream=True))
            await asyncio.sleep(2 * IDLE_S)
            writer.close()

    async def _chaos(self, end_s: float) -> None:
        chance = random.Random(self._seed + 1)
        while time.monotonic() < end_s:
            upstream = chance.choice(self._run.upstreams)
            match chance.choice(("fault", "fault", "slow", "refuse", "kill", "sick", "heal", "heal")):
                case "fault":
                    fault = chance.choice((*EARLY, *MID))
                    self.faults[fault] += 1
                    if upstream not in self._dead:
                        await upstream.tell("behave", fault=fault, count=chance.choice((1, 5, -1)))
                case "slow":
                    if upstream not in self._dead:
                        await upstream.tell("behave", ttft_s=0.5, token_s=0.05)
                case "sick":
                    if upstream not in self._dead:
                        await upstream.tell("behave", health=chance.choice((0, 503)))
                case "refuse":
                    if upstream not in self._dead:
                        await upstream.tell("refuse")
                case "kill":
                    if upstream not in self._dead:
                        self.faults["kill -9"] += 1
                        await upstream.kill()
                        self._dead.add(upstream)
                case _:
                    await self._heal(upstream)
            await asyncio.sleep(chance.uniform(0.0, 2 * CHAOS_EVERY_S))

    async def _heal(self, upstream: Upstream) -> None:
        if upstream in self._dead:
            await upstream.start()
            self._dead.discard(upstream)
        await upstream.tell("open")
        await upstream.tell("behave")
        await upstream.tell("clear")

    async def _look(self, end_s: float) -> None:
        pid = self._run.process.pid
        while time.monotonic() < end_s:
            with suppress(OSError):
                self.fds.append(len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208 - a folder of the kernel's
                self.threads.append(len(os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
                self.rss_mb.append(rss_mb(pid))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _reload(self, end_s: float) -> None:
        """Send SIGHUP if the router handles it; otherwise the signal would end the process."""
        while time.monotonic() < end_s:
            if catches(self._run.process.pid, signal.SIGHUP):
                os.kill(self._run.process.pid, signal.SIGHUP)
                self.reloads += 1
            await asyncio.sleep(RELOAD_EVERY_S)


def catches(pid: int, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal (proc(5), SigCgt)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def slope(samples: list[float], seconds_s: float) -> float | None:
    """Return the growth from the first to the last third after the warm-up, scaled to RSS_SLOPE_PER_S of time."""
    steady = samples[int(WARM_PART * len(samples)) :]
    third = len(steady) // 3
    if third < 2:
        return None
    between_s = seconds_s * (1 - WARM_PART) * 2 / 3
    return (median(steady[-third:]) - median(steady[:third])) / between_s * RSS_SLOPE_PER_S


async def _is_recovered(run: Run, fds: int) -> bool:
    """True if the number of descriptors is about `fds` again, and requests are answered."""
    with suppress(OSError):
        held = len(os.listdir(f"/proc/{run.process.pid}/fd"))  # noqa: PTH208 - a folder of the kernel's
        return held <= fds + FDS_MAX and all([(await run.ask()).ok for _ in range(2 * REPLICAS)])
    return True  # the end of the process is reported separately


async def soak(bench: Bench, seconds_s: float, seed: int) -> list[Row]:
    """Goal 19: the rows of a soak of `seconds_s`."""
    bench.only_ours("its gauges and its log are looked at")
    async with bench.run_cluster(REPLICAS, FLAGS) as run:
        pid = run.process.pid
        before = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        soaked = Soak(run, seed)
        await soaked.go(seconds_s)
        left = await (wait_until_idle(run, bench.scale.patience_s(HEAL_S)) if bench.scale.counts else gauges(run))
        if bench.scale.counts:
            await poll_until(lambda: _is_recovered(run, before), bench.scale.patience_s(HEAL_S))
        alive = run.process.running
        fds = len(os.listdir(f"/proc/{pid}/fd")) if alive else None  # noqa: PTH208
        asked = await send_at_rate(20, 40, lambda _: run.ask())
        log = run.process.output.read_bytes()
    bugs = Counter(found.decode() for found in BUGS.findall(log))
    growth_mb = slope(soaked.rss_mb, seconds_s)
    threads = max(soaked.threads, default=0) - min(soaked.threads, default=0)
    chaos = f"{soaked.faults.total()} faults, {soaked.ended.total()} requests: {dict(soaked.ended.most_common(6))}"
    grows, most = f"... RSS, MB more every {RSS_SLOPE_PER_S:g} s", f"at most {max(soaked.rss_mb, default=0.0):.0f} MB"
    memory = row(19, grows, RSS_SLOPE_MAX_MB, growth_mb, note=most)
    buggy = f"soak of {seconds_s:g} s: bugs and unretrieved exceptions in the log"
    more, held = None if fds is None else fds - before, f"at most {max(soaked.fds, default=0)}"
    return [
        row(19, buggy, 0, bugs.total(), note=f"{dict(bugs) or ''} {chaos}"),
        row(19, "... gauges of open requests, afterwards", 0, left, ok=left == 0),
        row(19, "... file descriptors more than before", FDS_MAX, more, note=held),
        row(19, "... threads, most less fewest", THREADS_MAX, threads),
        *([] if bench.scale.counts else [memory]),  # a rate, which needs minutes on an otherwise idle machine
        row(19, "... reloads, at least one", 1, soaked.reloads, ok=soaked.reloads > 0 and alive),
        failures(19, "... requests that fail, once all is well again", asked),
    ]
