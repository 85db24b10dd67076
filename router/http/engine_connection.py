"""One connection to an engine, with requests one after the other. This module determines the cost of a streamed token.

A token arrives as one chunk of a chunked body, and the chunk contains one event (vLLM 0.32 and SGLang 0.5 write one
event at a time). A read takes the shortcut if it consists of whole chunks that each end with an object and a blank
line. It is relayed unchanged with its framing, in one write, without parser, copy or wake-up of a task. Everything else
goes through httptools, which is llhttp, and is relayed as bytes of a body. This includes the short pieces at the end of
a stream ([DONE], `message_stop`). It is safe to skip the parser: it stands between two chunks before and after the
read, and it has accepted each size line before (chunk_passthrough.py).

Other connections wait while one is read. A read is therefore parsed in slices. The rest of it after SLICE_S, or while
the client does not read, waits for its turn of the loop (read_fairness.py). The same holds for the bytes after
TURN_BYTES of an answer, however they are cut into reads.

Bytes outside of bodies (trailers, chunk extensions, chunk sizes) must be bounded. Each chunk may carry as much of them
as any honest engine sends. In addition, EXCESS_BYTES_MAX are allowed, as in Go's net/http (https://go.dev/issue/64433).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from router.core.types.progress import is_progress
from router.http.chunk_passthrough import CHUNK_END, NEWLINES_OF_TWO, is_passthrough, learn, sizes
from router.http.exchange import UpstreamResponse
from router.http.failures import describe
from router.http.outbox import Outbox
from router.http.read_fairness import CHUNK_BYTES, TURN_BYTES, ReadFairness
from router.http.request import ADDRESS_HEADERS, HOP_HEADERS, OWN_HEADERS

CR = 13
HEAD_BYTES_MAX = 64 << 10
LINES_MAX = 256  # header lines in a head
SLICE_BYTES = 16 << 10  # bytes parsed at once, unless all of it is one body; chunks of one byte cost 1 ms natively
SLICE_S = 0.001  # CPU time for one connection in one turn of the loop, except if a single slice takes longer
EXCESS_BYTES_MAX = 16 << 10
EXCESS_BYTES_A_CHUNK = 18  # a size of up to 14 digits and two line ends; in addition, twice the bytes of the chunk
# Values of Connection that name no header to remove, or headers that an answer cannot do without.
KEPT_BY_CONNECTION = frozenset((b"", b"close", b"keep-alive", b"content-type", b"content-encoding"))

_NO_PARSER = httptools.HttpResponseParser(object())


class UpstreamConnection(asyncio.Protocol):
    """A connection to an engine that serves one request after the other."""

    __slots__ = (
        "_answer", "_before_last", "_between", "_body_bytes", "_chunks", "_excess_bytes", "_follows", "_headed",
        "_held", "_keep", "_last", "_mark", "_outbox", "_pace", "_parser", "_piece", "_pieces", "_rest", "_transport",
        "_turn_bytes", "_waits", "_write", "bytes", "events", "give_back", "head_bytes", "idle_since_s",
    )  # fmt: skip

    def __init__(self, give_back: Callable[[UpstreamConnection], None], outbox: Outbox, pace: ReadFairness) -> None:
        """`give_back` is called when the connection can accept another request."""
        self._outbox = outbox
        self._pace = pace
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: UpstreamResponse | None = None
        self._headed = False  # the head of the answer was read to its end
        self.head_bytes = 0  # bytes read so far, including at least the head; 0 = the engine has sent no byte
        self._keep = False  # the connection can accept another request after this answer
        self._between = False  # the parser stands between two chunks
        self._write: Callable[[bytes], None] | None = None  # the shortcut, while it is open
        self._mark = b""  # BodySink.slow_path_marker, while the shortcut is open
        self.events = self.bytes = 0  # events that took the shortcut, and bytes including their size lines
        self._last = self._before_last = b""  # the last two chunks that took the shortcut
        self.give_back = give_back
        self.idle_since_s = 0.0
        self._piece = b""  # first piece of the body in the slice that is parsed
        self._pieces: list[bytes] = []  # pieces that follow it
        self._body_bytes = self._chunks = 0  # bytes of the body and number of chunks in that slice
        self._excess_bytes = 0
        self._follows = False  # more of the read follows the slice that is parsed
        self._rest = b""  # bytes read and not parsed yet
        self._held = False  # the client does not read
        self._waits = False  # the connection waits for its turn
        self._turn_bytes = 0  # bytes of the answer since its last turn

    @property
    def usable(self) -> bool:
        """True if the connection is open. It is closed after unexpected bytes."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, answer: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Send a request. The response goes to `answer`."""
        self._answer, self._headed, self.head_bytes, self._excess_bytes = answer, False, 0, 0
        self._turn_bytes = 0
        if self._transport is None:
            answer.broke("connection closed")
        else:
            self._outbox.put(self._transport, head, body)

    def peer(self) -> str:
        """Return the engine's address; "" if it is unknown."""
        there = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(there[0]) if isinstance(there, tuple) else ""

    def says_something(self) -> bool:
        """True if the last event that took the shortcut has data."""
        return is_progress(self._last)

    def pause(self) -> None:
        """Stop reading for now."""
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        self._held = False
        if self._rest:
            self._wait()
        else:
            self._read_on()

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self._held and not self._waits:
            transport.resume_reading()

    def _wait(self) -> None:
        """Stop reading until this connection's next turn."""
        transport = self._transport
        if self._waits or transport is None or transport.is_closing():
            return
        self._waits = True
        transport.pause_reading()
        self._pace.turns.enqueue(self._go_on)

    def _go_on(self) -> None:
        """Take this connection's turn."""
        self._waits, self._turn_bytes = False, 0
        if self._rest and not self._held:
            rest, self._rest = self._rest, b""
            try:
                self._parse_slices(rest)
            except BaseException:  # a bug: the transport would close itself if it had made this call
                if self._transport is not None:
                    self._transport.abort()
                raise
        if not self._rest:
            self._read_on()

    def abort(self) -> None:
        """Close at once, without a notice to the answer."""
        self.detour()
        self._answer, self._rest = None, b""
        if self._transport is not None:
            self._transport.abort()

    def detour(self) -> None:
        """Leave the shortcut, and report to the sink the events that took it."""
        if self._write is not None and self._answer is not None and self._answer.sink is not None:
            self._answer.sink.note_fast_path(self.events, self.bytes, (self._before_last, self._last))
            if self.says_something():
                self._answer.moved = True
        self._write, self.events, self.bytes, self._last, self._before_last = None, 0, 0, b"", b""

    # -- transport side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the transport. Asyncio has set TCP_NODELAY."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a close by the engine or the network."""
        rest, self._rest = self._rest, b""
        if rest and self._answer is not None:
            self._parse(rest, follows=False)
        self.detour()
        self._transport, self._parser = None, _NO_PARSER  # a parser and its connection refer to each other
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if exc is None and self._headed and answer.until_eof:
            answer.on_complete()
        else:
            answer.broke(describe(exc) if exc is not None else "connection closed")

    def data_received(self, data: bytes) -> None:
        """Handle received bytes. The hot path, one chunk that is one event, touches this object and the client's
        transport and no other: with hundreds of streams each object is a cache miss. Bytes are examined without method
        calls, which is fast in native code."""
        write, size = self._write, len(data)
        self._turn_bytes += size
        if write is not None:
            end, mark = 2, self._mark
            if not mark or mark not in data:
                while end < size and data[end] != CR:
                    end += 1
                if sizes.get(data[:end]) == size - end - 4 and data[-5:] == CHUNK_END:
                    write(data)
                    self.events += 1 if data.count(b"\n") < NEWLINES_OF_TWO else data.count(b"\n\n")
                    self.bytes += size
                    self._before_last, self._last = self._last, data
                    if self._turn_bytes >= TURN_BYTES:
                        self._wait()
                    return
                data = self._pass_chunks(data, write)
                if not data:
                    if self._turn_bytes >= TURN_BYTES:
                        self._wait()
                    return
            self.detour()
        if self._rest:  # a transport may still deliver buffered bytes after a pause
            self._rest += data
        elif len(data) <= SLICE_BYTES:
            self._parse(data, follows=False)
        elif self._pace.turns.waiting:  # each connection takes its turn after those that already wait
            self._rest = data
            self._wait()
        else:
            self._parse_slices(data)
        if self._turn_bytes >= TURN_BYTES:
            self._wait()

    def _pass_chunks(self, data: bytes, write: Callable[[bytes], None]) -> bytes:
        """Write all chunks at the beginning of `data` that may take the shortcut, at once, and return the rest. Several
        chunks arrive in one read when the engine or the router lags, which is when each write matters most."""
        before_last, last, end = is_passthrough(data)
        if not end:
            return data
        passed = data[:end]
        write(passed)
        self.events += passed.count(b"\n\n")
        self.bytes += end
        self._before_last = passed[before_last:last] if last else self._last
        self._last = passed[last:]
        return data[end:]

    def _parse_slices(self, data: bytes) -> None:
        """Parse in slices, and keep the rest when this connection's time is over."""
        clock, at, size = self._pace.clock, 0, len(data)
        until_s = clock() + SLICE_S
        while at < size:
            answer = self._answer
            # Events of a stream may each be examined, which takes far longer than to relay a body.
            is_body = self._headed and answer is not None and answer.body_bytes >= 0 and not answer.streams
            end = size if is_body else min(size, at + SLICE_BYTES)
            self._parse(data[at:end], follows=end < size)
            at = end
            if at < size:
                if self._answer is None:
                    return  # the connection broke
                if self._held or clock() > until_s:
                    self._rest = data[at:]
                    if not self._held:
                        self._wait()
                    return

    def _parse(self, data: bytes, *, follows: bool) -> None:
        """Parse received bytes. `follows`: more bytes have been read after them."""
        answer = self._answer
        if answer is None:  # an unsolicited byte, such as an engine's notice of a timeout
            self.abort()
            return
        self.head_bytes += len(data)
        self._follows, self._body_bytes, self._chunks = follows, 0, 0
        headed, why = self._headed, ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, httptools.HttpParserCallbackError) as error:
            why = f"not HTTP: {error.__context__ or error}"
        if self._piece:
            self._hand_over(answer)
        self._turn_bytes += CHUNK_BYTES * self._chunks
        if headed:
            excess_bytes = len(data) - 3 * self._body_bytes - EXCESS_BYTES_A_CHUNK * self._chunks
            if excess_bytes > 0 or self._excess_bytes:
                self._excess_bytes = max(0, self._excess_bytes + excess_bytes)
                if self._excess_bytes > EXCESS_BYTES_MAX:
                    why = why or f"trailers or extensions of chunks of more than {EXCESS_BYTES_MAX} bytes"
        elif self.head_bytes > HEAD_BYTES_MAX and not self._headed:
            why = why or f"a head of more than {HEAD_BYTES_MAX} bytes"
        if why:
            self.abort()
            answer.broke(why)
        elif self._between and not follows and data.endswith(b"\r\n") and self._answer is not None:
            sink = answer.sink
            if sink is not None:
                self._write, self._mark = sink.fast_path(), sink.slow_path_marker
                if self._write is not None:
                    learn(data)

    def _hand_over(self, answer: UpstreamResponse) -> None:
        """Pass the parsed part of the body on, with many small chunks joined into one piece."""
        piece, self._piece = self._piece, b""
        if self._pieces:
            piece = b"".join((piece, *self._pieces))
            self._pieces.clear()
        answer.take(piece)

    # -- parser callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head. Raises RuntimeError if no answer is expected."""
        if self._answer is None:
            raise RuntimeError("an answer without a request")
        self._headed = self._between = False
        answer = self._answer
        answer.lines.clear()
        answer.named, answer.tells_where, answer.until_eof = b"", False, True
        answer.streams, answer.coded, answer.body_bytes = False, False, -1

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers, which follow the body, are dropped."""
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
            if value.strip().lower() != b"chunked":  # if it were relayed, the client would misread the body
                raise RuntimeError("a transfer coding other than chunked")
            answer.until_eof = False
        elif low == b"connection":
            answer.named += b"," + value

    def on_headers_complete(self) -> None:
        """Handle the end of the head. Its body may take long to begin."""
        answer, status = self._answer, self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise RuntimeError("an invalid status")
        if answer is None or 100 <= status < 200:
            if status == 101:
                raise RuntimeError("an upgrade that was not requested")
            return
        self._look_at_head(answer)
        answer.on_head(status)
        self._keep = self._parser.should_keep_alive() and not answer.until_eof
        self._headed = True

    def _look_at_head(self, answer: UpstreamResponse) -> None:
        """Remove the headers that Connection names. Raises RuntimeError for a head over its limits, which may have
        arrived in one read."""
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
        """Begin a chunk."""
        self._between = False
        self._chunks += 1

    def on_chunk_complete(self) -> None:
        """Note that a chunk has ended."""
        self._between = True

    def on_body(self, data: bytes) -> None:
        """Take a parsed piece of the body. Raises RuntimeError for a body of an interim answer, which must not have
        one."""
        if not self._headed:
            raise RuntimeError("an interim answer with a body")
        self._body_bytes += len(data)
        if not self._piece:
            self._piece = data
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Handle the end of the answer. The connection is free now, with three exceptions: the engine wants it closed,
        has not read all of the request, or has sent excess bytes."""
        answer = self._answer
        if answer is None or not self._headed:
            return
        if self._piece:
            self._hand_over(answer)
            if self._answer is None:
                return  # the reader has dropped the answer
        self._answer, self._between = None, False
        transport = self._transport
        if transport is not None:
            is_free = self._keep and not self._follows and not transport.is_closing()
            if is_free and not transport.get_write_buffer_size():
                self.give_back(self)
            else:
                transport.abort()  # an engine that has answered may never read the rest of the request
        answer.on_complete()
