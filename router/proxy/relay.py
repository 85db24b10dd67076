"""Relay of an answer's body from engine to client, with as little parsing as possible.

Streams pass event by event. A partial event waits, up to PARTIAL_BYTES_MAX, until its end has arrived, so that a broken
stream ends on an event boundary. The parts of a longer event that have no line end contain no boundary, and are not
searched for patterns that begin a line. The necessary facts are read from cheap signs: blank lines count the events,
and usage is read once, at the end, from the last few pieces.

A complete stream has a finish reason or a last event. If it has neither, the client receives an error event of its
dialect, since a stream that merely stops looks like a short answer to most clients. An event that is too long to be
buffered has passed in part, and is ended by a blank line before the error event. The last pieces also decide if a
stream is complete. The events that clients take for the end (`[DONE]`, `message_stop`) arrive as a separate piece or
through the parser, never by the shortcut. They are not relayed after a stream that is incomplete.

A client that does not read stops reads from the engine's socket. At most the bytes of one read are buffered for it
beyond the transport's buffer (WRITE_BUFFER_BYTES_MAX of client_connection).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from router.core.dialects import Dialect, sse
from router.core.dialects.usage_filter import UsageFilter
from router.core.types.placements import EndReason
from router.core.types.progress import is_progress
from router.http.exchange import UpstreamResponse
from router.http.failures import StreamInterrupted, StreamTruncated
from router.http.request import Stream

# The tail of a stream: number of its last pieces, and bytes kept of each. A piece is at least a whole event unless that
# is very long.
TAIL_PIECES, TAIL_BYTES = 16, 8 << 10
TOLD = (
    EndReason.FAILED,
    EndReason.REFUSED_BY_ENGINE,
)  # endings that the engine has reported to the client by an error event
RAW_TAIL_BYTES = TAIL_PIECES * TAIL_BYTES
NAME_BYTES = 512  # bytes before a cut event that are also examined: enough to identify the kind of the events there
PARTIAL_BYTES_MAX = 64 << 10
EVENT_BYTES_MAX = 256 << 20  # longest event that engines send: hidden states of a whole answer

_END_BYTES = 2  # length of the longest event terminator, minus one
_DONE = re.compile(rb"^(?:data: ?\[DONE\]|event: ?message_stop\b)", re.MULTILINE)
_EVENT_END = re.compile(rb"\n\r?\n")
_COMMENTS = re.compile(rb"(?::[^\n]*\n\r?\n)+")
_CUT = b"0\r\n"  # chunk size line put before a piece that lacks its beginning


class Relay:
    """Relay of one answer's body to one client."""

    __slots__ = (
        "_answer",
        "_begun",
        "_client",
        "_cuts",
        "_dropping",
        "_events_only",
        "_judge",
        "_last",
        "_last_bytes",
        "_long_bytes",
        "_long_ended",
        "_partial",
        "_speaks",
        "_tail",
        "_usage",
        "bytes",
        "ending",
        "events",
        "paused",
        "slow_path_marker",
    )  # fmt: skip

    def __init__(
        self,
        answer: UpstreamResponse,
        client: Stream,
        *,
        begun: Callable[[bytes], bool] | None = None,
        strip_usage: Dialect | None = None,
        judge: Dialect | None = None,
        speaks: Dialect | None = None,
        last: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """The optional arguments:

        - `begun`: called with each piece until it returns True.
        - `strip_usage`: the usage event, which only the router requested, is removed.
        - `judge`: decides if the stream is complete. Without it no stream is judged, and a stream that breaks ends with
          an error event of the dialect `speaks` and a broken connection.
        - `last`: receives the tail of a complete, judged stream and returns the bytes to send after it.
        """
        self._answer = answer
        self._client = client
        self._begun = begun
        self._usage = UsageFilter(strip_usage) if strip_usage is not None else None
        self.slow_path_marker = self._usage.mark if self._usage is not None else b""
        self._events_only = answer.streams
        self._judge = judge
        self._speaks = judge or speaks
        self._cuts = judge is None or answer.unlabelled  # clients may not read events, or not know this kind
        self._last = last
        self._dropping = False  # a `[DONE]` arrived before the stream was complete, so the rest is dropped
        self._long_ended: EndReason | None = None  # ending from an event that is too long for the tail
        self.ending: EndReason | None = None  # ending that the stream reported, known at its end
        self._partial = bytearray()
        self._long_bytes = 0  # bytes that have passed of an incomplete event
        self._tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self._last_bytes = bytearray()  # last bytes of a body that is no event stream
        self.events = 0
        self.paused = False  # the client does not read
        self.bytes = 0  # bytes that have passed, some including chunk framing
        client.sender = self

    @property
    def tail(self) -> bytes:
        """The last TAIL_PIECES pieces of an event stream that have passed; the last bytes of any other body."""
        if not self._events_only:
            return bytes(self._last_bytes)
        return b"".join(_unframe_chunk(piece) for piece in self._tail) if self._client.chunked else b"".join(self._tail)

    @property
    def usage_unasked(self) -> bool:
        """True if the stream showed that its engine sends usage without a request for it."""
        return self._usage is not None and self._usage.unasked

    @property
    def before_first_output(self) -> bool:
        """True if prefill may not be done yet: the stream has a sign of it, and that sign has not passed."""
        return self._begun is not None

    # -- engine side ----------------------------------------------------------------------------------------------

    def body(self, data: bytes) -> None:
        """Relay a piece of the body."""
        if not self._events_only:
            self._pass_raw(data)
            return
        within = self._long_bytes > 0
        data = self._take_complete_events(data)
        if not data or self._dropping:
            return
        if within and b"\n" not in data:
            self._write(data)
        else:
            self._pass(data)

    def fast_path(self) -> Callable[[bytes], None] | None:
        """Return the client's `write` if no byte has to be read on the way."""
        holds = self._usage is not None and self._usage.holds
        looks = self._partial or self._begun is not None or self._dropping or holds
        return self._client.write if self._client.chunked and self._events_only and not looks else None

    def note_fast_path(self, events: int, size: int, last: tuple[bytes, bytes]) -> None:
        """Account for events that took the shortcut: their number, their bytes, and the last two chunks."""
        self.events += events
        self.bytes += size
        for piece in last:
            self._remember(piece)

    def end(self) -> None:
        """Handle the end of the body. Raises StreamTruncated, and ends nothing, if its stream was not complete."""
        if self._judge is not None:
            partial = bytes(self._partial)
            self.ending = self._find_ending(self._judge, self.tail + (partial if _is_event(partial) else b""))
            if self.ending is None:
                raise StreamTruncated("it ended without an end marker")
        self._close()

    def end_with_error(self, event: Callable[[Dialect, bytes], bytes]) -> bool:
        """Handle a break of the body. Return True if the answer was complete before it, or if the engine had refused it
        with an error. Otherwise the client is notified. An event stream ends with an error event, which `event` makes
        from the last events. The connection is also broken if the client may not understand such an event."""
        self._partial.clear()
        tail, judge, speaks = self.tail, self._judge, self._speaks
        within = bool(tail) and not tail.endswith((b"\n\n", b"\n\r\n"))
        if judge is None or within:
            if self._usage is not None:
                self._usage.close()
            if self._events_only and speaks is not None:
                # An event that was too long to be buffered has passed in part. It ends here, so that the client parses
                # the next one.
                self._client.write(self._frame_chunk((b"\n\n" if within else b"") + event(speaks, tail)))
            self._finish()
            return False
        self.ending = self._find_ending(judge, tail)
        whole = self.ending is EndReason.OK and (not judge.says_done or _done(tail) is not None)
        if whole or self.ending in TOLD:
            self._close()
        else:
            if self._usage is not None:
                self._usage.close()
            self._client.write(self._frame_chunk(event(judge, tail)))
            self._finish()
        return whole or self.ending is EndReason.REFUSED_BY_ENGINE

    def _finish(self) -> None:
        """End an incomplete body."""
        if self._cuts:
            self._client.abort_response()
        else:
            self._client.end()

    def _close(self) -> None:
        if self._partial:
            self._pass(bytes(self._partial))
        if self._usage is not None and (rest := self._usage.close()):
            self._client.write(self._frame_chunk(rest))
        if self._last is not None and self.ending is EndReason.OK and self._client.chunked:
            tail = self.tail
            if tail.endswith((b"\n\n", b"\n\r\n")):  # after half a line, a comment would be a part of that line
                self._client.write(self._frame_chunk(self._last(tail)))
        self._client.end()

    def switch_answer(self, answer: UpstreamResponse) -> None:
        """Continue the body, which stands between two events, with another answer."""
        self._partial.clear()
        self._answer = answer

    # -- client side ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause the engine, because the client does not read."""
        self.paused = True
        self._answer.pause()

    def resume(self) -> None:
        """Resume the engine, because the client reads again."""
        self.paused = False
        self._answer.resume()

    def on_client_disconnect(self) -> None:
        """Detach from the client, which has left. Its transport must not be written to."""
        self._answer.disable_fast_path()

    # -- internals ------------------------------------------------------------------------------------------------

    def _take_complete_events(self, data: bytes) -> bytes:
        """Return all bytes up to the end of the last whole event. The rest is kept as the partial event, unless it is
        longer than PARTIAL_BYTES_MAX: then it passes in parts."""
        partial = self._partial
        if not partial and data.endswith(b"\n\n"):
            self._long_bytes = 0
            return data
        searched = max(0, len(partial) - _END_BYTES)
        partial += data
        end = 0
        if partial.rfind(b"\n", searched) >= 0:  # a search for one byte is twenty times as fast as a search for two
            end = max(partial.rfind(b"\n\n", searched) + 2, partial.rfind(b"\n\r\n", searched) + 3)
        if end < 3:  # no end of an event was found
            if len(partial) <= PARTIAL_BYTES_MAX:
                return b""
            end = len(partial)
            self._answer.moved = True  # a long event may also take long to arrive
            self._long_bytes += end
            if self._long_bytes > EVENT_BYTES_MAX:
                self._answer.fail(StreamInterrupted(f"an event of more than {EVENT_BYTES_MAX} bytes"))
        else:
            self._long_bytes = 0
        passed = bytes(partial[:end])
        del partial[:end]
        return passed

    def _pass_raw(self, data: bytes) -> None:
        """Relay bytes of a body that is no event stream."""
        if self._begun is not None and self._begun(data):
            self._begun = None
        if not data.isspace():
            self._answer.moved = True
        self.bytes += len(data)
        self._last_bytes += data
        if len(self._last_bytes) > 2 * RAW_TAIL_BYTES:
            del self._last_bytes[:-RAW_TAIL_BYTES]
        self._client.write(self._frame_chunk(data))

    def _pass(self, data: bytes) -> None:
        if self._judge is not None and (found := _done(data)):
            # Judge by the bytes before its end. Later bytes may arrive in another piece, which is too late.
            ends = _EVENT_END.search(data, found.end())
            said = data[: ends.end()] if ends is not None else data
            self._dropping = self._find_ending(self._judge, self.tail + said) is None
            if self._dropping and not (data := data[: found.start()]):
                return
        if self._begun is not None and self._begun(data):
            self._begun = None
        if self._begun is None and is_progress(data):
            self._answer.moved = True
        self.events += data.count(b"\n\n") or data.count(b"\n\r\n")
        self._write(data)

    def _write(self, data: bytes) -> None:
        """Write a piece to the client and remember it."""
        self.bytes += len(data)
        piece = self._frame_chunk(data)
        if not self._only_comments(data):
            self._remember(piece)
        if self._usage is not None and (kept := self._usage.feed(data)) is not data:
            self.slow_path_marker = self._usage.mark
            piece = self._frame_chunk(kept)
        self._client.write(piece)

    def _find_ending(self, judge: Dialect, tail: bytes) -> EndReason | None:
        if self._dropping:
            return None
        return judge.find_ending(tail) or (self._long_ended if tail.endswith((b"\n\n", b"\n\r\n")) else None)

    def _only_comments(self, data: bytes) -> bool:
        """True if the data are only comments, such as pings. They carry no outcome, and must not push events out of the
        tail."""
        if not data.startswith(b":") or not _COMMENTS.fullmatch(data):
            return False
        # After a tail that does not end with an event, this is a line of a long event.
        return not self._tail or self.tail.endswith((b"\n\n", b"\n\r\n"))

    def _frame_chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._client.chunked else data

    def _remember(self, piece: bytes) -> None:
        if len(piece) > TAIL_BYTES:
            if self._judge is not None:
                body = _unframe_chunk(piece) if self._client.chunked else piece
                tail = self.tail
                ended = self._judge.find_ending(tail) or self._judge.find_ending(_around_cut(tail + body))
                self._long_ended = ended or self._long_ended
            self._tail.clear()  # dialects expect a piece without its beginning to come first
            piece = _CUT + piece[-TAIL_BYTES:]
        if piece:
            self._tail.append(piece)


def _around_cut(body: bytes) -> bytes:
    """Return the part of a long piece that its last TAIL_BYTES omit: the last whole events before the cut, and all of
    the event that is cut. Any part of that may hold the finish reason, since SGLang's logprobs and vLLM's token ids
    follow it."""
    cut = len(body) - TAIL_BYTES
    start = 0
    if body.rfind(b"\n", 0, cut) >= 0:
        start = max(body.rfind(b"\n\n", 0, cut) + 2, body.rfind(b"\n\r\n", 0, cut) + 3)
        start = start if start > 2 else 0  # no end of an event was found before the cut
    return body[max(0, start - NAME_BYTES) :] + b"\n\n"


def _is_event(partial: bytes) -> bool:
    """True if this is a whole event except for its blank line."""
    data = sse.payload(partial.rstrip())
    return data == b"[DONE]" or (bool(data) and sse.is_valid_first_event(partial + b"\n\n"))


def _done(data: bytes) -> re.Match[bytes] | None:
    """Find the first event that clients take for the end. A regular expression reads each byte, so it runs last."""
    return _DONE.search(data) if b"[DONE]" in data or b"message_stop" in data else None


def _unframe_chunk(piece: bytes) -> bytes:
    return piece[piece.index(b"\r\n") + 2 : -2]
