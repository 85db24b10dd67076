"""An engine's answer to one request, from the time at which the request is sent.

An answer makes progress by data: by events that have data, or by bytes of any other body. Pings, blank lines, and bytes
of a head or of trailers do not count. An engine that sends only these counts as silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.core.types.progress import has_data
from router.http.failures import ClosedBeforeResponse, StreamInterrupted

# A stream counts as begun at its first event with data, or after FIRST_EVENT_BYTES_MAX without one. If these bytes have
# no data, only comments, the engine has failed.
FIRST_EVENT_BYTES_MAX = 64 << 10
UNCLAIMED_BYTES_MAX = 1 << 20  # bytes read before a sink takes them; beyond, the engine must wait
END_BYTES = 2  # length of the longest event terminator, minus one
NO_BODY = (204, 304)


class BodySink(Protocol):
    """Consumer of the body of an answer."""

    def body(self, data: bytes) -> None:
        """Take a piece of the body."""

    def fast_path(self) -> Callable[[bytes], None] | None:
        """Return a function that writes whole chunks unparsed, if each ends with an event. None while they must be
        parsed."""

    @property
    def before_first_output(self) -> bool:
        """True if all events of a stream so far only confirm that its request has arrived, and not that work on it has
        begun."""

    @property
    def slow_path_marker(self) -> bytes:
        """Bytes that exclude a chunk which contains them from the shortcut; b"" if every chunk may take it."""

    def note_fast_path(self, events: int, size: int, last: tuple[bytes, bytes]) -> None:
        """Account for events that took the shortcut since it was opened: their number, their bytes, and the last two
        chunks."""


class EngineWire(Protocol):
    """Interface to the connection that carries an answer (engine_connection.py)."""

    events: int

    def send(self, answer: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Send a request. The response goes to `answer`."""

    def peer(self) -> str:
        """Return the engine's address; "" if it is unknown."""

    def says_something(self) -> bool:
        """True if the last event that took the shortcut has data."""

    def pause(self) -> None:
        """Stop reading for now."""

    def resume(self) -> None:
        """Continue to read."""

    def abort(self) -> None:
        """Close at once, without a notice to the answer."""

    def detour(self) -> None:
        """Leave the shortcut, and report to the sink the events that took it."""


class UpstreamResponse:
    """An engine's answer, from the time at which its request is sent."""

    __slots__ = (
        "_barren", "_connection", "_loop", "_paused", "_pieces", "_seen_events", "_size", "_waiter",
        "_whole_bytes_max", "begun", "body_bytes", "coded", "complete", "head", "lines", "moved", "named",
        "peer", "pull_within_s", "replica", "since_s", "sink", "status", "streams", "tells_where",
        "unlabelled", "until_eof", "until_whole",
    )  # fmt: skip

    def __init__(
        self, replica: str, loop: asyncio.AbstractEventLoop, *, until_whole: bool, whole_bytes_max: int
    ) -> None:
        """An event stream begins with its first event. Any other body begins with its first bytes, unless it is
        buffered (`headed`). A buffered body, and any body with `until_whole`, begins when it is whole, or longer than
        `whole_bytes_max` bytes."""
        self.replica = replica
        self.peer = ""  # address of the engine, set for whole answers only
        self.until_whole, self.status = until_whole, 0
        self.lines: list[bytes] = []  # header lines, without hop-by-hop headers
        self.named = b""  # values of Connection, which name more hop-by-hop headers
        self.tells_where = False  # a header may reveal the engine's address
        self.streams = False  # the body is an event stream that can be parsed
        self.unlabelled = False  # an event stream under another content type
        self.coded = False  # the body is compressed
        self.body_bytes = -1  # length of the body by its head; -1: the head has no length
        self.until_eof = False  # the body ends with the connection
        self.head = b""  # once begun: the first bytes of the body, or all of it
        self.complete = False  # the body was read to the end
        self.begun = False
        self.sink: BodySink | None = None
        self.moved = True  # data arrived since the watchdog last looked
        self.pull_within_s: float | None = None  # longest silence before it begins; None: no P2P KV transfer
        self.since_s = loop.time()
        self._loop = loop
        self._whole_bytes_max = whole_bytes_max
        self._pieces: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._connection: EngineWire | None = None
        self._paused = False
        self._seen_events = 0
        # Number of first pieces of a stream that has not begun, which are whole events without data. Of the other
        # pieces only the last one may contain the end of an event.
        self._barren = 0

    @property
    def whole(self) -> bool:
        """True if `head` is all of the body, and can be sent at once. An event stream is relayed in any case."""
        return self.complete and not self._pieces and (self.until_whole or not self.streams)

    @property
    def has_output(self) -> bool:
        """True if the answer has begun with more than early events."""
        return self.begun and (self.sink is None or not self.sink.before_first_output)

    @property
    def is_detached(self) -> bool:
        """True if the rest of the answer is not expected: it is whole, broken, or dropped."""
        return self._connection is None

    # -- for the caller ------------------------------------------------------------------------------------------

    async def begin(self, connection: EngineWire, head: bytes, body: bytes) -> None:
        """Send the request, and return when the answer has begun. Raises ClosedBeforeResponse, and any error passed to
        `fail`."""
        self._connection = connection
        if self.until_whole:
            self.peer = connection.peer()
        self._waiter = self._loop.create_future()
        connection.send(self, head, body)
        try:  # `_heard` inlined: this saves a coroutine for every request
            await self._waiter
        finally:
            self._waiter = None
        self.head, self._pieces, self._size, self._barren = b"".join(self._pieces), [], 0, 0
        self.begun = self.moved = True
        if self.streams and not self.head.strip():
            raise ClosedBeforeResponse("the stream ended before its first event")

    async def read_more(self) -> None:
        """Wait for more of a body that has begun, unless more has arrived already, and append it to `head`. Raises
        StreamInterrupted, and any error passed to `fail`."""
        if not self._pieces and not self.complete:
            if self._connection is None:
                raise StreamInterrupted("connection closed")
            self._waiter = self._loop.create_future()
            await self._wait_for_data()
        self.head += b"".join(self._pieces)
        self._pieces, self._size, self._barren = [], 0, 0

    async def relay(self, sink: BodySink) -> None:
        """Pass the body to `sink`, `head` first, and return when all of it was passed. Raises StreamInterrupted."""
        self.resume()  # resume before the first write, which may pause again
        sink.body(self.head)
        for piece in self._pieces:
            sink.body(piece)
        self._pieces.clear()
        self.sink = sink
        if self.complete:
            return
        if self._connection is None:
            raise StreamInterrupted("connection closed")
        self._waiter = self._loop.create_future()
        await self._wait_for_data()

    async def _wait_for_data(self) -> None:
        try:
            if self._waiter is not None:
                await self._waiter
        finally:
            self._waiter = None  # an error in it refers to frames that refer to this answer (loop.COLLECT)

    def pause(self) -> None:
        """Stop reading from the engine, because the client does not read."""
        if self._connection is not None and not self._paused:
            self._paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._connection is not None and self._paused:
            self._paused, self.moved = False, True
            self._connection.resume()

    def silent_since(self, now_s: float) -> float:
        """Return the time since which no data has arrived, as observed by the calls of this method. While reading is
        paused, the engine does not count as silent."""
        connection = self._connection
        events = connection.events if connection is not None else 0
        passed = connection is not None and events != self._seen_events and connection.says_something()
        if self.moved or self._paused or passed:
            self.since_s = now_s
        self.moved, self._seen_events = False, events
        return self.since_s

    def disable_fast_path(self) -> None:
        """End the shortcut, because the client is gone and chunks may no longer be written to it."""
        if self._connection is not None:
            self._connection.detour()

    def fail(self, error: Exception) -> None:
        """End the answer with this error, in any state."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def close(self) -> None:
        """Break the connection unless all was read. This cancels the engine's work: vLLM and SGLang abort a request
        when its client is gone."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self.sink = None  # the sink refers to this answer

    # -- for the connection --------------------------------------------------------------------------------------

    def on_head(self, status: int) -> None:
        """Handle the end of the head, and decide if the body is buffered. A body of known and small length is, so that
        the request can be retried if the body breaks off. An error is buffered too, since its text decides about
        retries."""
        self.status = status
        self.until_eof = self.until_eof and status not in NO_BODY
        self.streams = self.streams and not self.coded and status not in NO_BODY
        if not self.streams and (status >= 400 or 0 <= self.body_bytes <= self._whole_bytes_max):
            self.until_whole = True

    def take(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self.sink is not None:
            self.sink.body(data)
            return
        self._pieces.append(data)
        self._size += len(data)
        if not self.streams and not data.isspace():  # white space is the ping of bodies that are no streams
            self.moved = True
        if self._size > self._whole_bytes_max + UNCLAIMED_BYTES_MAX:
            self.pause()
        if self._waiter is not None and not self._waiter.done() and self._enough(data):
            self._waiter.set_result(None)

    def _enough(self, data: bytes) -> bool:
        """True if the answer has begun with this piece."""
        if self.until_whole:
            if self._size <= self._whole_bytes_max:
                return False
            self.until_whole = False
            return True
        if not self.streams:
            return True
        is_long = self._size > FIRST_EVENT_BYTES_MAX
        if b"\n" not in data and not is_long:
            return False
        pieces, barren = self._pieces, self._barren
        end = len(data)
        if not is_long and not data.endswith(b"\n\n"):
            before = (
                b"".join(pieces[max(barren, len(pieces) - 3) : -1])[-END_BYTES:] if len(pieces) - barren > 1 else b""
            )
            looked = before + data
            end = max(looked.rfind(b"\n\n") + 2, looked.rfind(b"\n\r\n") + 3)
            if end < 3:
                return False
            end -= len(before)
        head = b"".join(pieces[barren:])
        end += len(head) - len(data)
        if has_data(head[:end]):
            return True
        pieces[barren:] = [head[:end], head[end:]] if end < len(head) else [head]
        self._barren = barren + 1
        if is_long:
            self.fail(ClosedBeforeResponse(f"{FIRST_EVENT_BYTES_MAX} bytes without an event that has data"))
        return False

    def on_complete(self) -> None:
        """Note that the body is whole. The connection no longer belongs to this answer."""
        self.resume()
        self.complete, self._connection = True, None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def broke(self, why: str) -> None:
        """Note that the connection broke, for the reason `why`."""
        self._connection = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(StreamInterrupted(why) if self.begun else ClosedBeforeResponse(why))
