"""How many times as long as the fleet's model says the work of one replica takes.

Replicas of one kind are mostly alike, and one replica's few answers resemble each other: three coefficients fitted to
them are noise, by which requests go to whichever replica was lucky. So the shape of a model, how times grow with sizes,
is learned from the whole fleet (prefill.py, steps.py), and of each replica one factor is learned: the exponential of
the mean logarithm of (observed time / the fleet model's), with PRIOR observations at 1. Within BAND the difference is
noise, and the factor is 1.

A replica whose factor is AVOIDED gets no requests while others are free, and would seem slow for ever after a first
request that compiled kernels (Triton, torch.compile), or a minute in which a neighbour took its cores. So the evidence
against it fades while nothing is observed.

Routers that share add up their logarithms and weights: all see the same factor, though each sees a part of the answers.
Each fades only its own evidence, and only where that is slower than all of it together: otherwise less of it would make
the replica seem slower.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Generic, Protocol, Self, TypeVar

FORGET = 0.98  # weight of an observation fades to a third after about 50 more
PRIOR = 2.0  # observations at the fleet's speed that are assumed before any was made
BAND = 1.25  # a factor between 1 / BAND and BAND counts as 1
FACTOR_MAX = 64.0  # a replica is at most so many times as slow, or as fast, as its fleet
OUTLIER = 8.0  # an observation further than this factor from the known one is clipped: a pause, not work
CLIPPED_FROM = 3  # observations after which those that follow may be outliers
AVOIDED = 2.0  # a factor above this keeps requests away
FADE_S = 30.0  # time without an observation in which half of the evidence for such a factor is forgotten
WEIGHT_MAX = 1 / (1 - FORGET)  # most evidence that one router can have
LOG_MAX = log(FACTOR_MAX)


class Scalable(Protocol):
    """A model of times."""

    def times(self, factor: float) -> Self:
        """The model of what takes so many times as long."""
        ...


M = TypeVar("M", bound=Scalable)


class SpeedFactor(Generic[M]):
    """Learned from ratios of observed times to those of the fleet's model."""

    __slots__ = (
        "_fleet",
        "_log_sum",
        "_model",
        "_shared",
        "_weight",
        "fades_s",
        "had_evidence",
        "observations",
        "value",
    )

    def __init__(self) -> None:
        self.observations = 0
        self.value = 1.0
        self.had_evidence = False  # whether there ever was any here: other routers may hold it, and need to be updated
        self.fades_s = inf  # time at which half is forgotten, unless something is observed before
        self._log_sum = self._weight = 0.0
        self._shared: dict[str, tuple[float, float]] = {}  # router -> its `evidence`
        self._fleet: M | None = None  # the fleet's model that `_model` was made of
        self._model: M | None = None  # None: to be made

    def of(self, fleet: M) -> M:
        """The replica's model; the very object `fleet` where the factor is 1."""
        if self.value == 1.0:
            return fleet
        model = self._model
        if model is None or self._fleet is not fleet:
            self._fleet, self._model = fleet, (model := fleet.times(self.value))
        return model

    @property
    def is_known(self) -> bool:
        """Whether this router or another one has observed anything."""
        return self.observations > 0 or bool(self._shared)

    @property
    def evidence(self) -> tuple[float, float]:
        """(sum of logarithms, their weight), as observed here."""
        return self._log_sum, self._weight

    def observe(self, took_ms: float, expected_ms: float, now_s: float = inf) -> None:
        """Work that takes `expected_ms` by the fleet's model took so long here. Impossible times are ignored. Made at
        `now_s`, the observation fades if no other follows."""
        if not (0 < took_ms < inf and 0 < expected_ms < inf):
            return
        ratio = min(max(took_ms / expected_ms, 1 / FACTOR_MAX), FACTOR_MAX)
        if self.observations >= CLIPPED_FROM:
            ratio = min(max(ratio, self.value / OUTLIER), self.value * OUTLIER)
        self._log_sum = self._log_sum * FORGET + log(ratio)
        self._weight = self._weight * FORGET + 1.0
        self.observations += 1
        self.had_evidence = True
        self.fades_s = now_s + FADE_S
        self._update()

    def fade(self, now_s: float) -> None:
        """Forget half of the evidence for a slow replica of which nothing was observed for FADE_S, and half of its
        observations, the last one as a whole."""
        if now_s < self.fades_s or self.value <= AVOIDED or self._log_sum < self._weight * log(self.value):
            return
        self._log_sum, self._weight = self._log_sum / 2, self._weight / 2
        self.observations = int(min(self.observations, WEIGHT_MAX) / 2)
        self.fades_s = now_s + FADE_S
        if not self.observations:
            self._log_sum, self._weight, self.fades_s = 0.0, 0.0, inf
        self._update()

    def share(self, router: str, log_sum: float, weight: float) -> None:
        """Take another router's evidence in place of its earlier one."""
        if weight > 0:
            self._shared[router] = _bounded(log_sum, weight)
        else:
            self._shared.pop(router, None)
        self._update()

    def reset(self) -> None:
        """Forget all evidence, other routers' included until they share it again."""
        self._log_sum, self._weight, self.observations, self.fades_s = 0.0, 0.0, 0, inf
        self._shared.clear()
        self._update()

    def forget(self, router: str) -> None:
        """Another router is gone, and so is its evidence."""
        if self._shared.pop(router, None) is not None:
            self._update()

    def adopt(self, log_sum: float, weight: float, observations: int, now_s: float) -> None:
        """Begin with evidence from before this router started, unless there is some already."""
        if self.observations or observations <= 0 or weight <= 0:
            return
        self.observations, self.had_evidence = observations, True
        self._log_sum, self._weight = _bounded(log_sum, weight)
        self.fades_s = now_s + FADE_S
        self._update()

    def _update(self) -> None:
        log_sum, weight = self._log_sum, self._weight
        for shared in self._shared.values():
            log_sum, weight = log_sum + shared[0], weight + shared[1]
        value = exp(log_sum / (weight + PRIOR))
        self.value = 1.0 if 1 / BAND < value < BAND else value
        self._model = None


def _bounded(log_sum: float, weight: float) -> tuple[float, float]:
    """Evidence no stronger than a router's own can be."""
    weight = min(weight, WEIGHT_MAX)
    return min(max(log_sum, -weight * LOG_MAX), weight * LOG_MAX), weight
