"""What of a stream is progress, and what only keeps its connection open."""

from __future__ import annotations

import pytest

from router.core.dialects import ANTHROPIC, OPENAI, RESPONSES, SGLANG, Dialect
from router.core.types.progress import has_data, is_progress

NO_DATA = (
    b"", b"\n", b"\r\n\r\n", b": ping\n\n", b":\r\n\r\n", b": data: x\n\n", b"retry: 10\n\n", b"id: 7\n\n",
    b"data:\n\n", b"data: \n\n", b"data:\r\n\r\n", b"x-data: a\n\n",
)  # fmt: skip
PINGS = (
    b"data: {}\n\n",
    b"data:{}\r\n\r\n",
    b"data: { }\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'data: {"type":"ping"}\n\n',
)
DATA = (
    b'data: {"id":"a"}\n\n',
    b"data: [DONE]\n\n",
    b'data:{"choices":[]}\r\n\r\n',
    b": ping\n\ndata: x\n\n",
    b'12\r\ndata: {"a":1}\n\n\r\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    b'data: {"type":"pinger"}\n\n',
    b'data: {}\n\ndata: {"a":1}\n\n',
)


@pytest.mark.parametrize("events", NO_DATA)
def test_no_data(events: bytes) -> None:
    """Comments, blank lines and events without data."""
    assert not has_data(events)
    assert not is_progress(events)


@pytest.mark.parametrize("events", PINGS)
def test_pings(events: bytes) -> None:
    """Data that says nothing."""
    assert has_data(events)
    assert not is_progress(events)


@pytest.mark.parametrize("events", DATA)
def test_progress(events: bytes) -> None:
    """Any other data, also where it follows a ping or the size line of a chunk."""
    assert has_data(events)
    assert is_progress(events)


@pytest.mark.parametrize("dialect", [OPENAI, SGLANG, ANTHROPIC, RESPONSES])
@pytest.mark.parametrize("events", [*NO_DATA, *PINGS])
def test_no_dialect_takes_pings_for_the_first_token(dialect: Dialect, events: bytes) -> None:
    """Whatever a stream pings with, its prefill is not known to be done."""
    assert not dialect.has_output(events)
