from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from router.admin.pages import Pages
from router.core.types.placements import Confidence, PlacementReason, Receipt, Usage
from router.http.engine_errors import EngineFailed
from router.http.failures import StreamInterrupted, TimedOut, UpstreamError
from router.telemetry import catalogue, counters, logs
from router.telemetry import metrics as rendering
from router.telemetry.metrics import Metrics, MetricSources
from router.telemetry.process_totals import SPANS_DROPPED, UNEXPLAINED, ProcessTotals
from router.telemetry.request_record import RequestRecord
from tests.support.histories import no_history
from tests.telemetry.counted import REPLICAS, Library, metrics, record, records, router


@pytest.fixture(scope="module")
def no_created_series() -> Iterator[None]:
    """The library alone, without the time at which each of its counters was made."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    yield
    prometheus_client.enable_created_metrics()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("no_created_series")
@settings(deadline=None)
@given(st.lists(records, max_size=12))
def test_the_page_is_what_the_library_would_write(seen: list[RequestRecord]) -> None:
    """Our own counters give, byte for byte, the page that prometheus_client's counters give."""
    ours, library = metrics(), Library()
    ours.requests.set_tenants(["acme"], 9)
    for replica in REPLICAS:
        ours.requests.add_replica(replica)
    for each in seen:
        ours.observe(each)
        library.observe(each)
    ours.requests.count_attempt_failure(REPLICAS[0], "connect")
    library.of["replica_failures"].labels(REPLICAS[0], "connect").inc()
    library.of["attempts"].labels("connect").inc()
    expected = generate_latest(library.registry)

    page = ours.page()
    assert page[: len(expected)] == expected
    assert page[len(expected) :].startswith(b"# HELP warmroute_in_flight_requests ")
    assert page == generate_latest(ours.registry)


def test_what_was_learned_of_decoding_is_told() -> None:
    """Both pages tell each replica's model of a decoding step: one its coefficients, one what they come to by now."""
    of = router(2)
    first, second = of.fleet.members.values()
    first.own_speed.step_factor.value = (
        2.0  # of the guess: 20 ms, 0.1 ms for a stream, 0.05 ms for 1,000 tokens of context
    )
    first.clock.join(1_000, 0.0, 0.0)
    it = metrics(of)
    pages = Pages(of, it, ready=lambda: True, clock=lambda: 0.0, history=no_history())

    page = it.page().decode()
    assert f'warmroute_replica_decode_step_seconds{{replica="{first.id}"}} 0.0403' in page
    assert f'warmroute_replica_decode_step_seconds{{replica="{second.id}"}} 0.02' in page  # nothing learned: the guess
    row = msgspec.to_builtins(pages._replica(first, 0.0))
    assert row["decode_step"] == {"floor_ms": 40.0, "per_stream_ms": 0.2, "per_context_token_ms": 1e-4}
    assert row["answer_tokens"] == 300.0


def busy() -> Metrics:
    """Metrics with many series."""
    it = metrics(router(3))
    for n in range(40):
        for route in ("/v1/completions", "/v1/chat/completions"):
            it.observe(record(route=route, model=f"m{n}", ttft_s=0.1, duration_s=1.0))
    return it


async def test_requests_go_on_while_a_page_is_written() -> None:
    """A long page gives the loop a turn after at most SLICE_SAMPLES lines, and is the same page."""
    it, turns = busy(), 0
    running = asyncio.create_task(it.page_in_slices())
    while not running.done():
        await asyncio.sleep(0)
        turns += 1

    page = running.result()
    assert page == it.page()
    assert turns >= page.count(b"\n") / (rendering.SLICE_SAMPLES + 2)
    assert max(part.count(b"\n") for part in it._slices()) <= rendering.SLICE_SAMPLES + 2


def test_what_changes_while_a_page_is_written_does_no_harm() -> None:
    """A replica may leave and a model may appear between two slices; every series stays whole."""
    known = router(3)
    it = metrics(known)
    for n in range(40):
        it.observe(record(model=f"m{n}", duration_s=1.0))
    slices = []
    for number, part in enumerate(it._slices()):
        slices.append(part)
        it.observe(record(model=f"new{number}", duration_s=1.0))
        if b"replica_ready" in part:
            known.replace([])
    page = b"".join(slices).decode()

    for family in re.findall(r"^# TYPE (\S+)", page, re.MULTILINE):
        assert page.count(f"# TYPE {family} ") == 1
    for model in re.findall(r'duration_seconds_count{model="(\w+)"', page):
        assert len(re.findall(rf'duration_seconds_bucket{{le="[^"]+",model="{model}"', page)) == 21
    assert "warmroute_replica_ready{" in page
    assert "warmroute_replica_grade{" not in page


@pytest.mark.promise("Labels of metrics are bounded, and series of a replica end with it.", "records")
@pytest.mark.inside
def test_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models beyond the limit are counted together; those known before keep their own series."""
    monkeypatch.setattr(counters, "MODELS_MAX", 2)
    it = metrics()
    for model in ("a", "b", "c", "d", "a"):
        it.observe(record(model=model))

    counts = re.findall(r'warmroute_requests_total{model="(\w+)".*status="200"} (\S+)', it.page().decode())
    assert counts == [("a", "2.0"), ("b", "1.0"), ("other", "2.0")]


@pytest.mark.promise("Labels of metrics are bounded, and series of a replica end with it.", "records")
def test_failures_leave_with_their_replica() -> None:
    """What a replica failed at is gone with it, and what others did is not."""
    it = metrics()
    for replica in REPLICAS:
        it.requests.count_attempt_failure(replica, "connect")
        it.requests.count_attempt_failure(replica, "a kind of its own")
    it.requests.remove_replica(REPLICAS[0])
    it.requests.remove_replica("http://10.0.0.9:8000")

    page = it.page().decode()
    assert f'replica="{REPLICAS[0]}"' not in page
    assert page.count(f'replica="{REPLICAS[1]}"') == 2


def test_every_kind_of_failure_is_there_from_the_start() -> None:
    """Kinds of failures that the page begins with at nought are all that there are."""
    bases = (UpstreamError, TimedOut, StreamInterrupted, EngineFailed)
    kinds = {failure.kind for made in bases for failure in made.__subclasses__()}
    assert set(catalogue.KINDS) == {*kinds, StreamInterrupted.kind}


def test_a_replica_that_gets_nothing_counts() -> None:
    """Tokens by replica begin at nought when it joins, go when it leaves, and do not come back with a late record."""
    it, (first, second) = metrics(), REPLICAS
    it.requests.add_replica(first)
    it.requests.add_replica(second)
    receipt = Receipt(second, "warm", PlacementReason.WARM, Confidence.EXACT, 100, 60)
    it.observe(record(ending="ok", receipt=receipt))
    page = it.page().decode()
    assert f'warmroute_replica_placed_tokens_total{{replica="{first}"}} 0.0' in page
    assert f'warmroute_replica_placed_tokens_total{{replica="{second}"}} 100.0' in page
    assert f'warmroute_replica_computed_tokens_total{{replica="{second}"}} 40.0' in page

    it.requests.remove_replica(second)
    it.observe(record(ending="ok", receipt=receipt))
    assert f'replica="{second}"' not in it.page().decode()


def test_saved_prefill() -> None:
    """What was cached saves tokens by the engine's count, and seconds by the speed that the replica has shown; what
    was no answer saves nothing."""
    known = router(1)
    (id_,) = known.fleet.members
    known.fleet.members[id_].own_speed.prefill_factor.value = 2.0  # of the guess: 0.1 ms a token
    it, receipt = metrics(known), Receipt(id_, "warm", PlacementReason.WARM, Confidence.EXACT, 1_000, 900)
    it.observe(record(ending="ok", receipt=receipt, usage=Usage(1_000, 5, 800)))
    it.observe(record(ending="failed", error="engine_failed", receipt=receipt))
    page = it.page().decode()
    assert 'warmroute_saved_prefill_tokens_total{model="m"} 800.0' in page
    assert 'warmroute_saved_prefill_seconds_total{model="m"} 0.16' in page


@pytest.mark.promise("Labels of metrics are bounded, and series of a replica end with it.", "records")
def test_tokens_of_tenants() -> None:
    """Tokens are counted for tenants by name, and for at most so many of them."""
    it = metrics()
    it.requests.set_tenants(["acme", "other inc"], 1)
    receipt = Receipt(REPLICAS[0], "warm", PlacementReason.WARM, Confidence.EXACT, 100, 60)
    for tenant in ("acme", "other inc", "acme"):
        it.observe(record(ending="ok", receipt=receipt, tenant=tenant))
    page = it.page().decode()
    assert 'warmroute_tenant_prompt_tokens_total{tenant="acme"} 200.0' in page
    assert 'warmroute_tenant_cached_tokens_total{tenant="other"} 60.0' in page


def test_the_process_is_on_the_page() -> None:
    """The router's page ends with what the kernel says of its process."""
    page = Metrics(router(), lambda: 0.0, process=True).page().decode()
    assert "\nprocess_resident_memory_bytes " in page
    assert "\nprocess_open_fds " in page


def test_dropped_log_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says how many log lines were dropped."""
    monkeypatch.setattr(logs, "count_dropped", lambda: 7)
    assert b"\nwarmroute_log_lines_dropped_total 7.0\n" in Metrics(router(), lambda: 0.0).page()


def test_dropped_spans_are_counted() -> None:
    """The page says how many spans did not reach the collector, and 0 where nothing is traced."""
    it = Metrics(router(), lambda: 0.0, MetricSources(totals=ProcessTotals(lambda: {SPANS_DROPPED: 7})))
    assert b"\nwarmroute_spans_dropped_total 7.0\n" in it.page()
    assert b"\nwarmroute_spans_dropped_total 0.0\n" in Metrics(router(), lambda: 0.0).page()


def test_prompts_that_were_not_compared_are_counted() -> None:
    """The page says how many prompts the frontends have not compared with an earlier one."""
    it = Metrics(router(), lambda: 0.0, MetricSources(totals=ProcessTotals(lambda: {UNEXPLAINED: 7})))
    assert b"\nwarmroute_differences_unexplained_total 7.0\n" in it.page()
