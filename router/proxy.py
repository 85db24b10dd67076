"""The life of one request.

    read -> parse -> identity and blocks -> match and place (a lease) -> call the replica -> relay bytes as they come
    -> close the lease at the end of the answer -> one metrics call, one log line

Nothing reaches the client before the replica's first body bytes, so until then a failure may be made good by
another replica. Bodies pass byte for byte in both directions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from uuid import uuid4

from aiohttp import web
from multidict import CIMultiDict

from router.core.dialects import Dialect, spoken_on
from router.core.facts import Ending, Outcome
from router.core.fleet import Lease
from router.core.health import RetryBudget
from router.core.models import NoReplica
from router.core.routing import Router
from router.metrics import RequestRecord
from router.reading import HOP_HEADERS, RESPONSES, Question, Reader, Refusal, none_ready, read
from router.relay import ClientLeft, Relayed, relay
from router.upstream import Answer, BrokeMidway, ConnectFailed, EngineFailed, Failure, TimedOut, Upstream

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
CLIENT_LEFT_STATUS = 499  # nginx's; in metrics and logs only, nobody is there to read it
ID_CHARS_MAX = 128
DETAIL_CHARS_MAX = 300


class Proxy:
    """Answers requests that go to engines."""

    def __init__(
        self,
        router: Router,
        reader: Reader,
        upstream: Upstream,
        report: Callable[[RequestRecord], None],
        failed: Callable[[str, str], None],
        lost: Callable[[str], None],
        *,
        clock: Callable[[], float],
        budget: RetryBudget,
        retries_max: int,
        retry_on_timeout: bool,
        receipts: bool,
    ) -> None:
        self._router = router
        self._reader = reader
        self._upstream = upstream
        self._report = report
        self._failed = failed
        self._lost = lost
        self._clock = clock
        self._budget = budget
        self._retries_max = retries_max
        self._retry_on_timeout = retry_on_timeout
        self._receipts = receipts
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whatever happens; everything about it is reported once."""
        record = RequestRecord(id=request_id(request), route=_route(request.path), at_s=time.time())
        started_s = self._clock()
        self.in_flight += 1
        self._idle.clear()
        try:
            return await self._serve(request, record)
        except Refusal as refusal:
            return refuse(request, record, refusal, spoken_on(request.path))
        except asyncio.CancelledError:
            record.status, record.ending = CLIENT_LEFT_STATUS, Ending.CLIENT_LEFT
            raise
        except ClientLeft:
            record.status, record.ending = CLIENT_LEFT_STATUS, Ending.CLIENT_LEFT
            return web.Response(status=CLIENT_LEFT_STATUS)  # for nobody
        except Exception:
            log.exception("bug: request failed inside the router", extra={"fields": {"request_id": record.id}})
            bug = Refusal(500, "internal_error", "The router failed; the log has the reason under this request id.")
            return refuse(request, record, bug, spoken_on(request.path))
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            record.duration_s = self._clock() - started_s
            self._report(record)

    async def idle(self) -> None:
        """Return when nothing is being answered."""
        await self._idle.wait()

    async def _serve(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        body = await read(request)
        read_s = self._clock()
        question = await self._reader.understand(request, body, record.id)
        record.model, record.stream = question.model or "", question.ask.stream
        self._budget.deposit()
        lease, answer, called_s = await self._call(question, record, read_s)
        relayed = Relayed()
        outcome = Outcome(Ending.CLIENT_LEFT)
        try:
            begun = self._begun(question, lease, record, called_s)
            waiting = question.ask.stream and not answer.whole and not begun(answer.head)
            response = self._head(request, answer, lease, record, question)
            if answer.whole and not question.strip_usage:
                relayed.see(answer.head)
            else:
                await _prepare(response, request)
                strip = question.dialect if question.strip_usage else None
                await relay(
                    answer.head, answer.pieces(), response, relayed, self._clock, strip, begun if waiting else None
                )
            outcome = _outcome(question, answer, relayed)
        except BrokeMidway as error:
            outcome = Outcome(Ending.FAILED)
            record.error = f"broke_midway: {error}"
            self._failed(lease.replica, "broke_midway")
            if request.transport is not None:
                request.transport.close()  # no clean end: the client must not take this for a whole answer
        finally:
            answer.close()
            self._finish(lease, outcome, relayed, record)
        return response

    # -- place and call ------------------------------------------------------------------------------------------

    async def _call(self, question: Question, record: RequestRecord, read_s: float) -> tuple[Lease, Answer, float]:
        """Place, call, and once more elsewhere if that may help. Returns the lease, the answer that has begun, and
        when the first replica was called. Raises Refusal."""
        lease = self._place(question, frozenset())
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
                following = self._following(question, failure, tried)
                if following is None and isinstance(failure, EngineFailed):
                    return lease, failure.answer, called_s  # what the engine said is the best answer there is
                if isinstance(failure, EngineFailed):
                    failure.answer.close()
                self._router.finish(lease, Outcome(Ending.FAILED), self._clock())
                if following is None:
                    raise self._refusal(failure, tried) from failure
                record.retries += ((failure.kind, lease.replica),)
                lease = following
            except BaseException:
                self._router.finish(lease, Outcome(Ending.CLIENT_LEFT), self._clock())
                raise

    def _following(self, question: Question, failure: Failure, tried: frozenset[str]) -> Lease | None:
        """A lease on another replica, if one may be tried and there is one."""
        now_s = self._clock()
        if len(tried) > self._retries_max or not self._may_retry(question, failure) or not self._budget.covers(now_s):
            return None
        try:
            lease = self._place(question, tried)
        except Refusal:
            return None
        self._budget.withdraw(now_s)  # only now: where nobody is left to try, nothing is spent
        return lease

    def _place(self, question: Question, tried: frozenset[str]) -> Lease:
        """Raises Refusal when no replica is left to try."""
        try:
            return self._router.route(
                question.ask,
                question.model,
                question.chain,
                self._clock(),
                ring_key=question.ring_key,
                tokens=question.tokens,
                body_tokens=question.body_tokens,
                exclude=tried,
                only=question.only,
            )
        except NoReplica as error:
            raise none_ready() from error

    async def _attempt(self, question: Question, lease: Lease) -> Answer:
        answer = await self._upstream.call(
            lease.replica,
            question.method,
            question.target,
            question.headers,
            question.body,
            hold=not question.ask.stream,
        )
        if question.ask.stream and not answer.whole:
            status = question.dialect.event_error(answer.head)
            if status is not None and status >= 500:
                raise EngineFailed(answer)
        if answer.status == 200 and question.dialect.aborted(answer.head):
            raise EngineFailed(answer)
        if question.path.startswith(RESPONSES):
            self._reader.owners.learn(answer.head, lease.replica)
        return answer

    def _note(self, lease: Lease, failure: Failure) -> None:
        """A failed attempt is counted, and proof of death acted upon."""
        self._failed(lease.replica, failure.kind)
        if isinstance(failure, ConnectFailed) and failure.refused:
            for id_ in self._router.fleet.same_server(lease.replica):
                if self._router.observe_health(id_, False, "connection refused", proof=True):
                    self._router.forget(id_)
                    fields = {"replica": id_, "why": "connection refused"}
                    log.warning("replica does not answer as it should", extra={"fields": fields})
            self._lost(lease.replica)

    def _may_retry(self, question: Question, failure: Failure) -> bool:
        if _stored(question):
            return isinstance(failure, ConnectFailed)  # otherwise it may have been stored there
        return failure.retry or (isinstance(failure, TimedOut) and self._retry_on_timeout)

    def _refusal(self, failure: Failure, tried: frozenset[str]) -> Refusal:
        if isinstance(failure, ConnectFailed) and not any(m.id not in tried for m in self._router.fleet.ready()):
            return none_ready()
        return _failed(failure)

    # -- answer --------------------------------------------------------------------------------------------------

    def _head(
        self, request: web.Request, answer: Answer, lease: Lease, record: RequestRecord, question: Question
    ) -> web.StreamResponse:
        record.status = answer.status
        headers = CIMultiDict((k, v) for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS)
        headers["x-warmroute-request-id"] = record.id
        if self._receipts:
            receipt = lease.receipt
            headers["x-warmroute-replica"] = receipt.replica
            headers["x-warmroute-reason"] = receipt.reason
            headers["x-warmroute-grade"] = receipt.grade
            headers["x-warmroute-predicted-cached-tokens"] = str(receipt.predicted_cached_tokens)
        if answer.whole and not question.strip_usage:
            return web.Response(status=answer.status, headers=headers, body=answer.head)
        return web.StreamResponse(status=answer.status, headers=headers)

    def _begun(
        self, question: Question, lease: Lease, record: RequestRecord, called_s: float
    ) -> Callable[[bytes], bool]:
        """Looks at a piece of a stream; True when it shows that prefill is done, of which note is taken."""

        def begun(piece: bytes) -> bool:
            if not question.dialect.begun(piece):
                return False
            now_s = self._clock()
            self._router.first_token(lease, now_s)
            record.ttft_s = now_s - called_s
            return True

        return begun

    def _finish(self, lease: Lease, outcome: Outcome, relayed: Relayed, record: RequestRecord) -> None:
        now_s = self._clock()
        self._router.finish(lease, outcome, now_s)
        record.ending = outcome.ending
        record.usage = outcome.usage
        if record.ttft_s is not None:
            record.events = relayed.events
            if lease.first_token_s is not None and relayed.events > 2 and relayed.last_s:
                record.inter_token_s = (relayed.last_s - lease.first_token_s) / (relayed.events - 1)


async def _prepare(response: web.StreamResponse, request: web.Request) -> None:
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise ClientLeft from error


def _outcome(question: Question, answer: Answer, relayed: Relayed) -> Outcome:
    if answer.status >= 500:
        return Outcome(Ending.FAILED)
    if answer.status >= 400:
        return Outcome(Ending.REFUSED_BY_ENGINE)
    if question.ask.stream and not answer.whole:
        if question.dialect.event_error(answer.head) is not None:
            return Outcome(Ending.FAILED)
        return Outcome(Ending.OK, question.dialect.stream_usage(relayed.tail), relayed.events)
    return Outcome(Ending.OK, question.dialect.usage(answer.head) if answer.whole else None)


def _stored(question: Question) -> bool:
    """Whether the engine may keep the answer, so that it must not be made twice."""
    return question.path.startswith(RESPONSES) and question.ask.stored is not False


def refuse(request: web.Request, record: RequestRecord, refusal: Refusal, dialect: Dialect) -> web.Response:
    """The router's own error, in the words of the dialect."""
    record.status, record.ending = refusal.status, "refused"
    record.error, record.detail = refusal.code, str(refusal)[:DETAIL_CHARS_MAX]
    headers = {"x-warmroute-request-id": record.id}
    if refusal.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    body = dialect.error(refusal.status, refusal.code, str(refusal), refusal.param)
    return web.Response(status=refusal.status, body=body, content_type="application/json", headers=headers)


def request_id(request: web.Request) -> str:
    """The client's own id if it is a sane one, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if 0 < len(given) <= ID_CHARS_MAX and given.isascii() and given.isprintable() else uuid4().hex


def _route(path: str) -> str:
    """The label of a path: response ids are left out."""
    return RESPONSES + "/{id}" if path.startswith(RESPONSES + "/") else path


def _failed(failure: Failure) -> Refusal:
    if isinstance(failure, TimedOut):
        return Refusal(504, "timed_out", "The replica did not answer in time.")
    return Refusal(502, "engine_failed", "The replica failed before it answered.")
