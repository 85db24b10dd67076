"""Stream failover: reads the events of a stream, and continues the stream on another replica when it breaks.

    body       splits the engine's bytes into events, notes the generated text, removes ids, passes the rest to Relay
    _go_on     after a break or a hand-over, places elsewhere with the text so far as prompt and relays the new events

A broken stream is continued once, within the retry budget, and within the silence that any stream may keep. A hand-over
(`hand_over`) breaks a stream on purpose, so that a replica that is about to leave need not be waited for. It requires
that the stream can be continued and that another replica is ready. It may happen each time that a replica leaves.

Streams without failover do not pass through this module. Their relay reads none of their events (exchange.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.dialects import OPENAI, errors, sse
from router.core.dialects.failover import (
    EXACT,
    AlreadyComplete,
    FailoverMismatch,
    FailoverPlan,
    FailoverRefused,
    StreamStitcher,
    recorder_of,
    stitcher_of,
)
from router.core.dialects.failover.recorder import PROMPT_BYTES_MAX
from router.core.dialects.rank_field import for_rank
from router.core.dialects.sse import EventSplitter
from router.core.types.placements import EndReason, Outcome
from router.core.types.progress import is_progress
from router.core.types.replicas import Replica
from router.http.engine_errors import EngineFailed
from router.http.exchange import UpstreamResponse
from router.http.failures import (
    ConnectFailed,
    StaleConnection,
    Stalled,
    StreamDiverged,
    StreamInterrupted,
    StreamMigrated,
    StreamTruncated,
    UpstreamError,
    UpstreamOverloaded,
)
from router.http.request import Refusal
from router.http.upstream import FULL_S, Upstream
from router.ingress.placement_call import CONNECT_ATTEMPTS_MAX, place_or_refuse
from router.ingress.proxied_request import ProxiedRequest
from router.placement_api import LEFT, LeaseHandle, PlacementService
from router.proxy.attempts import UpstreamCall, stays
from router.proxy.relay import Relay
from router.proxy.retry_budget import RetryBudget
from router.telemetry.request_record import RequestRecord

MIGRATION_RETRY_S = 0.25  # delay before an intentionally broken stream is offered to other replicas again
MISMATCH = "the repeated part of the answer differs"
_REFUSED = Outcome(EndReason.REFUSED_BY_ENGINE)
# A first event contains the ids of the prompt. Its limit is ID_BYTES_MAX bytes per byte of the request, or
# FIRST_EVENT_BYTES_MAX for parts that are not in it, such as an image. The limit of later events is
# sse.EVENT_BYTES_MAX.
FIRST_EVENT_BYTES_MAX, ID_BYTES_MAX = PROMPT_BYTES_MAX + sse.EVENT_BYTES_MAX, 8


class FailoverSink:
    """Sink of all answers of one stream: passes to its Relay the bytes that the client must get."""

    slow_path_marker = b""  # nothing takes the shortcut

    def __init__(self, plan: FailoverPlan, question: ProxiedRequest, relay: Relay, answer: UpstreamResponse) -> None:
        request = question.request  # a request keeps its body if a plan needs it
        self.carried = recorder_of(plan, lambda: request.body)
        self.answer = answer
        self.resumed: StreamStitcher | None = None  # None until another replica continues the stream
        self.begun = False  # an event of the current answer has arrived
        self.differs = False
        self.said = False  # the answer is complete, and its end was sent to the client
        self.refused = False  # the engine reported an error of the request itself, which ends the stream
        self._relay = relay
        first_bytes_max = sse.EVENT_BYTES_MAX + ID_BYTES_MAX * question.wanted.body_bytes
        self._splitter = EventSplitter(bytes_max=min(FIRST_EVENT_BYTES_MAX, first_bytes_max))
        self._told: Callable[[], None] | None = None

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

    def _pass(self, events: list[bytes]) -> None:
        if self.differs or not events:
            return
        if any(map(is_progress, events)):
            self.answer.moved = True
            self._has_begun()
        stream = self.resumed or self.carried
        try:
            made = b"".join([event if self._refuses(event) else stream.take(event) for event in events])
        except FailoverMismatch as error:
            self.differs = True
            self.answer.fail(StreamDiverged(str(error)))
            return
        if made:
            self._relay.body(made)

    def _has_begun(self) -> None:
        """Note that an event of the current answer has arrived."""
        if not self.begun:
            self.begun = True
            self._splitter.bytes_max = sse.EVENT_BYTES_MAX
            if self._told is not None:
                self._told()

    def _refuses(self, event: bytes) -> bool:
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
        if self.differs:
            raise StreamDiverged(MISMATCH)
        if (self.resumed or self.carried).broken and not self.refused:
            raise StreamTruncated("the engine reported a failure, or ended the stream early")
        self._relay.end()

    def resume(self, answer: UpstreamResponse, told: Callable[[], None]) -> None:
        """Switch to the answer of another replica. Its first event calls the callback `told`."""
        self._splitter.close()
        self.answer, self.begun, self._told = answer, False, told
        self.resumed = stitcher_of(self.carried)
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
        self.said = True
        return True


class StreamFailover:
    """Relays streams with failover. `silence_s_max`, which may be replaced: the longest time for which a client may
    wait for the next event."""

    def __init__(
        self,
        placer: PlacementService,
        upstream: Upstream,
        *,
        clock: Callable[[], float],
        budget: RetryBudget,
        silence_s_max: float,
    ) -> None:
        self.silence_s_max = silence_s_max
        self._placer = placer
        self._upstream = upstream
        self._clock = clock
        self._budget = budget
        self._open: set[FailoverSink] = set()

    async def relay(
        self, call: UpstreamCall, carrying: FailoverSink, record: RequestRecord
    ) -> StreamInterrupted | None:
        """Relay a stream, on two replicas if necessary; `call` is then updated to the second one. Return the final
        break, or None if the whole stream was relayed."""
        self._open.add(carrying)
        try:
            broke = await _relay_to_end(carrying)
            breaks = 0
            while broke is not None and not carrying.refused:
                given_up = (carrying.resumed or carrying.carried).given_up
                if given_up and await stays(self._placer, self._upstream, call.lease) and carrying.finish(given_up):
                    return None
                breaks += not isinstance(broke, StreamMigrated)
                if not await self._go_on(call, carrying, broke, record, again=breaks > 1):
                    break
                broke = None if carrying.said else await _relay_to_end(carrying)
            return broke
        finally:
            self._open.discard(carrying)

    def migrate_streams(self, replica: str) -> int:
        """Move every stream of a replica that can be continued to another replica, if another one is ready. Return
        their number."""
        if not self._placer.has_other_ready(frozenset((replica,))):
            return 0
        moved = [
            each for each in self._open if each.answer.replica == replica and each.begun and each.carried.can_go_on
        ]
        for carrying in moved:
            carrying.answer.fail(StreamMigrated("the replica is being removed"))
        return len(moved)

    def has_streams(self, replica: str) -> bool:
        """True if a stream with failover is open at a replica."""
        return any(each.answer.replica == replica for each in self._open)

    async def _go_on(
        self,
        call: UpstreamCall,
        carrying: FailoverSink,
        broke: StreamInterrupted,
        record: RequestRecord,
        *,
        again: bool,
    ) -> bool:
        """Return True if the stream continues, or was complete and is ended. `again`: it broke before, and may not be
        retried."""
        cause, replica = broke.kind, call.lease.replica
        if isinstance(broke, StreamDiverged):
            self._placer.finish(call.lease, LEFT, self._clock())  # attributed to no replica
            record.continued, record.not_continued = ("", "", ""), "differs"
            return False
        try:
            body = carrying.carried.next_body()
        except AlreadyComplete as said:
            if not carrying.finish(said.events):
                return False
            record.continued = (EXACT, cause, replica)
            return True
        except FailoverRefused as why:
            record.not_continued = why.reason
            return False
        planned = isinstance(broke, StreamMigrated)
        if again and not planned:
            record.not_continued = "again"
            return False
        if not planned and not self._budget.covers(self._clock()):
            record.not_continued = "budget"
            return False
        if call.question.trace is not None:
            call.question.trace.record_failure(cause, 0, self._clock())
        blames = not (planned or isinstance(broke, Stalled))  # silence alone is no replica's fault
        outcome = LEFT if planned else Outcome(EndReason.FAILED) if blames else _REFUSED
        self._placer.finish(call.lease, outcome, self._clock())
        self._upstream.done(call.answer)
        found = await self._in_time(call.question, replica, carrying.carried.next_path, body, planned=planned)
        if isinstance(found, str):
            record.not_continued = found
            return False
        if not planned:
            self._placer.count_attempt_failure(replica, cause)
            self._budget.withdraw(self._clock())
        found[0].receipt.replay = call.lease.receipt.replay
        call.lease, call.answer = found
        record.receipt = call.lease.receipt
        lease, placer, clock = call.lease, self._placer, self._clock
        carrying.resume(call.answer, lambda: placer.first_token(lease, clock()))
        record.continued = (EXACT, cause, replica)
        return True

    async def _in_time(
        self, question: ProxiedRequest, replica: str, path: str, body: bytes, *, planned: bool
    ) -> tuple[LeaseHandle, UpstreamResponse] | str:
        """Return the continuing answer and its lease, or the reason for giving up. A stream that was broken on purpose
        waits for a replica that accepts it, and may be retried like any request."""
        failed = False
        try:
            async with asyncio.timeout(self.silence_s_max):
                while True:
                    found = await self._call_other_replica(question, replica, path, body)
                    if not planned or not isinstance(found, str):
                        return found
                    if found == "failed":
                        if failed or not self._budget.withdraw(self._clock()):
                            return found
                        failed = True
                    await asyncio.sleep(MIGRATION_RETRY_S)
        except TimeoutError:
            return "late"

    async def _call_other_replica(
        self, question: ProxiedRequest, replica: str, path: str, body: bytes
    ) -> tuple[LeaseHandle, UpstreamResponse] | str:
        tried, fresh = frozenset((replica,)), False
        for _ in range(CONNECT_ATTEMPTS_MAX):
            try:
                question.wanted.may_pull = question.wanted.may_split = False
                lease = await place_or_refuse(self._placer, question.wanted, tried, self._clock)
            except Refusal:
                return "replica"
            try:
                answer = await self._call_upstream(question, lease, path, body, fresh=fresh)
            except BaseException:
                self._placer.finish(lease, LEFT, self._clock())
                raise
            if not isinstance(answer, UpstreamError):
                return lease, answer
            refused = isinstance(answer, EngineFailed) and _is_request_error(answer.answer)
            self._placer.finish(lease, _REFUSED if refused else Outcome(answer.ending), self._clock())
            if refused:  # the request as rewritten by the router is at fault, and not the replica
                return "failed"
            self._placer.count_attempt_failure(lease.replica, answer.kind)
            if isinstance(answer, UpstreamOverloaded):
                self._placer.set_cooldown(lease.replica, answer.retry_after_s, full=answer.full)
            if not isinstance(answer, ConnectFailed | StaleConnection | UpstreamOverloaded):
                return "failed"  # some GPU time may have been spent
            tried, fresh = tried | {lease.replica}, fresh or isinstance(answer, StaleConnection)
        return "replica"

    async def _call_upstream(
        self, question: ProxiedRequest, lease: LeaseHandle, path: str, body: bytes, *, fresh: bool
    ) -> UpstreamResponse | UpstreamError:
        """Return a stream that has begun without an error, or a failure. `fresh`: use a new connection."""
        lines, trace, replica = question.lines, question.trace, lease.replica
        if trace is not None:
            lines = [*lines, trace.record_call(lease.receipt, self._clock())]
        if "#" in replica and (rank := Replica(replica).rank) is not None:
            lines, body = for_rank(rank, path, lines, body)
        try:
            answer = await self._upstream.call(replica, "POST", path, lines, body, fresh=fresh)
        except EngineFailed as failure:
            self._upstream.done(failure.answer)
            return failure
        except UpstreamError as failure:
            return failure
        if trace is not None:
            trace.record_response(answer.status, self._clock(), whole=answer.whole)
        status = OPENAI.event_error(answer.head) if answer.status == 200 and answer.streams else answer.status
        if status is None:
            return answer
        full = status == 503 and await self._upstream.is_full(answer)
        self._upstream.done(answer)
        return UpstreamOverloaded(status, FULL_S, full=True) if full else EngineFailed(answer)


def _is_request_error(answer: UpstreamResponse) -> bool:
    """True if an engine attributes the error to the request itself, by its status or in its first event."""
    if answer.status >= 400:
        return answer.status < 500
    status = OPENAI.event_error(answer.head)
    return status is not None and status < 500


async def _relay_to_end(carrying: FailoverSink) -> StreamInterrupted | None:
    """Relay the current answer to its end. Return the break, or None."""
    try:
        await carrying.answer.relay(carrying)
        carrying.end()
    except StreamInterrupted as error:  # an answer that fails within its head carries no reason
        return StreamDiverged(MISMATCH) if carrying.differs else error
    return None
