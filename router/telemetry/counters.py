"""Counters and histograms of requests, updated once per request, at its end.

Counting is on the path of every request, so the counts are plain numbers in lists, found by label values.
prometheus_client's own counters take a lock, a search and one or two calls per update. The series that requests of one
kind add to are looked up once, and kept (`ModelSeries`, `KindSeries`, `PlacementSeries`). FAMILIES (catalogue.py)
become families of Prometheus at a scrape (metrics/). Differences and replays, which the observatory counts
(core/insights/ledger/totals.py), are copied then.

There is one hit rate: hits over hits and misses. Each token is counted as the engine reports it if its answer has a
count, and otherwise as predicted. A second series has the number of tokens that engines reported.

Labels are bounded. Routes and reasons are fixed sets. Models are those that replicas serve, the first MODELS_MAX; all
others share the label `other`. Replicas are those discovered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from router.config.api_keys import NONE, OTHER
from router.core.dialects import PATHS
from router.core.estimators.prefill import PrefillModel
from router.core.insights.breakdown import default_breakdown
from router.core.insights.ledger.decaying_sums import REPLAYS
from router.core.insights.ledger.totals import Ledger
from router.core.insights.token_funnel import token_fates
from router.core.types.placements import Confidence, EndReason, PlacementReason, Receipt, Usage
from router.core.types.requests import Priority
from router.telemetry.catalogue import (
    BEGUN_BY_MODEL,
    FAMILIES,
    LATENCY_S,
    MODELS_BEGUN_MAX,
    PREDECLARED_SERIES,
    PREDICTION_BUCKETS,
    REPLICA_TTFT_S,
    TTFT_RATIO,
)
from router.telemetry.request_record import NO_REPLICA_READY, RequestRecord
from router.telemetry.series import Counter, Histogram, KindSeries, ModelSeries, PlacementSeries, RecentTokens

MODELS_MAX = 1_000  # models with a label value each, because adapters may come and go without end

_OK = EndReason.OK
_FAILED = EndReason.FAILED
_TOKENS_MIN = 1e-9  # a decayed sum below this counts as 0
_COMPUTED = (EndReason.OK, EndReason.CLIENT_LEFT)  # endings of requests with computed prompts
_REPLICA_COUNTERS = (
    "replica_placed_tokens", "replica_computed_tokens", "replica_requests", "replica_completion_tokens"
)  # fmt: skip


class RequestMetrics:
    """All counters and histograms of one router."""

    def __init__(self, prefill: Callable[[str], PrefillModel] = lambda _: PrefillModel(), policy: str = "") -> None:
        """`prefill(replica)`: the learned prefill speed of the replica. `policy`: its decisions have series from a
        model's first request on."""
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for each in FAMILIES:
            labels = each.labels.split()
            if each.bounds:
                self._histograms[each.name] = Histogram(each.name, each.text, each.bounds, *labels)
            else:
                self._counters[each.name] = Counter(each.name, each.text, *labels)
        for name, series in PREDECLARED_SERIES.items():
            self._counters[name].begin(series)
        self._begun = dict(BEGUN_BY_MODEL)
        if policy:
            self._begun["decisions"] = [(policy, reason) for reason in PlacementReason]
        self._prefill = prefill
        self.splits = False  # True if some requests may use disaggregated prefill
        self._models: dict[str, ModelSeries] = {"": ModelSeries("none")}
        self._others = ModelSeries(OTHER)
        self._served: set[str] = set()  # models with series of refusals
        self._placements: dict[tuple[str, str, PlacementReason, Confidence, str], PlacementSeries] = {}
        # Cached-token counts in answers, for engine_hit_rate.py.
        # Replica -> prompt tokens and hits of answers with a count, and requests of which it served one stage of
        # disaggregated prefill.
        self.verified_tokens: dict[str, list[float]] = {}
        self.unverified_tokens: dict[
            tuple[str, str], float
        ] = {}  # (replica, model) -> prompt tokens of the other answers
        self._overhead = self._histograms["overhead_seconds"]
        self._overhead_of_all = self._overhead.get_series()
        self.reloaded_at_s: float | None = None  # Unix time of the last reload that is in force
        self.unready_at_s: dict[str, float] = {}  # label of a model -> Unix time of its last 503 `no_replica_ready`
        self.tenants: Collection[str] = ()
        self._tenants_max = 0
        self.tenant_labels: set[str] = set()  # tenants that have sent requests and are counted by name

    def list_families(self) -> list[Counter | Histogram]:
        """Return all families, in the order of the page."""
        return [self._histograms[each.name] if each.bounds else self._counters[each.name] for each in FAMILIES]

    def import_ledger(self, ledger: Ledger) -> None:
        """Replace the series that the observatory counts by its sums. The ledger must have been settled."""
        self._get_series("duplicate_prompts")[0] = ledger.totals[REPLAYS]
        for change, requests in ledger.differences.items():
            self._get_series("prompt_divergences", change.value)[0] = requests

    def _get_series(self, name: str, *labels: object) -> list[float]:
        """Return the series of this counter with these label values; a new one begins at 0."""
        series = self._counters[name].series
        return series.get(labels) or series.setdefault(labels, [0.0])

    def set_tenants(self, tenants: Collection[str], tenants_max: int) -> None:
        """Count these tenants by name: the first `tenants_max` that ever send a request; the rest share one label."""
        self.tenants, self._tenants_max = tenants, tenants_max

    def tenant(self, name: str) -> str:
        """Return the label of a tenant."""
        if name not in self.tenants:
            return NONE
        if name in self.tenant_labels or len(self.tenant_labels) < self._tenants_max:
            self.tenant_labels.add(name)
            return name
        return OTHER

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        model = self._models.get(record.model) or self._model(record.model)
        what = (record.route, record.status, record.ending)
        kind = model.kinds.get(what) or self._kind(model, what)
        kind.requests[0] += 1
        if record.error == NO_REPLICA_READY:
            self.unready_at_s[model.label] = record.at_s + record.times.duration_s
        duration, duration_s = kind.duration, record.times.duration_s
        duration[bisect_left(LATENCY_S, duration_s)] += 1
        duration[-1] += duration_s
        if self.tenants:
            self._get_series("tenant_requests", self.tenant(record.client.tenant), f"{record.status // 100}xx")[0] += 1
        if record.times.overhead_s is not None:
            self._overhead.add(self._overhead_of_all, record.times.overhead_s)
        if record.times.queued_s > 0:
            waited = self._histograms["queue_seconds"]
            waited.add(waited.get_series(model.label), record.times.queued_s)
        if record.times.events or record.times.ttft_s is not None or record.times.inter_token_s is not None:
            self._observe_stream(model, record)
        if record.times.wanted_ttft_ms is not None and record.stream:
            result = "none" if record.times.in_time is None else "in_time" if record.times.in_time else "late"
            self._get_series("ttft_deadlines", result, record.client.priority.name.lower(), model.label)[0] += 1
        if record.trace_id:
            self._exemplify(model, record)
        for failure, _ in record.retries:
            self._get_series("retries", _leg_of(failure)[1])[0] += 1
        if self.splits and record.receipt is not None:
            decision = "prefill-decode" if record.receipt.leg is not None else "decode-only"
            self._get_series("disagg_decisions", decision, model.label)[0] += 1
        if record.failover.continued[0]:
            self._get_series("stream_failovers", *record.failover.continued[:2])[0] += 1
        if record.failover.not_continued and record.ending == _FAILED:
            self._get_series("stream_failovers_refused", record.failover.not_continued)[0] += 1
        for repair in record.repairs:
            self._get_series("tool_normalizations", repair)[0] += 1
        receipt = record.receipt
        if receipt is not None:
            if record.error is None:  # a failed attempt was counted when it failed
                if kind.attempts is None:
                    kind.attempts = self._get_series("attempts", record.ending)
                kind.attempts[0] += 1
            self._observe_receipt(model, receipt, record)
            if record.ending == _OK:
                self._observe_saved(model, receipt, record.usage, record.client.tenant)

    def _model(self, name: str) -> ModelSeries:
        if len(self._models) > MODELS_MAX:
            return self._others
        model = self._models[name] = ModelSeries(name)
        if len(self._models) <= MODELS_BEGUN_MAX + 1:  # one of them is that of requests for no model
            for family, series in self._begun.items():
                self._counters[family].begin((*labels, name) for labels in series)
        return model

    def _kind(self, model: ModelSeries, what: tuple[str, int, str]) -> KindSeries:
        route, status, _ = what
        duration = self._histograms["duration_seconds"].get_series(route, model.label)
        kind = model.kinds[what] = KindSeries(self._get_series("requests", route, model.label, status), duration)
        return kind

    def _placement(self, receipt: Receipt, model: str) -> PlacementSeries:
        replica = receipt.replica
        told = self.verified_tokens.get(replica)
        placement = PlacementSeries(
            self._get_series("decisions", receipt.policy, receipt.reason, model),
            self._get_series("prediction_confidence", receipt.grade),
            [self._counters[name].series.get((replica,)) or [0.0] for name in _REPLICA_COUNTERS],
            self._histograms["replica_ttft_seconds"].series.get((replica,)),
            told or [0.0, 0.0, 0.0],
            (replica, model),
        )
        self._placements[replica, receipt.policy, receipt.reason, receipt.grade, model] = placement
        return placement

    def _observe_stream(self, model: ModelSeries, record: RequestRecord) -> None:
        label = model.label
        if record.times.ttft_s is not None:
            if model.ttft is None:
                model.ttft = self._histograms["ttft_seconds"].get_series(label)
            self._histograms["ttft_seconds"].add(model.ttft, record.times.ttft_s)
            if record.receipt is not None and record.receipt.ttft_ms:
                self._observe_prediction(model, record.receipt, record.times.ttft_s)
        if record.times.inter_token_s is not None:
            if model.inter_token is None:
                model.inter_token = self._histograms["inter_token_seconds"].get_series(label)
            self._histograms["inter_token_seconds"].add(model.inter_token, record.times.inter_token_s)
        if record.times.events:
            if model.events is None:
                model.events = self._get_series("stream_events", label)
            model.events[0] += record.times.events

    def _observe_prediction(self, model: ModelSeries, receipt: Receipt, ttft_s: float) -> None:
        """Compare a time to first token with the prediction in its receipt."""
        if model.ttft_ratio is None:
            model.ttft_within = [
                self._get_series("ttft_predictions", within, model.label) for within in PREDICTION_BUCKETS
            ]
            model.ttft_ratio = self._histograms["ttft_prediction_ratio"].get_series(model.label)
        ttft_ms = ttft_s * 1e3
        model.ttft_within[(ttft_ms > receipt.ttft_ms) + (ttft_ms > receipt.ttft_p90_ms)][0] += 1
        ratio = ttft_ms / receipt.ttft_ms
        model.ttft_ratio[bisect_left(TTFT_RATIO, ratio)] += 1
        model.ttft_ratio[-1] += ratio

    def _exemplify(self, model: ModelSeries, record: RequestRecord) -> None:
        """Attach the trace of a sampled request to the histograms of its times, as exemplars."""
        at_s = round(record.at_s + record.times.duration_s, 3)
        duration = self._histograms["duration_seconds"]
        duration.exemplify((record.route, model.label), record.times.duration_s, record.trace_id, at_s)
        if record.times.ttft_s is not None:
            self._histograms["ttft_seconds"].exemplify((model.label,), record.times.ttft_s, record.trace_id, at_s)

    def _observe_receipt(self, model: ModelSeries, receipt: Receipt, record: RequestRecord) -> None:
        prompt, predicted, label = receipt.prompt_tokens, receipt.predicted_cached_tokens, model.label
        placement = self._placements.get((receipt.replica, receipt.policy, receipt.reason, receipt.grade, label))
        if placement is None:
            placement = self._placement(receipt, label)
        placement.decisions[0] += 1
        placement.requests[0] += 1
        if record.times.ttft_s is not None and placement.ttft is not None:
            placement.ttft[bisect_left(REPLICA_TTFT_S, record.times.ttft_s)] += 1
            placement.ttft[-1] += record.times.ttft_s
        usage = record.usage
        completion = usage.completion_tokens if usage is not None else record.times.events
        if completion:
            self._observe_completion(model, placement, completion, record.client.tenant)
        self._observe_tokens(model, placement, receipt, record)
        if not prompt:
            return
        if receipt.spill:
            self._get_series("spills", receipt.spill, label)[0] += 1
            self._get_series("spilled_tokens", receipt.spill, label)[0] += receipt.spilled_tokens
        placement.graded[0] += 1
        placement.placed[0] += prompt
        if prompt > predicted:
            placement.computed[0] += prompt - predicted
        if model.prompt is None:
            model.prompt = self._get_series("prompt_tokens", model.label)
            model.predicted = self._get_series("predicted_cached_tokens", model.label)
        model.prompt[0] += prompt
        model.predicted[0] += predicted
        if usage is not None and usage.cached_tokens is not None:
            self._observe_reported(model, usage, predicted, receipt.grade)

    def _observe_completion(self, model: ModelSeries, placement: PlacementSeries, tokens: int, tenant: str) -> None:
        if model.completion is None:
            model.completion = self._get_series("completion_tokens", model.label)
        model.completion[0] += tokens
        placement.completion[0] += tokens
        if self.tenants:
            self._get_series("tenant_completion_tokens", self.tenant(tenant))[0] += tokens

    def _observe_tokens(
        self, model: ModelSeries, placement: PlacementSeries, receipt: Receipt, record: RequestRecord
    ) -> None:
        """Count every token of a computed prompt as a hit or a miss, verified or not."""
        usage, miss = record.usage, record.cache.miss
        if miss is None:
            if receipt.miss is not None or record.ending not in _COMPUTED:
                return
            miss = default_breakdown(receipt, usage)
        tokens, hit = miss.prompt_tokens, miss.hit
        if hit:
            hits = model.replayed if receipt.replay else model.genuine
            if hits is None:
                hits = self._get_series("hit_tokens", "replay" if receipt.replay else "genuine", model.label)
                if receipt.replay:
                    model.replayed = hits
                else:
                    model.genuine = hits
            hits[0] += hit
            if miss.loaded:
                self._get_series("loaded_tokens", model.label)[0] += miss.loaded
            if miss.pulled:
                self._get_series("pulled_tokens", model.label)[0] += miss.pulled
        if (pull := receipt.pull) is not None:
            told = usage is not None and usage.verified
            arrived = "all" if miss.pulled >= pull.tokens else "some" if miss.pulled else "none"
            self._get_series("p2p_transfers", arrived if told else "unreported", model.label)[0] += 1
        misses = model.misses
        for reason, of_reason in miss.misses.items():
            series = misses.get(reason)
            if series is None:
                series = misses[reason] = self._get_series("miss_tokens", reason.value, model.label)
            series[0] += of_reason
        places = record.cache.places
        for place, of_place in (token_fates(miss, replay=receipt.replay) if places is None else places).items():
            ended = model.places.get(place)
            if ended is None:
                ended = model.places[place] = self._get_series("token_fate", place.value, model.label)
            ended[0] += of_place
        told = usage is not None and usage.verified
        if (leg := receipt.leg) is not None:
            for each in (receipt.replica, leg.replica):
                if (of_replica := self.verified_tokens.get(each)) is not None:
                    of_replica[2] += 1
        if told:
            placement.verified_tokens[0] += tokens
            placement.verified_tokens[1] += hit
        else:
            self.unverified_tokens[placement.key] = self.unverified_tokens.get(placement.key, 0.0) + tokens
        model.recent.add(tokens, hit, receipt.predicted_cached_tokens, told, record.at_s)

    def _observe_reported(self, model: ModelSeries, usage: Usage, predicted: int, grade: Confidence) -> None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens or 0
        if model.reported is None:
            model.reported = self._get_series("reported_prompt_tokens", model.label)
            model.cached = self._get_series("cached_tokens", model.label)
        model.reported[0] += prompt
        model.cached[0] += cached
        over = predicted - cached
        self._get_series("predictions", grade, "equal" if not over else "over" if over > 0 else "under")[0] += 1
        if over > 0:
            self._get_series("overpredicted_tokens", grade)[0] += over

    def _observe_saved(self, model: ModelSeries, receipt: Receipt, usage: Usage | None, tenant: str) -> None:
        prompt, cached = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            prompt, cached = usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens)
        if model.saved is None:
            model.saved = self._get_series("saved_prefill_tokens", model.label)
            model.saved_s = self._get_series("saved_prefill_seconds", model.label)
        if cached:
            model.saved[0] += cached
            model.saved_s[0] += self._prefill(receipt.replica).saved_ms(cached) / 1e3
        if self.tenants:
            of_tenant = self.tenant(tenant)
            self._get_series("tenant_prompt_tokens", of_tenant)[0] += prompt
            self._get_series("tenant_cached_tokens", of_tenant)[0] += cached

    def count_attempt_failure(self, replica: str | None, kind: str) -> None:
        """Count one failed attempt. `replica` is None if the replica has left, because it then has no series."""
        leg, kind = _leg_of(kind)
        if leg:
            self._get_series("disagg_failures", leg, kind)[0] += 1
        if replica is not None:
            self._get_series("replica_failures", replica, kind)[0] += 1
        self._get_series("attempts", kind)[0] += 1

    def count_shed(self, code: str, priority: Priority, model: str = "") -> None:
        """Count one request that was shed."""
        label = (self._models.get(model) or self._model(model)).label
        self._get_series("shed_requests", code, priority.name.lower(), label)[0] += 1

    def serve(self, declared: Collection[str], models: Iterable[str]) -> None:
        """Begin the series of refusals for all models that settings declare, and for the first MODELS_BEGUN_MAX models
        that replicas serve. An autoscaler reads these series, and the first refusal counts."""
        for model in declared:
            self._begin_refusals(model)
        for model in models:
            if len(self._served) >= MODELS_BEGUN_MAX + len(declared):
                return
            self._begin_refusals(model)

    def _begin_refusals(self, model: str) -> None:
        if model not in self._served:
            self._served.add(model)
            for path in PATHS:
                self._get_series("requests", path, self.label(model), 503)

    def recent(self) -> dict[str, RecentTokens]:
        """Return the recent prompt tokens by model's label, for models that had any."""
        series = (*self._models.values(), self._others)
        return {model.label: model.recent for model in series if model.recent.prompt > _TOKENS_MIN}

    def labels(self) -> list[str]:
        """Return the labels of all models that requests named."""
        return [model.label for name, model in self._models.items() if name]

    def label(self, model: str) -> str:
        """Return the label of a model, known from its requests or not."""
        known = self._models.get(model)
        return known.label if known is not None else model if len(self._models) <= MODELS_MAX else OTHER

    def set_engine_counts(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Copy the counts of silent answers by the engines' own counters (engine_hit_rate.py), by model's label."""
        for label, (prompt, cached) in sums.items():
            self._get_series("counted_prompt_tokens", label)[0] = prompt
            self._get_series("counted_cached_tokens", label)[0] = cached

    def count_prewarm(self, result: str, prompt_tokens: int) -> None:
        """Count one prompt for warming a replica. `result` is ok, failed or skipped."""
        self._get_series("prewarm_requests", result)[0] += 1
        self._get_series("prewarm_tokens")[0] += prompt_tokens

    def count_reload(self, result: str, now_s: float) -> None:
        """Count one reload of the settings: `ok` if they are in force now, `refused` if the old ones stay."""
        self._get_series("reloads", result)[0] += 1
        if result == "ok":
            self.reloaded_at_s = now_s

    def count_grade_fall(self, replica: str) -> None:
        """Count one fall of the grade of a replica's cache state."""
        self._get_series("replica_grade_falls", replica)[0] += 1

    def add_replica(self, replica: str) -> None:
        """Begin the series of a replica, so that a replica without any requests also counts in a mean."""
        for name in (*_REPLICA_COUNTERS, "replica_grade_falls"):
            self._counters[name].begin([(replica,)])
        self._histograms["replica_ttft_seconds"].get_series(replica)
        self.verified_tokens[replica] = [0.0, 0.0, 0.0]
        self._placements.clear()

    def remove_replica(self, replica: str) -> None:
        """Drop the series of a replica that left."""
        for name in (*_REPLICA_COUNTERS, "replica_grade_falls"):
            self._counters[name].series.pop((replica,), None)
        self._histograms["replica_ttft_seconds"].series.pop((replica,), None)
        self.verified_tokens.pop(replica, None)
        self._placements.clear()
        failures = self._counters["replica_failures"].series
        for labels in [labels for labels in failures if labels[0] == replica]:
            del failures[labels]


def _leg_of(kind: str) -> tuple[str, str]:
    """Return the (leg, kind) of a failure as the data plane reports it. The leg is "" if the request did not use
    disaggregated prefill."""
    leg, mark, rest = kind.partition("_")
    return (leg, rest) if mark and leg in ("prefill", "decode") else ("", kind)
