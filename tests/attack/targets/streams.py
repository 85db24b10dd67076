"""What engines answer, as the dialects read it: events, usage, errors, and whether a stream is whole."""

from __future__ import annotations

import random

import msgspec

from router.core.dialects import PATHS, Dialect, sse
from router.core.dialects.dialect import Abort
from router.core.dialects.sse import EventSplitter
from router.core.prompts.json_fields import USAGE_TOKENS_MAX
from router.core.types.placements import EndReason, Usage
from tests.attack.cuts import cut
from tests.attack.target import Target


def events(data: bytes) -> None:
    """Bytes of a stream: events are the same wherever it is cut, and joined they are the stream."""
    whole, in_pieces = EventSplitter(), EventSplitter()
    found = whole.feed(data)
    pieces = cut(random.Random(data), data) if data else []
    assert [event for piece in pieces for event in in_pieces.feed(piece)] == found
    rest = whole.close()
    assert in_pieces.close() == rest
    assert b"".join(found) + rest == data
    assert sse.is_valid_first_event(data) in (True, False)
    forwards = [*filter(None, map(sse.payload, found)), *filter(None, [sse.payload(rest)])]
    assert len(list(sse.payloads_backwards(data))) >= len(forwards)


def usage(data: bytes) -> None:
    """An answer, and the end of a stream, of each dialect."""
    for dialect in PATHS.values():
        _possible(dialect.usage(data))
        _possible(dialect.stream_usage(data))
        assert dialect.event_error(data) in (None, *range(400, 600))
        assert dialect.event_error(b'data: {"error":' + data + b"\n\n") in (None, *range(400, 600))
        assert dialect.find_abort(data) in (None, *Abort)
        assert dialect.has_output(data) in (True, False)
        assert dialect.is_usage_event(data) in (True, False)
        assert dialect.find_ending(data) in (None, EndReason.OK, EndReason.FAILED, EndReason.REFUSED_BY_ENGINE)
        _error_event(dialect, data)


def _possible(found: Usage | None) -> None:
    if found is not None:
        assert 0 <= found.prompt_tokens <= USAGE_TOKENS_MAX
        assert 0 <= found.completion_tokens <= USAGE_TOKENS_MAX
        assert found.cached_tokens is None or 0 <= found.cached_tokens <= found.prompt_tokens


def _error_event(dialect: Dialect, tail: bytes) -> None:
    event = dialect.error_event(502, "stream_broken", "x", tail)
    assert event.endswith(b"\n\n")
    msgspec.json.decode(sse.payload(event))
    assert dialect.find_ending(b"data: {}\n\n" + event) is EndReason.FAILED


WORDS = (
    b"data: ", b"data:", b"event: ", b"event: message_stop\n", b": ping\n\n", b"\n\n", b"\r\n\r\n", b"\r",
    b"id: 1\n", b'"usage":{', b'"prompt_tokens":', b'"completion_tokens":', b'"cached_tokens":',
    b'"prompt_tokens_details":{', b'"finish_reason":"stop"', b'"choices":[]', b'"error":{', b'"code":500',
    b'"type":"response.completed"', b"[DONE]", b'"stop_reason":"', b'"type":"message_stop"', b'"meta_info":{',
    b'"sequence_number":', b'"input_tokens":', b'"index":1', b'"cache_read_input_tokens":', b'"hidden_states":[',
    b'"sglext":{', b'"type":"response.failed"',
)  # fmt: skip

TARGETS = (Target(events, WORDS), Target(usage, WORDS, steps=(40_000, 600)))
