"""Bytes from engine to client, looked at as little as possible.

Streams pass event by event: what follows the last whole event is held back (up to PARTIAL_BYTES_MAX) until its end has
come, so that a stream that breaks has ended on an event's boundary. What must be known of a stream is known from cheap
signs: events are counted by their blank lines, and usage is read once, at the end, from the last few pieces.

A stream must say that it is whole (a reason to finish, a last event), or the client is told that it is not, by an error
event of its dialect: a stream that merely stops looks like a short answer to most clients. Whether it does is read from
the last pieces too, when its end comes; what clients take for the end (`[DONE]`, `message_stop`) comes as a piece of
its own or through the parser, never by the shortcut, and is not passed on behind a stream that is not whole.

A client that does not read stops the engine's socket: at most what one read brings is kept for it beyond the
transport's buffer (client_connection.WRITE_BUFFER_BYTES_MAX).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from router.core.dialects import Dialect, sse
from router.core.dialects.sse import EventSplitter
from router.core.facts.placements import Ending
from router.http.exchange import EngineAnswer
from router.http.failures import Unfinished
from router.http.request import Stream

TAIL_PIECES = 16  # each a whole event at least, unless that is very long
TAIL_BYTES = 8 << 10  # kept of each
NAME_BYTES = 512  # of the events before one that is not kept whole: enough to know what they are
PARTIAL_BYTES_MAX = 64 << 10

_END_BYTES = 2  # of the longest end of an event, less one
_DONE = re.compile(rb"^(?:data: ?\[DONE\]|event: ?message_stop\b)", re.MULTILINE)
_COMMENTS = re.compile(rb"(?::[^\n]*\n\r?\n)+")
_CUT = b"0\r\n"  # stands for the size line of a piece whose beginning is not kept


class Relay:
    """Takes one answer's body and writes it to one client."""

    __slots__ = (
        "_answer", "_begun", "_client", "_dropping", "_events_only", "_judge", "_long_ended", "_partial", "_splitter",
        "_strip_usage", "_tail", "ending", "events",
    )  # fmt: skip

    def __init__(
        self,
        answer: EngineAnswer,
        client: Stream,
        *,
        begun: Callable[[bytes], bool] | None = None,
        strip_usage: Dialect | None = None,
        judge: Dialect | None = None,
    ) -> None:
        """`begun` is shown what passes until it says True; with `strip_usage` the event that only we asked for is left
        out; `judge` says whether the stream is whole."""
        self._answer = answer
        self._client = client
        self._begun = begun
        self._strip_usage = strip_usage
        self._splitter = EventSplitter()  # for what is stripped
        self._events_only = answer.streams
        self._judge = judge
        self._dropping = False  # an end has come that was none
        self._long_ended: Ending | None = None  # what an event said that is too long for the tail
        self.ending: Ending | None = None  # what the stream said of it, at its end
        self._partial = bytearray()
        self._tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self.events = 0
        client.sender = self

    @property
    def tail(self) -> bytes:
        """The end of what has passed, TAIL_PIECES pieces of it."""
        return b"".join(_unframed(piece) for piece in self._tail) if self._client.chunked else b"".join(self._tail)

    # -- the engine's side ---------------------------------------------------------------------------------------

    def body(self, data: bytes) -> None:
        """Any bytes of the body."""
        if self._events_only:
            data = self._whole_events(data)
        if data and not self._dropping:
            self._pass(data)

    def shortcut(self) -> Callable[[bytes], None] | None:
        """Straight to the client, where nothing has to be seen on the way."""
        looks = self._partial or self._begun is not None or self._strip_usage is not None or self._dropping
        return self._client.write if self._client.chunked and self._events_only and not looks else None

    def passed(self, events: int, last: tuple[bytes, bytes]) -> None:
        """Take note of what went straight."""
        self.events += events
        for piece in last:
            self._remember(piece)

    def end(self) -> None:
        """The body is whole. Raises Unfinished, with nothing of the end written, when what it holds is not."""
        if self._judge is not None:
            partial = bytes(self._partial)
            self.ending = self._ended(self._judge, self.tail + (partial if _is_event(partial) else b""))
            if self.ending is None:
                raise Unfinished("it did not say that it was whole")
        self._close()

    def broke(self, event: Callable[[Dialect, bytes], bytes]) -> bool:
        """The body broke off. True when all of the answer had come before that; else the client is told by `event`,
        which is given the last events, or by a broken connection where events mean nothing."""
        self._partial.clear()
        tail, judge = self.tail, self._judge
        if judge is None or not (tail.endswith((b"\n\n", b"\n\r\n")) or not tail):
            self._client.cut()
            return False
        self.ending = self._ended(judge, tail)
        whole = self.ending is Ending.OK and (not judge.says_done or _DONE.search(tail) is not None)
        if not whole and self.ending is not Ending.FAILED:
            self._client.write(self._framed(event(judge, tail)))
        self._close()
        return whole

    def _close(self) -> None:
        if self._partial:
            self._pass(bytes(self._partial))
        if rest := self._splitter.close():
            self._client.write(self._framed(rest))
        self._client.end()

    # -- the client's side ---------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The client does not read."""
        self._answer.pause()

    def resume(self) -> None:
        """It reads again."""
        self._answer.resume()

    def gone(self) -> None:
        """It left; its transport may not be written to any more."""
        self._answer.detour()

    # -- inside --------------------------------------------------------------------------------------------------

    def _whole_events(self, data: bytes) -> bytes:
        """What is partial and `data`, up to the end of the last whole event; the rest is partial. An event longer than
        PARTIAL_BYTES_MAX is not."""
        partial = self._partial
        if not partial and data.endswith(b"\n\n"):
            return data
        searched = max(0, len(partial) - _END_BYTES)
        partial += data
        end = max(partial.rfind(b"\n\n", searched) + 2, partial.rfind(b"\n\r\n", searched) + 3)
        if end < 3:  # neither was found
            if len(partial) <= PARTIAL_BYTES_MAX:
                return b""
            end = len(partial)
        passed = bytes(partial[:end])
        del partial[:end]
        return passed

    def _pass(self, data: bytes) -> None:
        if self._judge is not None and (found := _DONE.search(data)):
            self._dropping = self._ended(self._judge, self.tail + data) is None
            if self._dropping and not (data := data[: found.start()]):
                return
        if self._begun is not None and self._begun(data):
            self._begun = None
        self.events += data.count(b"\n\n") or data.count(b"\n\r\n")
        piece = self._framed(data)
        if not self._only_comments(data):
            self._remember(piece)
        if self._strip_usage is not None:
            strip = self._strip_usage
            kept = b"".join(event for event in self._splitter.feed(data) if not strip.is_usage_event(event))
            piece = self._framed(kept)
        self._client.write(piece)

    def _ended(self, judge: Dialect, tail: bytes) -> Ending | None:
        if self._dropping:
            return None
        return judge.ended(tail) or (self._long_ended if tail.endswith((b"\n\n", b"\n\r\n")) else None)

    def _only_comments(self, data: bytes) -> bool:
        """Pings say nothing of the stream, and must not push out of the tail what does."""
        if not data.startswith(b":") or not _COMMENTS.fullmatch(data):
            return False
        return not self._tail or self.tail.endswith((b"\n\n", b"\n\r\n"))  # else it goes on with a long event

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._client.chunked else data

    def _remember(self, piece: bytes) -> None:
        if len(piece) > TAIL_BYTES:
            if self._judge is not None:
                body = _unframed(piece) if self._client.chunked else piece
                tail = self.tail
                ended = self._judge.ended(tail) or self._judge.ended(_around_cut(tail + body))
                self._long_ended = ended or self._long_ended
            self._tail.clear()  # what has lost its beginning must come first: that is how dialects know it
            piece = _CUT + piece[-TAIL_BYTES:]
        if piece:
            self._tail.append(piece)


def _around_cut(body: bytes) -> bytes:
    """What a long piece says that its last TAIL_BYTES do not: the last whole events before those, and all of the event
    that is cut, of which any part may hold the reason to finish (SGLang's logprobs and vLLM's token ids follow it)."""
    cut = len(body) - TAIL_BYTES
    start = max(body.rfind(b"\n\n", 0, cut) + 2, body.rfind(b"\n\r\n", 0, cut) + 3)
    start = start if start > 2 else 0  # neither was found
    return body[max(0, start - NAME_BYTES) :] + b"\n\n"


def _is_event(partial: bytes) -> bool:
    """Whether all of an event is there but its blank line."""
    data = sse.payload(partial.rstrip())
    return data == b"[DONE]" or (bool(data) and sse.begins_well(partial + b"\n\n"))


def _unframed(piece: bytes) -> bytes:
    return piece[piece.index(b"\r\n") + 2 : -2]
