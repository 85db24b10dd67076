"""Chunks that may be relayed unparsed: their sizes, and the part of a read that consists of them.

Such a chunk ends with an object and a blank line, which is the end of an event. Its size line is one that the parser
has accepted before.
"""

from __future__ import annotations

import re

SIZE_LINE_BYTES_MAX = 10
SIZES_MAX = 4_096
BYTES_MAX = 128 << 10  # size of the longest such chunk: less than a read that fills its buffer (read_fairness.py)
BYTES_MIN = 54  # size of the shortest such chunk; `event: message_stop` and its data have up to 53 bytes
CHUNK_END = b"}\n\n\r\n"  # end of an object, an event and a chunk
NEWLINES_OF_TWO = 6  # minimum number of newlines in two events and in the framing of their chunk

_SIZE_LINE = re.compile(rb"[0-9a-fA-F]{1,8}\Z")
sizes = dict[bytes, int]()  # size line -> size; events have few distinct sizes, which recur


def learn(data: bytes) -> None:
    """Remember the size line of the chunk that the parser has just accepted, if it is at the beginning of `data`."""
    line = data[: data.find(b"\r\n", 1, SIZE_LINE_BYTES_MAX)]
    if line not in sizes and _SIZE_LINE.match(line) and BYTES_MIN <= int(line, 16) <= BYTES_MAX:
        if len(sizes) >= SIZES_MAX:
            sizes.clear()
        sizes[line] = int(line, 16)


def is_passthrough(data: bytes) -> tuple[int, int, int]:
    """Return the start offsets of the last two such chunks at the beginning of `data`, and the end offset of the last
    one. `(0, 0, 0)`: there is no such chunk. `(0, 0, end)`: there is one."""
    before_last = last = at = 0
    while at < len(data):
        end = data.find(b"\r\n", at + 1, at + SIZE_LINE_BYTES_MAX)
        size = sizes.get(data[at:end])
        if size is None or not data.startswith(CHUNK_END, end + size - 1):
            break
        before_last, last, at = last, at, end + size + 4
    return before_last, last, at
