"""Goal 16: the prefix index within its budget, for any number of blocks.

The real `PrefixIndex` runs in a separate process, so that the process memory is the index's memory. It receives new
prompts of 64 blocks, in rotation for eight replicas. Some grow by a turn, and some are repeated. At the end a sample of
prompts shows if the remaining ones are the most recently used. If a replica still has a sampled prompt, it must have
every sampled prompt that it used later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.common import flags
from loadtest.common.processes import run_process
from loadtest.common.report import Row
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, row
from router.core.cache_state.prefix_index import PrefixIndex

BUDGET_BYTES = 512 << 20
RSS_TIMES_MAX = 1.25
SECONDS_S, FULL_SECONDS_S = 60, 600
TURNOVER, TURNOVER_TIMEOUT_S = 2.0, 150
REPLICAS, PROMPT_KEYS, TURN_KEYS = 8, 64, 16
LOOK_EVERY = 500
SAMPLE_EVERY, SAMPLE_MAX = 49, 4_000  # every 49th use: not a multiple of the number of replicas
GROW, AGAIN = 0.2, 0.1


@dataclass(slots=True)
class Churn:
    """An index that is being filled, with a record of the uses."""

    seconds_s: float
    index: PrefixIndex
    turnover: float = 0.0
    """The churn ends early after this many times the held blocks; 0: it does not."""
    sample_every: int = SAMPLE_EVERY
    chance: random.Random = field(default_factory=lambda: random.Random(16))
    distinct: int = 0
    steps: int = 0
    top_mb: float = 0.0
    longest_ms: float = 0.0
    sample: dict[int, tuple[int, str, list[int]]] = field(default_factory=dict)
    """First key -> step of its last use, replica, keys; the oldest uses first."""

    def run(self, pid: int) -> None:
        """Use the index until the time is over."""
        began_s = now_s = time.monotonic()
        last: dict[str, list[int]] = {}
        while now_s - began_s < self.seconds_s:
            self.steps += 1
            name = f"r{self.steps % REPLICAS}"
            self._use(name, self._prompt(last.get(name)), now_s)
            last[name] = self._keys
            then_s, now_s = now_s, time.monotonic()
            self.longest_ms = max(self.longest_ms, 1e3 * (now_s - then_s))
            if self.steps % LOOK_EVERY == 0:
                self.top_mb = max(self.top_mb, rss_mb(pid))
                now_s = time.monotonic()
                if self.turnover and self.distinct >= self.turnover * _count_held_blocks(self.index):
                    break
        self.top_mb = max(self.top_mb, rss_mb(pid))

    _keys: list[int] = field(default_factory=list)

    def _prompt(self, before: list[int] | None) -> list[int]:
        draw = self.chance.random()
        if before and draw < GROW:
            self.distinct += TURN_KEYS
            return before + [self.chance.getrandbits(64) for _ in range(TURN_KEYS)]
        self.distinct += PROMPT_KEYS
        return [self.chance.getrandbits(64) for _ in range(PROMPT_KEYS)]

    def _use(self, name: str, keys: list[int], now_s: float) -> None:
        self._keys = keys
        self.index.pin(name, self.steps, keys, now_s)
        self.index.unpin(name, self.steps, now_s)
        if keys[0] in self.sample or self.steps % self.sample_every == 0:
            self.sample.pop(keys[0], None)
            self.sample[keys[0]] = (self.steps, name, keys)
            if len(self.sample) > SAMPLE_MAX:
                del self.sample[next(iter(self.sample))]
        if self.sample and self.chance.random() < AGAIN / self.sample_every:
            first = self.chance.choice(list(self.sample))
            _, holder, again = self.sample.pop(first)
            self.index.touch(holder, again, now_s)
            self.sample[first] = (self.steps, holder, again)

    def count_misordered(self) -> int:
        """Return the number of evicted sampled prompts for which one used earlier on the same replica is still
        there."""
        wrong, held = 0, set[str]()
        for _, name, keys in self.sample.values():
            depth = self.index.depth(name, keys)
            wrong += name in held and depth < len(keys)
            if depth:  # the leaf of the first may be gone: it is the next to be evicted
                held.add(name)
        return wrong


def _count_held_blocks(index: PrefixIndex) -> int:
    return sum(index.blocks(f"r{i}") for i in range(REPLICAS))


def churn(seconds_s: float, bytes_max: int, turnover: float = 0.0) -> dict[str, float]:
    """Return the results of a churn; memory in MB excludes the empty process."""
    index = PrefixIndex(bytes_max)
    for i in range(REPLICAS):
        index.add(f"r{i}", 1 << 40)
    gc.collect()
    gc.freeze()  # objects from the start are not scanned again, as in router/eventloop.py
    pid = os.getpid()
    before_mb, began_s = rss_mb(pid), time.monotonic()
    churned = Churn(seconds_s, index, turnover)
    churned.run(pid)
    took_s = time.monotonic() - began_s
    held = _count_held_blocks(index)
    sampled = sum(8 * len(keys) + 250 for _, _, keys in churned.sample.values()) / 1e6
    grew_mb = churned.top_mb - before_mb
    return {
        "seconds_s": took_s,
        "grew_mb": grew_mb,
        "sample_mb": sampled,
        "held": held,
        "distinct": churned.distinct,
        "bytes_per_block": (grew_mb - sampled) * 1e6 / max(1, held),
        "estimate_mb": index.bytes_used / 1e6,
        "out_of_order": churned.count_misordered(),
        "longest_ms": churned.longest_ms,
    }


async def index_memory(bench: Bench) -> list[Row]:
    """Goal 16: the rows; the index size is the one of section 5, the time is not."""
    bench.only_ours("its own index")
    seconds_s = TURNOVER_TIMEOUT_S if bench.scale.counts else bench.scale.pick_count(SECONDS_S // 2, FULL_SECONDS_S)
    words = ["-m", "loadtest.faults.cases.memory", "--seconds", str(seconds_s), "--bytes", str(BUDGET_BYTES)]
    words += ["--turnover", str(TURNOVER)] if bench.scale.counts else []
    async with run_process("memory", [sys.executable, *words], bench.folder) as process:
        if await process.wait_for_exit():
            raise process.error("failed")
        said = json.loads(process.output.read_text().splitlines()[-1])
    times = (said["grew_mb"] - said["sample_mb"]) * 1e6 / BUDGET_BYTES
    full = said["distinct"] > said["held"]
    note = f"{said['distinct']:,} distinct blocks in {said['seconds_s']:.0f} s, {said['held']:,} held"
    estimate = f"{said['bytes_per_block']:.0f} bytes a block; its own estimate is {said['estimate_mb']:.0f} MB"
    case = "index of 512 MiB under churn: RSS in times of its budget"
    turned = said["distinct"] / said["held"]
    return [
        row(16, case, RSS_TIMES_MAX, times, note=f"{note}; {estimate}"),
        row(16, "... blocks that came by for each that was held, at least", 1, turned, ok=full),
        row(16, "... sampled prompts gone before one used earlier", 0, said["out_of_order"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the index in this process; the last line of output has the results."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.faults.cases.memory", description="Churn the prefix index."
    )
    parser.add_argument("--seconds", type=flags.positive(), default=SECONDS_S)
    parser.add_argument("--bytes", type=flags.integer(1), default=BUDGET_BYTES)
    parser.add_argument(
        "--turnover", type=flags.number(), default=0.0, help="end after this multiple of the index size"
    )
    options = parser.parse_args(argv)
    print(json.dumps(churn(options.seconds, options.bytes, options.turnover)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
