"""Everything that is counted, once per request and at its end.

That is on the path of every request, so these are plain numbers in dicts by label values; prometheus_client's own
counters take a lock, a search and a call or two an update. Families are made of them (metrics) when a scrape asks.
Labels are bounded: routes and reasons are fixed sets, models are those that replicas serve (the first MODELS_MAX of
them, anything else is `other`), replicas are those discovered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import exp
from typing import TypeAlias

from router.core.facts import Ending, Grade, Priority, Reason, Receipt, Usage
from router.core.prefill import PrefillModel
from router.core.spill import Cause
from router.keys import NONE, OTHER

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

Labels: TypeAlias = tuple[object, ...]  # values, in the order of the names; str() is what is shown


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
    tenant: str = ""
    queued_s: float = 0.0  # waited in the router for a place
    trace_id: str = ""  # of one that is traced


class Counter:
    """A counter by label values. `values` is added to as it is: a call would cost more than the addition."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = f"warmroute_{name}", text, labels
        self.values: defaultdict[Labels, float] = defaultdict(float)

    def begin(self, series: Iterable[Labels]) -> None:
        """Have these at nought."""
        self.values.update(dict.fromkeys(series, 0.0))


class Histogram:
    """A histogram by label values. A series is one list: its buckets, the one without bound last, then the sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.name, self.text, self.labels, self.bounds = f"warmroute_{name}", text, labels, bounds
        self.series: dict[Labels, list[float]] = {}
        if not labels:
            self._begin(())

    def _begin(self, labels: Labels) -> list[float]:
        series = self.series[labels] = [0.0] * (len(self.bounds) + 2)
        return series

    def add(self, labels: Labels, value: float) -> None:
        """Count one observation, in the first bucket whose bound is not below it."""
        series = self.series.get(labels) or self._begin(labels)
        series[bisect_left(self.bounds, value)] += 1
        series[-1] += value


class Ratio:
    """A ratio over an exponentially fading window."""

    def __init__(self) -> None:
        self._part = self._whole = self._at_s = 0.0

    def add(self, part: float, whole: float, now_s: float) -> None:
        """Add to both; what is older than now counts less."""
        if now_s > self._at_s:  # records of several workers need not come in order
            fade = exp((self._at_s - now_s) / HIT_RATE_WINDOW_S)
            self._part, self._whole, self._at_s = self._part * fade, self._whole * fade, now_s
        self._part += part
        self._whole += whole

    @property
    def value(self) -> float | None:
        """None until something was added."""
        return self._part / self._whole if self._whole > 1e-9 else None


class Tallies:
    """All counters and histograms of one router."""

    def __init__(self, prefill: Callable[[str], PrefillModel] = lambda _: PrefillModel(), policy: str = "") -> None:
        """`prefill(replica)` is what is learned of its speed. The decisions of `policy` are there from the start."""
        self._prefill = prefill
        self.hit_rate_predicted, self.hit_rate_actual = Ratio(), Ratio()
        self._models: dict[str, tuple[str]] = {"": ("none",)}
        self._requests = Counter("requests", "Requests answered.", "route", "model", "status")
        self._ttft = Histogram("ttft_seconds", "Time to the first event of a stream.", _LATENCY_S, "model")
        text = "Request read to answer ended."
        self._duration = Histogram("duration_seconds", text, _LATENCY_S, "route", "model")
        text = "Mean time between the events of a stream."
        self._inter_token = Histogram("inter_token_seconds", text, _INTER_TOKEN_S, "model")
        text = "Request read to request sent on: parse, hash, match, place."
        self._overhead = Histogram("overhead_seconds", text, _OVERHEAD_S)
        self._queue = Histogram("queue_seconds", "Waited for a place, of requests that had to.", _LATENCY_S)
        text = "Requests turned away though replicas are there, by reason."
        self._shed = Counter("shed_requests", text, "code", "priority")
        self._events = Counter("stream_events", "Streamed events passed on.", "model")
        self._prompt = Counter("prompt_tokens", "Prompt tokens placed, estimated.", "model")
        self._predicted = Counter("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model")
        text = "Prompt tokens of answers that say how many were cached."
        self._reported = Counter("reported_prompt_tokens", text, "model")
        self._cached = Counter("cached_tokens", "Prompt tokens that engines reported as cached.", "model")
        self._decisions = Counter("decisions", "Placements.", "policy", "reason")
        self._graded = Counter("graded_requests", "Placements by grade of the prediction.", "grade")
        text = "Predictions against the engine's own count of cached tokens."
        self._predictions = Counter("predictions", text, "grade", "result")
        self._over = Counter("overpredicted_tokens", "Tokens predicted to be cached that were not.", "grade")
        text = "Requests sent to replicas, further attempts included, by what became of them."
        self._attempts = Counter("attempts", text, "outcome")
        self._retries = Counter("retries", "Attempts that failed and were retried elsewhere.", "kind")
        self._failures = Counter("replica_failures", "Attempts that failed.", "replica", "kind")
        text = "Placements that workers made by the ring, as the hub was lost to them."
        self._hub_lost = Counter("worker_hub_lost_placements", text)
        self._hub_lost.begin([()])
        self._reloads = Counter("reloads", "Times that the settings were read again.", "result")
        self._reloads.begin([("ok",), ("refused",)])
        self.reloaded_at_s: float | None = None  # Unix time of the last that is in force
        text = "Requests answered, by tenant of the keys file and class of status."
        self._of_tenants = Counter("tenant_requests", text, "tenant", "status")
        text = "Prompt tokens of whole answers, by tenant of the keys file."
        self._tenant_prompt = Counter("tenant_prompt_tokens", text, "tenant")
        text = "Those of them that were cached: by the engine's count, else as predicted."
        self._tenant_cached = Counter("tenant_cached_tokens", text, "tenant")
        text = "Prompt tokens of whole answers that were not computed: by the engine's count, else as predicted."
        self._saved = Counter("saved_prefill_tokens", text, "model")
        text = "Prefill that was not done for that, estimated in a replica's seconds by its learned speed."
        self._saved_s = Counter("saved_prefill_seconds", text, "model")
        text = "Placements off the replica that holds most of the prompt, by what spoke against it."
        self._spills = Counter("spills", text, "cause")
        text = "Tokens that it holds, and that were predicted to be computed again."
        self._spilled = Counter("spilled_tokens", text, "cause")
        text = "Prompt tokens placed on a replica, estimated."
        self._placed = Counter("replica_placed_tokens", text, "replica")
        self._computed = Counter("replica_computed_tokens", "Those of them predicted to be computed.", "replica")
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

    def all(self) -> list[Counter | Histogram]:
        """In the order of the page."""
        return [tally for tally in vars(self).values() if isinstance(tally, Counter | Histogram)]

    def know(self, tenants: Collection[str], tenants_max: int) -> None:
        """Whom to count by name: of all that ever are, the first `tenants_max`; others are one more."""
        self._tenants, self._tenants_max = tenants, tenants_max

    def _tenant(self, name: str) -> str:
        if name not in self._tenants:
            return NONE
        if name in self._tenant_labels or len(self._tenant_labels) < self._tenants_max:
            self._tenant_labels.add(name)
            return name
        return OTHER

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        of_model = self._models.get(record.model) or self._model(record.model)
        (model,) = of_model
        self._requests.values[record.route, model, record.status] += 1
        self._duration.add((record.route, model), record.duration_s)
        if self._tenants:
            self._of_tenants.values[self._tenant(record.tenant), f"{record.status // 100}xx"] += 1
        if record.overhead_s is not None:
            self._overhead.add((), record.overhead_s)
        if record.queued_s > 0:
            self._queue.add((), record.queued_s)
        if record.ttft_s is not None:
            self._ttft.add(of_model, record.ttft_s)
        if record.inter_token_s is not None:
            self._inter_token.add(of_model, record.inter_token_s)
        if record.events:
            self._events.values[of_model] += record.events
        for kind, _ in record.retries:
            self._retries.values[kind,] += 1
        if record.receipt is not None:
            if record.error is None:  # else the attempt was counted when it failed
                self._attempts.values[record.ending,] += 1
            self._observe_receipt(of_model, record.receipt, record.usage, record.at_s)
            if record.ending == Ending.OK:
                self._observe_saved(of_model, record.receipt, record.usage, record.tenant)

    def _model(self, name: str) -> tuple[str]:
        if len(self._models) > MODELS_MAX:
            return ("other",)
        return self._models.setdefault(name, (name,))

    def _observe_receipt(self, of_model: tuple[str], receipt: Receipt, usage: Usage | None, now_s: float) -> None:
        predicted, spill = receipt.predicted_cached_tokens, receipt.spill
        self._decisions.values[receipt.policy, receipt.reason] += 1
        if not receipt.prompt_tokens:
            return
        if spill:
            self._spills.values[spill,] += 1
            self._spilled.values[spill,] += receipt.spilled_tokens
        of_replica = (receipt.replica,)
        if of_replica in self._placed.values:  # else it is gone
            self._placed.values[of_replica] += receipt.prompt_tokens
            self._computed.values[of_replica] += max(0, receipt.prompt_tokens - predicted)
        self._graded.values[receipt.grade,] += 1
        self._prompt.values[of_model] += receipt.prompt_tokens
        self._predicted.values[of_model] += predicted
        self.hit_rate_predicted.add(predicted, receipt.prompt_tokens, now_s)
        if usage is not None and usage.cached_tokens is not None:
            self._reported.values[of_model] += usage.prompt_tokens
            self._cached.values[of_model] += usage.cached_tokens
            self.hit_rate_actual.add(usage.cached_tokens, usage.prompt_tokens, now_s)
            over = predicted - usage.cached_tokens
            result = "equal" if not over else "over" if over > 0 else "under"
            self._predictions.values[receipt.grade, result] += 1
            self._over.values[receipt.grade,] += max(0, over)

    def _observe_saved(self, of_model: tuple[str], receipt: Receipt, usage: Usage | None, tenant: str) -> None:
        prompt, cached = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            prompt, cached = usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens)
        self._saved.values[of_model] += cached
        model = self._prefill(receipt.replica)
        self._saved_s.values[of_model] += max(0.0, model.ms(prompt, 0) - model.ms(prompt - cached, cached)) / 1e3
        if self._tenants:
            of_tenant = (self._tenant(tenant),)
            self._tenant_prompt.values[of_tenant] += prompt
            self._tenant_cached.values[of_tenant] += cached

    def failed(self, replica: str | None, kind: str) -> None:
        """Count one failed attempt; None: at a replica that is none any more, and has no series."""
        if replica is not None:
            self._failures.values[replica, kind] += 1
        self._attempts.values[kind,] += 1

    def shed(self, code: str, priority: Priority) -> None:
        """Count one request that was turned away."""
        self._shed.values[code, priority.name.lower()] += 1

    def hub_lost(self, placements: int) -> None:
        """Count placements that workers made without the hub."""
        self._hub_lost.values[()] += placements

    def reloaded(self, result: str, now_s: float) -> None:
        """The settings were read again: `ok` if they are in force now, `refused` if the old ones stay."""
        self._reloads.values[result,] += 1
        if result == "ok":
            self.reloaded_at_s = now_s

    def joined(self, replica: str) -> None:
        """Begin the series of a replica: one that is given nothing counts in a mean, too."""
        self._placed.values[replica,] = self._computed.values[replica,] = 0.0

    def left(self, replica: str) -> None:
        """Drop the series of a replica that is gone."""
        self._placed.values.pop((replica,), None)
        self._computed.values.pop((replica,), None)
        failures = self._failures.values
        for labels in [labels for labels in failures if labels[0] == replica]:
            del failures[labels]
