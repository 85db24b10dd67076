"""Everything that is counted, once per request, at its end.

Counting is on the path of every request, so the counts are plain numbers in lists, found by label values;
prometheus_client's own counters take a lock, a search and a call or two per update. The series that requests of one
kind add to are looked up once, and kept (`ModelSeries`, `KindSeries`, `PlacementSeries`). FAMILIES become families of
Prometheus when a scrape asks (metrics/). What the observatory counts (core/observatory/ledger/ledger.py) is taken over
then.

Labels are bounded: routes and reasons are fixed sets, models are those that replicas serve (the first MODELS_MAX, any
other is `other`), replicas are those discovered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import NamedTuple

from router.core.dialects.repairs import REPAIRS
from router.core.facts.misses import Change, Miss
from router.core.facts.placements import Ending, Grade, Reason, Receipt, Usage
from router.core.facts.requests import Priority
from router.core.learned.prefill import PrefillModel
from router.core.observatory.ledger.ledger import Ledger
from router.core.observatory.ledger.sums import AT, HIT, REPLAY, REPLAYS, FadingRatio
from router.core.placement.spill import SpillCause
from router.settings.keys import NONE, OTHER
from router.telemetry.record import RequestRecord
from router.telemetry.series import Counter, Histogram, KindSeries, Labels, ModelSeries, PlacementSeries

HIT_RATE_WINDOW_S = 300.0
MODELS_MAX = 1_000  # models with a label value of their own: adapters may come and go for ever

_LATENCY_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_INTER_TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_OVERHEAD_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_OK = Ending.OK


class Family(NamedTuple):
    """A family of series: a histogram where it has bounds, otherwise a counter."""

    name: str
    text: str
    labels: str = ""  # names of the labels, separated by spaces
    bounds: tuple[float, ...] = ()


FAMILIES = (  # families in the order of the metrics page
    Family("requests", "Requests answered.", "route model status"),
    Family("ttft_seconds", "Time to the first event of a stream.", "model", _LATENCY_S),
    Family("duration_seconds", "Request read to answer ended.", "route model", _LATENCY_S),
    Family("inter_token_seconds", "Mean time between the events of a stream.", "model", _INTER_TOKEN_S),
    Family("overhead_seconds", "Request read to request sent on: parse, hash, match, place.", "", _OVERHEAD_S),
    Family("queue_seconds", "Waited for a place, or held back, of requests that were.", "", _LATENCY_S),
    Family("shed_requests", "Requests turned away though replicas are there, by reason.", "code priority"),
    Family("stream_events", "Streamed events passed on.", "model"),
    Family("prompt_tokens", "Prompt tokens placed, estimated.", "model"),
    Family("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model"),
    Family("reported_prompt_tokens", "Prompt tokens of answers that say how many were cached.", "model"),
    Family("cached_tokens", "Prompt tokens that engines reported as cached.", "model"),
    Family("decisions", "Placements.", "policy reason"),
    Family("graded_requests", "Placements by grade of the prediction.", "grade"),
    Family("predictions", "Predictions against the engine's own count of cached tokens.", "grade result"),
    Family("overpredicted_tokens", "Tokens predicted to be cached that were not.", "grade"),
    Family("attempts", "Requests sent to replicas, further attempts included, by what became of them.", "outcome"),
    Family("retries", "Attempts that failed and were retried elsewhere.", "kind"),
    Family("replica_failures", "Attempts that failed.", "replica kind"),
    Family("worker_hub_lost_placements", "Placements that workers made by the ring, as the hub was lost to them."),
    Family("reloads", "Times that the settings were read again.", "result"),
    Family("tenant_requests", "Requests answered, by tenant of the keys file and class of status.", "tenant status"),
    Family("tenant_prompt_tokens", "Prompt tokens of whole answers, by tenant of the keys file.", "tenant"),
    Family(
        "tenant_cached_tokens", "Those of them that were cached: by the engine's count, else as predicted.", "tenant"
    ),
    Family(
        "saved_prefill_tokens",
        "Prompt tokens of whole answers that were not computed: by the engine's count, else as predicted.",
        "model",
    ),
    Family(
        "saved_prefill_seconds",
        "Prefill that was not done for that, estimated in a replica's seconds by its learned speed.",
        "model",
    ),
    Family("spills", "Placements off the replica that holds most of the prompt, by what spoke against it.", "cause"),
    Family("spilled_tokens", "Tokens that it holds, and that were predicted to be computed again.", "cause"),
    Family("replica_placed_tokens", "Prompt tokens placed on a replica, estimated.", "replica"),
    Family("replica_computed_tokens", "Those of them predicted to be computed.", "replica"),
    Family("prewarm_requests", "Prompts sent to fill replicas' caches, by what became of them.", "result"),
    Family("prewarm_tokens", "Prompt tokens of those that were answered."),
    Family(
        "miss_tokens",
        "Prompt tokens that were computed, by why: by the engine's count where it told, else as predicted.",
        "reason",
    ),
    Family(
        "hit_tokens",
        "Prompt tokens that were cached, likewise: in prompts asked for before (replay), or not (genuine).",
        "kind",
    ),
    Family("replays", "Requests whose very prompt was asked for before, within the observatory's window."),
    Family(
        "differences",
        "Prompts that differ from an earlier one before tokens that both have, by what differs.",
        "change",
    ),
    Family("repairs", "Requests whose tools were put in order before they were sent, by what they needed.", "repair"),
)

KINDS = (  # kinds of failures (http/failures.py)
    "broke_early", "broke_midway", "connect", "engine", "garbage", "lost", "shed", "stale", "stalled",
    "stuck", "timeout", "unfinished",
)  # fmt: skip

# Series that are there from the first scrape on: one that begins with its first increment has no rate that shows it.
_OUTCOMES = (Ending.OK.value, Ending.CLIENT_LEFT.value, *KINDS)
BEGUN: dict[str, list[Labels]] = {
    "shed_requests": [(code, each.name.lower()) for code in ("overloaded", "rate_limited") for each in Priority],
    "graded_requests": [(grade,) for grade in Grade],
    "predictions": [(grade, result) for grade in Grade for result in ("equal", "over", "under")],
    "overpredicted_tokens": [(grade,) for grade in Grade],
    "attempts": [(outcome,) for outcome in _OUTCOMES],
    "retries": [(kind,) for kind in KINDS],
    "worker_hub_lost_placements": [()],
    "reloads": [("ok",), ("refused",)],
    "spills": [(cause.value,) for cause in SpillCause],
    "spilled_tokens": [(cause.value,) for cause in SpillCause],
    "prewarm_requests": [("ok",), ("failed",), ("skipped",)],
    "prewarm_tokens": [()],
    "miss_tokens": [(miss.value,) for miss in Miss],
    "hit_tokens": [("genuine",), ("replay",)],
    "replays": [()],
    "differences": [(change.value,) for change in Change],
    "repairs": [(repair,) for repair in REPAIRS],
}


class Tallies:
    """All counters and histograms of one router."""

    def __init__(self, prefill: Callable[[str], PrefillModel] = lambda _: PrefillModel(), policy: str = "") -> None:
        """`prefill(replica)` is what is learned of the replica's speed. Decisions of `policy` are there from the
        start."""
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for each in FAMILIES:
            labels = each.labels.split()
            if each.bounds:
                self._histograms[each.name] = Histogram(each.name, each.text, each.bounds, *labels)
            else:
                self._counters[each.name] = Counter(each.name, each.text, *labels)
        for name, series in BEGUN.items():
            self._counters[name].begin(series)
        if policy:
            self._counters["decisions"].begin((policy, reason) for reason in Reason)
        self._prefill = prefill
        self._models: dict[str, ModelSeries] = {"": ModelSeries("none")}
        self._others = ModelSeries(OTHER)
        self._placements: dict[tuple[str, str, Reason, Grade], PlacementSeries] = {}
        self._overhead = self._histograms["overhead_seconds"]
        self._overhead_of_all = self._overhead.of()
        self.hit_rate_predicted, self.hit_rate_actual = FadingRatio(HIT_RATE_WINDOW_S), FadingRatio(HIT_RATE_WINDOW_S)
        self.reloaded_at_s: float | None = None  # Unix time of the last reload that is in force
        self._tenants: Collection[str] = ()
        self._tenants_max = 0
        self._tenant_labels: set[str] = set()

    def all(self) -> list[Counter | Histogram]:
        """All families, in the order of the page."""
        return [self._histograms[each.name] if each.bounds else self._counters[each.name] for each in FAMILIES]

    def take_over(self, ledger: Ledger) -> None:
        """Replace what the observatory counts by its sums; the ledger must have been settled."""
        totals = ledger.totals
        for miss, at in AT.items():
            self._of("miss_tokens", miss.value)[0] = totals[at]
        self._of("hit_tokens", "genuine")[0] = totals[HIT] - totals[REPLAY]
        self._of("hit_tokens", "replay")[0] = totals[REPLAY]
        self._of("replays")[0] = totals[REPLAYS]
        for change, requests in ledger.differences.items():
            self._of("differences", change.value)[0] = requests

    def _of(self, name: str, *labels: object) -> list[float]:
        """The series of this counter with these label values, begun if it is new."""
        series = self._counters[name].series
        return series.get(labels) or series.setdefault(labels, [0.0])

    def know(self, tenants: Collection[str], tenants_max: int) -> None:
        """Count these tenants by name: the first `tenants_max` that ever ask; the rest share one label."""
        self._tenants, self._tenants_max = tenants, tenants_max

    def tenant(self, name: str) -> str:
        """The label of a tenant."""
        if name not in self._tenants:
            return NONE
        if name in self._tenant_labels or len(self._tenant_labels) < self._tenants_max:
            self._tenant_labels.add(name)
            return name
        return OTHER

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        model = self._models.get(record.model) or self._model(record.model)
        what = (record.route, record.status, record.ending)
        kind = model.kinds.get(what) or self._kind(model, what)
        kind.requests[0] += 1
        duration, duration_s = kind.duration, record.duration_s
        duration[bisect_left(_LATENCY_S, duration_s)] += 1
        duration[-1] += duration_s
        if self._tenants:
            self._of("tenant_requests", self.tenant(record.tenant), f"{record.status // 100}xx")[0] += 1
        if record.overhead_s is not None:
            self._overhead.add(self._overhead_of_all, record.overhead_s)
        if record.queued_s > 0:
            waited = self._histograms["queue_seconds"]
            waited.add(waited.of(), record.queued_s)
        if record.events or record.ttft_s is not None or record.inter_token_s is not None:
            self._observe_stream(model, record)
        for failure, _ in record.retries:
            self._of("retries", failure)[0] += 1
        for repair in record.repairs:
            self._of("repairs", repair)[0] += 1
        receipt = record.receipt
        if receipt is not None:
            if record.error is None:  # a failed attempt was counted when it failed
                if kind.attempts is None:
                    kind.attempts = self._of("attempts", record.ending)
                kind.attempts[0] += 1
            self._observe_receipt(model, receipt, record.usage, record.at_s)
            if record.ending == _OK:
                self._observe_saved(model, receipt, record.usage, record.tenant)

    def _model(self, name: str) -> ModelSeries:
        if len(self._models) > MODELS_MAX:
            return self._others
        return self._models.setdefault(name, ModelSeries(name))

    def _kind(self, model: ModelSeries, what: tuple[str, int, str]) -> KindSeries:
        route, status, _ = what
        duration = self._histograms["duration_seconds"].of(route, model.label)
        kind = model.kinds[what] = KindSeries(self._of("requests", route, model.label, status), duration)
        return kind

    def _placement(self, receipt: Receipt) -> PlacementSeries:
        labels = (receipt.replica,)
        placement = PlacementSeries(
            self._of("decisions", receipt.policy, receipt.reason),
            self._of("graded_requests", receipt.grade),
            self._counters["replica_placed_tokens"].series.get(labels) or [0.0],
            self._counters["replica_computed_tokens"].series.get(labels) or [0.0],
        )
        self._placements[receipt.replica, receipt.policy, receipt.reason, receipt.grade] = placement
        return placement

    def _observe_stream(self, model: ModelSeries, record: RequestRecord) -> None:
        label = model.label
        if record.ttft_s is not None:
            if model.ttft is None:
                model.ttft = self._histograms["ttft_seconds"].of(label)
            self._histograms["ttft_seconds"].add(model.ttft, record.ttft_s)
        if record.inter_token_s is not None:
            if model.inter_token is None:
                model.inter_token = self._histograms["inter_token_seconds"].of(label)
            self._histograms["inter_token_seconds"].add(model.inter_token, record.inter_token_s)
        if record.events:
            if model.events is None:
                model.events = self._of("stream_events", label)
            model.events[0] += record.events

    def _observe_receipt(self, model: ModelSeries, receipt: Receipt, usage: Usage | None, now_s: float) -> None:
        prompt, predicted = receipt.prompt_tokens, receipt.predicted_cached_tokens
        placement = self._placements.get((receipt.replica, receipt.policy, receipt.reason, receipt.grade))
        if placement is None:
            placement = self._placement(receipt)
        placement.decisions[0] += 1
        if not prompt:
            return
        if receipt.spill:
            self._of("spills", receipt.spill)[0] += 1
            self._of("spilled_tokens", receipt.spill)[0] += receipt.spilled_tokens
        placement.graded[0] += 1
        placement.placed[0] += prompt
        if prompt > predicted:
            placement.computed[0] += prompt - predicted
        if model.prompt is None:
            model.prompt = self._of("prompt_tokens", model.label)
            model.predicted = self._of("predicted_cached_tokens", model.label)
        model.prompt[0] += prompt
        model.predicted[0] += predicted
        self.hit_rate_predicted.add(predicted, prompt, now_s)
        if usage is not None and usage.cached_tokens is not None:
            self._observe_reported(model, usage, predicted, receipt.grade, now_s)

    def _observe_reported(self, model: ModelSeries, usage: Usage, predicted: int, grade: Grade, now_s: float) -> None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens or 0
        if model.reported is None:
            model.reported = self._of("reported_prompt_tokens", model.label)
            model.cached = self._of("cached_tokens", model.label)
        model.reported[0] += prompt
        model.cached[0] += cached
        self.hit_rate_actual.add(cached, prompt, now_s)
        over = predicted - cached
        self._of("predictions", grade, "equal" if not over else "over" if over > 0 else "under")[0] += 1
        if over > 0:
            self._of("overpredicted_tokens", grade)[0] += over

    def _observe_saved(self, model: ModelSeries, receipt: Receipt, usage: Usage | None, tenant: str) -> None:
        prompt, cached = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            prompt, cached = usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens)
        if model.saved is None:
            model.saved = self._of("saved_prefill_tokens", model.label)
            model.saved_s = self._of("saved_prefill_seconds", model.label)
        if cached:
            model.saved[0] += cached
            model.saved_s[0] += self._prefill(receipt.replica).saved_ms(cached) / 1e3
        if self._tenants:
            of_tenant = self.tenant(tenant)
            self._of("tenant_prompt_tokens", of_tenant)[0] += prompt
            self._of("tenant_cached_tokens", of_tenant)[0] += cached

    def failed(self, replica: str | None, kind: str) -> None:
        """Count one failed attempt. `replica` is None where the replica has left, and has no series."""
        if replica is not None:
            self._of("replica_failures", replica, kind)[0] += 1
        self._of("attempts", kind)[0] += 1

    def shed(self, code: str, priority: Priority) -> None:
        """Count one request that was turned away."""
        self._of("shed_requests", code, priority.name.lower())[0] += 1

    def hub_lost(self, placements: int) -> None:
        """Take over how many placements workers have made without the hub."""
        self._of("worker_hub_lost_placements")[0] = placements

    def prewarmed(self, result: str, prompt_tokens: int) -> None:
        """Count one prompt for warming a replica: `result` is ok, failed or skipped."""
        self._of("prewarm_requests", result)[0] += 1
        self._of("prewarm_tokens")[0] += prompt_tokens

    def reloaded(self, result: str, now_s: float) -> None:
        """Count one reload of the settings: `ok` if they are in force now, `refused` if the old ones stay."""
        self._of("reloads", result)[0] += 1
        if result == "ok":
            self.reloaded_at_s = now_s

    def joined(self, replica: str) -> None:
        """Begin the series of a replica, so that a replica which is given nothing counts in a mean, too."""
        self._counters["replica_placed_tokens"].begin([(replica,)])
        self._counters["replica_computed_tokens"].begin([(replica,)])
        self._placements.clear()

    def left(self, replica: str) -> None:
        """Drop the series of a replica that left."""
        self._counters["replica_placed_tokens"].series.pop((replica,), None)
        self._counters["replica_computed_tokens"].series.pop((replica,), None)
        self._placements.clear()
        failures = self._counters["replica_failures"].series
        for labels in [labels for labels in failures if labels[0] == replica]:
            del failures[labels]
