"""Which events of a stream are progress: those with data that is more than a ping.

A server may keep a connection open by comments, blank lines, empty objects or pings though nothing is worked on, so none
of these shows that an engine makes tokens.
"""

from __future__ import annotations

import re

_DATA = re.compile(rb"^data: ?(?![ \r\n])", re.MULTILINE)
# A line of data that is no empty object, and not the ping of the Messages API.
_PROGRESS = re.compile(rb'^data: ?(?![ \r\n]|\{ ?\}|\{ ?"type": ?"ping" ?\})', re.MULTILINE)


def has_data(events: bytes) -> bool:
    """Whether these events have data: comments and blank lines have none."""
    return _DATA.search(events) is not None


def is_progress(events: bytes) -> bool:
    """Whether these events, of which the first may follow the size line of a chunk, have data that is no ping."""
    return events.startswith(b'data: {"id"') or _PROGRESS.search(events) is not None
