"""Everything that is counted, once per request and at its end.

That is on the path of every request, so these are plain numbers in lists, found by label values; prometheus_client's
own counters take a lock, a search and a call or two an update. What requests of one kind add to is found once, and kept
(`OfModel`, `Kind`, `Place`). Families are made of series (metrics) when a scrape asks. What the observatory counts
(core/observatory/ledger/ledger.py) is taken over then.
Labels are bounded: routes and reasons are fixed sets, models are those that replicas serve (the first MODELS_MAX of
them, anything else is `other`), replicas are those discovered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection

from router.core.dialects.repairs import REPAIRS
from router.core.facts.misses import Change, Miss
from router.core.facts.placements import Ending, Grade, Reason, Receipt, Usage
from router.core.facts.requests import Priority
from router.core.learned.prefill import PrefillModel
from router.core.observatory.ledger.ledger import Ledger
from router.core.observatory.ledger.sums import AT, HIT, REPLAY, REPLAYS, FadingRatio
from router.core.placement.spill import Cause
from router.settings.keys import NONE, OTHER
from router.telemetry.record import RequestRecord
from router.telemetry.series import Counter, Histogram, Kind, OfModel, Place

HIT_RATE_WINDOW_S = 300.0
MODELS_MAX = 1_000  # label values; adapters may come and go for ever

_LATENCY_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_INTER_TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_OVERHEAD_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

# Series that are there from the first scrape on: what begins with its first increment has no rate that shows it.
KINDS = (  # of failures, see failures.py
    "broke_early", "broke_midway", "connect", "engine", "garbage", "lost", "shed", "stale", "stalled",
    "stuck", "timeout", "unfinished",
)  # fmt: skip
SHED_CODES = ("overloaded", "rate_limited")
RESULTS = ("equal", "over", "under")
PREWARM_RESULTS = ("ok", "failed", "skipped")
HITS = _GENUINE, _REPLAY = ("genuine",), ("replay",)
_OK = Ending.OK


class Tallies:
    """All counters and histograms of one router."""

    def __init__(self, prefill: Callable[[str], PrefillModel] = lambda _: PrefillModel(), policy: str = "") -> None:
        """`prefill(replica)` is what is learned of its speed. The decisions of `policy` are there from the start."""
        self._all: list[Counter | Histogram] = []  # in the order of the page
        counter, histogram = self._counter, self._histogram
        self._prefill = prefill
        self.hit_rate_predicted, self.hit_rate_actual = FadingRatio(HIT_RATE_WINDOW_S), FadingRatio(HIT_RATE_WINDOW_S)
        self._models: dict[str, OfModel] = {"": OfModel("none")}
        self._others = OfModel(OTHER)
        self._places: dict[tuple[str, str, Reason, Grade], Place] = {}
        self._requests = counter("requests", "Requests answered.", "route", "model", "status")
        self._ttft = histogram("ttft_seconds", "Time to the first event of a stream.", _LATENCY_S, "model")
        text = "Request read to answer ended."
        self._duration = histogram("duration_seconds", text, _LATENCY_S, "route", "model")
        text = "Mean time between the events of a stream."
        self._inter_token = histogram("inter_token_seconds", text, _INTER_TOKEN_S, "model")
        text = "Request read to request sent on: parse, hash, match, place."
        self._overhead = histogram("overhead_seconds", text, _OVERHEAD_S)
        self._overhead_of_all = self._overhead.of()
        self._queue = histogram("queue_seconds", "Waited for a place, or held back, of requests that were.", _LATENCY_S)
        text = "Requests turned away though replicas are there, by reason."
        self._shed = counter("shed_requests", text, "code", "priority")
        self._events = counter("stream_events", "Streamed events passed on.", "model")
        self._prompt = counter("prompt_tokens", "Prompt tokens placed, estimated.", "model")
        self._predicted = counter("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model")
        text = "Prompt tokens of answers that say how many were cached."
        self._reported = counter("reported_prompt_tokens", text, "model")
        self._cached = counter("cached_tokens", "Prompt tokens that engines reported as cached.", "model")
        self._decisions = counter("decisions", "Placements.", "policy", "reason")
        self._graded = counter("graded_requests", "Placements by grade of the prediction.", "grade")
        text = "Predictions against the engine's own count of cached tokens."
        self._predictions = counter("predictions", text, "grade", "result")
        self._over = counter("overpredicted_tokens", "Tokens predicted to be cached that were not.", "grade")
        text = "Requests sent to replicas, further attempts included, by what became of them."
        self._attempts = counter("attempts", text, "outcome")
        self._retries = counter("retries", "Attempts that failed and were retried elsewhere.", "kind")
        self._failures = counter("replica_failures", "Attempts that failed.", "replica", "kind")
        text = "Placements that workers made by the ring, as the hub was lost to them."
        self._hub_lost = counter("worker_hub_lost_placements", text)
        self._hub_lost.begin([()])
        self._reloads = counter("reloads", "Times that the settings were read again.", "result")
        self._reloads.begin([("ok",), ("refused",)])
        self.reloaded_at_s: float | None = None  # Unix time of the last that is in force
        text = "Requests answered, by tenant of the keys file and class of status."
        self._of_tenants = counter("tenant_requests", text, "tenant", "status")
        text = "Prompt tokens of whole answers, by tenant of the keys file."
        self._tenant_prompt = counter("tenant_prompt_tokens", text, "tenant")
        text = "Those of them that were cached: by the engine's count, else as predicted."
        self._tenant_cached = counter("tenant_cached_tokens", text, "tenant")
        text = "Prompt tokens of whole answers that were not computed: by the engine's count, else as predicted."
        self._saved = counter("saved_prefill_tokens", text, "model")
        text = "Prefill that was not done for that, estimated in a replica's seconds by its learned speed."
        self._saved_s = counter("saved_prefill_seconds", text, "model")
        text = "Placements off the replica that holds most of the prompt, by what spoke against it."
        self._spills = counter("spills", text, "cause")
        text = "Tokens that it holds, and that were predicted to be computed again."
        self._spilled = counter("spilled_tokens", text, "cause")
        text = "Prompt tokens placed on a replica, estimated."
        self._placed = counter("replica_placed_tokens", text, "replica")
        self._computed = counter("replica_computed_tokens", "Those of them predicted to be computed.", "replica")
        text = "Prompts sent to fill replicas' caches, by what became of them."
        self._prewarm = counter("prewarm_requests", text, "result")
        self._prewarm_tokens = counter("prewarm_tokens", "Prompt tokens of those that were answered.")
        text = "Prompt tokens that were computed, by why: by the engine's count where it told, else as predicted."
        self._misses = counter("miss_tokens", text, "reason")
        text = "Prompt tokens that were cached, likewise: in prompts asked for before (replay), or not (genuine)."
        self._hits = counter("hit_tokens", text, "kind")
        text = "Requests whose very prompt was asked for before, within the observatory's window."
        self._replays = counter("replays", text)
        text = "Prompts that differ from an earlier one before tokens that both have, by what differs."
        self._differences = counter("differences", text, "change")
        text = "Requests whose tools were put in order before they were sent, by what they needed."
        self._repairs = counter("repairs", text, "repair")
        self._begin(policy)
        self._tenants: Collection[str] = ()
        self._tenants_max = 0
        self._tenant_labels: set[str] = set()

    def _begin(self, policy: str) -> None:
        priorities = [priority.name.lower() for priority in Priority]
        self._shed.begin((code, priority) for code in SHED_CODES for priority in priorities)
        self._decisions.begin((policy, reason) for reason in Reason if policy)
        self._graded.begin((grade,) for grade in Grade)
        self._over.begin((grade,) for grade in Grade)
        self._predictions.begin((grade, result) for grade in Grade for result in RESULTS)
        self._attempts.begin((outcome,) for outcome in (Ending.OK.value, Ending.CLIENT_LEFT.value, *KINDS))
        self._retries.begin((kind,) for kind in KINDS)
        self._spills.begin((cause.value,) for cause in Cause)
        self._spilled.begin((cause.value,) for cause in Cause)
        self._prewarm.begin((result,) for result in PREWARM_RESULTS)
        self._prewarm_tokens.begin([()])
        self._misses.begin((miss.value,) for miss in Miss)
        self._hits.begin(HITS)
        self._replays.begin([()])
        self._differences.begin((change.value,) for change in Change)
        self._repairs.begin((repair,) for repair in REPAIRS)

    def all(self) -> list[Counter | Histogram]:
        """In the order of the page."""
        return self._all

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, *labels)
        self._all.append(made)
        return made

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        made = Histogram(name, text, bounds, *labels)
        self._all.append(made)
        return made

    def take_over(self, ledger: Ledger) -> None:
        """What the observatory has counted, `settle`d: of these the ledger's word is all that there is."""
        totals = ledger.totals
        for miss, at in AT.items():
            self._misses.of(miss.value)[0] = totals[at]
        self._hits.series[_GENUINE][0], self._hits.series[_REPLAY][0] = totals[HIT] - totals[REPLAY], totals[REPLAY]
        self._replays.of()[0] = totals[REPLAYS]
        for change, requests in ledger.differences.items():
            self._differences.of(change.value)[0] = requests

    def know(self, tenants: Collection[str], tenants_max: int) -> None:
        """Whom to count by name: of all that ever are, the first `tenants_max`; others are one more."""
        self._tenants, self._tenants_max = tenants, tenants_max

    def tenant(self, name: str) -> str:
        """As a label."""
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
            self._of_tenants.of(self.tenant(record.tenant), f"{record.status // 100}xx")[0] += 1
        if record.overhead_s is not None:
            self._overhead.add(self._overhead_of_all, record.overhead_s)
        if record.queued_s > 0:
            self._queue.add(self._queue.of(), record.queued_s)
        if record.events or record.ttft_s is not None or record.inter_token_s is not None:
            self._observe_stream(model, record)
        for failure, _ in record.retries:
            self._retries.of(failure)[0] += 1
        for repair in record.repairs:
            self._repairs.of(repair)[0] += 1
        receipt = record.receipt
        if receipt is not None:
            if record.error is None:  # else the attempt was counted when it failed
                if kind.attempts is None:
                    kind.attempts = self._attempts.of(record.ending)
                kind.attempts[0] += 1
            self._observe_receipt(model, receipt, record.usage, record.at_s)
            if record.ending == _OK:
                self._observe_saved(model, receipt, record.usage, record.tenant)

    def _model(self, name: str) -> OfModel:
        if len(self._models) > MODELS_MAX:
            return self._others
        return self._models.setdefault(name, OfModel(name))

    def _kind(self, model: OfModel, what: tuple[str, int, str]) -> Kind:
        route, status, _ = what
        requests, duration = self._requests.of(route, model.label, status), self._duration.of(route, model.label)
        kind = model.kinds[what] = Kind(requests, duration)
        return kind

    def _place(self, receipt: Receipt) -> Place:
        decisions, graded = self._decisions.of(receipt.policy, receipt.reason), self._graded.of(receipt.grade)
        of_replica = (receipt.replica,)
        placed, computed = self._placed.series.get(of_replica), self._computed.series.get(of_replica)
        place = Place(decisions, graded, placed or [0.0], computed or [0.0])
        self._places[receipt.replica, receipt.policy, receipt.reason, receipt.grade] = place
        return place

    def _observe_stream(self, model: OfModel, record: RequestRecord) -> None:
        label = model.label
        if record.ttft_s is not None:
            if model.ttft is None:
                model.ttft = self._ttft.of(label)
            self._ttft.add(model.ttft, record.ttft_s)
        if record.inter_token_s is not None:
            if model.inter_token is None:
                model.inter_token = self._inter_token.of(label)
            self._inter_token.add(model.inter_token, record.inter_token_s)
        if record.events:
            if model.events is None:
                model.events = self._events.of(label)
            model.events[0] += record.events

    def _observe_receipt(self, model: OfModel, receipt: Receipt, usage: Usage | None, now_s: float) -> None:
        prompt, predicted = receipt.prompt_tokens, receipt.predicted_cached_tokens
        place = self._places.get((receipt.replica, receipt.policy, receipt.reason, receipt.grade))
        if place is None:
            place = self._place(receipt)
        place.decisions[0] += 1
        if not prompt:
            return
        if receipt.spill:
            self._spills.of(receipt.spill)[0] += 1
            self._spilled.of(receipt.spill)[0] += receipt.spilled_tokens
        place.graded[0] += 1
        place.placed[0] += prompt
        if prompt > predicted:
            place.computed[0] += prompt - predicted
        if model.prompt is None:
            model.prompt, model.predicted = self._prompt.of(model.label), self._predicted.of(model.label)
        model.prompt[0] += prompt
        model.predicted[0] += predicted
        self.hit_rate_predicted.add(predicted, prompt, now_s)
        if usage is not None and usage.cached_tokens is not None:
            self._observe_reported(model, usage, predicted, receipt.grade, now_s)

    def _observe_reported(self, model: OfModel, usage: Usage, predicted: int, grade: Grade, now_s: float) -> None:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens or 0
        if model.reported is None:
            model.reported, model.cached = self._reported.of(model.label), self._cached.of(model.label)
        model.reported[0] += prompt
        model.cached[0] += cached
        self.hit_rate_actual.add(cached, prompt, now_s)
        over = predicted - cached
        self._predictions.of(grade, "equal" if not over else "over" if over > 0 else "under")[0] += 1
        if over > 0:
            self._over.of(grade)[0] += over

    def _observe_saved(self, model: OfModel, receipt: Receipt, usage: Usage | None, tenant: str) -> None:
        prompt, cached = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            prompt, cached = usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens)
        if model.saved is None:
            model.saved, model.saved_s = self._saved.of(model.label), self._saved_s.of(model.label)
        if cached:
            model.saved[0] += cached
            model.saved_s[0] += self._prefill(receipt.replica).saved_ms(cached) / 1e3
        if self._tenants:
            of_tenant = self.tenant(tenant)
            self._tenant_prompt.of(of_tenant)[0] += prompt
            self._tenant_cached.of(of_tenant)[0] += cached

    def failed(self, replica: str | None, kind: str) -> None:
        """Count one failed attempt; None: at a replica that is none any more, and has no series."""
        if replica is not None:
            self._failures.of(replica, kind)[0] += 1
        self._attempts.of(kind)[0] += 1

    def shed(self, code: str, priority: Priority) -> None:
        """Count one request that was turned away."""
        self._shed.of(code, priority.name.lower())[0] += 1

    def hub_lost(self, placements: int) -> None:
        """Take over how many placements workers have made without the hub."""
        self._hub_lost.of()[0] = placements

    def prewarmed(self, result: str, prompt_tokens: int) -> None:
        """Count one prompt that a replica was, or was not, warmed with."""
        self._prewarm.of(result)[0] += 1
        self._prewarm_tokens.of()[0] += prompt_tokens

    def reloaded(self, result: str, now_s: float) -> None:
        """The settings were read again: `ok` if they are in force now, `refused` if the old ones stay."""
        self._reloads.of(result)[0] += 1
        if result == "ok":
            self.reloaded_at_s = now_s

    def joined(self, replica: str) -> None:
        """Begin the series of a replica: one that is given nothing counts in a mean, too."""
        self._placed.begin([(replica,)])
        self._computed.begin([(replica,)])
        self._places.clear()

    def left(self, replica: str) -> None:
        """Drop the series of a replica that is gone."""
        self._placed.series.pop((replica,), None)
        self._computed.series.pop((replica,), None)
        self._places.clear()
        failures = self._failures.series
        for labels in [labels for labels in failures if labels[0] == replica]:
            del failures[labels]
