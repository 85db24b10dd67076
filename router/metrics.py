"""What Prometheus sees; the only importer of prometheus_client.

Counters and histograms are updated once per request, at its end. Gauges about replicas are read from the Router when
a scrape asks, so that a departed replica's series depart with it. Labels are bounded: routes and reasons are fixed
sets, models are those that replicas serve (anything else is `other`), replicas are those discovered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from router import __version__
from router.core.facts import Grade, Receipt, Usage
from router.core.fleet import Member
from router.core.routing import Router

CONTENT_TYPE = CONTENT_TYPE_LATEST
disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` twin of every counter helps nobody here
HIT_RATE_WINDOW_S = 300.0

_LATENCY_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_INTER_TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_OVERHEAD_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


@dataclass(slots=True)
class RequestRecord:
    """Everything about one request that metrics, the log line and `/admin/decisions` are made of."""

    id: str
    route: str
    at_s: float = 0.0  # Unix time
    model: str = ""
    status: int = 0
    ending: str = ""
    error: str | None = None
    detail: str | None = None  # what the client was told of it
    stream: bool = False
    duration_s: float = 0.0
    overhead_s: float | None = None  # from the whole request read to the call of the first replica
    ttft_s: float | None = None
    inter_token_s: float | None = None
    events: int = 0
    receipt: Receipt | None = None
    usage: Usage | None = None
    retries: tuple[tuple[str, str], ...] = ()  # (kind of failure, replica) of attempts that were retried


class Metrics:
    """All metrics of one router; no globals, so several can live in one process."""

    def __init__(
        self,
        router: Router,
        in_flight: Callable[[], int],
        clock: Callable[[], float],
        streams: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict,
        prompts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`streams`: figures of event streams by replica; `prompts`: what became of prompts on the way to tokens."""
        self.registry = CollectorRegistry()
        self._hits = _HitRate()
        self._define()
        self.registry.register(_Gauges(router, in_flight, clock, self._hits))
        self.registry.register(_Events(router, streams, prompts))

    def _define(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"warmroute_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"warmroute_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)

        self._requests = counter("requests", "Requests answered.", "route", "model", "status")
        self._ttft = histogram("ttft_seconds", "Time to the first event of a stream.", _LATENCY_S, "model")
        self._duration = histogram("duration_seconds", "Request read to answer ended.", _LATENCY_S, "route", "model")
        self._inter_token = histogram(
            "inter_token_seconds", "Mean time between the events of a stream.", _INTER_TOKEN_S, "model"
        )
        self._overhead = histogram(
            "overhead_seconds", "Request read to request sent on: parse, hash, match, place.", _OVERHEAD_S
        )
        self._events = counter("stream_events", "Streamed events passed on.", "model")
        self._prompt = counter("prompt_tokens", "Prompt tokens placed, estimated.", "model")
        self._predicted = counter("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model")
        self._reported = counter(
            "reported_prompt_tokens", "Prompt tokens of answers that say how many were cached.", "model"
        )
        self._cached = counter("cached_tokens", "Prompt tokens that engines reported as cached.", "model")
        self._decisions = counter("decisions", "Placements.", "policy", "reason")
        self._graded = counter("graded_requests", "Placements by grade of the prediction.", "grade")
        self._predictions = counter(
            "predictions", "Predictions against the engine's own count of cached tokens.", "grade", "result"
        )
        self._over = counter("overpredicted_tokens", "Tokens predicted to be cached that were not.", "grade")
        self._retries = counter("retries", "Attempts that failed and were retried elsewhere.", "kind")
        self._failures = counter("replica_failures", "Attempts that failed.", "replica", "kind")

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        model = record.model or "none"
        self._requests.labels(record.route, model, str(record.status)).inc()
        self._duration.labels(record.route, model).observe(record.duration_s)
        if record.overhead_s is not None:
            self._overhead.observe(record.overhead_s)
        if record.ttft_s is not None:
            self._ttft.labels(model).observe(record.ttft_s)
        if record.inter_token_s is not None:
            self._inter_token.labels(model).observe(record.inter_token_s)
        if record.events:
            self._events.labels(model).inc(record.events)
        for kind, _ in record.retries:
            self._retries.labels(kind).inc()
        if record.receipt is not None:
            self._observe_receipt(model, record.receipt, record.usage, record.at_s)

    def _observe_receipt(self, model: str, receipt: Receipt, usage: Usage | None, now_s: float) -> None:
        self._decisions.labels(receipt.policy, receipt.reason.value).inc()
        if not receipt.prompt_tokens:
            return
        self._graded.labels(receipt.grade.value).inc()
        self._prompt.labels(model).inc(receipt.prompt_tokens)
        self._predicted.labels(model).inc(receipt.predicted_cached_tokens)
        self._hits.predicted.add(receipt.predicted_cached_tokens, receipt.prompt_tokens, now_s)
        if usage is not None and usage.cached_tokens is not None:
            self._reported.labels(model).inc(usage.prompt_tokens)
            self._cached.labels(model).inc(usage.cached_tokens)
            self._hits.actual.add(usage.cached_tokens, usage.prompt_tokens, now_s)
            over = receipt.predicted_cached_tokens - usage.cached_tokens
            result = "equal" if not over else "over" if over > 0 else "under"
            self._predictions.labels(receipt.grade.value, result).inc()
            self._over.labels(receipt.grade.value).inc(max(0, over))

    def failed(self, replica: str, kind: str) -> None:
        """Count one failed attempt."""
        self._failures.labels(replica, kind).inc()

    def left(self, replica: str) -> None:
        """Drop the series of a replica that is gone."""
        for kind in ("connect", "broke_early", "lost", "timeout", "engine", "broke_midway"):
            if (replica, kind) in self._failures._metrics:  # noqa: SLF001 - remove() raises for what was never counted
                self._failures.remove(replica, kind)

    def page(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Ratio:
    """A ratio over an exponentially fading window."""

    def __init__(self) -> None:
        self._part = self._whole = self._at_s = 0.0

    def add(self, part: float, whole: float, now_s: float) -> None:
        fade = exp(min(0.0, self._at_s - now_s) / HIT_RATE_WINDOW_S)
        self._part, self._whole, self._at_s = self._part * fade + part, self._whole * fade + whole, now_s

    @property
    def value(self) -> float | None:
        return self._part / self._whole if self._whole > 1e-9 else None


class _HitRate:
    def __init__(self) -> None:
        self.predicted, self.actual = _Ratio(), _Ratio()


class _Gauges(Collector):
    """Reads the Router when scraped."""

    def __init__(
        self, router: Router, in_flight: Callable[[], int], clock: Callable[[], float], hits: _HitRate
    ) -> None:
        self._router, self._in_flight, self._clock, self._hits = router, in_flight, clock, hits

    def collect(self) -> Iterable[Metric]:
        """One family after another; every name is always present, so that dashboards find it."""
        yield _gauge("in_flight_requests", "Requests being answered.", (), [((), self._in_flight())])
        rates = [(("predicted",), self._hits.predicted.value), (("actual",), self._hits.actual.value)]
        yield _gauge("token_hit_rate", "Cached part of prompt tokens, last five minutes.", ("kind",), rates)
        index = self._router.index
        yield _gauge("index_keys", "Distinct blocks in the prefix index.", (), [((), index.keys)])
        yield _gauge("index_bytes", "Bytes the prefix index takes.", (), [((), index.bytes_used)])
        masks = self._router.knowledge.masks
        yield _gauge("held_keys", "Distinct blocks that events say are held.", (), [((), len(masks))])
        yield _gauge("build_info", "Version of the router.", ("version",), [((__version__,), 1)])
        yield from self._replicas()

    def _replicas(self) -> Iterable[Metric]:
        router, now_s = self._router, self._clock()
        members = list(router.fleet.members.values())

        def each(name: str, text: str, value: Callable[[Member], float | None]) -> Metric:
            return _gauge(f"replica_{name}", text, ("replica",), [((m.id,), value(m)) for m in members])

        yield each("ready", "1 when requests may be sent there.", lambda m: float(m.health.fit))
        yield each("in_flight", "Open leases.", lambda m: len(m.leases))
        yield each(
            "pending_prefill_seconds", "Modelled prefill sent and not done.", lambda m: m.pending_ms(now_s) / 1e3
        )
        yield each("running", "Requests running, by the engine's count.", lambda m: m.load.running)
        yield each("waiting", "Requests waiting, by the engine's count.", lambda m: m.load.waiting)
        yield each("kv_usage", "KV pool in use by live requests, 0 to 1.", lambda m: m.load.kv_usage)
        yield each("kv_tokens", "KV pool in tokens.", lambda m: m.load.kv_tokens_max)
        yield each("index_blocks", "Blocks believed held.", lambda m: router.index.blocks(m.id))
        yield each("share", "Our part of the replica's computed tokens.", lambda m: m.share)
        yield each("prefill_tokens_per_second", "Learned prefill speed.", lambda m: _speed(router, m))
        yield each("hit_rate", "The engine's own hits over queries, since it started.", _engine_rate)
        yield _gauge(
            "replica_grade",
            "1 at the grade of what is known of the replica's cache.",
            ("replica", "grade"),
            [((m.id, g.value), float(m.grade is g)) for m in members for g in Grade],
        )


class _Events(Collector):
    """What event streams and tokenizers have done so far; read when scraped."""

    def __init__(
        self,
        router: Router,
        streams: Callable[[], Mapping[str, Mapping[str, float | None]]],
        prompts: Callable[[], Mapping[str, int]],
    ) -> None:
        self._router, self._streams, self._prompts = router, streams, prompts

    def collect(self) -> Iterable[Metric]:
        """Counters by replica, and gauges of what its events say now."""
        streams = self._streams()
        for name, text in _STREAM_COUNTERS.items():
            family = CounterMetricFamily(f"warmroute_replica_event_{name}", text, labels=("replica",))
            for replica, figures in streams.items():
                family.add_metric((replica,), figures.get(name) or 0.0)
            yield family
        lags = [((replica,), figures.get("lag_s")) for replica, figures in streams.items()]
        yield _gauge("replica_event_lag_seconds", "Age of its last batch of events when it came.", ("replica",), lags)
        knowledge = self._router.knowledge
        ledgers = {id_: ledger for id_ in streams if (ledger := knowledge.ledger(id_)) is not None}
        held = [((id_,), ledger.blocks) for id_, ledger in ledgers.items()]
        yield _gauge("replica_held_blocks", "Blocks held, by its own events.", ("replica",), held)
        shares = [((id_,), equal / n) for id_ in ledgers for equal, n in [knowledge.checks(id_)] if n]
        text = "Part of its last 200 answers that events predicted to the token."
        yield _gauge("replica_predictions_equal", text, ("replica",), shares)
        prompts = CounterMetricFamily(
            "warmroute_prompts_tokenized",
            "Prompts on their way to token ids, by what became of them.",
            labels=("outcome",),
        )
        for outcome, count in self._prompts().items():
            prompts.add_metric((outcome,), count)
        yield prompts


_STREAM_COUNTERS = {
    "batches": "Batches of events applied.",
    "blocks": "Blocks that events said were stored or removed.",
    "gaps": "Batches of events that were missing when the next came.",
    "replays": "Replays of events asked for, routine looks included: one every ten seconds or so.",
    "restarts": "Restarts of the engine that a replay proved; slow ones are new streams.",
    "lost": "Times that batches of events were lost for good.",
    "malformed": "Batches of events that could not be read.",
}


def _speed(router: Router, member: Member) -> float | None:
    model = router.fleet.model_of(member)
    return 1e3 / model.per_token_ms if model.per_token_ms else None


def _engine_rate(member: Member) -> float | None:
    load = member.load
    queries, hits = load.cache_query_tokens_total, load.cache_hit_tokens_total
    return float(hits / queries) if queries and hits is not None else None


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float | None]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"warmroute_{name}", text, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, value)
    return family
