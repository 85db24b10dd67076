"""Series of numbers by label values, and groups of series that requests of one kind add to.

Making and hashing labels takes longer than the addition, so series are looked up once, and kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeAlias

Labels: TypeAlias = tuple[object, ...]  # values in the order of the names, shown by str()


class Counter:
    """A counter by label values. A series is a list of one number, which is kept and added to directly: a call would
    cost more than the addition."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = f"warmroute_{name}", text, labels
        self.series: dict[Labels, list[float]] = {}

    def begin(self, series: Iterable[Labels]) -> None:
        """Begin these series at 0."""
        for labels in series:
            self.series[labels] = [0.0]

    def of(self, *labels: object) -> list[float]:
        """The series with these label values, begun if it is new."""
        return self.series.get(labels) or self.series.setdefault(labels, [0.0])


class Gauge(Counter):
    """A level by label values."""


class Histogram:
    """A histogram by label values. A series is one list: the buckets, the unbounded one last, then the sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.name, self.text, self.labels, self.bounds = f"warmroute_{name}", text, labels, bounds
        self.series: dict[Labels, list[float]] = {}
        if not labels:
            self.of()

    def of(self, *labels: object) -> list[float]:
        """The series with these label values, begun if it is new."""
        return self.series.get(labels) or self.series.setdefault(labels, [0.0] * (len(self.bounds) + 2))

    def add(self, series: list[float], value: float) -> None:
        """Count one observation in the first bucket whose bound is not below the value."""
        series[bisect_left(self.bounds, value)] += 1
        series[-1] += value


class KindSeries:
    """Series of requests with one route, model, status and ending."""

    __slots__ = ("attempts", "duration", "requests")

    def __init__(self, requests: list[float], duration: list[float]) -> None:
        self.requests, self.duration = requests, duration
        self.attempts: list[float] | None = None  # begun by the first request that was sent to a replica


class ModelSeries:
    """Series of requests for one model, or for all that are `other`. Those that are None begin with the first request
    that has such a value."""

    __slots__ = ("cached", "events", "inter_token", "kinds", "label", "predicted", "prompt", "reported", "saved",
                 "saved_s", "ttft")  # fmt: skip

    def __init__(self, label: str) -> None:
        self.label = label
        self.kinds: dict[tuple[str, int, str], KindSeries] = {}  # series by route, status and ending
        self.ttft: list[float] | None = None
        self.inter_token: list[float] | None = None
        self.events: list[float] | None = None
        self.prompt: list[float] | None = None
        self.predicted: list[float] = []
        self.reported: list[float] | None = None
        self.cached: list[float] = []
        self.saved: list[float] | None = None
        self.saved_s: list[float] = []


class PlacementSeries:
    """Series of placements on one replica, for one reason, with predictions of one grade."""

    __slots__ = ("computed", "decisions", "graded", "placed")

    def __init__(self, decisions: list[float], graded: list[float], placed: list[float], computed: list[float]) -> None:
        self.decisions, self.graded = decisions, graded
        self.placed, self.computed = placed, computed  # the two lists are not shown where the replica has left
