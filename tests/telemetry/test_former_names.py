"""Renamed metrics, headers and log events under both names, until the former ones are removed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from loadtest.docgen.metrics import exercised_metrics
from router.core.types.placements import Confidence, ExternalKv, PlacementReason, Pull, Receipt
from router.former_names import HEADERS, LOG_EVENTS, METRICS, UNTIL, former_labels, former_values
from router.ingress.local_responses import receipt_text
from tests.extproc.asking import asking, destinations, picking, removed, set_headers
from tests.support.fakes import FakeEngine, running
from tests.support.speaking import Speaking
from tests.telemetry.counted import record
from tests.telemetry.log_lines import Pipe

Series = dict[tuple[tuple[str, str], ...], float]
CHAT = "/v1/chat/completions"
NAMES = ("x-warmroute-stream-failover", "x-warmroute-continue")
PULLED = ExternalKv(0, Pull("http://10.0.0.2:8000", "10.0.0.2:5710", 32, 1.0, 1.0, 1.0))
BODY: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "temperature": 0,
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "word " * 400}],
}


def series(page: str, name: str) -> Series | None:
    """Values by labels of one metric of a page; None if the page does not have it."""
    for family in text_string_to_metric_families(page):
        if name in (family.name, f"{family.name}_total"):
            return {tuple(sorted(s.labels.items())): s.value for s in family.samples if s.name == name}
    return None


def in_former_words(found: Series, former: str) -> Series:
    """The same series with the labels and label values of the former metric."""
    labels = former_labels(former)
    return {
        tuple(sorted((labels.get(label, label), former_values(label).get(v, v)) for label, v in of)): value
        for of, value in found.items()
    }


async def _measure() -> str:
    """The metrics of a router after prompts that repeat, deadlines, and a stream that broke and failed over."""
    async with FakeEngine(owned_by="vllm") as one, FakeEngine(owned_by="vllm") as two, ClientSession() as client:
        async with running(one, two) as app:
            headers = {"x-warmroute-ttft-ms": "60000", NAMES[1]: "exact"}
            words = BODY["messages"][0]["content"]
            for said in (words, words, words + "tail"):
                body = {**BODY, "messages": [{"role": "user", "content": said}]}
                async with client.post(app.url + CHAT, json=body, headers=headers) as response:
                    assert response.status == 200
                    await response.read()
            queue = [Speaking(after=7).reply(), Speaking(seed=9).reply()]

            async def reply(engine: FakeEngine, request: Any) -> Any:
                return await queue.pop(0)(engine, request)

            for engine in (one, two):
                engine.script.extend([reply, reply])
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert b"stream_broken" not in await response.read()
            async with client.get(f"{app.admin_url}/metrics") as response:
                admin = await response.text()
            async with client.get(f"{app.url}/metrics") as response:
                main = await response.text()
    for former in METRICS:
        assert series(main, former) == series(admin, former)
    return admin


@pytest.fixture(scope="module")
def measured() -> str:
    """The metrics page of a router that has served requests."""
    return asyncio.run(_measure())


@pytest.fixture(scope="module")
def exercised() -> str:
    """A page on which every metric has a series."""
    return exercised_metrics(former_names=True).page().decode()


@pytest.mark.parametrize("former", METRICS)
def test_both_metrics_have_the_same_values(former: str, measured: str, exercised: str) -> None:
    """After requests through a router, and where every metric has a series."""
    name = METRICS[former].name
    for page in (measured, exercised):
        found = series(page, name)
        assert found is not None
        assert series(page, former) == in_former_words(found, former)
        assert f"# HELP {former} Former name of {name}, until {UNTIL}.\n" in page
    assert series(exercised, former)


@pytest.mark.parametrize(
    ("former", "labels"),
    [
        ("warmroute_funnel_tokens_total", {"place": "genuine", "model": "m"}),
        ("warmroute_deadlines_total", {"kept": "in_time", "priority": "normal", "model": "m"}),
        ("warmroute_continued_streams_total", {"how": "exact", "cause": "broke_midway"}),
        ("warmroute_replays_total", {}),
        ("warmroute_graded_requests_total", {"grade": "estimated"}),
    ],
)
def test_former_metrics_count_requests(former: str, labels: dict[str, str], measured: str) -> None:
    """With the former labels and label values."""
    assert (series(measured, former) or {})[tuple(sorted(labels.items()))] > 0


def test_former_metrics_are_absent_without_the_setting() -> None:
    """`metrics.former_names: false` leaves the current names only."""
    page = exercised_metrics().page().decode()
    assert not [former for former in METRICS if series(page, former) is not None]


async def test_former_metrics_are_in_every_format() -> None:
    """In OpenMetrics, for which a strict parser finds no family twice, and in the registry."""
    metrics = exercised_metrics(former_names=True)
    _, page = await metrics.page_for("application/openmetrics-text;version=1.0.0")
    shown = {sample.name for family in openmetrics(page.decode()) for sample in family.samples}
    registered = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert METRICS.keys() <= shown & registered


# -- headers -----------------------------------------------------------------------------------------------------------


def test_response_headers_have_both_names() -> None:
    """With the same value, in the receipt that both data planes send."""
    receipt = Receipt("http://10.0.0.1:8000", "warm", PlacementReason.PULL, Confidence.EXACT, 100, 50)
    receipt.brought = PULLED
    lines = receipt_text(receipt, record(not_continued="penalty"), isolated=False).split("\r\n")
    sent = dict(line.split(": ") for line in lines if line)
    answered = {former: name for former, name in HEADERS.items() if name != NAMES[0]}
    assert len(answered) == len(HEADERS) - 1 == 2
    assert all(sent[former] == sent[name] in ("32", "penalty") for former, name in answered.items())


async def test_response_headers_behind_a_gateway(engine: FakeEngine) -> None:
    """Envoy sets both names on the answer."""
    async with picking(engine) as app, asking(app) as it:
        await it.pick()
        (lease,) = [lease for member in app.router.members for lease in member.leases.values()]
        lease.receipt.brought = PULLED
        await it.answer()
        told = await it.hear()
        assert told is not None
        headers = set_headers(told)
    assert headers["x-warmroute-predicted-p2p-tokens"] == headers["x-warmroute-predicted-pull-tokens"] == "32"


@pytest.mark.parametrize("name", NAMES)
async def test_a_request_header_works_under_both_names(client: ClientSession, name: str) -> None:
    """A header asks for failover, declines it, is refused if it is invalid, and is not forwarded."""
    async with FakeEngine(owned_by="vllm") as engine:
        async with running(engine, upstream__continue_streams="exact") as app:
            for wish, asks in (("exact", True), ("off", False)):
                async with client.post(app.url + CHAT, json=BODY, headers={name: wish}) as response:
                    assert response.status == 200
                    await response.read()
                assert (b"return_token_ids" in engine.seen[-1].body) is asks
                assert name not in {each.lower() for each in engine.seen[-1].headers}
            async with client.post(app.url + CHAT, json=BODY, headers={name: "maybe"}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_stream_failover")


async def test_of_two_request_headers_the_current_one_counts(client: ClientSession) -> None:
    """A client that sends both names gets what the current one asks for."""
    async with FakeEngine(owned_by="vllm") as engine:
        async with running(engine) as app:
            async with client.post(app.url + CHAT, json=BODY, headers={NAMES[0]: "off", NAMES[1]: "exact"}) as response:
                await response.read()
        assert b"return_token_ids" not in engine.seen[-1].body


@pytest.mark.parametrize("name", NAMES)
async def test_behind_a_gateway_too(engine: FakeEngine, name: str) -> None:
    """Envoy removes the header under both names, so that no replica receives it."""
    async with picking(engine) as app, asking(app) as it:
        told = await it.pick(headers={name: "exact"})
        assert len(destinations(told)) == 1
        assert removed(told) == {name}


# -- log events --------------------------------------------------------------------------------------------------------


def test_renamed_events_have_their_former_name(pipe: Pipe) -> None:
    """In a field of their own; an event that was not renamed has none."""
    pipe.setup()
    log = logging.getLogger("router.x")
    for event in (*LOG_EVENTS.values(), "replica_up"):
        log.info("a sentence", extra={"event": event, "fields": {"replica": "r"}})
    *renamed, other = pipe.lines()
    assert [(line["former_event"], line["event"]) for line in renamed] == list(LOG_EVENTS.items())
    assert list(renamed[0]) == ["time", "level", "logger", "message", "event", "former_event", "replica"]
    assert "former_event" not in other
