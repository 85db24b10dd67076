"""Promises of the trace readers. Files are made by hand; the shipped slices are only counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from loadtest.common.runs import merged_runs, shared_blocks
from loadtest.common.traces import Request, Session, TraceError, read_trace

DATA = Path(__file__).parents[3] / "loadtest" / "data"


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _open_row(at_ms: int, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": ids}


def _turn(at_s: float, tokens: int, runs: list[list[int]], **more: object) -> dict[str, Any]:
    return {"s": "one", "t": at_s, "in": tokens, "out": 5, "h": runs, **more}


def _requests(path: Path, rows: list[dict[str, Any]]) -> tuple[Request, ...]:
    path.write_bytes(_lines(rows))
    return tuple(request for session in read_trace(path).sessions for request in session.requests)


def test_open_trace_is_read(tmp_path: Path) -> None:
    """A Mooncake line becomes a request with its time in seconds and its text four bytes a token."""
    [request] = _requests(tmp_path / "t.jsonl", [_open_row(2500, 700, [3, 9])])

    assert (request.at_s, request.input_tokens, request.output_tokens) == (2.5, 700, 7)
    assert len(request.text()) == 2800
    assert [request.text()] == request.messages()


def test_equal_ids_are_equal_text(tmp_path: Path) -> None:
    """Two prompts share exactly the text of the blocks whose ids they share."""
    left, right = _requests(tmp_path / "t.jsonl", [_open_row(0, 1024, [1, 2]), _open_row(1, 1024, [1, 3])])

    assert left.text()[:2048] == right.text()[:2048]
    assert left.text()[2048:2064] != right.text()[2048:2064]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_traces_read_alike(tmp_path: Path, suffix: str) -> None:
    """A trace reads the same plain, gzipped and as zstandard, and keeps its name."""
    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    path = tmp_path / f"small.jsonl{suffix}"
    path.write_bytes(packers[suffix](_lines([_open_row(0, 10, [1]), _open_row(5, 20, [1])])))

    trace = read_trace(path)

    assert (trace.name, trace.kind, trace.request_count) == ("small", "open", 2)


def test_turns_grow_by_messages(tmp_path: Path) -> None:
    """A turn that extends another starts with that turn's messages, the first of them unchanged."""
    first, second, third = _requests(
        tmp_path / "t.jsonl",
        [_turn(0, 100, [[1, 1]]), _turn(9, 300, [[1, 4]]), _turn(20, 301, [[1, 4]])],
    )

    assert first.messages() == second.messages()[:1]
    assert second.messages() == third.messages()[:2]
    assert [len(text) for text in third.messages()] == [400, 800, 4]


def test_branch_keeps_what_it_shares(tmp_path: Path) -> None:
    """A turn that departs within the last message keeps the messages before it, and no more."""
    _, longer, branch = _requests(
        tmp_path / "t.jsonl",
        [_turn(0, 128, [[1, 2]]), _turn(1, 320, [[1, 5]]), _turn(2, 384, [[1, 3], [70, 3]])],
    )

    assert longer.messages()[0] == branch.messages()[0]
    assert longer.messages()[1] != branch.messages()[1]
    assert len(branch.messages()) == 2


def test_think_time_of_flattened_agents(tmp_path: Path) -> None:
    """Between requests of one agent the think time counts; between agents, the time since the last answer."""
    requests = _requests(
        tmp_path / "t.jsonl",
        [
            _turn(0, 64, [[1, 1]], api=2),
            _turn(5, 64, [[50, 1]], api=1, a="sub"),
            _turn(9, 64, [[60, 1]], think=1.5, api=1, a="sub"),
            _turn(9.5, 64, [[1, 1]], think=99),
        ],
    )

    assert [request.think_s for request in requests] == [0.0, 3.0, 1.5, 0.0]


def test_long_prompt_ends_its_session(tmp_path: Path) -> None:
    """A prompt over the limit ends its session, since what follows builds on it; others go on."""
    path = tmp_path / "t.jsonl"
    other = {**_turn(0, 64, [[1, 1]]), "s": "two"}
    path.write_bytes(_lines([_turn(0, 64, [[1, 1]]), _turn(1, 640, [[1, 10]]), _turn(2, 64, [[1, 1]]), other]))

    trace = read_trace(path, input_tokens_max=128)

    assert [(s.name, len(s.requests)) for s in trace.sessions] == [("one", 1), ("two", 1)]
    assert trace.skipped == 2


def test_same_prompt_same_key(tmp_path: Path) -> None:
    """Requests have equal keys exactly when their texts are equal."""
    requests = _requests(
        tmp_path / "t.jsonl",
        [_turn(0, 70, [[1, 1]]), _turn(1, 70, [[1, 1]]), _turn(2, 71, [[1, 1]]), _turn(3, 130, [[1, 2]])],
    )

    for left in requests:
        for right in requests:
            assert (left.text() == right.text()) == (left.prompt_key() == right.prompt_key())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"not json\n", ":1: not a JSON object"),
        (b'{"a": 1}\n', ":1: unknown trace form with keys"),
        (_lines([_open_row(0, 10, [1]), {"timestamp": 1}]), ":2: Object missing required field"),
        (_lines([_open_row(0, 10, [1])]) + b"\n{\n", ":3: Input data was truncated"),
        (_lines([_open_row(0, 5000, [1])]), ":1: 1 hash_ids of 512 tokens do not cover input_length 5000"),
        (_lines([_turn(0, 640, [[1, 2]])]), ":1: 2 full blocks of 64 tokens do not fit 640 input tokens"),
        (b"\xff\xfe\n", ":1: 'utf-8' codec can't decode"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    """What cannot be read is refused with the file, the line and the reason."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    """A compressed trace that was cut off is an error, not a shorter trace."""
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(_lines([_open_row(i, 10, [i]) for i in range(5000)]))[:-40])

    with pytest.raises(TraceError, match="end-of-stream"):
        read_trace(path)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_shared_blocks_is_the_common_prefix(left: list[int], right: list[int]) -> None:
    """On merged runs, the shared count is the length of the two block lists' common prefix."""
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    runs = [merged_runs([(block, 1) for block in blocks]) for blocks in (left, right)]

    assert expected == shared_blocks(runs[0], runs[1])


@pytest.mark.parametrize(
    ("name", "kind", "requests"),
    [("mooncake_conversation", "open", 2000), ("claude_code_sessions", "sessions", 7531)],
)
def test_shipped_slices_are_whole(name: str, kind: str, requests: int) -> None:
    """The slices in the package are what NOTICE says they are, and no prompt is over 128,000 tokens."""
    trace = read_trace(DATA / f"{name}.jsonl.gz")

    assert (kind, requests) == (trace.kind, trace.request_count)
    assert max(_longest(session) for session in trace.sessions) <= 128_000


def _longest(session: Session) -> int:
    return max(request.input_tokens for request in session.requests)
