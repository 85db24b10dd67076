"""Families under their former names (router/former_names.py), made at a scrape. Values are counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.former_names import UNTIL, former_labels, former_metric, former_values
from router.telemetry.series import Counter, Gauge, Histogram, Labels

_TOTAL = "_total"  # ending of counters on the page, which a family's own name omits


class WithFormerNames(Collector):
    """Collector with the families of another one, each followed by the same samples under its former name."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        """Yield one family after another."""
        for family in self._collector.collect():
            yield family
            name = f"{family.name}{_TOTAL}" if family.type == "counter" else family.name
            former = former_metric(name)
            if former:
                yield _rename(family, former, name)


def with_former_names(tallies: Iterable[Counter | Histogram]) -> Iterator[Counter | Histogram]:
    """Yield tallies, each followed by its twin if it has a former name."""
    for tally in tallies:
        yield tally
        name = tally.name if isinstance(tally, Gauge) else f"{tally.name}{_TOTAL}"
        former = former_metric(name)
        if former and isinstance(tally, Counter):
            yield _make_twin(tally, former, name)


def _rename(family: Metric, former: str, name: str) -> Metric:
    """Return the family with its former name, labels and label values."""
    labels = former_labels(former)
    renamed = Metric(former.removesuffix(_TOTAL), _text(name), family.type)
    renamed.samples = [
        sample._replace(
            name=former,
            labels={labels.get(label, label): former_values(label).get(v, v) for label, v in sample.labels.items()},
        )
        for sample in family.samples
    ]
    return renamed


def _make_twin(tally: Counter, former: str, name: str) -> Counter:
    """Return a tally with the same series under the former labels and label values."""
    labels = former_labels(former)
    twin = type(tally)(
        former.removesuffix(_TOTAL), _text(name), *[labels.get(label, label) for label in tally.labels], prefix=""
    )
    values = [former_values(label) for label in tally.labels]
    if not any(values):
        twin.series = tally.series
        return twin
    for series, numbers in tally.series.items():
        twin.series[_translate(series, values)] = numbers
    return twin


def _translate(series: Labels, values: list[dict[str, str]]) -> Labels:
    return tuple(known.get(str(value), value) for value, known in zip(series, values, strict=True))


def _text(name: str) -> str:
    return f"Former name of {name}, until {UNTIL}."
