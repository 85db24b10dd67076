"""Prometheus families made of plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from router.telemetry.series import Counter, Gauge, Histogram


def families(tally: Counter | Histogram, samples_max: int) -> Iterator[Metric]:
    """Yield a tally's series as families of up to `samples_max` samples. A series is never split. A tally without
    series yields an empty family."""
    if isinstance(tally, Counter):
        values = list(tally.series.items())
        family = GaugeMetricFamily if isinstance(tally, Gauge) else CounterMetricFamily
        for at in range(0, len(values) or 1, samples_max):
            scalars = family(tally.name, tally.text, labels=tally.labels)
            for labels, (value,) in values[at : at + samples_max]:
                scalars.add_metric([str(label) for label in labels], value)
            yield scalars
        return
    bounds = bounds_of(tally.bounds)
    series, step = list(tally.series.items()), max(1, samples_max // (len(bounds) + 2))
    for at in range(0, len(series) or 1, step):
        histogram = HistogramMetricFamily(tally.name, tally.text, labels=tally.labels)
        for labels, (*counts, total) in series[at : at + step]:
            examples = tally.exemplars.get(labels)
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            with_examples = buckets if examples is None else [*_attach_exemplars(buckets, examples)]
            histogram.add_metric([str(label) for label in labels], with_examples, total)
        yield histogram


def _attach_exemplars(
    buckets: list[tuple[str, float]], examples: Mapping[int, tuple[float, str, float]]
) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Yield buckets of a series with their examples, as the OpenMetrics page shows them."""
    for number, (bound, count) in enumerate(buckets):
        if number in examples:
            value, trace_id, at_s = examples[number]
            yield bound, count, Exemplar({"trace_id": trace_id}, value, at_s)
        else:
            yield bound, count


def histogram(name: str, text: str, bounds: tuple[float, ...], series: list[float]) -> HistogramMetricFamily:
    """Return a histogram without labels. `series` contains its buckets, the unbounded one last, then the sum."""
    *counts, total = series
    family = HistogramMetricFamily(f"warmroute_{name}", text)
    family.add_metric((), list(zip(bounds_of(bounds), accumulate(counts), strict=True)), total)
    return family


def gauge(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float | None]]
) -> GaugeMetricFamily:
    """Return a gauge with one sample for each of `values` that is not None."""
    family = GaugeMetricFamily(f"warmroute_{name}", text, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, value)
    return family


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """Return a counter without labels."""
    return CounterMetricFamily(f"warmroute_{name}", text, value=value)


def counters(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    """Return a counter with one label."""
    family = CounterMetricFamily(f"warmroute_{name}", text, labels=(label,))
    for of, value in values:
        family.add_metric((of,), value)
    return family


def bounds_of(bounds: tuple[float, ...]) -> list[str]:
    """Return bounds of a histogram as values of the label `le`."""
    return [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
