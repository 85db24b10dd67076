"""Stream failover: continues a stream on another replica when it breaks.

    relay      relays the current answer through its FailoverSink, which records the text and ids so far
    _go_on     after a break or a hand-over, places elsewhere with the text so far as prompt and relays the new events

A broken stream is continued once, within the retry budget, and within the silence that any stream may keep. A hand-over
(`migrate_streams`) breaks a stream on purpose, so that a replica that is about to leave need not be waited for. It
requires that the stream can be continued and that another replica is ready. It may happen each time that a replica
leaves.

Streams without failover do not pass through this module. Their relay reads none of their events (exchange.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.dialects import OPENAI
from router.core.dialects.failover import EXACT, AlreadyComplete, FailoverRefused
from router.core.dialects.rank_field import for_rank
from router.core.types.placements import EndReason, Outcome
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
    UpstreamError,
    UpstreamOverloaded,
)
from router.http.request import Refusal
from router.http.upstream import FULL_S, Upstream
from router.ingress.placement_call import CONNECT_ATTEMPTS_MAX, place_or_refuse
from router.ingress.proxied_request import ProxiedRequest
from router.placement_api import LEFT, LeaseHandle, PlacementService
from router.proxy.attempts import UpstreamCall, stays
from router.proxy.failover_sink import FailoverSink
from router.proxy.retry_budget import RetryBudget
from router.telemetry.request_record import RequestRecord

MIGRATION_RETRY_S = 0.25  # delay before an intentionally broken stream is offered to other replicas again
_REFUSED = Outcome(EndReason.REFUSED_BY_ENGINE)


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

    async def relay(self, call: UpstreamCall, sink: FailoverSink, record: RequestRecord) -> StreamInterrupted | None:
        """Relay a stream, on two replicas if necessary; `call` is then updated to the second one. Return the final
        break, or None if the whole stream was relayed."""
        self._open.add(sink)
        try:
            broke = await sink.relay_to_end()
            breaks = 0
            while broke is not None and not sink.refused:
                given_up = sink.given_up
                if given_up and await stays(self._placer, self._upstream, call.lease) and sink.finish(given_up):
                    return None
                breaks += not isinstance(broke, StreamMigrated)
                if not await self._go_on(call, sink, broke, record, again=breaks > 1):
                    break
                broke = None if sink.complete else await sink.relay_to_end()
            return broke
        finally:
            self._open.discard(sink)

    def migrate_streams(self, replica: str) -> int:
        """Move every stream of a replica that can be continued to another replica, if another one is ready. Return
        their number."""
        if not self._placer.has_other_ready(frozenset((replica,))):
            return 0
        moved = [
            sink for sink in self._open if sink.answer.replica == replica and sink.begun and sink.recorder.can_continue
        ]
        for sink in moved:
            sink.answer.fail(StreamMigrated("the replica is being removed"))
        return len(moved)

    def has_streams(self, replica: str) -> bool:
        """True if a stream with failover is open at a replica."""
        return any(sink.answer.replica == replica for sink in self._open)

    async def _go_on(
        self, call: UpstreamCall, sink: FailoverSink, broke: StreamInterrupted, record: RequestRecord, *, again: bool
    ) -> bool:
        """Return True if the stream continues, or was complete and is ended. `again`: it broke before, and may not be
        retried."""
        cause, replica = broke.kind, call.lease.replica
        if isinstance(broke, StreamDiverged):
            self._placer.finish(call.lease, LEFT, self._clock())  # attributed to no replica
            record.failover.continued, record.failover.not_continued = ("", "", ""), "differs"
            return False
        planned = isinstance(broke, StreamMigrated)
        try:
            body = sink.recorder.next_body()
            if not planned:
                self._check_limits(again=again)
            self._release(call, broke)
            lease, answer = await self._in_time(call.question, replica, sink.recorder.next_path, body, planned=planned)
        except AlreadyComplete as complete:
            if not sink.finish(complete.events):
                return False
        except FailoverRefused as refusal:
            record.failover.not_continued = refusal.reason
            return False
        else:
            if not planned:
                self._placer.count_attempt_failure(replica, cause)
                self._budget.withdraw(self._clock())
            lease.receipt.replay = call.lease.receipt.replay
            call.lease, call.answer, record.receipt = lease, answer, lease.receipt
            placer, clock = self._placer, self._clock
            sink.switch_answer(answer, lambda: placer.first_token(lease, clock()))
        record.failover.continued = (EXACT, cause, replica)
        return True

    def _check_limits(self, *, again: bool) -> None:
        """Raise FailoverRefused if no retry is left for a broken stream."""
        if again:
            raise FailoverRefused("again")
        if not self._budget.covers(self._clock()):
            raise FailoverRefused("budget")

    def _release(self, call: UpstreamCall, broke: StreamInterrupted) -> None:
        """End the lease and the exchange of an answer that broke."""
        if call.question.trace is not None:
            call.question.trace.record_failure(broke.kind, 0, self._clock())
        if isinstance(broke, StreamMigrated):
            outcome = LEFT
        else:  # silence alone is no replica's fault
            outcome = _REFUSED if isinstance(broke, Stalled) else Outcome(EndReason.FAILED)
        self._placer.finish(call.lease, outcome, self._clock())
        self._upstream.done(call.answer)

    async def _in_time(
        self, question: ProxiedRequest, replica: str, path: str, body: bytes, *, planned: bool
    ) -> tuple[LeaseHandle, UpstreamResponse]:
        """Return the lease of another replica and its answer. A stream that was broken on purpose waits for a replica
        that accepts it, and may be retried like any request. Raises FailoverRefused."""
        failed = False
        try:
            async with asyncio.timeout(self.silence_s_max):
                while True:
                    try:
                        return await self._call_other_replica(question, replica, path, body)
                    except FailoverRefused as refusal:
                        if not planned:
                            raise
                        if refusal.reason == "failed":
                            if failed or not self._budget.withdraw(self._clock()):
                                raise
                            failed = True
                    await asyncio.sleep(MIGRATION_RETRY_S)
        except TimeoutError as error:
            raise FailoverRefused("late") from error

    async def _call_other_replica(
        self, question: ProxiedRequest, replica: str, path: str, body: bytes
    ) -> tuple[LeaseHandle, UpstreamResponse]:
        """Return the lease of another replica and its answer. Raises FailoverRefused."""
        tried, fresh = frozenset((replica,)), False
        for _ in range(CONNECT_ATTEMPTS_MAX):
            question.wanted.require_one_replica()
            try:
                lease = await place_or_refuse(self._placer, question.wanted, tried, self._clock)
            except Refusal as error:
                raise FailoverRefused("replica") from error
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
                raise FailoverRefused("failed")
            self._placer.count_attempt_failure(lease.replica, answer.kind)
            if isinstance(answer, UpstreamOverloaded):
                self._placer.set_cooldown(lease.replica, answer.retry_after_s, full=answer.full)
            if not isinstance(answer, ConnectFailed | StaleConnection | UpstreamOverloaded):
                raise FailoverRefused("failed")  # some GPU time may have been spent
            tried, fresh = tried | {lease.replica}, fresh or isinstance(answer, StaleConnection)
        raise FailoverRefused("replica")

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
