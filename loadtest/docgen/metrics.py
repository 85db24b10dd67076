"""The table of metrics, from the registry of a router that has seen one replica and one request."""

from __future__ import annotations

from loadtest.docgen.markdown import PageError, table
from router.core.cache_state.event_state import StoredPrefix
from router.core.insights.ledger.totals import Ledger
from router.core.kv_events.batch_decoder import Stored
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.cache_misses import MissReason, TokenBreakdown
from router.core.types.ended_requests import RequestTimes
from router.core.types.placements import Confidence, ExternalKv, PlacementReason, Pull, Receipt, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Priority
from router.core.types.tiers import CPU, GPU
from router.telemetry.metrics import Metrics, MetricSources
from router.telemetry.metrics.samples import PeeringMetrics, SnapshotMetrics
from router.telemetry.request_record import begin_record


def metrics_table() -> str:
    """Return every metric with its type, labels and help text, from the registry of a router with a replica."""
    rows = []
    for family in exercised_metrics().registry.collect():
        if not family.samples:
            raise PageError(f"{family.name} has no series: add its use to exercised_metrics")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for s in family.samples for label in s.labels if label != "le")
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return table(("name", "type", "labels", "meaning"), rows)


def exercised_metrics(*, former_names: bool = False) -> Metrics:
    """Return metrics with at least one series each: a replica with all reports, and a request that failed once.
    `former_names`: with those of renamed metrics, which have a page of their own."""
    id_ = "http://10.0.0.1:8000"
    router = Router(POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=16, default_cache_blocks=16)
    router.replace([Replica(id_, name="serving/vllm-0")])
    router.observations.observe_models(id_, [ServedModel("m", owned_by="vllm")])
    router.observations.observe_load(id_, Load(1, 0, 0.5, 4_096, 16, 100.0, 10.0, 100.0, 50.0, prefix_caching=True))
    router.knowledge.grade(id_, Confidence.CATCHING_UP, "joined late", 0.0)
    for medium in (GPU, "CPU"):
        event = Stored([1], None, bytes(64), 16, "", b"", None, medium, 0, prefix=True)
        router.knowledge.apply(id_, event, 0.0)
    router.fleet.members[id_].links.get_or_create(CPU)
    held = StoredPrefix(16, 16, Confidence.CATCHING_UP, epoch=0)
    router.knowledge.check_prediction(id_, held, 16, 16, 100)
    ledger = Ledger(templates_max=1, groups_max=2, steps_max=1, excerpts=False, tenant=str, now_s=0.0)
    streams = {id_: {"lag_s": 0.001}}
    fresh = {"fresh": 1.0, "stale_s": 0.0, "errors": 0.0, "replicas": 1.0}
    figures = MetricSources(
        in_flight=lambda: 1,
        streams=lambda: streams,
        prompts=lambda: {"encoded": 1},
        engine_version=lambda _: "0.32.0",
        discoveries=lambda: {"static": fresh},
        ledger=lambda: ledger,
        sharing=lambda: PeeringMetrics(True, 2, 0, True, 0.001, {}, {}),
        state=lambda: SnapshotMetrics({"estimate": 0, "events": 0}, {"restored": 0}, {}, 0, 0.0),
    )
    metrics = Metrics(router, lambda: 0.0, figures, splits=True, former_names=former_names)
    metrics.requests.set_tenants(["acme"], 1)
    metrics.requests.count_reload("ok", 0.0)
    metrics.requests.add_replica(id_)
    receipt = Receipt(id_, "warm", PlacementReason.WARM, Confidence.ESTIMATED, 100, 50, ttft_ms=90.0, ttft_p90_ms=120.0)
    record = begin_record("1", "/v1/completions", 1.0, "acme")
    record.model, record.status, record.ending, record.stream = "m", 200, "ok", True
    record.times = RequestTimes(1.0, 0.001, 0.1, 0.1, 0.01, 10)
    record.receipt, record.usage, record.retries = receipt, Usage(100, 10, 50), (("connect", id_),)
    record.cache.miss = TokenBreakdown(100, 50, {MissReason.NEW: 50}, pulled=32)
    receipt.brought = ExternalKv(0, Pull("http://10.0.0.2:8000", "10.0.0.2:5710", 32, 1.0, 1.0, 1.0))
    metrics.observe(record)
    ledger.observe(record)
    ledger.settle(1.0)
    metrics.requests.count_attempt_failure(id_, "connect")
    metrics.requests.count_attempt_failure(id_, "decode_blocks")
    metrics.requests.count_shed("overloaded", Priority.NORMAL)
    return metrics
