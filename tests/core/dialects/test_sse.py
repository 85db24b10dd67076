from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import sse
from router.core.dialects.sse import EventSplitter, is_valid_first_event, payload, payloads_backwards

PIECES = st.sampled_from(
    [b"data: {}", b"data:x", b"event: e", b": ping", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b" "]
)
STREAMS = st.lists(PIECES, max_size=30).map(b"".join)


def split(stream: bytes, cuts: list[int]) -> tuple[list[bytes], bytes]:
    """Feed a stream cut at these offsets: whole events, and the rest."""
    splitter, events, start = EventSplitter(), [], 0
    for end in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        events += splitter.feed(stream[start:end])
        start = end
    return events, splitter.close()


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(deadline=None)
def test_any_split_yields_the_same_events(stream: bytes, cuts: list[int]) -> None:
    """However the network cuts a stream, events are the same and joined they are the input byte for byte."""
    events, rest = split(stream, cuts)
    assert b"".join(events) + rest == stream
    assert (events, rest) == split(stream, [])
    assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lf_and_crlf_end_events(end: bytes) -> None:
    """Both line ends that engines and proxies send separate events, and neither reaches the payload."""
    one = b"event: a" + end + b'data: {"n":1}' + end + end
    two = b"data:first" + end + b"data: second" + end + b": comment" + end + end
    events, rest = split(one + two + b"data: cut", [3, 14, 30])
    assert (events, rest) == ([one, two], b"data: cut")
    assert [payload(event) for event in events] == [b'{"n":1}', b"first\nsecond"]


def test_an_endless_event_is_not_held() -> None:
    """An event over the limit is passed on in pieces, and the splitter then goes on."""
    splitter = EventSplitter()
    piece = b"data: " + b"x" * sse.EVENT_BYTES_MAX
    assert splitter.feed(piece) == [piece]
    assert splitter.feed(b"\n\ndata: y\n\n") == [b"\n\n", b"data: y\n\n"]
    assert splitter.close() == b""


def test_the_tail_reads_backwards() -> None:
    """Payloads come last first, pings are skipped, and a cut first piece is still given."""
    tail = b'"cut":1}\n\n: ping\n\ndata: two\r\n\r\ndata: [DONE]\n\n'
    assert list(payloads_backwards(tail)) == [b"[DONE]", b"two", b'"cut":1}']
    assert not any(payloads_backwards(b""))


def test_close_empties_the_splitter() -> None:
    """What was held is given back once."""
    splitter = EventSplitter()
    splitter.feed(b"data: half")
    assert (splitter.close(), splitter.close()) == (b"data: half", b"")


@pytest.mark.parametrize(
    ("head", "well"),
    [
        (b'data: {"a": 1}\n\n', True),
        (b'data:{"a": 1}\r\n\r\ndata: x', True),
        (b'data: {"a":\ndata: 1}\n\n', True),
        (b"\xef\xbb\xbf\n: hello\n\n", True),
        (b"event: ping\ndata: {}\n\n", True),
        (b'data: {"a": "' + b"x" * 70_000, True),  # not whole: who knows
        (b'data: {"a": 1\n\n', False),
        (b'data: {"a": 1}x\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b"data: 7\n\n", False),
        (b"<html>\n\n", False),
        (b"database: {}\n\n", False),
    ],
)
def test_how_a_stream_begins(head: bytes, well: bool) -> None:
    """A field or a comment, and an object in the first event, as far as it is there."""
    assert is_valid_first_event(head) is well


@given(st.binary(max_size=60))
def test_any_beginning_is_judged(head: bytes) -> None:
    """Nothing raises, whatever comes."""
    assert is_valid_first_event(head) in (True, False)
