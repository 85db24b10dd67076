"""The life of one request.

    read -> parse -> identity and blocks -> match and place (a lease) -> call the replica -> relay bytes as they come
    -> close the lease at the end of the answer -> one metrics call, one log line

Nothing reaches the client before the replica's first body bytes, so until then a failure may be made good by
another replica. Bodies pass byte for byte in both directions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from itertools import count
from math import ceil

from router.core.dialects import Dialect, spoken_on
from router.core.facts import Ending, Outcome, Shed
from router.core.health import RetryBudget
from router.core.models import NoReplica
from router.exchange import Answer, BrokeMidway, Failure
from router.keys import ANYBODY, Caller
from router.placing import Placed, Placer, UnknownResponse
from router.reading import RESPONSES, Question, Reader, Refusal, made_response, none_ready
from router.receiving import BadRequest, Request
from router.relay import Relay
from router.serving import ClientLeft, date_line
from router.tallies import RequestRecord
from router.upstream import ConnectFailed, EngineFailed, TimedOut, Upstream

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
CLIENT_LEFT_STATUS = 499  # nginx's; in metrics and logs only, nobody is there to read it
ID_CHARS_MAX = 128
DETAIL_CHARS_MAX = 300

_ID_PREFIX = secrets.token_hex(8)  # of this process
_id_numbers = count(secrets.randbits(32))


class Proxy:
    """Answers requests that go to engines."""

    def __init__(
        self,
        placer: Placer,
        reader: Reader,
        upstream: Upstream,
        report: Callable[[RequestRecord], None],
        *,
        clock: Callable[[], float],
        budget: RetryBudget,
        retries_max: int,
        retry_on_timeout: bool,
        receipts: bool,
    ) -> None:
        self._placer = placer
        self._reader = reader
        self._upstream = upstream
        self._report = report
        self._clock = clock
        self._budget = budget
        self._retries_max = retries_max
        self._retry_on_timeout = retry_on_timeout
        self._receipts = receipts
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: Request, caller: Caller = ANYBODY) -> None:
        """Answer one request, whatever happens; everything about it is reported once."""
        started_s = self._clock()
        record = RequestRecord(id=request_id(request), route=_route(request.path), at_s=time.time(), tenant=caller.name)
        self.in_flight += 1
        self._idle.clear()
        try:
            await self._serve(request, caller, record, started_s)
        except Refusal as refusal:
            refuse(request, record, refusal, spoken_on(request.path))
        except (asyncio.CancelledError, ClientLeft):
            record.status, record.ending = CLIENT_LEFT_STATUS, Ending.CLIENT_LEFT
            raise
        except Exception:
            log.exception("bug: request failed inside the router", extra={"fields": {"request_id": record.id}})
            if record.status:
                request.cut()  # an answer has begun
            else:
                bug = Refusal(500, "internal_error", "The router failed; the log has the reason under this request id.")
                refuse(request, record, bug, spoken_on(request.path))
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            record.duration_s = self._clock() - started_s
            self._report(record)

    async def idle(self) -> None:
        """Return when nothing is being answered."""
        await self._idle.wait()

    async def _serve(self, request: Request, caller: Caller, record: RequestRecord, read_s: float) -> None:
        question = await self._reader.understand(request, record.id, caller)
        record.model, record.stream = question.wanted.model or "", question.wanted.ask.stream
        self._budget.deposit()
        lease, answer, called_s = await self._call(question, record, read_s)
        outcome = Outcome(Ending.CLIENT_LEFT)
        relay: Relay | None = None
        try:
            lines = self._lines(answer, lease, record, receipts=self._receipts and question.receipts)
            if answer.whole:
                request.answer(answer.status, lines, answer.head)
            else:
                begun = self._begun(question, lease, record, called_s)
                relay = Relay(
                    answer,
                    request.begin(answer.status, lines),
                    begun=begun if question.wanted.ask.stream else None,
                    strip_usage=question.dialect if question.strip_usage else None,
                )
                await answer.relay(relay)
                relay.end()
            outcome = _outcome(question, answer, relay)
        except BrokeMidway as error:
            outcome = Outcome(Ending.FAILED)
            record.error = f"broke_midway: {error}"
            self._placer.failed(lease.replica, "broke_midway")
            request.cut()  # no clean end: the client must not take this for a whole answer
        finally:
            self._upstream.done(answer)
            self._finish(lease, outcome, relay, record)

    # -- place and call ------------------------------------------------------------------------------------------

    async def _call(self, question: Question, record: RequestRecord, read_s: float) -> tuple[Placed, Answer, float]:
        """Place, call, and once more elsewhere if that may help. Returns the lease, the answer that has begun, and
        when the first replica was called. Raises Refusal."""
        lease = await self._place(question, frozenset())
        called_s = self._clock()
        record.overhead_s = called_s - read_s
        tried: frozenset[str] = frozenset()
        while True:
            record.receipt = lease.receipt
            try:
                return lease, await self._attempt(question, lease), called_s
            except Failure as failure:
                self._note(lease, failure)
                tried |= {lease.replica}
                said = failure.answer if isinstance(failure, EngineFailed) else None
                try:
                    following = await self._following(question, failure, tried)
                except BaseException:
                    self._drop(lease, said, Ending.CLIENT_LEFT)
                    raise
                if following is None and said is not None:
                    return lease, said, called_s  # what the engine said is the best answer there is
                self._drop(lease, said, Ending.FAILED)
                if following is None:
                    raise self._refusal(failure, tried) from failure
                record.retries += ((failure.kind, lease.replica),)
                lease = following
            except BaseException:
                self._drop(lease, None, Ending.CLIENT_LEFT)
                raise

    def _drop(self, lease: Placed, answer: Answer | None, ending: Ending) -> None:
        if answer is not None:
            self._upstream.done(answer)
        self._placer.finish(lease, Outcome(ending), self._clock())

    async def _following(self, question: Question, failure: Failure, tried: frozenset[str]) -> Placed | None:
        """A lease on another replica, if one may be tried and there is one."""
        now_s = self._clock()
        if len(tried) > self._retries_max or not self._may_retry(question, failure) or not self._budget.covers(now_s):
            return None
        try:
            lease = await self._place(question, tried)
        except Refusal:
            return None
        self._budget.withdraw(now_s)  # only now: where nobody is left to try, nothing is spent
        return lease

    async def _place(self, question: Question, tried: frozenset[str]) -> Placed:
        """Raises Refusal when no replica is left to try."""
        try:
            return await self._placer.place(question.wanted, tried)
        except NoReplica as error:
            raise none_ready() from error
        except UnknownResponse as error:  # in the engines' words, whoever else knows it
            unknown = f"Response with id '{str(error)[:ID_CHARS_MAX]}' not found."
            raise Refusal(404, "response_not_found", unknown, "response_id") from error
        except Shed as shed:
            raise Refusal(429, shed.code, str(shed), retry_after_s=shed.retry_after_s) from shed

    async def _attempt(self, question: Question, lease: Placed) -> Answer:
        request, streams = question.request, question.wanted.ask.stream
        answer = await self._upstream.call(
            lease.replica, request.method, request.target, question.lines, question.body, hold=not streams
        )
        if streams and not answer.whole:
            status = question.dialect.event_error(answer.head)
            if status is not None and status >= 500:
                raise EngineFailed(answer)
        if answer.status == 200 and question.dialect.aborted(answer.head):
            raise EngineFailed(answer)
        if request.path == RESPONSES and question.stored and (made := made_response(answer.head)):
            self._placer.made_response(made, lease.replica, question.wanted.tenant)
        return answer

    def _note(self, lease: Placed, failure: Failure) -> None:
        """A failed attempt is counted, and proof of death acted upon."""
        self._placer.failed(lease.replica, failure.kind)
        if isinstance(failure, ConnectFailed) and failure.refused:
            self._upstream.lost(lease.replica)
            self._placer.refused(lease.replica)

    def _may_retry(self, question: Question, failure: Failure) -> bool:
        if question.stored:
            return isinstance(failure, ConnectFailed)  # otherwise it may have been stored there
        return failure.retry or (isinstance(failure, TimedOut) and self._retry_on_timeout)

    def _refusal(self, failure: Failure, tried: frozenset[str]) -> Refusal:
        if isinstance(failure, ConnectFailed) and not self._placer.others_ready(tried):
            return none_ready()
        return _failed(failure)

    # -- answer --------------------------------------------------------------------------------------------------

    def _lines(self, answer: Answer, lease: Placed, record: RequestRecord, *, receipts: bool) -> list[bytes]:
        """Header lines for the client: the engine's, and what we have to say."""
        record.status = answer.status
        lines = answer.lines
        if receipts:
            receipt = lease.receipt
            lines.append(
                f"x-warmroute-request-id: {record.id}\r\n"
                f"x-warmroute-replica: {receipt.replica}\r\n"
                f"x-warmroute-reason: {receipt.reason}\r\n"
                f"x-warmroute-grade: {receipt.grade}\r\n"
                f"x-warmroute-predicted-cached-tokens: {receipt.predicted_cached_tokens}\r\n".encode()
            )
        else:
            lines.append(f"x-warmroute-request-id: {record.id}\r\n".encode())
        return lines

    def _begun(
        self, question: Question, lease: Placed, record: RequestRecord, called_s: float
    ) -> Callable[[bytes], bool]:
        """Looks at a piece of a stream; True when it shows that prefill is done, of which note is taken."""

        def begun(piece: bytes) -> bool:
            if not question.dialect.begun(piece):
                return False
            now_s = self._clock()
            self._placer.first_token(lease, now_s)
            record.ttft_s = now_s - called_s
            return True

        return begun

    def _finish(self, lease: Placed, outcome: Outcome, relay: Relay | None, record: RequestRecord) -> None:
        now_s = self._clock()
        self._placer.finish(lease, outcome, now_s)
        record.ending = outcome.ending
        record.usage = outcome.usage
        if record.ttft_s is not None and relay is not None:
            record.events = relay.events
            if lease.first_token_s is not None and relay.events > 2 and outcome.ending is Ending.OK:
                # Its last event came with its end: nothing is timed for each.
                record.inter_token_s = (now_s - lease.first_token_s) / (relay.events - 1)


def _outcome(question: Question, answer: Answer, relay: Relay | None) -> Outcome:
    if answer.status >= 500:
        return Outcome(Ending.FAILED)
    if answer.status >= 400:
        return Outcome(Ending.REFUSED_BY_ENGINE)
    if question.wanted.ask.stream and relay is not None:
        if question.dialect.event_error(answer.head) is not None:
            return Outcome(Ending.FAILED)
        return Outcome(Ending.OK, question.dialect.stream_usage(relay.tail), relay.events)
    return Outcome(Ending.OK, question.dialect.usage(answer.head) if answer.whole else None)


def refuse(request: Request, record: RequestRecord, refusal: Refusal | BadRequest, dialect: Dialect) -> None:
    """The router's own error, in the words of the dialect."""
    record.status, record.ending = refusal.status, "refused"
    record.error, record.detail = refusal.code, str(refusal)[:DETAIL_CHARS_MAX]
    lines = [date_line(), b"content-type: application/json\r\n", f"x-warmroute-request-id: {record.id}\r\n".encode()]
    param, after_s = (refusal.param, refusal.retry_after_s) if isinstance(refusal, Refusal) else (None, None)
    if refusal.status == 401:
        lines.append(b"WWW-Authenticate: Bearer\r\n")  # RFC 9110 section 11.6.1
    if refusal.status in (429, 503):
        lines.append(b"Retry-After: %d\r\n" % (RETRY_AFTER_S if after_s is None else max(1, ceil(after_s))))
    request.answer(refusal.status, lines, dialect.error(refusal.status, refusal.code, str(refusal), param))


def request_id(request: Request) -> str:
    """The client's own id if it is a sane one, else a new one."""
    given = request.header(b"x-request-id")
    if 0 < len(given) <= ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return f"{_ID_PREFIX}{next(_id_numbers):016x}"


def _route(path: str) -> str:
    """The label of a path: response ids are left out."""
    return RESPONSES + "/{id}" if path.startswith(RESPONSES + "/") else path


def _failed(failure: Failure) -> Refusal:
    if isinstance(failure, TimedOut):
        return Refusal(504, "timed_out", "The replica did not answer in time.")
    return Refusal(502, "engine_failed", "The replica failed before it answered.")
