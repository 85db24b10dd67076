"""Reader of replies that checks their shape before hiredis parses them.

hiredis allocates a list with as many elements as a reply announces, 10^9 in thirteen bytes, and buffers the bytes of a
string of any length. So this module parses each header first. Lists, depth and lines beyond a limit raise a
ProtocolError at once, and no byte of such a reply reaches hiredis. A string that is only too long is dropped as its
bytes arrive, and is empty in the reply. So a publisher of long strings cannot disconnect the routers from each other.

RESP2 has five kinds of replies (https://redis.io/docs/latest/develop/reference/protocol-spec/). The header of each is a
line: `+text`, `-error`, `:number`, `$length` or `*count`. After `$length` come that number of bytes, and after `*count`
that number of replies.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hiredis

DEPTH_MAX = 8  # depth of nested lists, the same as in hiredis; an answer to COMMAND has seven
LINE_BYTES_MAX = 4_096  # a header, with an error's text
DIGITS_MAX = 12  # digits of a length
DROPPED_BYTES_MAX = 64 << 20  # a string that announces more ends the connection: no router waits for its end
_TEXTS, _STRING, _LIST = b"+-:", ord("$"), ord("*")
_MESSAGE = re.compile(rb"\*3\r\n\$7\r\nmessage\r\n\$([1-9]\d{0,2})\r\n([^\r\n]{1,200})\r\n\$(0|[1-9]\d{0,8})\r\n")
_EMPTY = b"$0\r\n\r\n"


class BoundedReader:
    """Has the methods of hiredis.Reader that redis-py and Wire call."""

    def __init__(
        self,
        error: Callable[[str], Exception],
        reply_error: Callable[[str], Exception],
        *,
        bytes_max: int,
        elements_max: int,
        nothing: Any = False,  # noqa: ANN401 - a mark of the caller's
    ) -> None:
        """Create a reader.

        - `bytes_max` and `elements_max`: limits of one reply, with all its parts.
        - `nothing`: returned if no reply is complete.
        - `error`: makes the exception for bytes that are no reply, or beyond a limit.
        """
        self._error, self._nothing = error, nothing
        self._reader = hiredis.Reader(protocolError=error, replyError=reply_error, notEnoughData=nothing)
        self._bytes_max, self._elements_max = bytes_max, elements_max
        self._data, self._at = b"", 0  # received bytes; those from this position on are not parsed yet
        self._body = 0  # bytes of a string, and the line end after it, that have not arrived yet
        self._dropping = False  # True if that string is dropped
        self._open = list[int]()  # number of missing replies of each list that has begun
        self._bytes = self._elements = 0  # counts of the reply that has begun

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def has_data(self) -> bool:
        """True if bytes are present that belong to no returned reply."""
        return self._at < len(self._data) or self._body > 0 or bool(self._open) or bool(self._reader.has_data())

    def gets(self, decode: bool = True) -> Any:  # noqa: ANN401 - as hiredis has it
        """Return the next reply. Raises an exception made by `error`."""
        if self._at >= len(self._data):
            return self._nothing
        if not self._open and not self._body and (message := self._message()) is not None:
            return message
        return self._reader.gets(decode) if self._scan() else self._nothing

    def _message(self) -> list[bytes] | None:
        """Return a message if it is complete. Nearly all replies are messages, and dozens arrive each second."""
        data = self._data
        found = _MESSAGE.match(data, self._at)
        if found is None:
            return None
        begin, channel = found.end(), found[2]
        end = begin + int(found[3])
        if len(channel) != int(found[1]) or end - begin > self._bytes_max or data[end : end + 2] != b"\r\n":
            return None
        self._at = end + 2
        return [b"message", channel, data[begin:end]]

    def _scan(self) -> bool:
        """Pass the available bytes of one reply on to hiredis. Returns True if the reply is complete."""
        data, begin, end = self._data, self._at, len(self._data)  # bytes before `begin` were passed on
        while self._at < end:
            if not self._body:
                head = self._at
                line_end = data.find(b"\r\n", head, head + LINE_BYTES_MAX)
                if line_end < 0:
                    if end - head >= LINE_BYTES_MAX:
                        raise self._error(f"a line of more than {LINE_BYTES_MAX} bytes")
                    break
                self._at = line_end + 2
                more = self._header(data[head], data[head + 1 : line_end])
                if self._dropping:
                    self._pass(begin, head)
                    self._reader.feed(_EMPTY)
                    begin = self._at
                if more and not self._body:
                    continue
            if self._body:
                step = min(self._body, end - self._at)
                self._at, self._body = self._at + step, self._body - step
                if self._dropping:
                    begin = self._at
                if self._body:
                    break
                self._dropping = False
            if not self._open or self._end_reply():
                self._bytes = self._elements = 0
                self._pass(begin, self._at)
                return True
        self._pass(begin, self._at)
        return False

    def _header(self, kind: int, rest: bytes) -> bool:
        """Process a header. Returns True if its reply has more parts. Raises an exception made by `error`."""
        if kind in (_STRING, _LIST):
            if rest.isdigit() and len(rest) <= DIGITS_MAX:
                return self._begin_reply(kind, int(rest))
            if rest != b"-1":
                raise self._error("a length that is not a number")
        elif kind in _TEXTS:
            self._bytes += len(rest)
            if self._bytes > self._bytes_max:
                raise self._error(f"a reply of more than {self._bytes_max} bytes")
        else:
            raise self._error(f"a reply of unknown type {chr(kind)!r}")
        return False

    def _begin_reply(self, kind: int, count: int) -> bool:
        if kind == _STRING:
            if count > DROPPED_BYTES_MAX:
                raise self._error(f"a string of {count} bytes")
            self._dropping = self._bytes + count > self._bytes_max
            self._bytes += 0 if self._dropping else count
            self._body = count + 2
            return True
        self._elements += count
        if self._elements > self._elements_max or len(self._open) >= DEPTH_MAX:
            raise self._error(f"a list of {count} replies, {len(self._open)} deep")
        if count:
            self._open.append(count)
        return count > 0

    def _end_reply(self) -> bool:
        """Count the end of a reply within a list. Returns True if the outermost list has ended."""
        while self._open:
            self._open[-1] -= 1
            if self._open[-1]:
                return False
            self._open.pop()
        return True

    def _pass(self, begin: int, end: int) -> None:
        if end > begin:
            self._reader.feed(self._data, begin, end - begin)
