"""Scanners of foreign bytes take no more than in proportion to them.

`tests/house/test_expressions.py` proves that of each regular expression; here whole scanners are tried. No time is
judged but a ratio: TIMES as much input may take SLACK times TIMES as long, in CPU time of the thread. A scanner whose
work is quadratic takes TIMES times TIMES as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from router.core.dialects import (
    ANTHROPIC,
    OPENAI,
    RESPONSES,
    SGLANG,
    Dialect,
    errors,
    multipart,
    response_metadata,
    sse,
)
from router.core.dialects.usage_filter import UsageFilter
from router.core.fleet.engine_metrics import engines, parse_load
from router.core.prompts import json_fields
from router.core.types.progress import is_progress
from router.http import chunk_passthrough

BYTES, TIMES, SLACK = 8 << 10, 16, 4
LEAST_S = 0.0005  # shorter measurements are noise
TRIES = 5

Scanner = Callable[[bytes], object]

UNITS = (
    b'"finish_reason":"a"', b'"finish_reason": {"', b'"finish_reason" ', b'"meta_info":{', b'"meta_info":{{}',
    b'"usage":{', b'"usage" : {"a":{}', b'"index" : 0', b'"choices":[]', b'"choices":[] "sglext" ', b'"sglext":{',
    b'"delta":{"hidden_states" ', b'"stop_reason":', b'"abort" "text":"', b'"type" "overloaded_error"',
    b'"error" ', b"event: response.completed\n", b"event: ping\n", b"event:", b"data: {", b"data: {}\n\n", b"data:\n",
    b": ping\n\n", b":", b"\n", b"\r\n", b"\r", b"\r\n\r", b" ", b"\t", b'"', b"\\", b'\\"', b"{", b"[", b"{[", b",",
    b"a", b"1", b"a=", b'a="', b'engine="1",', b'a="b",', b"--b\r\n", b"; name=", b"<", b"\xff", b"\xf0\x9f",
)  # fmt: skip


def _dialect(dialect: Dialect) -> dict[str, Scanner]:
    looks = (
        dialect.find_ending, dialect.stream_usage, dialect.usage, dialect.find_abort, dialect.event_error,
        dialect.has_output,
        dialect.is_usage_event, dialect.is_usage_unasked, lambda tail: dialect.error_event(502, "a", "b", tail),
    )  # fmt: skip
    names = ("ended", "stream_usage", "usage", "aborted", "event_error", "begun", "usage_event", "unasked", "error")
    return {f"{dialect.name}.{name}": look for name, look in zip(names, looks, strict=True)}


def _in_pieces(feed: Callable[[bytes], object]) -> Scanner:
    def scan(data: bytes) -> None:
        for at in range(0, len(data), 1_024):
            feed(data[at : at + 1_024])

    return scan


def _page(data: bytes) -> str:
    return "vllm:num_requests_running{" + data.decode("latin-1") + "} 1\n"


SCANNERS: dict[str, Scanner] = {
    **_dialect(OPENAI),
    **_dialect(ANTHROPIC),
    **_dialect(RESPONSES),
    **_dialect(SGLANG),
    "begins_well": sse.is_valid_first_event,
    "is_progress": is_progress,
    "several": sse.has_multiple_events,
    "payload": sse.payload,
    "backwards": lambda data: list(sse.payloads_backwards(data)),
    "splitter": lambda data: _in_pieces(sse.EventSplitter().feed)(data),
    "usage filter": lambda data: _in_pieces(UsageFilter(OPENAI).feed)(data),
    "told": response_metadata.metadata_of,
    "told by a stream": lambda data: response_metadata.metadata_of_stream(data, data),
    "full": errors.says_full,
    "cut usage": lambda data: json_fields.cut_usage(dict, data),
    "excess": lambda data: json_fields.check_limits(data, 64, 100_000, 1_000_000),
    "form": lambda data: multipart.any_form_model(b'multipart/form-data; boundary="b"', b"--b\r\n" + data),
    "form's type": lambda data: multipart.any_form_model(data, b"--b\r\n\r\n--b--"),
    "chunks": chunk_passthrough.is_passthrough,
    "load": lambda data: parse_load(_page(data)),
    "load of a rank": lambda data: parse_load(_page(data), 1),
    "engines": lambda data: engines(_page(data)),
}


def _cpu_s(scan: Scanner, data: bytes) -> float:
    began_s = time.thread_time()
    with suppress(ValueError):  # a scanner may refuse what it reads, if it does so in time
        scan(data)
    return time.thread_time() - began_s


def _grows(scan: Scanner, beginning: bytes, unit: bytes, ending: bytes) -> tuple[float, float]:
    """CPU seconds for the short and the long input: the least of a few tries, of which more are made while they say
    that it grows too fast."""
    short, long = (beginning + unit * (size // len(unit)) + ending for size in (BYTES, TIMES * BYTES))
    least_s = (float("inf"), float("inf"))
    for _ in range(TRIES):
        least_s = min(least_s[0], _cpu_s(scan, short)), min(least_s[1], _cpu_s(scan, long))
        if least_s[1] <= SLACK * TIMES * max(least_s[0], LEAST_S):
            break
    return least_s


@pytest.mark.promise("Every scanner of foreign bytes takes time linear in its input.", "engines")
@pytest.mark.finding("2026-11-28/8")
@pytest.mark.parametrize("name", SCANNERS)
def test_no_scanner_grows_faster_than_its_input(name: str) -> None:
    """Whatever stands in it again and again, and however it ends."""
    for unit in UNITS:
        for beginning, ending in ((b"", b""), (b"data: ", b"}\n\n")):
            short_s, long_s = _grows(SCANNERS[name], beginning, unit, ending)
            assert long_s <= SLACK * TIMES * max(short_s, LEAST_S), (unit, short_s, long_s)


def test_what_grows_faster_is_found() -> None:
    """A scanner whose work is quadratic fails."""

    def quadratic(data: bytes) -> None:
        for at in range(0, len(data), 16):
            data[at:].count(b"\0")

    short_s, long_s = _grows(quadratic, b"", b"a", b"")
    assert long_s > SLACK * TIMES * max(short_s, LEAST_S)
