"""A search for inputs that hold the event loop up: long ones, against a clock, on the code that ships.

    PYTHONPATH=.compiled:. python -m tests.attack.clock NAME SECONDS SEED

Lines of Python are counted by meter.py, which does not see one call of C that takes seconds. Here a call fails that
takes more than MS_PER_MB of CPU time for each megabyte, in the best of three runs, or more memory than it may
hold. Inputs that took the most are changed further, so that the search climbs towards what is slow. The search is a
process of its own: a call that does not end is ended with it, and the input in RUNNING is what it was at.
"""

from __future__ import annotations

import gc
import logging
import random
import resource
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.calls import Call, calls_of, quietly
from tests.attack.drive import FOLDER, ROOT
from tests.attack.grown import Recipe, changed, drawn, kept, recipe_of
from tests.attack.target import Target

MB = 1 << 20
RUNS = 3  # of a call that is too slow, of which the best counts: other processes only ever make one slower
BEST = 12  # inputs that are changed further
CHANGED = 0.6  # share of inputs that are changed ones of the best
HELD_EVERY = 8  # of so many inputs one has its memory judged, which takes several times as long
LEARNED_MAX = 300  # inputs that a fuzzer has learned and that are begun with
ADDRESS_BYTES_MAX = 8 << 30  # of the process: beyond, a call gets MemoryError instead of the machine's memory
RUNNING = "running.json"


@dataclass(frozen=True)
class Cost:
    """CPU time and memory of one call, as parts of what it may cost."""

    time: float
    held: float = 0.0

    @property
    def most(self) -> float:
        """The larger part."""
        return max(self.time, self.held)


@dataclass(frozen=True)
class Slow:
    """A call that costs too much, and the input."""

    target: Target
    call: Call
    recipe: Recipe
    cost: Cost
    size: int

    def told(self) -> str:
        """The cost, and the file that the recipe was written to. Writes the file."""
        folder = FOLDER / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        slug = "".join(letter if letter.isalnum() else "_" for letter in self.call.name)
        file = folder / f"{self.target.name}-{slug}.json"
        file.write_text(self.recipe.text(), "utf-8")
        mb = max(1.0, self.size / MB)
        spent = f"{self.cost.time * self.call.ms_per_mb * mb:,.0f} ms of CPU time"
        held = f" and {self.cost.held * self.call.held_mb_per_mb:,.0f} MB for one megabyte" if self.cost.held else ""
        where = f"{self.size:,} bytes, recipe in {file.relative_to(ROOT)}: {self.recipe.text().strip()[:400]}"
        keep = f"once mended, keep the file in tests/attack/grown/{self.target.name}/"
        replay = f"replay: make attack ARGS='--replay {file.relative_to(ROOT)}'"
        return f"{self.target.name}, {self.call.name}: {spent}{held} for {where}\n{replay}\n{keep}"


def cost_of(call: Call, data: bytes, *, held: bool) -> Cost:
    """What a call costs with these bytes."""
    allowed = max(1.0, len(data) / MB)
    allowed_s = allowed * call.ms_per_mb * call.once / 1_000
    best_s = _cpu_s(call, data)
    for _ in range(RUNS - 1):
        if best_s > allowed_s:
            best_s = min(best_s, _cpu_s(call, data))
    return Cost(best_s / allowed_s, _held_bytes(call, data[:MB]) / MB / call.held_mb_per_mb if held else 0.0)


def _cpu_s(call: Call, data: bytes) -> float:
    gc.collect(0)
    gc.disable()
    began_s = time.process_time()
    try:
        quietly(call, data)
        return time.process_time() - began_s
    finally:
        gc.enable()


def _held_bytes(call: Call, data: bytes) -> int:
    tracemalloc.start(1)
    try:
        quietly(call, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Search:
    """Inputs for one target, those that cost most among them changed further."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.calls = target, calls_of(target)
        self.inputs = 0
        self.worst: dict[str, tuple[Cost, Recipe]] = {}
        self.slow: dict[str, Slow] = {}
        self._choose = random.Random(seed)
        self._pool = [*target.seeds().values(), *learned(target)]
        self._best: list[tuple[float, Recipe]] = []

    def go(self, seconds: float) -> None:
        """All kept recipes, then others until the time is over."""
        until_s = time.monotonic() + seconds
        for recipe in kept(self.target.name).values():
            self.judge(recipe, held=True)
        while time.monotonic() < until_s:
            self.judge(self._next(), held=self.inputs % HELD_EVERY == 0)

    def judge(self, recipe: Recipe, *, held: bool) -> None:
        """One input, through each call."""
        self.inputs += 1
        (FOLDER / RUNNING).write_text(recipe.text(), "utf-8")
        whole, most = recipe.data(), 0.0
        for call in self.calls:
            data = whole[: call.bytes_max]
            cost = cost_of(call, data, held=held)
            most = max(most, cost.most)
            if call.name not in self.worst or cost.most > self.worst[call.name][0].most:
                self.worst[call.name] = cost, recipe
            if cost.most > 1.0 and (call.name not in self.slow or cost.most > self.slow[call.name].cost.most):
                self.slow[call.name] = Slow(self.target, call, recipe, cost, len(data))
        self._best = sorted([*self._best, (most, recipe)], key=lambda each: -each[0])[:BEST]

    def _next(self) -> Recipe:
        if self._best and self._choose.random() < CHANGED:
            return changed(self._choose, self._choose.choice(self._best)[1], self._pool, self.target.words)
        return drawn(self._choose, self._pool, self.target.words)


def learned(target: Target) -> Sequence[bytes]:
    """The shortest inputs that a fuzzer has learned."""
    folder = FOLDER / "learned" / target.name
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_size)[:LEARNED_MAX] if folder.exists() else []
    return [file.read_bytes() for file in files]


def replayed(target: Target, file: Path) -> list[Slow]:
    """The calls for which the recipe in a file costs too much."""
    search = Search(target, 0)
    FOLDER.mkdir(exist_ok=True)
    search.judge(recipe_of(file.read_text("utf-8")), held=True)
    return list(search.slow.values())


def main(name: str, seconds: float, seed: int) -> int:
    """The exit status: 1 if a call costs too much."""
    from tests.attack.targets import TARGETS
    from tests.compiled import COMPILED

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    FOLDER.mkdir(exist_ok=True)
    search = Search(TARGETS[name], seed)
    search.go(seconds)
    code = "native code" if COMPILED else "no native code (make compiled)"
    call, (cost, _) = max(search.worst.items(), key=lambda each: each[1][0].most)
    print(f"{name}: {search.inputs} long inputs on {code}, at most {cost.most:.0%} of what may be spent ({call})")
    for slow in search.slow.values():
        print(slow.told())
    return 1 if search.slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
