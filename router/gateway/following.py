"""From a lease to its end: what a gateway shows of the answer, and what the client is told.

The gateway says which endpoint served. If that is another one than was picked, it has gone down the list since the
first could not be reached: then the lease moves, and the first replica is charged with it.

Of a request that pulls (core/fleet/pulls.py) the gateway is asked to show the answer: engines send heads before they
prefill, so only the first piece says that the pull is over. Where none comes in time the source rests. The request goes
on waiting, since a gateway hears only answers to what it asks: nothing can be sent again or ended from here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from grpc.aio import EOF

from router.core.facts.placements import Ending, Outcome, Shed
from router.core.facts.progress import is_progress
from router.core.fleet.models import NoReplica
from router.core.observatory.explain import settled
from router.core.observatory.places import places_of
from router.gateway import extproc_pb2 as pb
from router.gateway import hints, words
from router.gateway.answer import UNSEEN, AnswerWatch
from router.gateway.endpoints import endpoint_of
from router.gateway.incoming import DUPLEX, NONE, STREAMED
from router.gateway.parts import PickerParts
from router.http.request import ADDRESS_HEADERS, OWN_HEADERS
from router.http.upstream import FULL_S
from router.placer import Placed, UnknownResponse
from router.reading.answering import CLIENT_LEFT_STATUS, COMPUTED, may_not_hear, receipt_text
from router.reading.question import Question
from router.settings.keys import Caller
from router.telemetry.catalogue import FALLBACK
from router.telemetry.record import RequestRecord

ALIVE_S = 0.5  # least time between two signs of life of a replica
ASKED_MAX = 8  # answers that may be asked for in vain before it counts as known that the gateway sends none
SHOWN_MIN = 64  # answers that are asked for before only a sample is: speeds must be known first
LINGER_S_MAX = 600.0
_ADDRESSES = frozenset(name.decode() for name in ADDRESS_HEADERS)
_OWN = OWN_HEADERS.decode()


class Following:
    """One request that has been picked for, or is about to be."""

    def __init__(
        self, parts: PickerParts, question: Question, record: RequestRecord, caller: Caller, answers: int
    ) -> None:
        """`answers`: how the gateway shows the answer's body. Where it does not, it may be asked to."""
        self._parts = parts
        self._question = question
        self._record = record
        self._caller = caller
        self._relayed, self._duplex = answers != NONE, answers == DUPLEX
        self._pieces = answers in (STREAMED, DUPLEX)  # they come as the engine sends them
        ratio = parts.rules.sampled_ratio
        sampled = random.random() < ratio or (parts.shown < SHOWN_MIN and ratio > 0)  # noqa: S311 - no secret
        self._asks = sampled and not self._relayed and parts.asked < ASKED_MAX
        # Whether the body of its answer comes by here, as far as known before it does.
        self.shown = self._relayed or (self._asks and parts.answers_come)
        self.lease: Placed | None = None
        self._told_s = self._alive_s = 0.0  # times at which the gateway was told, and of the last sign of life
        self._watch = AnswerWatch(question, parts.rules.answer_bytes_max, self._begun)
        self._stall: asyncio.TimerHandle | None = None  # when the pull counts as stalled; None: there is none under way
        self.lingers = False  # the gateway ended the stream as soon as it was told, and tells no end of the answer

    @property
    def shows_stalls(self) -> bool:
        """Whether the first piece of its answer is seen when it comes, or may be if the gateway, which shows heads of
        answers, is asked for it."""
        parts = self._parts
        return self._pieces or (not self._relayed and parts.heads_told and parts.asked < ASKED_MAX)

    @property
    def may_be_released(self) -> bool:
        """Whether Envoy carries the answer on without us."""
        return self.lease is not None and not self._relayed and not self._watch.seen

    def begin(self, lease: Placed) -> None:
        """The request has a lease."""
        self.lease, self._told_s = lease, self._parts.clock()
        self._record.receipt = lease.receipt
        usage = self._parts.desk.usage
        usage.ask(self._question, lease.replica)
        if usage.takes_out(self._question, lease.replica):
            self._watch.take_usage_out()
        if lease.receipt.pull is not None:
            self._asks = not self._relayed
            within_s = self._parts.rules.pull_stall_s + lease.receipt.ttft_p90_ms / 1e3
            self._stall = asyncio.get_running_loop().call_later(within_s, self._stalled, lease.receipt.pull.source)

    async def follow(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Answer what comes until the stream ends. `read` returns the next message, and EOF behind the last one."""
        while (message := await read()) is not EOF:
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                await write(await self._head(message))
            elif kind == "response_body":
                await write(self._body(message.response_body))
            elif kind == "response_trailers":
                self._watch.ended = True
                await write(words.PASS_TRAILERS)
            elif kind == "request_body":  # of a gateway that streams bodies while the request is on its way
                await write(words.CONTINUE_BODY)
            elif kind == "request_trailers":
                await write(words.CONTINUE_TRAILERS)

    # -- the answer ----------------------------------------------------------------------------------------------

    async def _head(self, message: pb.ProcessingRequest) -> bytes:
        """The head of the answer came. Returns what Envoy makes of it."""
        parts, watch = self._parts, self._watch
        head: pb.HttpHeaders = message.response_headers
        served = hints.served_by(message)
        fields = {header.key: header.raw_value or header.value.encode() for header in head.headers.headers}
        status = fields.get(":status", b"")
        watch.status = int(status) if status.isdigit() else 0
        watch.judged = (
            fields.get("content-type", b"").startswith(b"text/event-stream") and "content-encoding" not in fields
        )
        watch.ended = head.end_of_stream
        if watch.ended or watch.status != 200 or not watch.judged:
            self._pulled()  # no piece that could say so can be read
        self._record.status, parts.heads_told = watch.status, True
        if self._question.trace is not None:
            self._question.trace.answered(watch.status, parts.clock(), whole=head.end_of_stream)
        parts.served_told = parts.served_told or bool(served)
        watch.of_gateway = parts.served_told and not served and watch.status >= 500
        if served and self.lease is not None and served != endpoint_of(self.lease.replica):
            await self._move(self.lease, served)
        if self.lease is not None and not watch.of_gateway:
            self._heed(self.lease, fields)
        return self._told(fields, served, end=head.end_of_stream)

    def _heed(self, lease: Placed, fields: dict[str, bytes]) -> None:
        """Take the answer as a sign of life, and let a replica rest that asks for it."""
        self._parts.placer.alive(lease.replica)
        after, status, leg = fields.get("retry-after", b""), self._watch.status, lease.receipt.leg
        if status in (429, 503) and after.isdigit():
            self._parts.placer.rest(lease.replica, float(after))
        elif status == 404:  # the body, which would say what was not found, may not come by here
            self._parts.placer.lacks(lease.replica, "")
        elif status >= 500 and leg is not None:  # no engine says which of the two is at fault
            self._parts.placer.pair_broke(leg.replica, lease.replica)

    async def _move(self, first: Placed, served: str) -> None:
        """Another endpoint served: move the lease there."""
        parts, wanted = self._parts, self._question.wanted
        self._pulled()
        wanted.may_pull = False  # what it was told was decided for the first one
        parts.placer.finish(first, Outcome(Ending.UNREACHED), parts.clock())
        parts.placer.failed(first.replica, FALLBACK)
        self._record.retries += ((FALLBACK, first.replica),)
        wanted.among = frozenset((served,))
        try:
            self.lease = await parts.placer.place(wanted, frozenset((first.replica,)))
            self._record.receipt = self.lease.receipt
        except (NoReplica, Shed, UnknownResponse):  # nobody whom we know: the gateway chose among its own
            self.lease = None

    def _told(self, fields: dict[str, bytes], served: str, *, end: bool) -> bytes:
        """What the client gets of the head: the engine's headers and ours."""
        rules, lease, record, question = self._parts.rules, self.lease, self._record, self._question
        removed = [name for name in fields if name.startswith(_OWN)]
        if rules.receipts and question.receipts and lease is not None:
            text = receipt_text(lease.receipt, record, isolated=may_not_hear(self._caller, record))
        else:
            text = f"x-warmroute-request-id: {record.id}\r\n"
            removed += [name for name in fields if name in _ADDRESSES and not question.receipts]
        if record.warning:
            text += f"x-warmroute-warning: {record.warning}\r\n"
        if rules.conformance and served:
            text += f"{hints.CONFORMANCE_SERVED}: {served}\r\n"
        elif rules.conformance and hints.CONFORMANCE_SERVED in fields:
            removed.append(hints.CONFORMANCE_SERVED)  # a backend's own word stands in for nobody's
        set_ = _pairs(text)
        lost: list[bytes] = []
        if removed:
            kept = {name for name, _ in set_}
            lost = [name for each in removed if (name := each.encode()) not in kept]
        asks = self._asks and not end
        self._parts.asked += asks
        return words.to_client(set_, lost, streamed=asks)

    def _body(self, body: pb.HttpBody) -> bytes:
        """A piece of the answer came. Returns what Envoy makes of it."""
        now_s, lease = self._parts.clock(), self.lease
        if self._asks and not self._watch.seen:
            self._parts.asked, self._parts.answers_come = 0, True
            self._parts.shown += 1
        if (
            lease is not None
            and now_s - self._alive_s >= ALIVE_S
            and (not self._watch.judged or is_progress(body.body))
        ):
            self._alive_s = now_s
            self._parts.placer.alive(lease.replica)
        instead = self._watch.take(body.body, end=body.end_of_stream)
        if self._duplex:
            piece = body.body if instead is None else instead
            return words.answer_piece(piece, end=body.end_of_stream, duplex=True)
        if instead is None or instead == body.body:
            return words.PASS_BODY
        return words.answer_piece(instead, end=body.end_of_stream, duplex=False)

    def _begun(self) -> None:
        """A piece of the stream shows that prefill is done."""
        self._pulled()
        if self.lease is not None:
            now_s = self._parts.clock()
            if self._question.wanted.ask.stream:  # otherwise its prompt's length may be a guess
                self._parts.placer.first_token(self.lease, now_s)
            self._record.ttft_s = now_s - self._told_s
            due_s = self._question.wanted.due_s
            if due_s is not None:
                self._record.in_time = now_s <= due_s

    def _pulled(self) -> None:
        """Whatever was pulled is there, or nobody will say any more."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self, source: str) -> None:
        """No first piece came in time, which says nothing of a gateway that has shown no answer yet."""
        self._stall = None
        if self._pieces or self._parts.answers_come:
            self._parts.asked = 0  # unanswered asks in a row: the gateway shows answers, and this engine sent none
            self._parts.placer.pull_stalled(source)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The stream has ended: give the lease back, and record how the answer ended, as far as that was seen."""
        self._pulled()
        parts, lease, record, now_s = self._parts, self.lease, self._record, self._parts.clock()
        model = self._question.wanted.model
        outcome = self._watch.outcome(parts.placer.context_tokens(model), heads_told=parts.heads_told)
        if lease is not None and outcome.usage is not None and lease.receipt.leg is not None:
            outcome.usage = lease.receipt.found(outcome.usage)
        record.ending, record.usage = record.ending or outcome.ending, outcome.usage
        if not record.status and outcome.ending is Ending.CLIENT_LEFT:
            record.status = CLIENT_LEFT_STATUS
        if lease is None:
            return
        self._learn(lease.replica, outcome)
        if self._watch.status == 503 and outcome.ending is Ending.REFUSED_BY_ENGINE:
            parts.placer.rest(lease.replica, FULL_S, full=True)
        miss = lease.receipt.miss
        if miss is not None and outcome.ending in COMPUTED:
            record.miss = settled(miss, outcome.usage)
            record.places = places_of(record.miss, replay=lease.receipt.replay)
        if record.ttft_s is not None:
            record.events = self._watch.events
            if lease.first_token_s is not None and record.events > 2 and outcome.ending is Ending.OK:
                record.inter_token_s = (now_s - lease.first_token_s) / (record.events - 1)
        if self.lingers and not (self._watch.status and not record.stream):
            left_s = self._told_s + _expected_s(lease) - now_s
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._finish, lease, UNSEEN)
        else:
            parts.placer.finish(lease, outcome, now_s)

    def _learn(self, replica: str, outcome: Outcome) -> None:
        """Learn from a stream whether its replica sends usage that nobody asked for."""
        question, watch = self._question, self._watch
        left_alone = question.asks_usage and not question.usage_asked and watch.judged and watch.ended
        if watch.usage_unasked or (left_alone and outcome.ending is Ending.OK and not outcome.unseen):
            unasked = watch.usage_unasked or question.dialect.stream_usage(watch.tail) is not None
            self._parts.desk.usage.learn(question, replica, unasked=unasked)

    def _finish(self, lease: Placed, outcome: Outcome) -> None:
        self._parts.placer.finish(lease, outcome, self._parts.clock())


def _pairs(text: str) -> list[words.Header]:
    """Names and values of header lines."""
    pairs: list[words.Header] = []
    for line in text.encode().split(b"\r\n"):
        if line:
            name, _, value = line.partition(b": ")
            pairs.append((name, value))
    return pairs


def _expected_s(lease: Placed) -> float:
    """Seconds that the answer should take, by what is known of its replica; LINGER_S_MAX at most."""
    for each in lease.receipt.candidates:
        if each.id == lease.replica:
            return min((each.pending_ms + each.kv_wait_ms + each.uncached_ms + each.decode_ms) / 1e3, LINGER_S_MAX)
    return 0.0
