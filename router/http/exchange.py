"""One request to an engine and its answer, on one connection. What a streamed token costs is decided here.

A token comes as one chunk of a chunked body, and the chunk holds one event (vLLM 0.32 and SGLang 0.5 write an event at
a time). A read of whole chunks, each of which ends with an object and a blank line, takes the shortcut: it is handed on
as it came, framing included, in one write, without parser, copy, or a task that is woken. Everything else, also the
short pieces at the end of a stream ([DONE], `message_stop`), goes through httptools, which is llhttp, and is handed on
as bytes of a body. Skipping the parser is sound: it stands between two chunks before the read and behind it, and each
size line is one that it has accepted before (chunks.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from router.http.chunks import CHUNK_END, NEWLINES_OF_TWO, learn, passable, sizes
from router.http.failures import BrokeEarly, BrokeMidway, say
from router.http.outbox import Outbox
from router.http.request import ADDRESS_HEADERS, HOP_HEADERS, OWN_HEADERS

CR = 13
HEAD_BYTES_MAX = 64 << 10
LINES_MAX = 256  # header lines in a head
FIRST_EVENT_BYTES_MAX = 64 << 10  # a stream counts as begun at its first event, or at so many bytes without one
UNCLAIMED_BYTES_MAX = 1 << 20  # bytes read before a sink takes them; beyond, the engine must wait
NO_BODY = (204, 304)
# What Connection may say without naming a header to take out, or one without which an answer is not what it was.
KEPT_BY_CONNECTION = frozenset((b"", b"close", b"keep-alive", b"content-type", b"content-encoding"))

_EVENT_END = re.compile(rb"\n\r?\n")
_NO_PARSER = httptools.HttpResponseParser(object())


class BodySink(Protocol):
    """Whoever takes the body of an answer."""

    def body(self, data: bytes) -> None:
        """Take any bytes of the body."""

    def shortcut(self) -> Callable[[bytes], None] | None:
        """Where whole chunks that end with an event may be written as they come; None while they must be looked at."""

    @property
    def early(self) -> bool:
        """Whether all that has come of a stream says only that its request has arrived, and not that it is worked
        on."""

    @property
    def mark(self) -> bytes:
        """Bytes of which a chunk that has them may not take the shortcut; b"" where any chunk may."""

    def passed(self, events: int, size: int, last: tuple[bytes, bytes]) -> None:
        """Note what took the shortcut since it was taken: how many events and bytes, and the last two chunks."""


class EngineAnswer:
    """An engine's answer, from the time at which its request is sent."""

    __slots__ = (
        "_connection", "_loop", "_paused", "_pieces", "_seen_events", "_size", "_waiter", "_whole_bytes_max", "begun",
        "body_bytes", "coded", "complete", "head", "lines", "moved", "named", "pull_within_s", "replica", "since_s",
        "sink", "status", "streams", "tells_where", "unlabelled", "until_eof", "until_whole",
    )  # fmt: skip

    def __init__(
        self, replica: str, loop: asyncio.AbstractEventLoop, *, until_whole: bool, whole_bytes_max: int
    ) -> None:
        """A stream of events begins with its first event. Any other body begins with its first bytes, unless it is
        held (`headed`): then, and with `until_whole` in any case, it begins when it is whole, or longer than
        `whole_bytes_max` bytes."""
        self.replica = replica
        self.until_whole, self.status = until_whole, 0
        self.lines: list[bytes] = []  # header lines, without those of one connection
        self.named = b""  # values of Connection, which name more headers of one connection
        self.tells_where = False  # a header may show where the engine is
        self.streams = False  # the body is a stream of events that can be read
        self.unlabelled = False  # a stream of events under another content type
        self.coded = False  # the body is compressed
        self.body_bytes = -1  # length of the body by its head; -1: the head has none
        self.until_eof = False  # the body ends with the connection
        self.head = b""  # once begun: the first bytes of the body, or all of it
        self.complete = False  # the body was read to the end
        self.begun = False
        self.sink: BodySink | None = None
        self.moved = True  # something came since the watchdog last looked
        self.pull_within_s: float | None = (
            None  # for how long it may be silent before it begins; None: it pulls nothing
        )
        self.since_s = loop.time()
        self._loop = loop
        self._whole_bytes_max = whole_bytes_max
        self._pieces: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._connection: EngineConnection | None = None
        self._paused = False
        self._seen_events = 0

    @property
    def whole(self) -> bool:
        """Whether `head` is all of the body, and can be sent at once. A stream of events is relayed in any case."""
        return self.complete and not self._pieces and (self.until_whole or not self.streams)

    @property
    def at_work(self) -> bool:
        """Whether it has begun with more than early events."""
        return self.begun and (self.sink is None or not self.sink.early)

    @property
    def over(self) -> bool:
        """Whether no more of it will come: it is whole, broken, or nobody wants it."""
        return self._connection is None

    # -- for the caller ------------------------------------------------------------------------------------------

    async def begin(self, connection: EngineConnection, head: bytes, body: bytes) -> None:
        """Send the request, and return when the answer has begun. Raises BrokeEarly, and what `fail` was given."""
        self._connection = connection
        self._waiter = self._loop.create_future()
        connection.send(self, head, body)
        try:  # `_heard` written out: this saves a coroutine for every request
            await self._waiter
        finally:
            self._waiter = None
        self.head, self._pieces, self._size = b"".join(self._pieces), [], 0
        self.begun = True
        if self.streams and not self.head:
            raise BrokeEarly("the stream ended before its first event")

    async def grow(self) -> None:
        """Wait for more of a body that has begun, unless it has come by now, and add it to `head`. Raises BrokeMidway,
        and what `fail` was given."""
        if not self._pieces and not self.complete:
            if self._connection is None:
                raise BrokeMidway("connection closed")
            self._waiter = self._loop.create_future()
            await self._heard()
        self.head += b"".join(self._pieces)
        self._pieces, self._size = [], 0

    async def relay(self, sink: BodySink) -> None:
        """Hand the body to `sink`, `head` first, and return when it was handed over whole. Raises BrokeMidway."""
        self.resume()  # resume before the first write, which may pause again
        sink.body(self.head)
        for piece in self._pieces:
            sink.body(piece)
        self._pieces.clear()
        self.sink = sink
        if self.complete:
            return
        if self._connection is None:
            raise BrokeMidway("connection closed")
        self._waiter = self._loop.create_future()
        await self._heard()

    async def _heard(self) -> None:
        try:
            if self._waiter is not None:
                await self._waiter
        finally:
            self._waiter = None  # an error in it refers to frames that refer to this answer (loop.COLLECT)

    def pause(self) -> None:
        """Stop reading from the engine: the client does not read."""
        if self._connection is not None and not self._paused:
            self._paused = True
            self._connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._connection is not None and self._paused:
            self._paused, self.moved = False, True
            self._connection.resume()

    def silent_since(self, now_s: float) -> float:
        """The time since when nothing has come, as seen by the calls of this method. While we do not read, the engine
        does not count as silent."""
        connection = self._connection
        events = connection.events if connection is not None else 0
        if self.moved or self._paused or events != self._seen_events:
            self.since_s = now_s
        self.moved, self._seen_events = False, events
        return self.since_s

    def detour(self) -> None:
        """End the shortcut: chunks may no longer be written as they come, since the client is gone."""
        if self._connection is not None:
            self._connection.detour()

    def fail(self, error: Exception) -> None:
        """End the answer with this error, whatever it waits for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def close(self) -> None:
        """Break the connection unless all was read. That cancels the engine's work: vLLM and SGLang abort a request
        whose client is gone."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self.sink = None  # the sink refers to this answer

    # -- for the connection --------------------------------------------------------------------------------------

    def headed(self, status: int) -> None:
        """The head is whole: decide what is held. The body of a known and small length is, so that one that breaks off
        can be tried again. So is an error, which says whether another replica may be tried."""
        self.status = status
        self.until_eof = self.until_eof and status not in NO_BODY
        self.streams = self.streams and not self.coded and status not in NO_BODY
        if not self.streams and (status >= 400 or 0 <= self.body_bytes <= self._whole_bytes_max):
            self.until_whole = True

    def take(self, data: bytes) -> None:
        """A piece of the body came."""
        if self.sink is not None:
            self.sink.body(data)
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > self._whole_bytes_max + UNCLAIMED_BYTES_MAX:
            self.pause()
        if self._waiter is not None and not self._waiter.done() and self._enough(data):
            self._waiter.set_result(None)

    def _enough(self, data: bytes) -> bool:
        """Whether the answer has begun with this piece."""
        if self.until_whole:
            if self._size <= self._whole_bytes_max:
                return False
            self.until_whole = False
            return True
        if not self.streams or self._size > FIRST_EVENT_BYTES_MAX:
            return True
        # The end of an event has at most three bytes, so it came in at most three pieces.
        return b"\n" in data and _EVENT_END.search(b"".join(self._pieces[-3:])) is not None

    def ended(self) -> None:
        """The body is whole, and the connection no longer belongs to this answer."""
        self.resume()
        self.complete, self._connection = True, None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def broke(self, why: str) -> None:
        """The connection broke, for the reason `why`."""
        self._connection = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BrokeMidway(why) if self.begun else BrokeEarly(why))


class EngineConnection(asyncio.Protocol):
    """A connection to an engine, used for one request after the other."""

    __slots__ = (
        "_answer", "_before_last", "_between", "_headed", "_keep", "_last", "_mark", "_outbox", "_parser",
        "_transport", "_write", "bytes", "events", "give_back", "head_bytes", "idle_since_s",
    )  # fmt: skip

    def __init__(self, give_back: Callable[[EngineConnection], None], outbox: Outbox) -> None:
        """`give_back` is called when the connection may take another request."""
        self._outbox = outbox
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: EngineAnswer | None = None
        self._headed = False  # the head of the answer was read to its end
        self.head_bytes = 0  # bytes read so far, at least the head's; 0 = the engine has sent nothing
        self._keep = False  # the connection may take another request behind this answer
        self._between = False  # the parser stands between two chunks
        self._write: Callable[[bytes], None] | None = None  # the shortcut, while it is open
        self._mark = b""  # BodySink.mark, while the shortcut is open
        self.events = self.bytes = 0  # events, and bytes with their size lines, that took the shortcut
        self._last = self._before_last = b""  # the last two chunks that took the shortcut
        self.give_back = give_back
        self.idle_since_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether the connection is open. One on which something unexpected came is not."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, answer: EngineAnswer, head: bytes, body: bytes) -> None:
        """Send a request. What comes back goes to `answer`."""
        self._answer, self._headed, self.head_bytes = answer, False, 0
        if self._transport is None:
            answer.broke("connection closed")
        else:
            self._outbox.put(self._transport, head, body)

    def pause(self) -> None:
        """Read no more for now."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once. The answer is not told."""
        self.detour()
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def detour(self) -> None:
        """Leave the shortcut, and tell the sink what took it."""
        if self._write is not None and self._answer is not None and self._answer.sink is not None:
            self._answer.sink.passed(self.events, self.bytes, (self._before_last, self._last))
            self._answer.moved = True
        self._write, self.events, self.bytes, self._last, self._before_last = None, 0, 0, b"", b""

    # -- the transport's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has set TCP_NODELAY."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine or the network closed the connection."""
        self.detour()
        self._transport, self._parser = None, _NO_PARSER  # a parser and its connection refer to each other
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if exc is None and self._headed and answer.until_eof:
            answer.ended()
        else:
            answer.broke(say(exc) if exc is not None else "connection closed")

    def data_received(self, data: bytes) -> None:
        """Bytes came. The hot path, one chunk that is one event, touches this object and the client's transport and no
        other: with hundreds of streams each object is a cache miss. Bytes are looked at without calls of methods, which
        is what native code is fast at."""
        write = self._write
        if write is not None:
            end, size, mark = 2, len(data), self._mark
            if not mark or mark not in data:
                while end < size and data[end] != CR:
                    end += 1
                if sizes.get(data[:end]) == size - end - 4 and data[-5:] == CHUNK_END:
                    write(data)
                    self.events += 1 if data.count(b"\n") < NEWLINES_OF_TWO else data.count(b"\n\n")
                    self.bytes += size
                    self._before_last, self._last = self._last, data
                    return
                data = self._pass_chunks(data, write)
                if not data:
                    return
            self.detour()
        self._parse(data)

    def _pass_chunks(self, data: bytes, write: Callable[[bytes], None]) -> bytes:
        """Write what may take the shortcut at the beginning of `data`, all at once. Returns what is left. Several
        chunks come in one read when the engine or the router is behind, which is when each write counts most."""
        before_last, last, end = passable(data)
        if not end:
            return data
        passed = data[:end]
        write(passed)
        self.events += passed.count(b"\n\n")
        self.bytes += end
        self._before_last = passed[before_last:last] if last else self._last
        self._last = passed[last:]
        return data[end:]

    def _parse(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # a byte that nobody asked for, such as an engine's notice of a timeout
            self.abort()
            return
        answer.moved = True
        self.head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, httptools.HttpParserCallbackError) as error:
            self.abort()
            answer.broke(f"not HTTP: {error.__context__ or error}")
            return
        if not self._headed and self.head_bytes > HEAD_BYTES_MAX:
            self.abort()
            answer.broke(f"a head of more than {HEAD_BYTES_MAX} bytes")
            return
        if self._between and data.endswith(b"\r\n") and self._answer is not None and answer.sink is not None:
            self._write, self._mark = answer.sink.shortcut(), answer.sink.mark
            if self._write is not None:
                learn(data)

    # -- the parser's side ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins. Raises RuntimeError where no answer is waited for."""
        if self._answer is None:
            raise RuntimeError("an answer that nobody asked for")
        self._headed = self._between = False
        answer = self._answer
        answer.lines.clear()
        answer.named, answer.tells_where, answer.until_eof = b"", False, True
        answer.streams, answer.coded, answer.body_bytes = False, False, -1

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came. Trailers, which come behind the body, are dropped."""
        answer = self._answer
        if answer is None or self._headed:
            return
        low = name.lower()
        if low not in HOP_HEADERS:
            if low.startswith(OWN_HEADERS):
                return
            answer.lines.append(b"%b: %b\r\n" % (name, value))
            if low == b"content-type":
                answer.streams = value[:17].lower() == b"text/event-stream"
            elif low == b"content-encoding":
                answer.coded = value.strip().lower() not in (b"", b"identity")
            elif low in ADDRESS_HEADERS:
                answer.tells_where = True
        elif low == b"content-length":
            answer.until_eof, answer.body_bytes = False, int(value)
        elif low == b"transfer-encoding":
            if value.strip().lower() != b"chunked":  # passed on, the body would not be what the client takes it for
                raise RuntimeError("a transfer coding other than chunked")
            answer.until_eof = False
        elif low == b"connection":
            answer.named += b"," + value

    def on_headers_complete(self) -> None:
        """The head is whole. Its body may take long to begin."""
        answer, status = self._answer, self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise RuntimeError("a status that is none")
        if answer is None or 100 <= status < 200:
            if status == 101:
                raise RuntimeError("an upgrade that nobody asked for")
            return
        self._look_at_head(answer)
        answer.headed(status)
        self._keep = self._parser.should_keep_alive() and not answer.until_eof
        self._headed = True

    def _look_at_head(self, answer: EngineAnswer) -> None:
        """Take out the headers that Connection names. Raises RuntimeError for a head over its limits, which may have
        come in one read."""
        lines = answer.lines
        if len(lines) > LINES_MAX:
            raise RuntimeError(f"a head of more than {LINES_MAX} lines")
        if self.head_bytes > HEAD_BYTES_MAX < sum(map(len, lines)) + len(answer.named):
            raise RuntimeError(f"a head of more than {HEAD_BYTES_MAX} bytes")
        if answer.named:
            named = {name.strip().lower() for name in answer.named.split(b",")} - KEPT_BY_CONNECTION
            if named:
                answer.lines = [line for line in lines if line[: line.index(b":")].lower() not in named]

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._between = False

    def on_chunk_complete(self) -> None:
        """A chunk has ended."""
        self._between = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body was parsed. Raises RuntimeError for one of an interim answer, which has none."""
        if not self._headed:
            raise RuntimeError("an interim answer with a body")
        if self._answer is not None:
            self._answer.take(data)

    def on_message_complete(self) -> None:
        """The answer is whole. The connection is free now, unless the engine wants it closed or has not read all of the
        request."""
        answer = self._answer
        if answer is None or not self._headed:
            return
        self._answer, self._between = None, False
        transport = self._transport
        if transport is not None:
            if self._keep and not transport.is_closing() and not transport.get_write_buffer_size():
                self.give_back(self)
            else:
                transport.abort()  # an engine that has answered may never read the rest of the request
        answer.ended()
