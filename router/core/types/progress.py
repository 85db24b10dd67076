"""Detection of progress in event streams: an event counts if it has data other than a ping.

A server may keep a connection open with comments, blank lines, empty objects or pings while it does not work on the
request. None of these shows that an engine produces tokens. No single expression searches for data lines, because it
would examine each byte.
"""

from __future__ import annotations

import re

_TOKEN = b'data: {"id"'  # beginning of nearly all events
_DATA = re.compile(rb"data: ?(?![ \r\n])")
# A data line that is neither an empty object nor the ping of the Messages API.
_PROGRESS = re.compile(rb'data: ?(?![ \r\n]|\{ ?\}|\{ ?"type": ?"ping" ?\})')


def has_data(events: bytes) -> bool:
    """True if these events have data; comments and blank lines have none."""
    return events.startswith(_TOKEN) or _has_line(events, _DATA)


def is_progress(events: bytes) -> bool:
    """True if these events have data that is not a ping. The first event may follow the size line of a chunk."""
    return events.startswith(_TOKEN) or _has_line(events, _PROGRESS)


def _has_line(events: bytes, line: re.Pattern[bytes]) -> bool:
    if line.match(events) is not None:
        return True
    at = events.find(b"\ndata:")
    while at >= 0:
        if line.match(events, at + 1) is not None:
            return True
        at = events.find(b"\ndata:", at + 1)
    return False
