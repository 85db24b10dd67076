"""Metrics under OpenTelemetry's names for generative AI."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as conventions
from prometheus_client.parser import text_string_to_metric_families

from router.core.types.placements import Confidence, PlacementReason, Receipt, Usage
from router.core.types.replicas import ServedModel
from router.telemetry import gen_ai
from router.telemetry.metrics import Metrics
from router.telemetry.request_record import RequestRecord
from tests.telemetry.counted import metrics, record, router

CHAT = "/v1/chat/completions"
NEWER = (  # names that the package of conventions does not have yet
    "duration.seconds", "time_to_first_chunk.seconds", "operation.input_tokens", "operation.output_tokens",
    "usage.input_tokens", "usage.output_tokens", "usage.cache_read.input_tokens",
)  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs/reference/names.md").read_text()


PLACED = Receipt("http://10.0.0.0:8000", "warm", PlacementReason.WARM, Confidence.ESTIMATED, 1000, 600)
USED = {"input_tokens": 1000.0, "output_tokens": 11.0, "cache_read_input_tokens": 640.0}


def standard(engine: str = "vllm") -> Metrics:
    """Metrics with OpenTelemetry's names, of a router with one replica that serves `m`."""
    of = router(1)
    (id_,) = of.fleet.members
    of.observe_models(id_, [ServedModel("m", owned_by=engine)])
    return Metrics(of, lambda: 0.0, otel_names=True)


def stream(**fields: object) -> RequestRecord:
    """A streamed answer of 11 tokens in 6 events: 0.25 s to the first, and 1 s from there to the last."""
    known = {"route": CHAT, "ending": "ok", "duration_s": 1.25, "ttft_s": 0.25, "inter_token_s": 0.2, "events": 6}
    return record(**{**known, "usage": Usage(1000, 11), **fields})


def samples(of: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name on the page, by the values of its labels in the order of their names."""
    families = text_string_to_metric_families(of.page().decode())
    return {
        tuple(value for _, value in sorted(each.labels.items())): each.value
        for family in families
        for each in family.samples
        if each.name == name
    }


def test_they_are_off_unless_asked_for() -> None:
    """Without the setting no name of OpenTelemetry is on the page, and a request is counted by one call as before."""
    it = metrics()
    it.observe(stream())
    assert b"gen_ai_" not in it.page()
    assert it.observe == it._tallies.observe


def test_names_labels_and_units_are_the_conventions() -> None:
    """Each family has the name that OpenTelemetry's exporter gives it, and the attributes that are required."""
    it = standard()
    it.observe(stream())
    page = {family.name: family for family in text_string_to_metric_families(it.page().decode())}
    names = {
        f"{conventions.GEN_AI_SERVER_REQUEST_DURATION}.seconds",
        f"{conventions.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN}.seconds",
        f"{conventions.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN}.seconds",
        conventions.GEN_AI_CLIENT_TOKEN_USAGE,
        f"{conventions.GEN_AI_CLIENT_OPERATION_DURATION}.seconds",
        f"{conventions.GEN_AI_CLIENT_OPERATION_TIME_TO_FIRST_CHUNK}.seconds",
        *(f"gen_ai.client.inference.{name}" for name in NEWER),
    }
    ours = {name for name in page if name.startswith("gen_ai")}
    assert ours == {name.replace(".", "_") for name in names}
    required = {
        each.replace(".", "_")
        for each in (
            attributes.GEN_AI_OPERATION_NAME,
            attributes.GEN_AI_PROVIDER_NAME,
            attributes.GEN_AI_REQUEST_MODEL,
        )
    }
    for name in ours:
        assert page[name].type == ("counter" if "_usage_" in name else "histogram")
        assert all(required <= each.labels.keys() for each in page[name].samples)


def test_what_one_stream_adds() -> None:
    """Times and tokens of a stream are counted once each; time per token divides by tokens and not by events."""
    it = standard()
    it.observe(stream())
    labels = ("chat", "vllm", "m")
    assert samples(it, "gen_ai_server_request_duration_seconds_sum") == {("", *labels): 1.25}
    assert samples(it, "gen_ai_server_time_to_first_token_seconds_sum") == {labels: 0.25}
    assert samples(it, "gen_ai_server_time_per_output_token_seconds_sum") == {labels: pytest.approx(0.1)}
    usage = samples(it, "gen_ai_client_token_usage_sum")
    assert usage == {("chat", "vllm", "m", "input"): 1000.0, ("chat", "vllm", "m", "output"): 11.0}
    buckets = samples(it, "gen_ai_server_time_to_first_token_seconds_bucket")
    assert (buckets["chat", "vllm", "m", "0.1"], buckets["chat", "vllm", "m", "0.25"]) == (0.0, 1.0)


def test_the_page_has_every_name() -> None:
    """And no other."""
    it = standard()
    it.observe(stream())
    families = text_string_to_metric_families(it.page().decode())
    names = {f"{each.name}{'_total' if each.type == 'counter' else ''}" for each in families}
    assert {name for name in names if name.startswith("gen_ai")} == set(
        re.findall(r"`(gen_ai_(?:server|client)_\w+)`", PAGE)
    )


def test_a_client_of_replicas() -> None:
    """What replicas were called for is counted from the first call on, under the older and the newer name; tokens as
    the engine reports them, and nothing for a request that called nobody."""
    it = standard()
    it.observe(stream(receipt=PLACED, overhead_s=0.25, usage=Usage(1000, 11, 640)))
    it.observe(stream(receipt=PLACED, status=400, ending="refused", usage=None, ttft_s=None))
    it.observe(stream(status=503, ending="", error="overloaded", usage=None))
    labels = ("chat", "vllm", "m")
    for name in ("operation", "inference"):
        duration = samples(it, f"gen_ai_client_{name}_duration_seconds_sum")
        assert duration == {("", *labels): 1.0, ("400", *labels): 1.25}
        assert samples(it, f"gen_ai_client_{name}_time_to_first_chunk_seconds_sum") == {labels: 0.25}
    used = {name: samples(it, f"gen_ai_client_inference_usage_{name}_total") for name in USED}
    assert used == {name: {(*labels, "unknown"): tokens} for name, tokens in USED.items()}
    assert samples(it, "gen_ai_client_inference_operation_input_tokens_count") == {labels: 1.0}
    assert samples(it, "gen_ai_client_inference_operation_output_tokens_sum") == {labels: 11.0}
    ours = {name: samples(it, f"warmroute_{name}") for name in ("reported_prompt_tokens_total", "cached_tokens_total")}
    assert [*ours.values()] == [{("m",): 1000.0}, {("m",): 640.0}]


def test_embeddings_are_no_inference() -> None:
    """They have a duration as a client's operation, and none under the names of inference."""
    it = standard()
    it.observe(stream(route="/v1/embeddings", receipt=PLACED))
    assert samples(it, "gen_ai_client_operation_duration_seconds_count") == {("", "embeddings", "vllm", "m"): 1.0}
    for name in ("duration_seconds_count", "usage_input_tokens_total", "operation_input_tokens_count"):
        assert samples(it, f"gen_ai_client_inference_{name}") == {}


def test_without_a_count_by_the_engine_events_are_tokens() -> None:
    """No token usage is made up, and the time per token is that between events."""
    it = standard()
    it.observe(stream(usage=None))
    assert samples(it, "gen_ai_client_token_usage_sum") == {}
    assert list(samples(it, "gen_ai_server_time_per_output_token_seconds_sum").values()) == [0.2]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"status": 503, "ending": "", "error": "overloaded"}, "overloaded"),
        ({"ending": "failed", "error": "engine_failed: its pod"}, "engine_failed"),
        ({"status": 500, "ending": "failed"}, "500"),
        ({"status": 404, "ending": "refused", "error": "model_not_found"}, ""),
        ({"status": 499, "ending": "client_left"}, ""),
    ],
)
def test_failures(fields: dict[str, object], error: str) -> None:
    """A failed request has a duration with the type of its error, and no time that only successes have."""
    it = standard()
    it.observe(stream(**fields))
    assert samples(it, "gen_ai_server_request_duration_seconds_count") == {(error, "chat", "vllm", "m"): 1.0}
    assert samples(it, "gen_ai_server_time_to_first_token_seconds_count") == {}
    assert samples(it, "gen_ai_server_time_per_output_token_seconds_count") == {}


def test_other_routes_are_not_counted() -> None:
    """What neither generates nor embeds has no operation in the conventions."""
    it = standard()
    it.observe(stream(route="/v1/models"))
    assert samples(it, "gen_ai_server_request_duration_seconds_count") == {}


@pytest.mark.inside  # it replaces a constant
def test_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have the labels of our own metrics; kinds of engines beyond the limit share one."""
    monkeypatch.setattr(gen_ai, "PROVIDERS_MAX", 1)
    kinds = {"a": ["vllm"], "b": ["sglang"], "c": ["vllm", "sglang"], "d": [], "": []}
    it = gen_ai.GenAiTallies(kinds.__getitem__, lambda model: model if model == "a" else "other")
    for model in kinds:
        it.observe(stream(model=model))
    duration, *_ = it.list_families()
    assert {labels[1:3] for labels in duration.series} == {
        ("vllm", "a"),
        ("other", "other"),
        ("unknown", "other"),
        ("unknown", ""),
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_page() -> None:
    """Prometheus's own checker reads the page, and has nothing to say of these names."""
    it = standard()
    it.observe(stream())
    checked = subprocess.run(["promtool", "check", "metrics"], input=it.page(), capture_output=True, check=False)
    said = (checked.stdout + checked.stderr).decode()
    assert "error while linting" not in said
    assert not [line for line in said.splitlines() if line.startswith("gen_ai")]
