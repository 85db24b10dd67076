"""Workloads drawn at random: the seed draws the cluster, the prompts, the answers, the arrivals and the load.

A policy is tuned to the scenarios that its authors look at. Here each seed is another scenario, and most of them are
unlike all of those. So they expose a term that helps the scenario it was made for and hurts others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from loadtest.fake_engine.calibration import CALIBRATION_OF_2025, CALIBRATIONS
from loadtest.simulate.engine.capacity import capacity_rps
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import open_workload
from loadtest.simulate.scenarios.generated import BLOCK_TOKENS, PIECE_TOKENS, Pieces, poisson, turns_of
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

REQUESTS = 800
REPLICAS = (2, 3, 4, 4, 6, 8, 8, 12, 16, 24)
KINDS = tuple(sorted(CALIBRATIONS.keys() - {CALIBRATION_OF_2025}))
"""Calibrations to draw from. One with a newer version among them is left out."""
CACHES = (1.0, 1.0, 1.0, 0.5, 0.3, 0.2)
"""KV caches, as parts of the calibration's cache."""
GROUPS = (0, 1, 2, 4, 8, 16, 24, 40, 100, 300)
"""Numbers of shared prefixes; 0: no two prompts have a common part."""
SKEWS = (0.0, 0.0, 0.7, 1.0, 1.3)
"""Exponents of Zipf's law for the requests of groups; 0: all alike."""
PREFIX_PIECES, ANSWER_TOKENS = (2, 5, 10, 20, 30, 50, 70, 100), (16, 60, 200, 200, 600, 1_200)
"""Medians of log-normal lengths."""
TAIL_PIECES = (1, 1, 2, 5, 15)
"""The longest tail after a shared prefix."""
ANSWER_SPREADS = (0.1, 0.5, 1.0)
LONG_SHARES, LONG_PIECES = (0.0, 0.0, 0.0, 0.02, 0.1), (40, 150)
"""Part of the prompts that are documents without a common part, and the range of their lengths."""
LOADS_DRAWN = (0.15, 1.5)
PROMPT_PART = 4
"""A prefix, a tail and a document each take at most a fourth of a cache."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Drawn parameters of the prompts."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    tail: int
    answer: int
    spread: float
    longs: float
    longest: int
    shared: bool

    def part(self, rng: random.Random, number: int) -> Pieces:
        """Return the request of a number."""
        if rng.random() < self.longs:
            length = min(self.longest, rng.randint(*LONG_PIECES))
            return Pieces(10_000 + number, 0, number, length, rng.randint(10, 60))
        tokens = max(1, min(3_000, int(rng.lognormvariate(log(self.answer), self.spread))))
        if not self.shared:
            return Pieces(10_000 + number, 0, number, rng.choice(self.lengths), tokens)
        (group,) = rng.choices(range(len(self.lengths)), self.weights)
        return Pieces(group, self.lengths[group], number, rng.randint(1, self.tail), tokens)


def draw_scenario(load: str, seed: int) -> Scenario:
    """A workload of 800 requests that the seed draws, at `load` times the load that it draws, 0.15 to 1.5 of the
    cluster's capacity. The cluster has 2 to 24 replicas of one of the calibrations with a fifth of its KV cache or
    more. No prefix or up to 300 prefixes are shared, each of up to a fourth of a cache. Answers have a median of 16 to
    1,200 tokens, and some prompts may be documents. Requests come at random, in bursts or in waves."""
    name = f"drawn:{seed}"
    rng = random.Random(name)
    calibration = CALIBRATIONS[rng.choice(KINDS)]
    kv_tokens = int(rng.choice(CACHES) * calibration.kv_tokens)
    setting = ClusterSpec(
        replicas=rng.choice(REPLICAS),
        calibration=calibration,
        kv_tokens=kv_tokens,
        grade=rng.choice(("estimated", "exact")),
        seed=seed,
    )
    draw = _draw(rng, max(4, min(100, kv_tokens // PROMPT_PART // PIECE_TOKENS)))
    parts = [draw.part(rng, number) for number in range(REQUESTS)]
    turns = turns_of(name, parts, _arrivals(rng))
    rate = LOADS[load] * rng.uniform(*LOADS_DRAWN) * capacity_rps(turns, setting, BLOCK_TOKENS)
    for turn in turns:
        turn.at_s /= rate
    return Scenario(open_workload("drawn", turns, BLOCK_TOKENS), setting, rate, "requests/s")


def _draw(rng: random.Random, longest: int) -> Draw:
    groups, skew, median = rng.choice(GROUPS), rng.choice(SKEWS), min(longest, rng.choice(PREFIX_PIECES))
    spread = 0.4 if groups else 0.8
    lengths = [int(rng.lognormvariate(log(median), spread)) for _ in range(groups or REQUESTS)]
    return Draw(
        tuple(max(1, min(longest, length)) for length in lengths),
        tuple(1 / (1 + rank) ** skew for rank in range(len(lengths))),
        min(longest, rng.choice(TAIL_PIECES)),
        rng.choice(ANSWER_TOKENS),
        rng.choice(ANSWER_SPREADS),
        rng.choice(LONG_SHARES),
        longest,
        bool(groups),
    )


def _arrivals(rng: random.Random) -> list[float]:
    """Return times in order, at about one a second. They are Poisson, in bursts of 1 to 24 at one moment, or in waves:
    a hundred at five times the rate of the hundred between them."""
    kind = rng.choice(("poisson", "poisson", "bursts", "waves"))
    if kind == "poisson":
        return poisson(rng, REQUESTS, 1.0)
    times, now_s = list[float](), 0.0
    while len(times) < REQUESTS:
        size = rng.choice((1, 1, 1, 8, 24)) if kind == "bursts" else 1
        rate = 1 / size if kind == "bursts" else (3.0 if len(times) // 100 % 2 else 0.6)
        now_s += rng.expovariate(rate)
        times += [now_s] * size
    return times[:REQUESTS]
