"""What Prometheus sees; the only importer of prometheus_client.

What is counted are plain numbers (tallies.py), which become families when a scrape asks. Gauges about replicas are
read from the Router then as well, so that a departed replica's series depart with it. A page of many series is
written in slices, between which the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router import __version__
from router.core.breaker import State
from router.core.facts import Grade, Priority
from router.core.member import Member
from router.core.prefill import PrefillModel
from router.core.routing import Router
from router.stalls import BOUNDS_S
from router.tallies import Counter, Histogram, RequestRecord, Tallies

__all__ = ["CONTENT_TYPE", "Metrics", "RequestRecord"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
SLICE_SAMPLES = 100  # of a page, written without a break: half a millisecond or so
SLICE_LINES = SLICE_SAMPLES + 2  # HELP and TYPE


class Metrics:
    """All metrics of one router; no globals, so several can live in one process."""

    def __init__(
        self,
        router: Router,
        in_flight: Callable[[], int],
        clock: Callable[[], float],
        streams: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict,
        prompts: Callable[[], Mapping[str, int]] = dict,
        lines_dropped: Callable[[], int] = int,
        queued: Callable[[], tuple[Mapping[Priority, int], int]] = lambda: ({}, 0),
        connections: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {}),
        discoveries: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        spans_dropped: Callable[[], int] = int,
        stalls: Callable[[], list[float]] = lambda: [0.0] * (len(BOUNDS_S) + 2),
        workers_cpu_s: Callable[[], float] = float,
        process: bool = False,
    ) -> None:
        """`streams`: figures of event streams by replica; `prompts`: what became of prompts on the way to tokens;
        `lines_dropped`: log lines that nobody took; `queued`: requests that wait for a place by priority, and bytes;
        `connections`: of clients, those open, and those that we closed by reason; `discoveries`: how fresh the view of
        each source of replicas is; `spans_dropped`: of traces, that did not reach the collector; `stalls`: of the event
        loops (see stalls.py); `workers_cpu_s`: CPU of other processes; with `process` the page ends with what the
        kernel says of this one, which no registry has."""
        self._tallies = Tallies(partial(_prefill, router), router.policy.name)
        self.observe = self._tallies.observe  # as it is: one call less on every request
        self.failed = self._tallies.failed
        self.joined = self._tallies.joined
        self.left = self._tallies.left
        self.shed = self._tallies.shed
        self.hub_lost = self._tallies.hub_lost
        self.reloaded = self._tallies.reloaded
        self.know_tenants = self._tallies.know
        gauges = _Gauges(router, in_flight, clock, self._tallies, lines_dropped, queued, spans_dropped)
        events, health = _Events(router, streams, prompts), _Health(stalls, workers_cpu_s)
        self._read = (gauges, _Connections(connections), _Discoveries(discoveries), events, health)
        self._process = ProcessCollector(registry=None) if process else None
        self.registry = CollectorRegistry()
        for collector in (_Counted(self._tallies), *self._read):
            self.registry.register(collector)

    def page(self) -> bytes:
        """The page that Prometheus scrapes, at one go."""
        return b"".join(self._slices())

    async def page_in_slices(self) -> bytes:
        """The same page, written a slice at a time: requests go on in between. No series is torn."""
        slices, lines = [], 0
        for text in self._slices():
            more = text.count(b"\n")
            if lines + more > SLICE_LINES:  # small families go together: a turn may take long where CPU is short
                await asyncio.sleep(0)
                lines = 0
            slices.append(text)
            lines += more
        await asyncio.sleep(0)
        return b"".join(slices)

    def _slices(self) -> Iterator[bytes]:
        for tally in self._tallies.all():
            for number, family in enumerate(_families(tally, SLICE_SAMPLES)):
                text = generate_latest(_Only(family))
                yield text.split(b"\n", 2)[2] if number else text  # HELP and TYPE once a family
        for collector in self._read:
            for family in collector.collect():
                yield generate_latest(_Only(family))
        if self._process is not None:
            yield generate_latest(self._process)


class _Only(Collector):
    """What `generate_latest` takes for a registry, with one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """That family."""
        return (self._family,)


class _Counted(Collector):
    """What was counted."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        """One family after another, each whole."""
        for tally in self._tallies.all():
            yield from _families(tally, 1 << 62)


def _families(tally: Counter | Histogram, samples_max: int) -> Iterator[Metric]:
    """Its series as they are, so many samples at once but never part of a series; an empty family if there is none."""
    if isinstance(tally, Counter):
        values = list(tally.values.items())
        for at in range(0, len(values) or 1, samples_max):
            counter = CounterMetricFamily(tally.name, tally.text, labels=tally.labels)
            for labels, value in values[at : at + samples_max]:
                counter.add_metric([str(label) for label in labels], value)
            yield counter
        return
    bounds = _bounds(tally.bounds)
    series, step = list(tally.series.items()), max(1, samples_max // (len(bounds) + 2))
    for at in range(0, len(series) or 1, step):
        histogram = HistogramMetricFamily(tally.name, tally.text, labels=tally.labels)
        for labels, (*counts, total) in series[at : at + step]:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            histogram.add_metric([str(label) for label in labels], buckets, total)
        yield histogram


def _bounds(bounds: tuple[float, ...]) -> list[str]:
    return [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]


def _prefill(router: Router, replica: str) -> PrefillModel:
    """What is learned of its speed; the fleet's, where it is gone."""
    member = router.fleet.members.get(replica)
    return router.fleet.model_of(member) if member is not None else router.fleet.prefill.model


class _Gauges(Collector):
    """Reads the Router when scraped."""

    def __init__(
        self,
        router: Router,
        in_flight: Callable[[], int],
        clock: Callable[[], float],
        tallies: Tallies,
        lines_dropped: Callable[[], int],
        queued: Callable[[], tuple[Mapping[Priority, int], int]],
        spans_dropped: Callable[[], int],
    ) -> None:
        self._router, self._in_flight, self._clock, self._tallies = router, in_flight, clock, tallies
        self._lines_dropped, self._queued, self._spans_dropped = lines_dropped, queued, spans_dropped

    def collect(self) -> Iterable[Metric]:
        """One family after another; every name is always present, so that dashboards find it."""
        yield _gauge("in_flight_requests", "Requests being answered.", (), [((), self._in_flight())])
        waiting, size_bytes = self._queued()
        counts = [((priority.name.lower(),), waiting.get(priority, 0)) for priority in Priority]
        yield _gauge("queued_requests", "Requests that wait for a place.", ("priority",), counts)
        yield _gauge("queued_bytes", "Bytes of the bodies of requests that wait.", (), [((), size_bytes)])
        tallies = self._tallies
        rates = [(("predicted",), tallies.hit_rate_predicted.value), (("actual",), tallies.hit_rate_actual.value)]
        yield _gauge("token_hit_rate", "Cached part of prompt tokens, last five minutes.", ("kind",), rates)
        index = self._router.index
        yield _gauge("index_keys", "Distinct blocks in the prefix index.", (), [((), index.keys)])
        yield _gauge("index_bytes", "Bytes the prefix index takes.", (), [((), index.bytes_used)])
        masks = self._router.knowledge.masks
        yield _gauge("held_keys", "Distinct blocks that events say are held.", (), [((), len(masks))])
        yield _gauge("build_info", "Version of the router.", ("version",), [((__version__,), 1)])
        text = "Unix time when settings that were read again came into force."
        yield _gauge("last_reload_timestamp_seconds", text, (), [((), tallies.reloaded_at_s)])
        dropped = "Log lines that nobody took from standard error in time."
        yield CounterMetricFamily("warmroute_log_lines_dropped", dropped, value=self._lines_dropped())
        dropped = "Spans of traces that the collector did not take, or for which the queue was full."
        yield CounterMetricFamily("warmroute_spans_dropped", dropped, value=self._spans_dropped())
        panics = "Placements on replicas that may not be fit, since no other was left."
        yield CounterMetricFamily("warmroute_panic_placements", panics, value=self._router.standing.panics)
        yield from self._replicas()

    def _replicas(self) -> Iterable[Metric]:
        router, now_s = self._router, self._clock()
        members = router.fleet.members  # as it is when a family is made: between two families a replica may leave

        def each(name: str, text: str, value: Callable[[Member], float | None]) -> Metric:
            return _gauge(f"replica_{name}", text, ("replica",), [((m.id,), value(m)) for m in members.values()])

        facts = [((m.id, m.replica.name, m.replica.node), 1.0) for m in members.values()]
        text = "1; what discovery knows of the replica, for joins."
        yield _gauge("replica_info", text, ("replica", "name", "node"), facts)
        yield each("ready", "1 when requests may be sent there.", lambda m: float(m.ready))
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
            "replica_breaker",
            "1 at what the replica is sent, as far as requests have a say in it.",
            ("replica", "state"),
            [((m.id, s.value), float(m.state(now_s) is s)) for m in members.values() for s in State],
        )
        yield _gauge(
            "replica_grade",
            "1 at the grade of what is known of the replica's cache.",
            ("replica", "grade"),
            [((m.id, g.value), float(m.grade is g)) for m in members.values() for g in Grade],
        )


class _Connections(Collector):
    """Clients' connections; read when scraped."""

    def __init__(self, connections: Callable[[], tuple[int, Mapping[str, int]]]) -> None:
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        """A gauge, and a counter by reason."""
        count, closed = self._connections()
        yield _gauge("connections", "Open connections of clients.", (), [((), count)])
        text = "Connections of clients that the router closed, by the limit that they ran into."
        family = CounterMetricFamily("warmroute_connections_closed", text, labels=("reason",))
        for reason, times in closed.items():
            family.add_metric((reason,), times)
        yield family


class _Discoveries(Collector):
    """Where replicas come from; read when scraped."""

    def __init__(self, discoveries: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._discoveries = discoveries

    def collect(self) -> Iterable[Metric]:
        """Three gauges and a counter by source."""
        known = self._discoveries()
        for name, key, text in (
            (
                "fresh",
                "fresh",
                "1 while the source's list of replicas may be taken for the truth.",
            ),
            ("stale_seconds", "stale_s", "Age of the source's list while it may not."),
            ("replicas", "replicas", "Replicas in the source's list, before ranks."),
        ):
            values = [((source,), float(figures[key])) for source, figures in known.items()]
            yield _gauge(f"discovery_{name}", text, ("source",), values)
        text = "Times that a source of replicas failed."
        errors = CounterMetricFamily("warmroute_discovery_errors", text, labels=("source",))
        for source, figures in known.items():
            errors.add_metric((source,), figures["errors"])
        yield errors


class _Health(Collector):
    """Of the router's own processes; read when scraped."""

    def __init__(self, stalls: Callable[[], list[float]], workers_cpu_s: Callable[[], float]) -> None:
        self._stalls, self._workers_cpu_s = stalls, workers_cpu_s

    def collect(self) -> Iterable[Metric]:
        """A histogram and a counter."""
        *counts, total_s = self._stalls()
        text = "How late the event loops came to a timer, where that was 5 ms or more; ten are due a second."
        family = HistogramMetricFamily("warmroute_loop_stall_seconds", text)
        family.add_metric((), list(zip(_bounds(BOUNDS_S), accumulate(counts), strict=True)), total_s)
        yield family
        text = "CPU of worker processes; that of this process, the hub, is process_cpu_seconds_total."
        yield CounterMetricFamily("warmroute_worker_cpu_seconds", text, value=self._workers_cpu_s())


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
