"""Sink of all answers of one stream with failover: splits the engine's bytes into events, records the generated text,
removes ids, and passes the bytes that the client must get to Relay."""

from __future__ import annotations

from collections.abc import Callable

from router.core.dialects import OPENAI, errors, sse
from router.core.dialects.failover import (
    FailoverMismatch,
    FailoverPlan,
    StreamRecorder,
    StreamStitcher,
    recorder_of,
    stitcher_of,
)
from router.core.dialects.failover.recorder import PROMPT_BYTES_MAX
from router.core.dialects.sse import EventSplitter
from router.core.types.placements import EndReason
from router.core.types.progress import is_progress
from router.http.exchange import UpstreamResponse
from router.http.failures import StreamDiverged, StreamInterrupted, StreamTruncated
from router.ingress.proxied_request import ProxiedRequest
from router.proxy.relay import Relay

MISMATCH = "the repeated part of the answer differs"
# A first event contains the ids of the prompt. Its limit is ID_BYTES_MAX bytes per byte of the request, or
# FIRST_EVENT_BYTES_MAX for parts that are not in it, such as an image. The limit of later events is
# sse.EVENT_BYTES_MAX.
FIRST_EVENT_BYTES_MAX, ID_BYTES_MAX = PROMPT_BYTES_MAX + sse.EVENT_BYTES_MAX, 8


class FailoverSink:
    """Sink of the first answer of a stream, and of those that continue it."""

    slow_path_marker = b""  # nothing takes the shortcut

    def __init__(self, plan: FailoverPlan, question: ProxiedRequest, relay: Relay, answer: UpstreamResponse) -> None:
        request = question.request  # a request keeps its body if a plan needs it
        self.recorder = recorder_of(plan, lambda: request.body)
        self.answer = answer
        self.begun = False  # an event of the current answer has arrived
        self.complete = False  # the answer is complete, and its end was sent to the client
        self.refused = False  # the engine reported an error of the request itself, which ends the stream
        self._stitcher: StreamStitcher | None = None  # None until another replica continues the stream
        self._diverged = False
        self._relay = relay
        first_bytes_max = sse.EVENT_BYTES_MAX + ID_BYTES_MAX * question.wanted.body_bytes
        self._splitter = EventSplitter(bytes_max=min(FIRST_EVENT_BYTES_MAX, first_bytes_max))
        self._on_first_event: Callable[[], None] | None = None

    @property
    def before_first_output(self) -> bool:
        """True if no event so far shows that prefill is done."""
        return self._relay.before_first_output

    def body(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._relay.paused:
            self.answer.pause()
        self._pass(self._splitter.feed(data))

    def fast_path(self) -> Callable[[bytes], None] | None:
        """Return None, because every event must be read."""
        return None

    def note_fast_path(self, events: int, size: int, last: tuple[bytes, bytes]) -> None:
        """Do nothing, because no event takes the shortcut."""

    @property
    def given_up(self) -> bytes:
        """Events by which the engine aborted the answer, and those after them; b"" if it did not."""
        return self._current.given_up

    @property
    def _current(self) -> StreamRecorder | StreamStitcher:
        return self._stitcher or self.recorder

    def _pass(self, events: list[bytes]) -> None:
        if self._diverged or not events:
            return
        if any(map(is_progress, events)):
            self.answer.moved = True
            self._note_begun()
        stream = self._current
        try:
            made = b"".join([event if self._is_refusal(event) else stream.take(event) for event in events])
        except FailoverMismatch as error:
            self._diverged = True
            self.answer.fail(StreamDiverged(str(error)))
            return
        if made:
            self._relay.body(made)

    def _note_begun(self) -> None:
        """Note that an event of the current answer has arrived."""
        if not self.begun:
            self.begun = True
            self._splitter.bytes_max = sse.EVENT_BYTES_MAX
            if self._on_first_event is not None:
                self._on_first_event()

    def _is_refusal(self, event: bytes) -> bool:
        """True if the engine has refused the request, with this event or an earlier one. Another replica would refuse
        it too."""
        if b'"error"' in event:
            status = OPENAI.event_error(event)
            self.refused = self.refused or (
                status is not None and errors.ending_of(status, event) is EndReason.REFUSED_BY_ENGINE
            )
        return self.refused

    def end(self) -> None:
        """Handle the end of the body. Raises StreamInterrupted if the stream did not end properly."""
        rest = self._splitter.close().rstrip()
        if rest and (sse.payload(rest) == b"[DONE]" or sse.is_valid_first_event(rest + b"\n\n")):
            self._pass([rest + b"\n\n"])
        if self._diverged:
            raise StreamDiverged(MISMATCH)
        if self._current.broken and not self.refused:
            raise StreamTruncated("the engine reported a failure, or ended the stream early")
        self._relay.end()

    async def relay_to_end(self) -> StreamInterrupted | None:
        """Relay the current answer to its end. Return the break, or None."""
        try:
            await self.answer.relay(self)
            self.end()
        except StreamInterrupted as error:  # an answer that fails within its head carries no reason
            return StreamDiverged(MISMATCH) if self._diverged else error
        return None

    def switch_answer(self, answer: UpstreamResponse, on_first_event: Callable[[], None]) -> None:
        """Continue with the answer of another replica."""
        self._splitter.close()
        self.answer, self.begun, self._on_first_event = answer, False, on_first_event
        self._stitcher = stitcher_of(self.recorder)
        self._relay.switch_answer(answer)

    def finish(self, events: bytes) -> bool:
        """Send the events that complete the answer, and end the stream. Return True if the stream is complete with
        them."""
        if events:
            self._relay.body(events)
        try:
            self._relay.end()
        except StreamTruncated:
            return False
        self.complete = True
        return True
