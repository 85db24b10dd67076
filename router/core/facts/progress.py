"""Which events of a stream are progress: those with data that is more than a ping.

A server may keep a connection open by comments, blank lines, empty objects or pings though nothing is worked on: none
of these shows that an engine makes tokens. No expression looks for lines of data, since it would look at each byte.
"""

from __future__ import annotations

import re

_TOKEN = b'data: {"id"'  # how nearly all events begin
_DATA = re.compile(rb"data: ?(?![ \r\n])")
# A line of data that is no empty object, and not the ping of the Messages API.
_PROGRESS = re.compile(rb'data: ?(?![ \r\n]|\{ ?\}|\{ ?"type": ?"ping" ?\})')


def has_data(events: bytes) -> bool:
    """Whether these events have data: comments and blank lines have none."""
    return events.startswith(_TOKEN) or _has_line(events, _DATA)


def is_progress(events: bytes) -> bool:
    """Whether these events, of which the first may follow the size line of a chunk, have data that is no ping."""
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
