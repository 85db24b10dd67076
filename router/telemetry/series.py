"""Series of numbers by label values, and groups of series that requests of one kind add to.

Building and hashing labels takes longer than the addition, so series are looked up once, and kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import exp
from typing import TypeAlias

from router.core.types.cache_misses import MissReason, TokenFate

RECENT_S = 300.0
FADE_S = 0.25
Labels: TypeAlias = tuple[object, ...]  # values in the order of the names, shown by str()


class Counter:
    """Counter by label values. A series is a list of one number. Callers keep the list and add to it directly, because
    a call would cost more than the addition."""

    def __init__(self, name: str, text: str, *labels: str, prefix: str = "warmroute_") -> None:
        self.name, self.text, self.labels = f"{prefix}{name}", text, labels
        self.series: dict[Labels, list[float]] = {}

    def begin(self, series: Iterable[Labels]) -> None:
        """Begin these series at 0."""
        for labels in series:
            self.series[labels] = [0.0]

    def get_series(self, *labels: object) -> list[float]:
        """Return the series with these label values; a new one begins at 0."""
        return self.series.get(labels) or self.series.setdefault(labels, [0.0])


class Gauge(Counter):
    """Level by label values."""


class Histogram:
    """Histogram by label values. A series is one list: the buckets, the unbounded one last, then the sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.name, self.text, self.labels, self.bounds = f"warmroute_{name}", text, labels, bounds
        self.series: dict[Labels, list[float]] = {}
        # The last traced observation of each bucket: value, trace id in hexadecimal, Unix time in seconds.
        self.exemplars: dict[Labels, dict[int, tuple[float, str, float]]] = {}
        if not labels:
            self.get_series()

    def get_series(self, *labels: object) -> list[float]:
        """Return the series with these label values; a new one begins at 0."""
        return self.series.get(labels) or self.series.setdefault(labels, [0.0] * (len(self.bounds) + 2))

    def add(self, series: list[float], value: float) -> None:
        """Count one observation in the first bucket with a bound not below the value."""
        series[bisect_left(self.bounds, value)] += 1
        series[-1] += value

    def exemplify(self, labels: Labels, value: float, trace_id: str, at_s: float) -> None:
        """Keep a counted observation as the example of its bucket. `at_s` is its Unix time."""
        buckets = self.exemplars.get(labels)
        if buckets is None:
            buckets = self.exemplars[labels] = {}
        buckets[bisect_left(self.bounds, value)] = (value, trace_id, at_s)


class RecentTokens:
    """Prompt tokens of one model over the last minutes, with exponential decay: tokens added RECENT_S ago count for a
    third of tokens added now. `verified`: prompt tokens of answers with a cached-token count by the engine. `told`: the
    hits among them."""

    __slots__ = ("at_s", "hit", "predicted", "prompt", "verified", "verified_hit")

    def __init__(self) -> None:
        self.prompt = self.hit = self.predicted = self.verified = self.verified_hit = self.at_s = 0.0

    def add(self, prompt: int, hit: int, predicted: int, verified: bool, now_s: float) -> None:
        """Add one prompt. The sums fade only if at least FADE_S has passed."""
        if now_s > self.at_s + FADE_S:  # records may arrive out of order
            fade = self.get_decay_factor(now_s)
            self.at_s = now_s
            self.prompt *= fade
            self.hit *= fade
            self.predicted *= fade
            self.verified *= fade
            self.verified_hit *= fade
        self.prompt += prompt
        self.hit += hit
        self.predicted += predicted
        if verified:
            self.verified += prompt
            self.verified_hit += hit

    def get_decay_factor(self, now_s: float) -> float:
        """Return the factor that brings the sums to the time `now_s`."""
        return exp((self.at_s - now_s) / RECENT_S)


class KindSeries:
    """Series of requests with one route, model, status and ending."""

    __slots__ = ("attempts", "duration", "requests")

    def __init__(self, requests: list[float], duration: list[float]) -> None:
        self.requests, self.duration = requests, duration
        self.attempts: list[float] | None = None  # begun by the first request that was sent to a replica


class ModelSeries:
    """Series of requests for one model, or for all models that share the label `other`. A series that is None begins
    with the first request that has such a value."""

    __slots__ = ("cached", "completion", "events", "genuine", "inter_token", "kinds", "label", "misses", "places",
                 "predicted", "prompt", "recent", "replayed", "reported", "saved", "saved_s", "ttft", "ttft_ratio",
                 "ttft_within")  # fmt: skip

    def __init__(self, label: str) -> None:
        self.label = label
        self.kinds: dict[tuple[str, int, str], KindSeries] = {}  # series by route, status and ending
        self.ttft: list[float] | None = None
        self.ttft_within: list[list[float]] = []  # streams by prediction: within the median, within p90, later
        self.ttft_ratio: list[float] | None = None
        self.inter_token: list[float] | None = None
        self.events: list[float] | None = None
        self.prompt: list[float] | None = None
        self.predicted: list[float] = []
        self.reported: list[float] | None = None
        self.cached: list[float] = []
        self.saved: list[float] | None = None
        self.saved_s: list[float] = []
        self.completion: list[float] | None = None
        self.genuine: list[float] | None = None  # hits in prompts that do not repeat an earlier one
        self.replayed: list[float] | None = None
        self.misses: dict[MissReason, list[float]] = {}
        self.places: dict[TokenFate, list[float]] = {}
        self.recent = RecentTokens()


class PlacementSeries:
    """Series of placements of one model on one replica, for one reason, with predictions of one grade. The series of a
    replica that has left are not shown."""

    __slots__ = (
        "completion",
        "computed",
        "decisions",
        "graded",
        "key",
        "placed",
        "requests",
        "ttft",
        "verified_tokens",
    )

    def __init__(
        self,
        decisions: list[float],
        graded: list[float],
        of_replica: list[list[float]],
        ttft: list[float] | None,
        told: list[float],
        key: tuple[str, str],
    ) -> None:
        """`of_replica`: tokens placed, tokens computed, requests, tokens of answers. `told`: prompt tokens and hits of
        answers with a cached-token count. `key`: the replica and the model's label."""
        self.decisions, self.graded = decisions, graded
        self.placed, self.computed, self.requests, self.completion = of_replica
        self.ttft, self.verified_tokens, self.key = ttft, told, key
