"""Placement, call and retries of one request, until its answer has begun.

Limits on the attempts of one request, with their reasons:

- `retries_max` retries after the first attempt that was sent. Each may have cost GPU time.
- CONNECT_ATTEMPTS_MAX attempts that reached no engine, or used a connection that was closed as idle. They cost no GPU
  time, so they do not count as retries; the limit is there because a client waits.
- One alternative to a replica that does not serve the model although its list contains it. Nothing was computed.
- One alternative to a replica that sheds load. The fleet is full, and a request sent to every replica makes it worse.
- The retry budget, shared by all requests. It keeps retries from hammering a dead fleet.

The next attempt never uses the replica that failed. It uses another rank of the same server only if no other server is
left. If no other replica is left, a replica that may not be at fault is tried a second time. Examples are a connect
timeout, a pooled connection that it had closed as idle, and a stalled transfer of blocks.

If the prefill of a disaggregated request failed, the request is placed once more in the same way, without the replica
at fault, and then on one replica. It is placed on one replica at once if its blocks did not arrive, or if the prefill
replica sheds load. SGLang's prefill and decode servers accept only disaggregated requests.

A replica may leave after placement or during the connect, before anything was sent to it. This does not count as an
attempt. The request is placed again even if no retry is allowed or left.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from msgspec import Struct

from router.config.schema import UpstreamSettings
from router.core.dialects import PATHS, Dialect, sse
from router.core.dialects.dialect import Abort
from router.core.dialects.model_not_found import missing_model
from router.core.dialects.p2p_body import with_pull
from router.core.dialects.rank_field import for_rank
from router.core.placement.placement_request import PlacementRequest
from router.core.types.disagg_types import PrefillStage
from router.core.types.placements import EndReason, Outcome
from router.core.types.replicas import Replica
from router.http.engine_errors import EngineFailed, LacksModel, NothingMade, TransferFailed
from router.http.exchange import UpstreamResponse
from router.http.failures import (
    ClosedBeforeResponse,
    ConnectFailed,
    InvalidStream,
    NoDescriptor,
    PrefillFailed,
    PullTimeout,
    ReplicaRemoved,
    StaleConnection,
    TimedOut,
    TransferFirstByteTimeout,
    TransferTimeout,
    UpstreamError,
    UpstreamOverloaded,
)
from router.http.request import Refusal
from router.http.upstream import FULL_S, Upstream
from router.ingress.local_responses import ID_WITHIN_BYTES, no_replica_ready, parse_response_id
from router.ingress.placement_call import CONNECT_ATTEMPTS_MAX, place_or_refuse
from router.ingress.proxied_request import RESPONSES, ProxiedRequest
from router.ingress.usage import UsageAsking
from router.placement_api import LeaseHandle, PlacementService
from router.proxy.disagg_calls.caller import DisaggCaller
from router.proxy.disagg_calls.request_state import raise_if_failed
from router.proxy.preamble_events import is_parsable_stream, label, wait_for_first_output
from router.proxy.relay import Relay
from router.proxy.retry_budget import RetryBudget
from router.telemetry.request_record import RequestRecord

REFUSED = (400, 404)  # statuses with which engines refuse a model that they do not serve
ERROR_EVENT = b'data: {"error"'
PAIR_FAILURES = (
    TransferFailed,
    TransferTimeout,
    TransferFirstByteTimeout,
)  # failures that are attributed to neither of the two replicas


class AttemptHistory:
    """Summary of the failed attempts of one request."""

    __slots__ = ("_again", "lacks", "replicas", "sent", "shed_until_s", "sheds", "splits", "stale", "unsent")

    def __init__(self) -> None:
        self.replicas: frozenset[str] = frozenset()  # replicas that were tried
        self._again: frozenset[str] = frozenset()  # tried replicas that may be tried a second time
        self.sent = self.unsent = self.sheds = 0  # numbers of failed attempts; those that shed load also count as sent
        self.lacks = 0  # number of replicas that do not serve the model
        self.splits = 0  # number of failed disaggregated attempts
        self.stale = False  # the first connection was stale
        self.shed_until_s: float | None = None  # time at which the first replica that shed load may be asked again

    def note(self, replica: str, failure: UpstreamError, *, in_two: bool = False) -> None:
        """Count one failed attempt. `in_two`: its decode stage failed."""
        left = isinstance(failure, ReplicaRemoved)
        lacks = isinstance(failure, LacksModel)
        self.lacks += lacks
        self.stale |= isinstance(failure, StaleConnection)
        refused = isinstance(failure, ConnectFailed) and (failure.refused or failure.timed_out)
        unsent = lacks or refused or _is_free(failure)
        self.unsent += unsent
        self.sent += not unsent
        # If a new connection breaks in the same way, the engine ended the stale one too, and idleness was not the
        # cause.
        self.sent += self.stale and isinstance(failure, ClosedBeforeResponse)
        self.sheds += isinstance(failure, UpstreamOverloaded)
        once_more = (
            left
            or isinstance(failure, (StaleConnection, PullTimeout, PAIR_FAILURES))
            or (isinstance(failure, ConnectFailed) and failure.timed_out)
            # vLLM's APIs other than chat close the connection of a decode stage without a status if its blocks do not
            # arrive. The decode engine may be well, and the prefill engine gone.
            or (in_two and isinstance(failure, ClosedBeforeResponse))
        )
        self._again = self._again | {replica} if once_more and replica not in self.replicas else self._again - {replica}
        self.replicas |= {replica}

    def note_shed(self, until_s: float) -> None:
        """Note that a replica sheds load until this time."""
        self.shed_until_s = until_s if self.shed_until_s is None else min(self.shed_until_s, until_s)

    @property
    def excluded(self) -> list[frozenset[str]]:
        """Return the sets of replicas that the next placement must exclude, in order of preference. The first set has
        all replicas that were tried. If no other replica is left, the second set omits those that may be tried a second
        time."""
        return [self.replicas, self.replicas - self._again] if self._again else [self.replicas]


class UpstreamCall(Struct, eq=False):  # a Struct for speed: core/types/requests.py
    """One answer that has begun, with the lease of its replica and its relay."""

    question: ProxiedRequest
    lease: LeaseHandle
    answer: UpstreamResponse
    called_s: float  # time at which the first replica was called
    relay: Relay | None = None  # None if the answer is delivered whole
    outcome: Outcome | None = None  # None until the answer is delivered; stays None if the client leaves first


class Attempts:
    """Places and calls until an answer has begun. `limits` may be replaced at any time, and applies to requests in
    flight."""

    def __init__(
        self,
        placer: PlacementService,
        upstream: Upstream,
        limits: UpstreamSettings,
        *,
        pull_timeout_s: float,
        clock: Callable[[], float],
        budget: RetryBudget,
        legs: DisaggCaller,
        usage: UsageAsking,
    ) -> None:
        self.limits = limits
        self._pull_timeout_s = pull_timeout_s  # added to the predicted time to first token
        self._legs = legs
        self._placer = placer
        self._upstream = upstream
        self._clock = clock
        self._budget = budget
        self._usage = usage

    async def begin(self, question: ProxiedRequest, record: RequestRecord, read_s: float) -> UpstreamCall:
        """Return a call with an answer that has begun. `read_s`: time at which the whole request had been read. Raises
        Refusal."""
        self._budget.deposit()
        try:
            lease = await self._place(question, frozenset())
        finally:
            record.times.queued_s = question.wanted.queued_s
        called_s = self._clock()
        record.times.overhead_s = called_s - read_s - record.times.queued_s
        tried: AttemptHistory | None = None
        while True:
            record.receipt, record.error = lease.receipt, None
            try:
                # After a failure pooled connections are not trusted either.
                begun = await self._try_attempt(question, lease, fresh=question.stored or tried is not None)
            except BaseException:
                self._release(lease, None, EndReason.CLIENT_LEFT)
                raise
            if not isinstance(begun, UpstreamError):
                return UpstreamCall(question, lease, begun, called_s)
            failure = begun
            record.error = f"{failure.kind}: {failure}"
            tried = tried or AttemptHistory()
            replica, cause = _fault(lease, failure)
            if question.trace is not None:
                question.trace.record_failure(failure.kind, _status_of(cause), self._clock())
            self._record_failure(lease, failure, tried)
            question.wanted.may_pull = False
            leg = lease.receipt.leg
            if leg is not None:  # the replica may be chosen again, and its cache does not have the prompt
                question.wanted.may_split = _may_split_again(leg, failure, tried)
                self._release(lease, None, failure.ending)
            said = failure.answer if isinstance(failure, EngineFailed) else None
            try:
                following = await self._next_attempt(question, cause, tried)
            except BaseException:
                self._release(lease, said, EndReason.CLIENT_LEFT)
                raise
            if following is None and said is not None and tried.shed_until_s is None:
                return UpstreamCall(question, lease, said, called_s)  # no better answer than the engine's error
            self._release(lease, said, failure.ending)
            if following is None:
                raise self._refusal(cause, tried, replica, question.wanted.model) from failure
            record.retries += ((failure.kind, replica),)
            following.receipt.replay = lease.receipt.replay  # a retry is not a replay: the client sent one request
            lease = following

    async def _try_attempt(
        self, question: ProxiedRequest, lease: LeaseHandle, *, fresh: bool
    ) -> UpstreamResponse | UpstreamError:
        """Return the outcome of one attempt. A failure is returned and not raised, since the caller awaits more
        afterwards: native code must not await while it handles an exception (deploy/compiled.py)."""
        try:
            return await self._attempt(question, lease, fresh=fresh)
        except UpstreamError as failure:
            return failure

    def _release(self, lease: LeaseHandle, answer: UpstreamResponse | None, ending: EndReason) -> None:
        if answer is not None:
            self._upstream.done(answer)
        self._placer.finish(lease, Outcome(ending), self._clock())

    async def _next_attempt(
        self, question: ProxiedRequest, failure: UpstreamError, tried: AttemptHistory
    ) -> LeaseHandle | None:
        """Return a lease for one more attempt, or None if no retry is allowed or no replica is left."""
        retries = not _is_free(failure) and not isinstance(failure, LacksModel)
        if not self._may_retry(question, failure, tried) or (retries and not self._budget.covers(self._clock())):
            return None
        for excluded in tried.excluded:
            try:
                lease = await self._place(question, excluded)
            except Refusal as refusal:
                if refusal.status == 429 and refusal.retry_after_s is not None:
                    tried.note_shed(self._clock() + refusal.retry_after_s)
                continue
            if retries:
                self._budget.withdraw(self._clock())  # only now, so that no budget is spent if no replica is left
            return lease
        return None

    async def _place(self, question: ProxiedRequest, excluded: frozenset[str]) -> LeaseHandle:
        """Return a lease. Raises Refusal if no replica is left to try."""
        return await place_or_refuse(self._placer, question.wanted, excluded, self._clock)

    async def _attempt(self, question: ProxiedRequest, lease: LeaseHandle, *, fresh: bool) -> UpstreamResponse:
        """Make one attempt. `fresh`: use new connections. Raises UpstreamError."""
        self._usage.ask(question, lease.replica)
        request, asked, trace = question.request, question.wanted.ask.stream, question.trace
        lines = question.lines if trace is None else [*question.lines, trace.record_call(lease.receipt, self._clock())]
        leg = lease.receipt.leg if question.wanted.may_split else None
        if leg is not None:
            within_s = self._pull_timeout_s + lease.receipt.ttft_p90_ms / 1e3
            answer = await self._legs.call(question, lease, leg, lines, blocks_within_s=within_s, fresh=fresh)
        else:
            replica, body, pull = lease.replica, question.body, lease.receipt.pull
            pull_within_s: float | None = None
            if pull is not None and question.wanted.may_pull:
                body = with_pull(body, pull.address, secrets.token_hex(16))
                pull_within_s = self._pull_timeout_s + lease.receipt.ttft_p90_ms / 1e3
            if "#" in replica and (rank := Replica(replica).rank) is not None:
                lines, body = for_rank(rank, request.path, lines, body)
            answer = await self._upstream.call(
                replica, request.method, request.target, lines, body, pull_within_s=pull_within_s, fresh=fresh
            )
            if pull_within_s is not None and is_parsable_stream(answer):
                answer = raise_if_failed(
                    await wait_for_first_output(answer, question.dialect.has_output, self._upstream)
                )
        if asked and request.path in PATHS:
            label(answer)
        stores = request.path == RESPONSES and question.stored
        if stores and not (answer.whole or answer.streams):  # the id must be known before the client can use it
            answer = raise_if_failed(await wait_for_first_output(answer, _names_itself, self._upstream))
        if trace is not None:
            trace.record_response(answer.status, self._clock(), whole=answer.whole)
        if answer.status in REFUSED or answer.head.startswith(ERROR_EVENT):
            lacking = missing_model(answer.status, answer.head, names_of(question.wanted)) if leg is None else ""
            if lacking:
                raise LacksModel(answer, lacking)
        try:
            streams = asked or answer.streams
            status = _first_status(question, answer) if streams and not answer.whole else 200
        except InvalidStream:
            self._upstream.done(answer)
            raise
        if status == 503 and await self._upstream.is_full(answer):
            self._upstream.done(answer)
            raise UpstreamOverloaded(status, FULL_S, full=True)
        abort = question.dialect.find_abort(answer.head) if answer.status == 200 else None
        if abort is not None and status < 500:
            await self._judge_abort(lease, answer, abort)
        elif status >= 500:
            raise EngineFailed(answer) if leg is None or leg.alone else TransferFailed(answer)
        if stores and (made := parse_response_id(answer.head)):
            self._placer.register_response_owner(made, lease.replica, question.wanted.tenant)
        return answer

    async def _judge_abort(self, lease: LeaseHandle, answer: UpstreamResponse, abort: Abort) -> None:
        """Return if the client should get an answer that its engine aborted: a partial generation of a replica that
        stays. Otherwise raise EngineFailed, which is not attributed to a healthy replica."""
        try:
            failed = abort is Abort.FAILED or not await stays(self._placer, self._upstream, lease)
        except BaseException:
            self._upstream.done(answer)
            raise
        if failed:
            raise EngineFailed(answer)
        if abort is Abort.NOTHING:
            raise NothingMade(answer)

    def _record_failure(self, lease: LeaseHandle, failure: UpstreamError, tried: AttemptHistory) -> None:
        """Count a failed attempt. Start a cooldown if the replica requested one, and report proof that a replica is
        dead."""
        replica, cause = _fault(lease, failure)
        in_two = lease.receipt.leg is not None and cause is failure
        tried.note(replica, cause, in_two=in_two)
        tried.splits += lease.receipt.leg is not None
        if isinstance(cause, NoDescriptor):
            self._placer.count_attempt_failure("", failure.kind)  # counted, but attributed to no replica
            return
        self._placer.count_attempt_failure(replica, f"decode_{failure.kind}" if in_two else failure.kind)
        if isinstance(cause, PAIR_FAILURES) and (leg := lease.receipt.leg) is not None:
            self._placer.report_pair_failure(leg.replica, replica)
            # vLLM's prefill replicas take whole requests if no other replica is left, and this one may be dead.
            if not leg.traits.single_stage_engines:
                tried.replicas |= {leg.replica}
        if isinstance(cause, PullTimeout) and lease.receipt.pull is not None:
            self._placer.report_pull_timeout(lease.receipt.pull.source)
        if isinstance(cause, LacksModel):
            self._placer.lacks(replica, cause.model)
        if isinstance(cause, UpstreamOverloaded):
            self._placer.set_cooldown(replica, cause.retry_after_s, full=cause.full)
            tried.note_shed(self._clock() + cause.retry_after_s)
        if isinstance(cause, ConnectFailed) and cause.refused:
            self._upstream.fail_silent_calls(replica)
            self._placer.report_connection_refused(replica)

    def _may_retry(self, question: ProxiedRequest, failure: UpstreamError, tried: AttemptHistory) -> bool:
        if tried.unsent >= CONNECT_ATTEMPTS_MAX:
            return False
        if _is_free(failure) or isinstance(failure, PullTimeout):
            return True  # a request is sent with a P2P KV transfer once, so it stalls for one at most once
        if isinstance(failure, LacksModel):
            return tried.lacks == 1
        if not self.limits.retries_max or tried.sent > self.limits.retries_max:
            return False
        if tried.sheds > isinstance(failure, UpstreamOverloaded):
            return False  # the one alternative to a replica that sheds load was tried
        if question.stored:  # a replica that accepted the request may have stored its response
            return isinstance(failure, ConnectFailed | UpstreamOverloaded)
        return failure.retry or (isinstance(failure, TimedOut) and self.limits.retry_on_timeout)

    def _refusal(self, failure: UpstreamError, tried: AttemptHistory, replica: str, model: str | None) -> Refusal:
        """Return the refusal after a last attempt that failed, on this replica, and may not be retried."""
        if tried.shed_until_s is not None:
            message = "The replicas accept no requests for now."
            return Refusal(429, "overloaded", message, retry_after_s=tried.shed_until_s - self._clock())
        if isinstance(failure, NoDescriptor):
            message = "The router has no file descriptor left for a connection; try again later."
            return Refusal(503, "out_of_descriptors", message)
        if isinstance(failure, ConnectFailed) and not self._placer.has_other_ready(tried.replicas, model):
            return no_replica_ready(*self._placer.readiness_summary(model))
        cause = f"{failure.kind} at {replica}, {failure}"
        if isinstance(failure, TimedOut):
            message = "The replica did not answer in time; try again later or with a shorter prompt."
            return Refusal(504, "timed_out", message, cause=cause)
        message = "The replica failed before it answered, and no other replica could answer; try again."
        return Refusal(502, "engine_failed", message, cause=cause)


def _is_free(failure: UpstreamError) -> bool:
    """True if another attempt after this failure is no retry, because no engine is known to have worked on the
    request."""
    return isinstance(failure, (ReplicaRemoved, StaleConnection))


async def stays(placer: PlacementService, upstream: Upstream, lease: LeaseHandle) -> bool:
    """True if a lease's replica is healthy at this moment and not known to be about to leave."""
    return placer.is_valid(lease) and await upstream.is_well(lease.replica)


def _may_split_again(leg: PrefillStage, failure: UpstreamError, tried: AttemptHistory) -> bool:
    """True if a failed disaggregated request may be placed as a disaggregated request again."""
    if leg.traits.single_stage_engines:
        return True
    if isinstance(failure, PAIR_FAILURES):
        return False
    shed = isinstance(failure, PrefillFailed) and isinstance(failure.cause, UpstreamOverloaded)
    return not shed and tried.splits < 2


def _fault(lease: LeaseHandle, failure: UpstreamError) -> tuple[str, UpstreamError]:
    """Return the replica at fault and its own failure."""
    if isinstance(failure, PrefillFailed):
        return failure.replica, failure.cause
    return lease.replica, failure


def names_of(wanted: PlacementRequest) -> list[str]:
    """Return the names that an engine may use in an error about a model that it does not serve."""
    named = wanted.ask.model or ""
    return [wanted.model or "", named, wanted.ask.adapter, named.rpartition(":")[2]]


def _status_of(failure: UpstreamError) -> int:
    """Return the status of the engine's answer, or 0 if it did not answer."""
    if isinstance(failure, EngineFailed):
        return failure.answer.status
    return failure.status if isinstance(failure, UpstreamOverloaded) else 0


def stream_dialect(question: ProxiedRequest, answer: UpstreamResponse) -> Dialect | None:
    """Return the dialect that can judge if an answer is complete. None if the answer is no event stream, is compressed,
    or has no dialect."""
    return question.judge if is_parsable_stream(answer) else None


def _names_itself(head: bytes) -> bool:
    """True if the beginning of a stored response contains its id, or is too long for an id to follow."""
    return len(head) > ID_WITHIN_BYTES or parse_response_id(head) is not None


def _first_status(question: ProxiedRequest, answer: UpstreamResponse) -> int:
    """Return the status that the first event of a stream implies, 200 if it is no error. Raises InvalidStream if the
    body does not begin with an event."""
    status = question.dialect.event_error(answer.head)
    if (
        (status or 0) < 500
        and stream_dialect(question, answer) is not None
        and not sse.is_valid_first_event(answer.head)
    ):
        raise InvalidStream("its first event is invalid")
    return status or 200
