"""A stream that may be continued: its events are read on the way, and when it breaks, another replica goes on with it.

    body       the engine's bytes, event by event: what is said is noted, ids are taken out, the rest goes to the Relay
    go on      a break, or a hand-over: place elsewhere, send what was said so far as a prompt, relay what follows

A stream that breaks is continued once, within the budget of retries, and after no more silence than any stream may
keep. A hand-over (`hand_over`) breaks it on purpose, if it can be continued and another replica is ready, so that a
replica that is about to leave need not be waited for; this may happen as often as replicas leave.

Streams that nobody wants continued never come here: their relay reads none of their events (exchange.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.dialects import OPENAI, errors, sse
from router.core.dialects.continuing import (
    APPROXIMATE,
    EXACT,
    ContinuationPlan,
    NotContinued,
    ResumedMessages,
    ResumedStream,
    SaidToEnd,
    StreamDiffers,
    carried_of,
    resumed_of,
)
from router.core.dialects.continuing.carried import PROMPT_BYTES_MAX
from router.core.dialects.ranks import for_rank
from router.core.dialects.sse import EventSplitter
from router.core.facts.placements import Ending, Outcome
from router.core.facts.progress import is_progress
from router.core.facts.replicas import Replica
from router.edge.attempts import Call, stays
from router.edge.relay import Relay
from router.edge.retry_budget import RetryBudget
from router.http.engine_failed import EngineFailed
from router.http.exchange import EngineAnswer
from router.http.failures import (
    BrokeMidway,
    ConnectFailed,
    Diverged,
    EngineShed,
    Failure,
    HandedOver,
    Stale,
    Stalled,
    Unfinished,
)
from router.http.request import Refusal
from router.http.upstream import FULL_S, Upstream
from router.placer import LEFT, Placed, Placer
from router.reading.placing import UNSENT_MAX, placed
from router.reading.question import Question
from router.telemetry.record import RequestRecord

AGAIN_S = 0.25  # before a stream that was broken on purpose is offered to other replicas again
DIFFERS = "what was said was not said again"
_REFUSED = Outcome(Ending.REFUSED_BY_ENGINE)
# A first event has the ids of the prompt: ID_BYTES_MAX bytes for each byte of the request, or FIRST_EVENT_BYTES_MAX for
# parts that are not in it, such as an image. Later events have at most sse.EVENT_BYTES_MAX.
FIRST_EVENT_BYTES_MAX, ID_BYTES_MAX = PROMPT_BYTES_MAX + sse.EVENT_BYTES_MAX, 8


class Carrying:
    """The sink of the answers of one stream: hands its Relay what the client is to get."""

    mark = b""  # nothing takes the shortcut

    def __init__(self, plan: ContinuationPlan, question: Question, relay: Relay, answer: EngineAnswer) -> None:
        request = question.request  # a request keeps its body where a plan needs it
        self.carried = carried_of(plan, lambda: request.body)
        self.answer = answer
        self.resumed: ResumedStream | ResumedMessages | None = None  # None before another replica goes on
        self.begun = False  # an event of the present answer has come
        self.differs = False
        self.said = False  # all was said, and its end was told
        self.refused = False  # the engine said that the request itself is at fault, which ends the stream
        self._dialect = question.dialect
        self._relay = relay
        first_bytes_max = sse.EVENT_BYTES_MAX + ID_BYTES_MAX * question.wanted.body_bytes
        self._splitter = EventSplitter(bytes_max=min(FIRST_EVENT_BYTES_MAX, first_bytes_max))
        self._told: Callable[[], None] | None = None

    @property
    def early(self) -> bool:
        """Whether nothing that has passed shows that prefill is done."""
        return self._relay.early

    def body(self, data: bytes) -> None:
        """Take any bytes of the body."""
        if self._relay.paused:
            self.answer.pause()
        self._pass(self._splitter.feed(data))

    def shortcut(self) -> Callable[[bytes], None] | None:
        """None: every event is looked at."""
        return None

    def passed(self, events: int, size: int, last: tuple[bytes, bytes]) -> None:
        """Do nothing: nothing takes the shortcut."""

    def _pass(self, events: list[bytes]) -> None:
        if self.differs or not events:
            return
        if any(map(is_progress, events)):
            self.answer.moved = True
            self._has_begun()
        stream = self.resumed or self.carried
        try:
            made = b"".join([event if self._refuses(event) else stream.take(event) for event in events])
        except StreamDiffers as error:
            self.differs = True
            self.answer.fail(Diverged(str(error)))
            return
        if made:
            self._relay.body(made)

    def _has_begun(self) -> None:
        """An event of the present answer has come."""
        if not self.begun:
            self.begun = True
            self._splitter.bytes_max = sse.EVENT_BYTES_MAX
            if self._told is not None:
                self._told()

    def _refuses(self, event: bytes) -> bool:
        """Whether the engine has refused the request, with this event or before: no other replica would do better."""
        if b'"error"' in event and (self.resumed is None or self._dialect is OPENAI):
            status = self._dialect.event_error(event)
            self.refused = self.refused or (
                status is not None and errors.ending_of(status, event) is Ending.REFUSED_BY_ENGINE
            )
        return self.refused

    def end(self) -> None:
        """The body has ended. Raises BrokeMidway if it did not say that it was whole."""
        rest = self._splitter.close().rstrip()
        if rest and (sse.payload(rest) == b"[DONE]" or sse.begins_well(rest + b"\n\n")):
            self._pass([rest + b"\n\n"])
        if self.differs:
            raise Diverged(DIFFERS)
        if (self.resumed or self.carried).broken and not self.refused:
            raise Unfinished("the engine said that it failed, or ended the stream early")
        self._relay.end()

    def resume(self, answer: EngineAnswer, told: Callable[[], None]) -> None:
        """Another replica goes on with this answer; `told` is called at its first event."""
        self._splitter.close()
        self.answer, self.begun, self._told = answer, False, told
        self.resumed = resumed_of(self.carried)
        self._relay.adopt(answer)

    def say_end(self, events: bytes) -> bool:
        """All was said; these events end the stream. Returns whether it is whole with them."""
        if events:
            self._relay.body(events)
        try:
            self._relay.end()
        except Unfinished:
            return False
        self.said = True
        return True


class Continuations:
    """Relays streams that may be continued, and continues them. `silence_s_max`, which may be replaced: the time for
    which a client may wait for the next event."""

    def __init__(
        self,
        placer: Placer,
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
        self._open: set[Carrying] = set()

    async def relay(self, call: Call, carrying: Carrying, record: RequestRecord) -> BrokeMidway | None:
        """Relay a stream, on two replicas if need be. `call` is then that of the second one. Returns what broke the
        stream for good; None: all of it has come."""
        self._open.add(carrying)
        try:
            broke = await _heard(carrying)
            breaks = 0
            while broke is not None and not carrying.refused:
                given_up = (carrying.resumed or carrying.carried).given_up
                if given_up and await stays(self._placer, self._upstream, call.lease) and carrying.say_end(given_up):
                    return None
                breaks += not isinstance(broke, HandedOver)
                if not await self._go_on(call, carrying, broke, record, again=breaks > 1):
                    break
                broke = None if carrying.said else await _heard(carrying)
            if record.continued[0] and carrying.carried.approximate:  # only the last answer may have told
                record.continued = (APPROXIMATE, *record.continued[1:])
            return broke
        finally:
            self._open.discard(carrying)

    def hand_over(self, replica: str) -> int:
        """Have every stream of a replica continued elsewhere that can be, if another replica is ready. Returns how
        many."""
        if not self._placer.others_ready(frozenset((replica,))):
            return 0
        moved = [
            each for each in self._open if each.answer.replica == replica and each.begun and each.carried.can_go_on
        ]
        for carrying in moved:
            carrying.answer.fail(HandedOver("its replica is about to leave"))
        return len(moved)

    def carries(self, replica: str) -> bool:
        """Whether a stream that may be continued is open at a replica."""
        return any(each.answer.replica == replica for each in self._open)

    async def _go_on(
        self, call: Call, carrying: Carrying, broke: BrokeMidway, record: RequestRecord, *, again: bool
    ) -> bool:
        """Whether the stream goes on, or was said to its end. `again`: it was broken before, and may not be again."""
        cause, replica = broke.kind, call.lease.replica
        if isinstance(broke, Diverged):
            self._placer.finish(call.lease, LEFT, self._clock())  # nobody's fault
            record.continued, record.not_continued = ("", "", ""), "differs"
            return False
        try:
            body = carrying.carried.next_body()
        except SaidToEnd as said:
            if not carrying.say_end(said.events):
                return False
            record.continued = (EXACT, cause, replica)
            return True
        except NotContinued as why:
            record.not_continued = why.reason
            return False
        planned = isinstance(broke, HandedOver)
        if again and not planned:
            record.not_continued = "again"
            return False
        if not planned and not self._budget.covers(self._clock()):
            record.not_continued = "budget"
            return False
        if call.question.trace is not None:
            call.question.trace.failed(cause, 0, self._clock())
        blames = not (planned or isinstance(broke, Stalled))  # silence alone blames nobody
        outcome = LEFT if planned else Outcome(Ending.FAILED) if blames else _REFUSED
        self._placer.finish(call.lease, outcome, self._clock())
        self._upstream.done(call.answer)
        found = await self._in_time(call.question, replica, carrying.carried.next_path, body, planned=planned)
        if isinstance(found, str):
            record.not_continued = found
            return False
        if not planned:
            self._placer.failed(replica, cause)
            self._budget.withdraw(self._clock())
        found[0].receipt.replay = call.lease.receipt.replay
        call.lease, call.answer = found
        record.receipt = call.lease.receipt
        lease, placer, clock = call.lease, self._placer, self._clock
        carrying.resume(call.answer, lambda: placer.first_token(lease, clock()))
        record.continued = (EXACT, cause, replica)
        return True

    async def _in_time(
        self, question: Question, replica: str, path: str, body: bytes, *, planned: bool
    ) -> tuple[Placed, EngineAnswer] | str:
        """An answer that goes on, and its lease; or why there is none. A stream that was broken on purpose waits for a
        replica that takes it, and may be tried again as any request."""
        failed = False
        try:
            async with asyncio.timeout(self.silence_s_max):
                while True:
                    found = await self._elsewhere(question, replica, path, body)
                    if not planned or not isinstance(found, str):
                        return found
                    if found == "failed":
                        if failed or not self._budget.withdraw(self._clock()):
                            return found
                        failed = True
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            return "late"

    async def _elsewhere(
        self, question: Question, replica: str, path: str, body: bytes
    ) -> tuple[Placed, EngineAnswer] | str:
        tried, fresh = frozenset((replica,)), False
        for _ in range(UNSENT_MAX):
            try:
                question.wanted.may_pull = question.wanted.may_split = False
                lease = await placed(self._placer, question.wanted, tried, self._clock)
            except Refusal:
                return "replica"
            try:
                answer = await self._called(question, lease, path, body, fresh=fresh)
            except BaseException:
                self._placer.finish(lease, LEFT, self._clock())
                raise
            if not isinstance(answer, Failure):
                return lease, answer
            refused = isinstance(answer, EngineFailed) and _refused(answer.answer)
            self._placer.finish(lease, _REFUSED if refused else Outcome(answer.ending), self._clock())
            if refused:  # what we made of the request is at fault, and not the replica
                return "failed"
            self._placer.failed(lease.replica, answer.kind)
            if isinstance(answer, EngineShed):
                self._placer.rest(lease.replica, answer.retry_after_s, full=answer.full)
            if not isinstance(answer, ConnectFailed | Stale | EngineShed):
                return "failed"  # some GPU time may be spent
            tried, fresh = tried | {lease.replica}, fresh or isinstance(answer, Stale)
        return "replica"

    async def _called(
        self, question: Question, lease: Placed, path: str, body: bytes, *, fresh: bool
    ) -> EngineAnswer | Failure:
        """A stream that has begun well; a failure is returned. `fresh`: on a new connection."""
        lines, trace, replica = question.lines, question.trace, lease.replica
        if trace is not None:
            lines = [*lines, trace.called(lease.receipt, self._clock())]
        if "#" in replica and (rank := Replica(replica).rank) is not None:
            lines, body = for_rank(rank, path, lines, body)
        try:
            answer = await self._upstream.call(replica, "POST", path, lines, body, fresh=fresh)
        except EngineFailed as failure:
            self._upstream.done(failure.answer)
            return failure
        except Failure as failure:
            return failure
        if trace is not None:
            trace.answered(answer.status, self._clock(), whole=answer.whole)
        status = OPENAI.event_error(answer.head) if answer.status == 200 and answer.streams else answer.status
        if status is None:
            return answer
        full = status == 503 and await self._upstream.is_full(answer)
        self._upstream.done(answer)
        return EngineShed(status, FULL_S, full=True) if full else EngineFailed(answer)


def _refused(answer: EngineAnswer) -> bool:
    """Whether an engine calls the request itself at fault, by its status or in its first event."""
    if answer.status >= 400:
        return answer.status < 500
    status = OPENAI.event_error(answer.head)
    return status is not None and status < 500


async def _heard(carrying: Carrying) -> BrokeMidway | None:
    """Relay the present answer to its end. Returns what broke it."""
    try:
        await carrying.answer.relay(carrying)
        carrying.end()
    except BrokeMidway as error:  # an answer that fails within its head tells nobody why
        return Diverged(DIFFERS) if carrying.differs else error
    return None
