"""Metrics under the names of endpoint pickers: what dashboards made for one find, and that it equals ours."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.core.types.placements import Confidence, PlacementReason, Receipt, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Priority
from router.telemetry.epp import ALIASES, COUNTED
from router.telemetry.metrics import Metrics, MetricSources
from router.telemetry.metrics.epp_pool import LEVELS
from router.telemetry.request_record import RequestRecord
from tests.core.ready import router_of
from tests.telemetry.counted import record

CHAT = "/v1/chat/completions"
PAGE = (Path(__file__).parents[2] / "docs/reference/names.md").read_text()
IDS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")


def standard(*aliases: str) -> Metrics:
    """Metrics with these aliases, of a router with two replicas that tell their load and one that does not."""
    of = router_of(IDS)
    of.replace([Replica(IDS[0], name="serving/vllm-0"), *map(Replica, IDS[1:])])
    for id_ in IDS:
        of.observe_health(id_, ok=True)
        of.observe_models(id_, [ServedModel("m", owned_by="vllm")])
    of.observe_load(IDS[0], Load(4, 1, 0.5), 0.0)
    of.observe_load(IDS[1], Load(2, 3, 0.25), 0.0)
    figures = MetricSources(waiting=lambda: {(Priority.HIGH, "m"): 2, (Priority.LOW, "unheard of"): 1})
    return Metrics(of, lambda: 0.0, figures, aliases=aliases)


def ended(**fields: object) -> RequestRecord:
    """A streamed answer of 11 tokens that was placed after 0.5 s, began 0.25 s later, and ended after 1.75 s."""
    receipt = Receipt(IDS[0], "warm", PlacementReason.WARM, Confidence.ESTIMATED, 1000, 600)
    known = {"route": CHAT, "ending": "ok", "duration_s": 1.75, "ttft_s": 0.25, "overhead_s": 0.5, "queued_s": 0.4}
    usage = Usage(1000, 11, 640)
    return record(**{"stream": True, "receipt": receipt, "usage": usage, "events": 11, **known, **fields})


def families(of: Metrics) -> dict[str, Metric]:
    """The page by names as queries have them."""
    found = text_string_to_metric_families(of.page().decode())
    return {f"{each.name}_total" if each.type == "counter" else each.name: each for each in found}


def values(of: Metrics, sample: str) -> dict[tuple[str, ...], float]:
    """Values of one sample name on the page, by the values of its labels in the order of their names."""
    return {
        tuple(value for _, value in sorted(each.labels.items())): each.value
        for family in families(of).values()
        for each in family.samples
        if each.name == sample
    }


def test_they_are_off_unless_asked_for() -> None:
    """Without the setting no name of a picker is on the page, and a request is counted by one call as before."""
    it = standard()
    it.observe(ended())
    assert not re.search(rb"^(llm_d_epp|inference)_", it.page(), re.MULTILINE)
    assert it.observe == it._tallies.observe


@pytest.mark.parametrize("aliases", [ALIASES[:1], ALIASES[1:], ALIASES])
def test_names_are_those_of_the_page(aliases: tuple[str, ...]) -> None:
    """What is asked for is there in full, and nothing else; the page has a row for each name, and for no other."""
    it = standard(*aliases)
    it.observe(ended())
    it.observe(ended(status=503, ending="", error="overloaded", receipt=None))
    there = {name for name in families(it) if name.startswith(ALIASES)}
    new = {f"llm_d_epp_{each.name}" for each in (*COUNTED, *LEVELS)}
    old = {f"inference_{each.old}" for each in (*COUNTED, *LEVELS) if each.old}
    assert there == (new if "llm_d_epp" in aliases else set()) | (old if "inference" in aliases else set())
    rows = [row.split("|") for row in PAGE.splitlines() if row.startswith("| `llm_d_epp_")]
    assert {
        name for row in rows for name in re.findall(r"`((?:llm_d_epp|inference)_\w+)`", row[1] + row[2])
    } == new | old


@pytest.mark.parametrize("name", ["llm_d_epp_request", "inference_objective"])
def test_values_equal_ours(name: str) -> None:
    """Requests, times and tokens under the picker's names are those of our own families, request by request."""
    it = standard(*ALIASES)
    for number in range(1, 6):
        it.observe(ended(duration_s=1.0 + number, usage=Usage(100 * number, 10 * number, 64 * number)))
    it.observe(ended(status=502, ending="failed", error="engine_failed", usage=None))
    model = ("m", "m")
    ours = {key: sum(values(it, f"warmroute_{key}").values()) for key in (
        "decisions_total", "duration_seconds_sum", "reported_prompt_tokens_total", "completion_tokens_total",
        "cached_tokens_total",
    )}  # fmt: skip
    failed_s = 1.75
    assert values(it, f"{name}_total" if "epp" in name else f"{name}_request_total") == {model: ours["decisions_total"]}
    duration = f"{name}_duration_seconds_sum" if "epp" in name else f"{name}_request_duration_seconds_sum"
    assert values(it, duration)[model] == pytest.approx(ours["duration_seconds_sum"] - failed_s)
    for theirs, our in (
        ("input_tokens", "reported_prompt_tokens_total"),
        ("cached_tokens" if "epp" in name else "prompt_cached_tokens", "cached_tokens_total"),
    ):
        assert values(it, f"{name}_{theirs}_sum")[model] == ours[our]
    assert values(it, f"{name}_output_tokens_sum")[model] == 10 + 20 + 30 + 40 + 50


def test_what_one_stream_adds() -> None:
    """Times begin when the request is read, as the picker's do; the time per token is that behind the first."""
    it = standard("llm_d_epp")
    it.observe(ended())
    assert values(it, "llm_d_epp_request_ttft_seconds_sum") == {("m", "true", "m"): 0.75}
    assert values(it, "llm_d_epp_request_streaming_tpot_seconds_sum") == {("m", "m"): pytest.approx(0.1)}
    assert values(it, "llm_d_epp_request_ntpot_seconds_sum") == {("m", "m"): pytest.approx(1.75 / 11)}
    queued = values(it, "llm_d_epp_flow_control_request_queue_duration_seconds_sum")
    assert queued == {("warmroute", "m", "Dispatched", "m"): 0.4}


def test_an_answer_that_does_not_stream() -> None:
    """Its time to the first token is all of its time, and no time per token is made up."""
    it = standard("llm_d_epp")
    it.observe(ended(stream=False, ttft_s=None, events=0, usage=None))
    assert values(it, "llm_d_epp_request_ttft_seconds_sum") == {("m", "false", "m"): 1.75}
    assert values(it, "llm_d_epp_request_streaming_tpot_seconds_count") == {}
    assert values(it, "llm_d_epp_request_input_tokens_count") == {}


@pytest.mark.parametrize(
    ("fields", "outcome", "code"),
    [
        ({"status": 429, "error": "overloaded"}, "RejectedCapacity", "429"),
        ({"status": 429, "error": "rate_limited"}, "RejectedOther", "429"),
        ({"status": 499, "ending": "client_left"}, "EvictedContextCancelled", None),
    ],
)
def test_requests_that_were_not_placed(fields: dict[str, object], outcome: str, code: str | None) -> None:
    """They are no requests to the picker's count, and have the outcome of their wait; who left is no error."""
    it = standard("llm_d_epp")
    it.observe(ended(receipt=None, usage=None, **fields))
    assert values(it, "llm_d_epp_request_total") == {}
    found = values(it, "llm_d_epp_flow_control_request_queue_duration_seconds_count")
    assert found == {("warmroute", "m", outcome, "m"): 1.0}
    assert values(it, "llm_d_epp_request_error_total") == ({(code, "m", "m"): 1.0} if code else {})


def test_the_pool_is_what_engines_say() -> None:
    """Means and deviations are over ready replicas that have told, as the picker takes them; each replica has the name
    of its pod where it is one."""
    it = standard(*ALIASES)
    pool = ("warmroute",)
    for prefix in ("llm_d_epp_", "inference_pool_"):
        assert values(it, f"{prefix}average_kv_cache_utilization") == {pool: 0.375}
        assert values(it, f"{prefix}average_queue_size") == {pool: 2.0}
        assert values(it, f"{prefix}average_running_requests") == {pool: 3.0}
    assert values(it, "llm_d_epp_std_dev_queue_size") == {pool: pytest.approx(2**0.5)}
    ready = sum(values(it, "warmroute_replica_ready").values())
    assert values(it, "llm_d_epp_ready_endpoints") == values(it, "inference_pool_ready_pods") == {pool: ready}
    each = values(it, "llm_d_epp_per_endpoint_queue_size")
    assert (
        each
        == values(it, "inference_pool_per_pod_queue_size")
        == {
            ("vllm-0", "warmroute"): 1.0,
            (IDS[1], "warmroute"): 3.0,
        }
    )
    waiting = values(it, "warmroute_replica_waiting")
    assert set(each.values()) == set(waiting.values())
    assert values(it, "llm_d_epp_flow_control_queue_size") == {
        ("warmroute", "m", "high", "m"): 2.0,
        ("warmroute", "unheard of", "low", "unheard of"): 1.0,
    }


def test_other_routes_are_not_counted() -> None:
    """What neither generates nor embeds is no inference request."""
    it = standard(*ALIASES)
    it.observe(ended(route="/v1/models"))
    assert values(it, "llm_d_epp_request_total") == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_page() -> None:
    """Prometheus's own checker reads the page, and has nothing to say of these names but that the `d` of `llm_d`, which
    is not ours to change, looks like days."""
    it = standard(*ALIASES)
    it.observe(ended())
    checked = subprocess.run(["promtool", "check", "metrics"], input=it.page(), capture_output=True, check=False)
    said = (checked.stdout + checked.stderr).decode()
    assert "error while linting" not in said
    lines = [line for line in said.splitlines() if line.startswith(ALIASES)]
    assert [
        line for line in lines if not re.fullmatch(r"llm_d_\w+ metric names should not contain .* units", line)
    ] == []
