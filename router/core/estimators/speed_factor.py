"""Speed factor of one replica: its time for the same work, relative to the fleet's model.

Replicas of one kind are mostly alike, and one replica's few answers resemble each other. Three coefficients fitted to
them are noise, and requests would go to the replica that was lucky. So the shape of a model (the growth of times with
sizes) is learned from the whole fleet (prefill.py, decode_step.py). For each replica only one factor is learned: the
exponential of the mean logarithm of (observed time / the fleet model's time), with PRIOR observations at 1. Within BAND
the difference is noise, and the factor is 1.

A replica with a factor above AVOIDED gets no requests while others are free. So it could seem slow forever after a
first request that compiled kernels (Triton, torch.compile), or a minute in which a neighbour took its cores. Therefore
the evidence against it fades if nothing is observed.

Routers that share state add up their logarithms and weights, so all use the same factor, although each observes a part
of the answers. Each router fades only its own evidence. It does so only if its own evidence shows a slower replica than
all evidence together: otherwise a smaller part of it would make the replica seem slower.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Generic, Protocol, Self, TypeVar

FORGET = 0.98  # weight of an observation fades to a third after about 50 more
PRIOR = 2.0  # observations at the fleet's speed that are assumed at first
BAND = 1.25  # a factor between 1 / BAND and BAND counts as 1
FACTOR_MAX = 64.0  # a replica is at most this many times as slow, or as fast, as its fleet
OUTLIER = 8.0  # an observation further than this factor from the known one is clipped: a pause, not work
CLIPPED_FROM = 3  # observations after which further ones may be outliers
AVOIDED = 2.0  # a factor above this keeps requests away from the replica
FADE_S = 30.0  # seconds without an observation in which half of the evidence for such a factor is dropped
WEIGHT_MAX = 1 / (1 - FORGET)  # maximum of the evidence of one router
LOG_MAX = log(FACTOR_MAX)


class Scalable(Protocol):
    """A model of times."""

    def times(self, factor: float) -> Self:
        """Return the model for work that takes `factor` times as long."""
        ...


M = TypeVar("M", bound=Scalable)


class SpeedFactor(Generic[M]):
    """A factor learned from ratios of observed times to those of the fleet's model."""

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
        # True if there ever was evidence here: other routers may hold it, and must be updated
        self.had_evidence = False
        self.fades_s = inf  # time at which half is dropped if no observation precedes it
        self._log_sum = self._weight = 0.0
        self._shared: dict[str, tuple[float, float]] = {}  # router -> its `evidence`
        self._fleet: M | None = None  # the fleet's model from which `_model` was derived
        self._model: M | None = None  # None: must be computed

    def scale_model(self, fleet: M) -> M:
        """Return the replica's model; the same object as `fleet` if the factor is 1."""
        if self.value == 1.0:
            return fleet
        model = self._model
        if model is None or self._fleet is not fleet:
            self._fleet, self._model = fleet, (model := fleet.times(self.value))
        return model

    @property
    def is_known(self) -> bool:
        """True if this router or another one has any observation."""
        return self.observations > 0 or bool(self._shared)

    @property
    def evidence(self) -> tuple[float, float]:
        """(sum of logarithms, their weight), as observed here."""
        return self._log_sum, self._weight

    def observe(self, took_ms: float, expected_ms: float, now_s: float = inf) -> None:
        """Record that work with an expected time of `expected_ms` by the fleet's model took `took_ms` here.

        Impossible times are ignored. `now_s` starts the time after which the observation fades if no other follows.
        """
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
        """Drop half of the evidence for a slow replica without an observation for FADE_S, and half of its observations.
        The last observation is dropped entirely."""
        if now_s < self.fades_s or self.value <= AVOIDED or self._log_sum < self._weight * log(self.value):
            return
        self._log_sum, self._weight = self._log_sum / 2, self._weight / 2
        self.observations = int(min(self.observations, WEIGHT_MAX) / 2)
        self.fades_s = now_s + FADE_S
        if not self.observations:
            self._log_sum, self._weight, self.fades_s = 0.0, 0.0, inf
        self._update()

    def share(self, router: str, log_sum: float, weight: float) -> None:
        """Store another router's evidence and replace its earlier one."""
        if weight > 0:
            self._shared[router] = _clamp_evidence(log_sum, weight)
        else:
            self._shared.pop(router, None)
        self._update()

    def reset(self) -> None:
        """Drop all evidence, including other routers' until they share it again."""
        self._log_sum, self._weight, self.observations, self.fades_s = 0.0, 0.0, 0, inf
        self._shared.clear()
        self._update()

    def forget(self, router: str) -> None:
        """Drop the evidence of another router that is gone."""
        if self._shared.pop(router, None) is not None:
            self._update()

    def adopt(self, log_sum: float, weight: float, observations: int, now_s: float) -> None:
        """Start with evidence from before this router started, unless there is some already."""
        if self.observations or observations <= 0 or weight <= 0:
            return
        self.observations, self.had_evidence = observations, True
        self._log_sum, self._weight = _clamp_evidence(log_sum, weight)
        self.fades_s = now_s + FADE_S
        self._update()

    def _update(self) -> None:
        log_sum, weight = self._log_sum, self._weight
        for shared in self._shared.values():
            log_sum, weight = log_sum + shared[0], weight + shared[1]
        value = exp(log_sum / (weight + PRIOR))
        self.value = 1.0 if 1 / BAND < value < BAND else value
        self._model = None


def _clamp_evidence(log_sum: float, weight: float) -> tuple[float, float]:
    """Limit evidence to the maximum of one router."""
    weight = min(weight, WEIGHT_MAX)
    return min(max(log_sum, -weight * LOG_MAX), weight * LOG_MAX), weight
