"""Requests, and the same counters as prometheus_client keeps them itself."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from router.core.estimators.prefill import PrefillModel
from router.core.insights.token_funnel import token_fates
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import MissReason, TokenBreakdown
from router.core.types.placements import Confidence, EndReason, PlacementReason, Receipt, Usage
from router.core.types.replicas import Replica
from router.telemetry import catalogue, counters, series
from router.telemetry.metrics import Metrics
from router.telemetry.request_record import RequestRecord
from tests.support.request_records import make_record

REPLICAS = ["http://10.0.0.1:8000", "http://10.0.0.2:8000#dp1"]
AWKWARD = ["m", "", "org/model:free", 'quo"ted', "back\\slash", "two\nlines", "naïve"]
SECONDS = st.one_of(st.none(), st.sampled_from([0.0, 0.025, 0.1, 1.0, 300.0, 300.1, 1e-5]), st.floats(0, 1e4))
TOKENS = st.integers(0, 1 << 40)


def router(replicas: int = 0) -> Router:
    """A Router that knows so many replicas."""
    it = Router(POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=16, default_cache_blocks=16)
    it.replace([Replica(f"http://10.0.0.{n}:8000") for n in range(replicas)])
    return it


def metrics(of: Router | None = None) -> Metrics:
    """Metrics of a router in which nothing is happening."""
    return Metrics(of or router(), lambda: 0.0)


def record(**fields: Any) -> RequestRecord:
    """A request that was answered, but for these fields."""
    return make_record(**{"model": "m", "status": 200, **fields})


breakdowns = st.builds(
    lambda hit, misses: TokenBreakdown(hit + sum(misses.values()), hit, misses),
    TOKENS,
    st.dictionaries(st.sampled_from(MissReason), TOKENS, max_size=3),
)
receipts = st.builds(
    Receipt,
    replica=st.sampled_from(REPLICAS),
    policy=st.sampled_from(["warm", "round_robin"]),
    reason=st.sampled_from(PlacementReason),
    grade=st.sampled_from(Confidence),
    prompt_tokens=TOKENS,
    predicted_cached_tokens=TOKENS,
    spill=st.sampled_from(["", *SpillCause]),
    spilled_tokens=TOKENS,
    miss=st.one_of(st.none(), breakdowns),
    replay=st.booleans(),
)
records = st.builds(
    make_record,
    route=st.sampled_from(["/v1/completions", "/v1/responses/{id}", "other"]),
    at_s=st.floats(0, 2e9),
    model=st.sampled_from(AWKWARD),
    status=st.sampled_from([200, 404, 499, 503]),
    ending=st.sampled_from(["ok", "refused", "client_left", "failed"]),
    duration_s=st.floats(0, 1e4),
    overhead_s=SECONDS,
    ttft_s=SECONDS,
    queued_s=st.sampled_from([0.0, 0.1, 30.0]),
    tenant=st.sampled_from(["acme", ""]),
    miss=st.one_of(st.none(), breakdowns),
    inter_token_s=SECONDS,
    events=st.integers(0, 5000),
    receipt=st.one_of(st.none(), receipts),
    usage=st.one_of(st.none(), st.builds(Usage, TOKENS, TOKENS, st.one_of(st.none(), TOKENS))),
    retries=st.lists(st.tuples(st.sampled_from(["connect", "lost"]), st.sampled_from(REPLICAS)), max_size=2).map(tuple),
)


class Library:
    """The same counters and histograms, as prometheus_client keeps them itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        kinds = {series.Counter: Counter, series.Histogram: Histogram}
        self.of: dict[str, Any] = {}
        for tally in counters.RequestMetrics(policy="warm").list_families():
            bounds = {"buckets": tally.bounds} if isinstance(tally, series.Histogram) else {}
            made = kinds[type(tally)](tally.name, tally.text, tally.labels, registry=self.registry, **bounds)
            self.of[tally.name.removeprefix("warmroute_")] = made
            for labels in tally.series if isinstance(tally, series.Counter) else ():
                if labels:
                    made.labels(*map(str, labels))
        for replica in REPLICAS:
            for name in (
                "placed_tokens",
                "computed_tokens",
                "requests",
                "completion_tokens",
                "ttft_seconds",
                "grade_falls",
            ):
                self.of[f"replica_{name}"].labels(replica)
        self._models: set[str] = set()

    def observe(self, record: RequestRecord) -> None:
        """Count one request, a call for each of its figures."""
        of, model = self.of, record.model or "none"
        if record.model not in {"", *self._models}:
            self._models.add(record.model)
            for name, series in catalogue.BEGUN_BY_MODEL.items():
                for labels in series:
                    of[name].labels(*map(str, labels), model)
            for reason in PlacementReason:
                of["decisions"].labels("warm", reason.value, model)
        of["tenant_requests"].labels(record.client.tenant or "none", f"{record.status // 100}xx").inc()
        if record.times.queued_s:
            of["queue_seconds"].labels(model).observe(record.times.queued_s)
        of["requests"].labels(record.route, model, str(record.status)).inc()
        of["duration_seconds"].labels(record.route, model).observe(record.times.duration_s)
        if record.times.overhead_s is not None:
            of["overhead_seconds"].observe(record.times.overhead_s)
        if record.times.ttft_s is not None:
            of["ttft_seconds"].labels(model).observe(record.times.ttft_s)
        if record.times.inter_token_s is not None:
            of["inter_token_seconds"].labels(model).observe(record.times.inter_token_s)
        if record.times.events:
            of["stream_events"].labels(model).inc(record.times.events)
        for kind, _ in record.retries:
            of["retries"].labels(kind).inc()
        if record.receipt is not None:
            if record.error is None:
                of["attempts"].labels(str(record.ending)).inc()
            self._answered(model, record, record.receipt)
            self._placed(model, record.receipt, record.usage)
            if record.ending == EndReason.OK:
                self._saved(model, record.receipt, record.usage, record.client.tenant or "none")

    def _answered(self, model: str, record: RequestRecord, receipt: Receipt) -> None:
        of, usage, miss = self.of, record.usage, record.cache.miss
        of["replica_requests"].labels(receipt.replica).inc()
        if record.times.ttft_s is not None:
            of["replica_ttft_seconds"].labels(receipt.replica).observe(record.times.ttft_s)
        tokens = usage.completion_tokens if usage is not None else record.times.events
        if tokens:
            of["completion_tokens"].labels(model).inc(tokens)
            of["replica_completion_tokens"].labels(receipt.replica).inc(tokens)
            of["tenant_completion_tokens"].labels(record.client.tenant or "none").inc(tokens)
        if miss is None and receipt.miss is None and record.ending in {"ok", "client_left"}:
            told = usage is not None and usage.verified
            total, hit = receipt.prompt_tokens, receipt.predicted_cached_tokens
            if told and usage is not None:
                total, hit = usage.prompt_tokens, usage.cached_tokens or 0
            hit = min(hit, total)
            miss = TokenBreakdown(total, hit, {MissReason.UNSUPPORTED: total - hit} if total > hit else {})
        if miss is not None:
            for reason, missed in miss.misses.items():
                of["miss_tokens"].labels(reason.value, model).inc(missed)
            for place, tokens in token_fates(miss, replay=receipt.replay).items():
                of["token_fate"].labels(place.value, model).inc(tokens)
            if miss.hit:
                of["hit_tokens"].labels("replay" if receipt.replay else "genuine", model).inc(miss.hit)

    def _placed(self, model: str, receipt: Receipt, usage: Usage | None) -> None:
        of, grade = self.of, receipt.grade.value
        of["decisions"].labels(receipt.policy, receipt.reason.value, model).inc()
        if not receipt.prompt_tokens:
            return
        if receipt.spill:
            of["spills"].labels(receipt.spill, model).inc()
            of["spilled_tokens"].labels(receipt.spill, model).inc(receipt.spilled_tokens)
        of["replica_placed_tokens"].labels(receipt.replica).inc(receipt.prompt_tokens)
        computed = max(0, receipt.prompt_tokens - receipt.predicted_cached_tokens)
        of["replica_computed_tokens"].labels(receipt.replica).inc(computed)
        of["prediction_confidence"].labels(grade).inc()
        of["prompt_tokens"].labels(model).inc(receipt.prompt_tokens)
        of["predicted_cached_tokens"].labels(model).inc(receipt.predicted_cached_tokens)
        if usage is not None and usage.cached_tokens is not None:
            of["reported_prompt_tokens"].labels(model).inc(usage.prompt_tokens)
            of["cached_tokens"].labels(model).inc(usage.cached_tokens)
            over = receipt.predicted_cached_tokens - usage.cached_tokens
            of["predictions"].labels(grade, "equal" if not over else "over" if over > 0 else "under").inc()
            of["overpredicted_tokens"].labels(grade).inc(max(0, over))

    def _saved(self, model: str, receipt: Receipt, usage: Usage | None, tenant: str) -> None:
        prompt, cached = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            prompt, cached = usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens)
        self.of["tenant_prompt_tokens"].labels(tenant).inc(prompt)
        self.of["tenant_cached_tokens"].labels(tenant).inc(cached)
        self.of["saved_prefill_tokens"].labels(model).inc(cached)
        self.of["saved_prefill_seconds"].labels(model).inc(PrefillModel().saved_ms(cached) / 1e3)
