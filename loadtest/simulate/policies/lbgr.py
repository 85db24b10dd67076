"""LBGR, learning-based greedy routing: estimated end-to-end time, with a learned remainder.

    ETA(r) = uncached characters x 1 ms + queue(r) + remainder(r)

The queue is the work that was sent to the replica and is not answered, in the same milliseconds, less 1/32 every 20 ms.
The remainder is learned per replica from answers, by recursive least squares with a constant as the only regressor
(forgetting 0.95). An observation is the time of an answer beyond the rest of the formula at its placement, at least 1
ms. Source: arXiv 2601.18999 and its code (fzwark/KVRouting, policy EtaOnline3D).

Differences: the decay is smooth here, without ticks. An answer that was cut off after its first token is learned from
like a whole one. Its own tree of prompts, which receives a prompt when the answer has ended, is left out: all rows
share one cache estimate. Its eviction (RLT) is the engine's, not the router's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate

KEPT = 31 / 32
TICK_S = 0.020
FORGET = 0.95
UNSURE = 1e6
"""Variance of a remainder without observations."""


@dataclass(slots=True)
class Remainder:
    """Recursive least squares of a constant."""

    ms: float = 0.0
    variance: float = UNSURE

    def learn(self, ms: float) -> None:
        """Take one observation."""
        gain = self.variance / (FORGET + self.variance)
        self.ms += gain * (ms - self.ms)
        self.variance = (1 - gain) * self.variance / FORGET


@dataclass(slots=True)
class Placed:
    """A request under way."""

    at_s: float
    own_ms: float
    queue_ms: float


class Lbgr(ScoringPolicy):
    """Policy without settings except the code's defaults."""

    name = "lbgr"

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, tuple[float, float]] = {}
        """Milliseconds of queue by replica, and the time at which they were measured."""
        self._remainders: dict[str, Remainder] = {}
        self._under_way: dict[SimRequest, Placed] = {}

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Add the request to the replica's queue."""
        super().on_placed(turn, replica, now_s)
        queue_ms, own_ms = self._queue_ms(replica, now_s), float(self._open[turn])
        self._under_way[turn] = Placed(now_s, own_ms, queue_ms)
        self._queues[replica] = queue_ms + own_ms, now_s

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the rest of the request from the queue, and learn from an answer."""
        answered = turn not in self._open
        super().on_ended(turn, replica, now_s)
        placed = self._under_way.pop(turn)
        left_ms = placed.own_ms * _compute_decay(now_s - placed.at_s)
        self._queues[replica] = max(0.0, self._queue_ms(replica, now_s) - left_ms), now_s
        if answered:
            took_ms = (now_s - placed.at_s) * 1e3
            self._remainder(replica).learn(max(1.0, took_ms - placed.own_ms - placed.queue_ms))

    def _work(self, candidate: Candidate) -> int:
        return max(1, candidate.uncached_tokens * BYTES_PER_TOKEN)

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        return least(candidates, self._eta_ms)[0]

    def _eta_ms(self, candidate: Candidate) -> float:
        queue_ms = self._queue_ms(candidate.id, self.sight.now_s)
        return self._work(candidate) + queue_ms + self._remainder(candidate.id).ms

    def _queue_ms(self, replica: str, now_s: float) -> float:
        ms, at_s = self._queues.get(replica, (0.0, now_s))
        return ms * _compute_decay(now_s - at_s)

    def _remainder(self, replica: str) -> Remainder:
        return self._remainders.setdefault(replica, Remainder())


def _compute_decay(seconds: float) -> float:
    return float(KEPT ** (seconds / TICK_S))
