"""Metrics that are read at a scrape: of the Router, of event streams, of this process.

These collectors keep no state, so the series of a replica end when it leaves. Every name is always present, so that
dashboards find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.fleet.breaker import State
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.types.placements import REPLICA_GRADES
from router.former_names import UNTIL
from router.telemetry import logs
from router.telemetry.build import Build, build
from router.telemetry.counters import RequestMetrics
from router.telemetry.loop_lag import BOUNDS_S
from router.telemetry.metrics.families import counter, counters, gauge, histogram
from router.telemetry.metrics.per_model import UnderWay
from router.telemetry.metrics.per_tenant import collect_tenants
from router.telemetry.metrics.samples import MetricSources

_SLOWNESS = (
    "Learned time of the replica for the same work, relative to all replicas with the same models;"
    " the higher of prefill and decode."
)
_DELAY = "Delay of first tokens that the replica's queue and prefill do not explain, such as that of a proxy."


class Gauges(Collector):
    """Metrics of the entire router."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        knowledge: EventIndex,
        fitness: Eligibility,
        tallies: RequestMetrics,
        figures: MetricSources,
    ) -> None:
        self._fleet, self._index, self._knowledge, self._fitness = fleet, index, knowledge, fitness
        self._tallies, self._figures = tallies, figures
        self._build = build()

    def collect(self) -> Iterable[Metric]:
        """Yield one family after another."""
        figures, tallies, totals = self._figures, self._tallies, self._figures.totals
        yield from self._collect_by_model()
        yield from collect_tenants(tallies, figures)
        text = "Queued requests that are deferred because their prompts would evict too much of a cache."
        yield gauge("deferred_requests", text, (), [((), figures.held())])
        yield gauge("queued_bytes", "Bytes of the bodies of queued requests.", (), [((), figures.queued()[1])])
        yield from self._rates()
        text = (
            "Fraction of prompts of the last five minutes that are not replays; near 0 if a load test repeats itself."
        )
        ledger = figures.ledger()
        diversity = ledger.diversity.value if ledger is not None else None
        yield gauge("prompt_diversity_ratio", text, (), [((), diversity)])
        text = "Prompts not compared with an earlier one because a limit of the observatory was reached."
        yield counter("differences_unexplained", text, totals.count_unexplained())
        index = self._index
        yield gauge("index_keys", "Distinct blocks in the prefix index.", (), [((), index.keys)])
        yield gauge("index_bytes", "Memory of the prefix index in bytes.", (), [((), index.bytes_used)])
        keys = self._knowledge.keys
        yield gauge("held_keys", "Distinct blocks cached by replicas, according to KV events.", (), [((), keys)])
        text = "Always 1; the router's build: version, native code or not, commit if known, and Python version."
        yield gauge("build_info", text, BUILD, [(_get_build_labels(self._build), 1)])
        text = "Unix time of the last successful configuration reload."
        yield gauge("last_reload_timestamp_seconds", text, (), [((), tallies.reloaded_at_s)])
        text = "Log lines dropped because standard error was not read in time."
        yield counter("log_lines_dropped", text, logs.count_dropped())
        text = "Trace spans dropped because the collector failed or the queue was full."
        yield counter("spans_dropped", text, totals.spans_dropped())
        failing, kept_bytes, lost = figures.history()
        text = "1 while the file of past decisions (admin.history_path) cannot be written; 0 without such a file."
        yield gauge("history_failing", text, (), [((), float(failing))])
        yield gauge("history_bytes", "Size of the history file with its journal, in bytes.", (), [((), kept_bytes)])
        yield counter(
            "history_decisions_dropped", "Decisions not written to the history file because its queue was full.", lost
        )
        text = "Placements on replicas that were not ready, because no other replica was left."
        yield counter("panic_mode_placements", text, self._fitness.panics)
        count, closed = totals.connections()
        yield gauge("connections", "Open client connections.", (), [((), count)])
        text = "Bytes of request bodies being received, queued, or sent to a replica that has not begun to answer."
        yield gauge("bodies_bytes", text, (), [((), totals.bodies_bytes())])
        text = "Messages to the endpoint picker that were not messages of Envoy's external processing."
        yield counter("picker_malformed_messages", text, totals.count_malformed())
        text = "Client connections closed by the router, by the limit that was exceeded."
        yield counters("connections_closed", text, "reason", closed.items())
        count, refused = figures.admin()
        yield gauge("admin_connections", "Open connections to the admin listener.", (), [((), count)])
        text = "Connections closed by the admin listener, by the limit that was exceeded."
        yield counters("admin_connections_closed", text, "reason", refused.items())
        text = "Delay of event-loop timers, if 5 ms or more; ten timers are due per second."
        yield histogram("loop_stall_seconds", text, BOUNDS_S, totals.stalls.series)

    def _collect_by_model(self) -> Iterable[Metric]:
        under_way = UnderWay(self._fleet, self._tallies, self._figures)
        in_flight = [((label,), requests) for label, requests in under_way.in_flight.items()]
        yield gauge("in_flight_requests", "Requests being answered.", ("model",), in_flight)
        counts = [((priority.name.lower(), label), n) for (priority, label), n in under_way.waiting.items()]
        text = "Requests in the router's queue, including deferred ones."
        yield gauge("queued_requests", text, ("priority", "model"), counts)

    def _rates(self) -> Iterable[Metric]:
        recent = self._tallies.recent()
        text = "Cache hit ratio of prompt tokens of the last five minutes: by the engine's count, else as predicted."
        rates = [((label,), tokens.hit / tokens.prompt) for label, tokens in recent.items()]
        yield gauge("token_hit_ratio", text, ("model",), rates)
        text = "Fraction of prompt tokens of the last five minutes with cache hits reported by the engine."
        rates = [((label,), tokens.verified / tokens.prompt) for label, tokens in recent.items()]
        yield gauge("token_hit_verified_ratio", text, ("model",), rates)
        now_s = max((tokens.at_s for tokens in recent.values()), default=0.0)
        prompt, predicted, verified, told = (
            sum(getattr(tokens, name) * tokens.get_decay_factor(now_s) for tokens in recent.values())
            for name in ("prompt", "predicted", "verified", "verified_hit")
        )
        actual = told / verified if verified else None
        old = [(("predicted",), predicted / prompt if prompt else None), (("actual",), actual)]
        text = (
            "Cache hit ratio of all models: `predicted`, and `actual` for answers with a cached-token count;"
            f" until {UNTIL}, see token_hit_ratio."
        )
        yield gauge("token_hit_rate", text, ("kind",), old)


class Replicas(Collector):
    """Metrics of each replica, as the Router knows it."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, clock: Callable[[], float], figures: MetricSources) -> None:
        self._fleet, self._index, self._clock, self._figures = fleet, index, clock, figures

    def collect(self) -> Iterable[Metric]:
        """Yield one family after another."""
        now_s = self._clock()

        def each(name: str, text: str, value: Callable[[ReplicaState], float | None]) -> GaugeMetricFamily:
            return gauge(f"replica_{name}", text, ("replica",), [((m.id,), value(m)) for m in self._members()])

        # The list of replicas is read for each family: a replica may leave between two families.
        text = f"Always 1; identity of the replica, for joins. The label name exists until {UNTIL}."
        yield gauge("replica_info", text, INFO, [(self._info(m), 1.0) for m in self._members()])
        text = "Replicas that serve the base model and may receive requests."
        yield gauge("model_ready_replicas", text, ("model",), _ready(self._members()))
        yield each("ready", "1 if the replica may receive requests.", lambda m: float(m.ready))
        yield each("in_flight", "Requests in flight on the replica.", lambda m: len(m.leases))
        yield each(
            "pending_prefill_seconds",
            "Estimated time until all prompts sent to the replica are prefilled.",
            lambda m: m.queue.pending_ms(now_s) / 1e3,
        )
        yield each("running", "Requests running, by the engine's count.", lambda m: m.load.running)
        yield each("waiting", "Requests waiting, by the engine's count.", lambda m: m.load.waiting)
        yield each("kv_usage_ratio", "KV pool in use by live requests, 0 to 1.", lambda m: m.load.kv_usage)
        yield each("kv_tokens", "Size of the KV pool in tokens.", lambda m: m.load.kv_tokens_max)
        yield each("index_blocks", "Blocks in the prefix index for the replica.", lambda m: self._index.blocks(m.id))
        text = "Fraction of the replica's computed prompt tokens that this router sent."
        yield each("share_ratio", text, lambda m: m.counters.share)
        yield each("prefill_tokens_per_second", "Learned prefill speed.", _speed)
        yield each("slowness_ratio", _SLOWNESS, _slowness)
        yield each("first_token_delay_seconds", _DELAY, lambda m: m.own_speed.delay.ms / 1e3)
        text = "Learned time of a decode step with the replica's current streams; its floor if there are no streams."
        yield each("decode_step_seconds", text, _step_s)
        loads = [(m.id, m.load.cache_query_tokens_total, m.load.cache_hit_tokens_total) for m in self._members()]
        text = "Tokens looked up in the engine's prefix cache, by its own count."
        queries = ((id_, queries) for id_, queries, _ in loads if queries is not None)
        yield counters("replica_cache_query_tokens", text, "replica", queries)
        text = "Tokens found in the engine's prefix cache, by its own count."
        found = ((id_, hits) for id_, _, hits in loads if hits is not None)
        yield counters("replica_cache_hit_tokens", text, "replica", found)
        sources = [(m.id, m.counters.page_source.restarts, m.counters.page_source.ignored) for m in self._members()]
        text = "Restarts of the replica's engine, detected in its metrics."
        yield counters("replica_restarts", text, "replica", ((id_, restarts) for id_, restarts, _ in sources))
        text = "Metrics pages from a different process without a restart, because several processes answer alternately."
        yield counters("replica_ignored_restarts", text, "replica", ((id_, ignored) for id_, _, ignored in sources))
        text = f"Prefix-cache hits divided by queries since the engine started; until {UNTIL}."
        yield each("hit_rate", text, _engine_rate)
        yield gauge(
            "replica_breaker",
            "1 for the current state of the replica's circuit breaker.",
            ("replica", "state"),
            [((m.id, s.value), float(m.state(now_s) is s)) for m in self._members() for s in State],
        )
        yield gauge(
            "replica_grade",
            "1 for the current grade of knowledge about the replica's cache.",
            ("replica", "grade"),
            [((m.id, g.value), float(m.grade is g)) for m in self._members() for g in REPLICA_GRADES],
        )

    def _members(self) -> list[ReplicaState]:
        """Return the replicas of this moment: one may leave between two slices of a page."""
        return list(self._fleet.members.values())

    def _info(self, member: ReplicaState) -> tuple[str, ...]:
        """Return the values of INFO; "" if unknown. The model is the first that is no adapter."""
        replica, version = member.replica, self._figures.engine_version(member.id)
        bases = [model for model in member.models.values() if model.parent is None]
        base = min(bases, key=lambda model: model.name, default=None)
        model, engine = (base.name, base.owned_by) if base is not None else ("", "")
        return member.id, replica.name, replica.pod, replica.namespace, replica.node, model, engine, version


class Sources(Collector):
    """Metrics of the sources of replicas."""

    def __init__(self, figures: MetricSources) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield three gauges and a counter, by source."""
        known = self._figures.discoveries()
        for name, key, text in (
            ("fresh", "fresh", "1 while the discovery source's list of replicas is current."),
            ("stale_seconds", "stale_s", "Age of the discovery source's list while it is stale; else 0."),
            (
                "replicas",
                "replicas",
                "Replicas in the discovery source's list, before expansion to data-parallel ranks.",
            ),
        ):
            values = [((source,), float(of[key])) for source, of in known.items()]
            yield gauge(f"discovery_{name}", text, ("source",), values)
        errors = ((source, of["errors"]) for source, of in known.items())
        yield counters("discovery_errors", "Discovery errors, by source.", "source", errors)


class Links(Collector):
    """Metrics of the link to other routers."""

    def __init__(self, figures: MetricSources) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield gauges, of which five have values only if routers share state, and counters."""
        found = self._figures.sharing()
        counts, failures = (found.counts, found.failures) if found is not None else ({}, {})
        text = (
            "1 while this router receives its own messages through the shared store, so that others can;"
            " 0 while it is alone."
        )
        yield gauge("peering_connected", text, (), [] if found is None else [((), float(found.whole))])
        text = "1 while the shared store accepts writes; 0 while it is full, read-only or absent."
        yield gauge("peering_writable", text, (), [] if found is None else [((), float(found.writable))])
        text = "Routers that this one receives messages from, including itself."
        yield gauge("peering_routers", text, (), [] if found is None else [((), found.routers)])
        text = "Routers of other fleets, without a replica in common, that use the same store and name as this one."
        yield gauge("peering_unknown_routers", text, (), [] if found is None else [((), found.strangers)])
        text = (
            "1 while other routers or clients send to the same replicas and share no state with this router; see the"
            " log event `routers_unshared`."
        )
        yield gauge("routers_unshared", text, (), [((), float(bool(self._figures.unshared())))])
        text = "Round-trip time of this router's last message through the shared store."
        yield gauge("peering_delay_seconds", text, (), [] if found is None else [((), found.delay_s)])
        text = "Messages between routers, by outcome at this router."
        yield counters("peering_messages", text, "kind", ((kind, counts.get(kind, 0)) for kind in MESSAGE_KINDS))
        text = "Bytes of messages sent to other routers (`said`) and received from them (`heard`)."
        sizes = ((kind, counts.get(f"{kind}_bytes", 0)) for kind in ("said", "heard"))
        yield counters("peering_bytes", text, "kind", sizes)
        text = "Times that this router continued alone because it no longer received its own messages."
        yield counter("peering_disconnects", text, counts.get("interruptions", 0))
        text = "Failures of the shared store, by kind."
        yield counters("peering_failures", text, "kind", ((kind, failures.get(kind, 0)) for kind in FAILURE_KINDS))


class States(Collector):
    """Metrics of saved and restored state."""

    def __init__(self, figures: MetricSources) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield four gauges, which have values if state is kept, and a counter."""
        found = self._figures.state()
        blocks, replicas, files = (found.blocks, found.replicas, found.files) if found is not None else ({}, {}, {})
        text = "Blocks restored from before this router's start, by source of the knowledge."
        yield gauge("snapshot_restored_blocks", text, ("source",), [((name,), float(blocks[name])) for name in blocks])
        text = "Replicas with saved state from before this router's start, by outcome of its restoration."
        yield gauge("snapshot_replicas", text, ("result",), [((name,), float(replicas[name])) for name in replicas])
        text = "Writes of the file in which this router saves its state, by result."
        yield counters("snapshot_writes", text, "result", ((name, files.get(name, 0)) for name in ("ok", "failed")))
        there = found is not None and found.age_s is not None
        text = "Size of the saved-state file in bytes."
        yield gauge("snapshot_bytes", text, (), [((), float(found.bytes))] if found is not None and there else [])
        text = "Time since the saved-state file was written."
        yield gauge("snapshot_age_seconds", text, (), [((), found.age_s)] if found is not None and there else [])


MESSAGE_KINDS = ("said", "heard", "bad", "ignored", "other_release", "unauthenticated", "replayed", "strangers")
FAILURE_KINDS = ("unreachable", "timeout", "refused", "silent", "protocol", "full", "read_only", "denied", "answer")


class Events(Collector):
    """Metrics of KV event streams and tokenizers."""

    def __init__(self, fleet: Fleet, knowledge: EventIndex, figures: MetricSources) -> None:
        self._fleet, self._knowledge, self._figures = fleet, knowledge, figures

    def collect(self) -> Iterable[Metric]:
        """Yield counters by replica, and gauges of the current state by its events."""
        streams = self._figures.streams()
        for name, text in _STREAM_COUNTERS.items():
            values = [(replica, of.get(name) or 0.0) for replica, of in streams.items()]
            yield counters(f"replica_event_{name}", text, "replica", values)
        lags = [((replica,), of.get("lag_s")) for replica, of in streams.items()]
        yield gauge(
            "replica_event_lag_seconds", "Age of the replica's last batch of KV events on arrival.", ("replica",), lags
        )
        knowledge = self._knowledge
        ledgers = {id_: ledger for id_ in streams if (ledger := knowledge.engine_blocks(id_)) is not None}
        held = [((id_,), ledger.blocks) for id_, ledger in ledgers.items()]
        yield gauge(
            "replica_cached_blocks", "Blocks cached on the replica, according to its KV events.", ("replica",), held
        )
        tiers = [((id_, tier), count) for id_, ledger in ledgers.items() for tier, count in ledger.tier_blocks()]
        text = "Blocks cached outside the replica's GPU, by tier, according to KV events; `shared` is the whole store."
        yield gauge("replica_tier_blocks", text, ("replica", "tier"), tiers)
        loads = [
            ((member.id, tier), member.speeds.loads.model(tier, link.fit).per_token_ms / 1e3)
            for member in self._fleet.members.values()
            for tier, link in member.links.items()
        ]
        text = "Learned time to load one token from a tier of the replica."
        yield gauge("replica_load_seconds_per_token", text, ("replica", "tier"), loads)
        shares = [((id_,), same / n) for id_ in ledgers for same, n in [knowledge.checks(id_)] if n]
        text = "Fraction of the replica's last 200 answers with an exact prediction of cached tokens."
        yield gauge("replica_predictions_equal_ratio", text, ("replica",), shares)
        text = "Prompts for tokenization, by outcome."
        yield counters("prompts_tokenized", text, "outcome", self._figures.prompts().items())


_STREAM_COUNTERS = {
    "batches": "Batches of KV events applied.",
    "blocks": "Blocks stored or removed by KV events.",
    "gaps": "Batches of KV events that were missing when the next batch arrived.",
    "replays": "KV event replays requested, including routine checks: about one every ten seconds.",
    "restarts": "Engine restarts detected by a KV event replay; slow restarts are counted as new streams.",
    "lost": "Unrecoverable losses of KV event batches.",
    "malformed": "Malformed batches of KV events, and messages that are not batches.",
}


def _ready(members: Iterable[ReplicaState]) -> list[tuple[tuple[str, ...], float]]:
    """Return the number of ready replicas of each model that is no adapter, for the first READY_MODELS_MAX by name."""
    counts = Counter[str]()
    for member in members:
        for model in member.models.values():
            if model.parent is None:
                counts[model.name] += member.ready
    return [((name,), counts[name]) for name in sorted(counts)[:READY_MODELS_MAX]]


READY_MODELS_MAX = 1_000
BUILD = ("version", "native", "commit", "python")


def _get_build_labels(build: Build) -> tuple[str, ...]:
    """Return the values of BUILD."""
    return build.version, "true" if build.native else "false", build.commit, build.python


INFO = ("replica", "name", "pod", "namespace", "node", "model", "engine", "version")


def _speed(member: ReplicaState) -> float | None:
    model = member.prefill_model
    return 1e3 / model.per_token_ms if model.per_token_ms else None


def _slowness(member: ReplicaState) -> float:
    own = member.own_speed
    return max(own.prefill_factor.value, own.step_factor.value)


def _step_s(member: ReplicaState) -> float:
    clock = member.clock
    return member.step_model.ms(clock.streams, clock.context_tokens) / 1e3


def _engine_rate(member: ReplicaState) -> float | None:
    load = member.load
    queries, hits = load.cache_query_tokens_total, load.cache_hit_tokens_total
    return float(hits / queries) if queries and hits is not None else None
