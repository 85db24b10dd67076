"""Families of the page as points, for formats other than Prometheus's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import Metric


@dataclass(slots=True)
class Distribution:
    """One series of a histogram."""

    labels: dict[str, str]
    bounds: list[float] = field(default_factory=list)  # upper bounds without the infinite one
    counts: list[int] = field(default_factory=list)  # observations of each bucket alone, the unbounded one last
    total: float = 0.0  # sum of all observations


@dataclass(slots=True)
class PointFamily:
    """One family: numbers by labels, or distributions if it is a histogram."""

    name: str
    text: str
    kind: str  # `counter`, `gauge` or `histogram`
    numbers: list[tuple[dict[str, str], float]] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)


def points_of(parts: Iterable[Metric]) -> list[PointFamily]:
    """Return families with their points. Consecutive parts of one family are joined."""
    found: dict[str, PointFamily] = {}
    for part in parts:
        family = found.setdefault(part.name, PointFamily(part.name, part.documentation, part.type))
        if part.type == "histogram":
            family.distributions += _distributions(part)
        else:
            family.numbers += [(sample.labels, sample.value) for sample in part.samples]
    return list(found.values())


def _distributions(part: Metric) -> list[Distribution]:
    """Return the series of a histogram. Its samples are the cumulative buckets, then the count and the sum."""
    found: list[Distribution] = []
    below = 0.0
    for sample in part.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            if not found or len(found[-1].counts) > len(found[-1].bounds):  # the previous series has its last bucket
                labels = {name: value for name, value in sample.labels.items() if name != "le"}
                found.append(Distribution(labels))
                below = 0.0
            found[-1].counts.append(round(sample.value - below))
            below = sample.value
            if bound != float("inf"):
                found[-1].bounds.append(bound)
        elif sample.name.endswith("_sum"):
            found[-1].total = sample.value
    return found
