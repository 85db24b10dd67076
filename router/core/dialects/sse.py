"""Server-sent events as engines send them: splitting a byte stream into whole events, and reading its end.

WHATWG HTML, section 9.2: events end with a blank line; lines end with LF, CRLF or CR. Engines and the proxies in front
of them send LF or CRLF; a lone CR is not treated as a line end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_END = re.compile(rb"\r?\n\r?\n")
_FIELD = re.compile(rb"(?:\xef\xbb\xbf)?(?:\r?\n)*+(?:(?:data|event|id|retry)?:|\Z)")
_DATA_LINE = re.compile(rb"^data: ?([^\n]*)", re.MULTILINE)
_LINE_END = re.compile(rb"(?<!\r)\r++(?:\n|\Z)")
END_BYTES_MAX = 3  # bytes of the longest terminator less one: the buffered bytes may end within a terminator
EVENT_BYTES_MAX = 1 << 20  # a longer event is passed on in pieces, not buffered
EVENTS_BACK_MAX = 1_024  # events at the end of a stream that are read: the tail of an ordinary one has about a hundred


class EventSplitter:
    """feed(bytes) -> whole events, terminators included; joined, they are the input byte for byte."""

    def __init__(self, *, bytes_max: int = EVENT_BYTES_MAX) -> None:
        """An event longer than `bytes_max`, which may be replaced, is passed on in pieces."""
        self._held = bytearray()
        self.bytes_max = bytes_max

    @property
    def holds(self) -> bool:
        """True if an event has begun and not ended."""
        return bool(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Return events completed by `data`. The incomplete rest is buffered, and only its new part is searched."""
        held, events = self._held, list[bytes]()
        seen, start = max(0, len(held) - END_BYTES_MAX), 0
        held += data
        # An expression looks at each byte, even if a long event has no line end.
        while held.find(b"\n", max(seen, start)) >= 0 and (match := _END.search(held, max(seen, start))):
            events.append(bytes(held[start : match.end()]))
            start = match.end()
        del held[:start]
        if len(held) > self.bytes_max:
            events.append(self.close())
        return events

    def close(self) -> bytes:
        """Return the bytes still buffered when the stream ended."""
        held = bytes(self._held)
        self._held.clear()
        return held


def line_ends(data: bytes, at: int) -> bool:
    """True if a line ends at this byte or after it."""
    return data.find(b"\n", at) >= 0 or data.find(b"\r", at) >= 0


def is_valid_first_event(head: bytes) -> bool:
    """True if the first bytes of a body are the beginning of a stream of JSON events. It begins with a field or a
    comment, and the first event, if it is whole, has an object."""
    if head.startswith(b"data: {") and _is_json(head[6 : head.find(b"\n\n")]):
        return True  # the case of nearly all chunks
    if not _FIELD.match(head):
        return False
    first, *more = _END.split(head, 1)
    data = payload(first) if more else b""
    return not data or (data.lstrip().startswith(b"{") and _is_json(data))


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def payload(event: bytes) -> bytes:
    """Return the data of one event: its `data:` lines joined by LF."""
    if b"\n" not in event:  # nearly all events have one line
        return event.rstrip(b"\r")[5:].removeprefix(b" ") if event.startswith(b"data:") else b""
    if b"\r" in event:
        event = _LINE_END.sub(b"\n", event)
    return b"\n".join(_DATA_LINE.findall(event))


def first_payload(chunk: bytes) -> bytes:
    """Return the data of the first event in a stream's first bytes."""
    return payload(_END.split(chunk, 1)[0])


def has_multiple_events(head: bytes) -> bool:
    """True if the first bytes of a stream have more than one whole event."""
    first = _END.search(head)
    return first is not None and _END.search(head, first.end()) is not None


def payloads_backwards(tail: bytes) -> Iterator[bytes]:
    """Yield the data of the whole events at the end of a stream, last first. The first piece of `tail` may be cut, and
    is yielded unchanged. At most the last EVENTS_BACK_MAX events are read."""
    # Splitting bytes is ten times as fast as an expression, and equivalent if all lines end with LF.
    first, *whole = _END.split(tail) if b"\r" in tail else tail.rsplit(b"\n\n", EVENTS_BACK_MAX)
    for event in reversed(whole[-EVENTS_BACK_MAX:]):
        data = payload(event)
        if data:
            yield data
    yield payload(first) or first
