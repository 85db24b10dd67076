"""One request from its lease to its end: observes the answer and sets the client's headers.

The gateway reports the endpoint that served. If this is not the picked one, the gateway could not reach the first
endpoints of the list. The lease then moves, and the failure is attributed to the first replica.

If a request has a P2P KV transfer (core/fleet/pulls.py), the gateway is requested to send the answer. Engines send
heads before they prefill, so only the first piece shows that the transfer is over. If no piece arrives in time, the
source gets a cooldown. The request continues to wait, since a gateway only accepts answers to its own messages: the
picker can neither resend nor end it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from grpc.aio import EOF

from router.config.api_keys import Caller
from router.core.fleet.models import NoReplicaReady
from router.core.insights.breakdown import with_actual_usage
from router.core.insights.token_funnel import token_fates
from router.core.types.placements import EndReason, Outcome, Shed
from router.core.types.progress import is_progress
from router.extproc import extproc_pb2 as pb
from router.extproc import metadata, processing_responses
from router.extproc.endpoints import endpoint_of
from router.extproc.picker_context import ServiceContext
from router.extproc.request_body import DUPLEX, NONE, STREAMED
from router.extproc.response_observer import UNOBSERVED, ResponseObserver
from router.http.request import ADDRESS_HEADERS, OWN_HEADERS
from router.http.upstream import FULL_S
from router.ingress.local_responses import CLIENT_LEFT_STATUS, COMPUTED, hide_cross_tenant, receipt_text
from router.ingress.proxied_request import ProxiedRequest
from router.placement_api import LeaseHandle, UnknownResponse
from router.telemetry.catalogue import FALLBACK
from router.telemetry.request_record import RequestRecord

ALIVE_S = 0.5  # minimum interval between two signs of life of a replica
UNANSWERED_REQUESTS_MAX = 8  # requested answers without a piece after which the gateway is known to send none
FULL_SAMPLING_UNTIL = 64  # answers that are requested before sampling begins: speeds must be known first
LINGER_S_MAX = 600.0
_ADDRESSES = frozenset(name.decode() for name in ADDRESS_HEADERS)
_OWN = OWN_HEADERS.decode()


class ResponseTracker:
    """One request that has an endpoint, or is about to get one."""

    def __init__(
        self, parts: ServiceContext, question: ProxiedRequest, record: RequestRecord, caller: Caller, answers: int
    ) -> None:
        """`answers`: the gateway's mode for the body of the answer. If it sends no body, it may be requested to."""
        self._parts = parts
        self._question = question
        self._record = record
        self._caller = caller
        self._relayed, self._duplex = answers != NONE, answers == DUPLEX
        self._pieces = answers in (STREAMED, DUPLEX)  # pieces arrive as the engine sends them
        ratio = parts.settings.extproc.response_sample_ratio
        sampled = random.random() < ratio or (parts.shown < FULL_SAMPLING_UNTIL and ratio > 0)  # noqa: S311 - no secret
        self._asks = sampled and not self._relayed and parts.asked < UNANSWERED_REQUESTS_MAX
        # True if the body of its answer is expected to pass through the picker.
        self.shown = self._relayed or (self._asks and parts.answers_come)
        self.lease: LeaseHandle | None = None
        self._told_s = self._alive_s = 0.0  # time of the response to the gateway, and of the last sign of life
        self._watch = ResponseObserver(
            question, parts.settings.limits.buffered_response_bytes_max, self._on_first_token
        )
        self._stall: asyncio.TimerHandle | None = None  # timer of the stalled transfer; None: no transfer in flight
        # the gateway ended the stream after the response, and does not report the end of the answer
        self.lingers = False

    @property
    def shows_stalls(self) -> bool:
        """True if the first piece of its answer is visible at once. It may also become so: a gateway that sends heads
        of answers can be requested to send the pieces."""
        parts = self._parts
        return self._pieces or (not self._relayed and parts.heads_told and parts.asked < UNANSWERED_REQUESTS_MAX)

    @property
    def can_detach(self) -> bool:
        """True if Envoy carries the answer without the picker."""
        return self.lease is not None and not self._relayed and not self._watch.seen

    def begin(self, lease: LeaseHandle) -> None:
        """Take the lease of the request."""
        self.lease, self._told_s = lease, self._parts.clock()
        self._record.receipt = lease.receipt
        usage = self._parts.ingress.usage
        usage.ask(self._question, lease.replica)
        if usage.takes_out(self._question, lease.replica):
            self._watch.take_usage_out()
        if lease.receipt.pull is not None:
            self._asks = not self._relayed
            within_s = self._parts.settings.p2p.timeout_s + lease.receipt.ttft_p90_ms / 1e3
            self._stall = asyncio.get_running_loop().call_later(
                within_s, self._on_pull_timeout, lease.receipt.pull.source
            )

    async def follow(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Answer messages until the stream ends. `read` returns the next message, and EOF after the last one."""
        while (message := await read()) is not EOF:
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                await write(await self._head(message))
            elif kind == "response_body":
                await write(self._body(message.response_body))
            elif kind == "response_trailers":
                self._watch.ended = True
                await write(processing_responses.PASS_TRAILERS)
            elif kind == "request_body":  # from a gateway that streams bodies while the request is in flight
                await write(processing_responses.CONTINUE_BODY)
            elif kind == "request_trailers":
                await write(processing_responses.CONTINUE_TRAILERS)

    # -- the answer ----------------------------------------------------------------------------------------------

    async def _head(self, message: pb.ProcessingRequest) -> bytes:
        """Handle the head of the answer. Return the response to Envoy."""
        parts, watch = self._parts, self._watch
        head: pb.HttpHeaders = message.response_headers
        served = metadata.served_by(message)
        fields = {header.key: header.raw_value or header.value.encode() for header in head.headers.headers}
        status = fields.get(":status", b"")
        watch.status = int(status) if status.isdigit() else 0
        watch.judged = (
            fields.get("content-type", b"").startswith(b"text/event-stream") and "content-encoding" not in fields
        )
        watch.ended = head.end_of_stream
        if watch.ended or watch.status != 200 or not watch.judged:
            self._cancel_pull_timer()  # no readable piece will show it
        self._record.status, parts.heads_told = watch.status, True
        if self._question.trace is not None:
            self._question.trace.record_response(watch.status, parts.clock(), whole=head.end_of_stream)
        parts.served_told = parts.served_told or bool(served)
        watch.of_gateway = parts.served_told and not served and watch.status >= 500
        if served and self.lease is not None and served != endpoint_of(self.lease.replica):
            await self._move_lease(self.lease, served)
        if self.lease is not None and not watch.of_gateway:
            self._apply_signals(self.lease, fields)
        return self._response_headers(fields, served, end=head.end_of_stream)

    def _apply_signals(self, lease: LeaseHandle, fields: dict[str, bytes]) -> None:
        """Take the answer as a sign of life, and start a cooldown of the replica if the answer requests one."""
        self._parts.placer.note_progress(lease.replica)
        after, status, leg = fields.get("retry-after", b""), self._watch.status, lease.receipt.leg
        if status in (429, 503) and after.isdigit():
            self._parts.placer.set_cooldown(lease.replica, float(after))
        elif status == 404:  # the body has the reason, but may not pass through the picker
            self._parts.placer.lacks(lease.replica, "")
        elif status >= 500 and leg is not None:  # no engine reports which of the two is at fault
            self._parts.placer.report_pair_failure(leg.replica, lease.replica)

    async def _move_lease(self, first: LeaseHandle, served: str) -> None:
        """Move the lease to the endpoint that served in place of the first one."""
        parts, wanted = self._parts, self._question.wanted
        self._cancel_pull_timer()
        wanted.may_pull = False  # the transfer was decided for the first replica
        parts.placer.finish(first, Outcome(EndReason.UNREACHED), parts.clock())
        parts.placer.count_attempt_failure(first.replica, FALLBACK)
        self._record.retries += ((FALLBACK, first.replica),)
        wanted.allowed_addresses = frozenset((served,))
        try:
            self.lease = await parts.placer.place(wanted, frozenset((first.replica,)))
            self._record.receipt = self.lease.receipt
        except (NoReplicaReady, Shed, UnknownResponse):  # an unknown replica: the gateway chose among its own
            self.lease = None

    def _response_headers(self, fields: dict[str, bytes], served: str, *, end: bool) -> bytes:
        """Return the header mutations for the client: the engine's headers and the router's."""
        settings, lease, record, question = self._parts.settings, self.lease, self._record, self._question
        removed = [name for name in fields if name.startswith(_OWN)]
        if settings.api.receipts and question.receipts and lease is not None:
            text = receipt_text(lease.receipt, record, isolated=hide_cross_tenant(self._caller, record))
        else:
            text = f"x-warmroute-request-id: {record.id}\r\n"
            removed += [name for name in fields if name in _ADDRESSES and not question.receipts]
        if record.warning:
            text += f"x-warmroute-warning: {record.warning}\r\n"
        if settings.extproc.conformance and served:
            text += f"{metadata.CONFORMANCE_SERVED}: {served}\r\n"
        elif settings.extproc.conformance and metadata.CONFORMANCE_SERVED in fields:
            removed.append(metadata.CONFORMANCE_SERVED)  # a backend must not report the serving endpoint itself
        set_ = _pairs(text)
        lost: list[bytes] = []
        if removed:
            kept = {name for name, _ in set_}
            lost = [name for each in removed if (name := each.encode()) not in kept]
        asks = self._asks and not end
        self._parts.asked += asks
        return processing_responses.to_client(set_, lost, streamed=asks)

    def _body(self, body: pb.HttpBody) -> bytes:
        """Handle a piece of the answer. Return the response to Envoy."""
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
            self._parts.placer.note_progress(lease.replica)
        instead = self._watch.take(body.body, end=body.end_of_stream)
        if self._duplex:
            piece = body.body if instead is None else instead
            return processing_responses.response_body_chunk(piece, end=body.end_of_stream, duplex=True)
        if instead is None or instead == body.body:
            return processing_responses.PASS_BODY
        return processing_responses.response_body_chunk(instead, end=body.end_of_stream, duplex=False)

    def _on_first_token(self) -> None:
        """Note that a piece of the stream shows that prefill is done."""
        self._cancel_pull_timer()
        if self.lease is not None:
            now_s = self._parts.clock()
            if self._question.wanted.ask.stream:  # otherwise its prompt's length may be an estimate
                self._parts.placer.first_token(self.lease, now_s)
            self._record.times.ttft_s = now_s - self._told_s
            if self._question.trace is not None:
                self._question.trace.record_first_token(now_s)
            due_s = self._question.wanted.due_s
            if due_s is not None:
                self._record.times.in_time = now_s <= due_s

    def _cancel_pull_timer(self) -> None:
        """Stop the timer of the transfer, because it is over, or its end will not be visible."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_pull_timeout(self, source: str) -> None:
        """Handle a missing first piece. It proves nothing if the gateway has sent no answer yet."""
        self._stall = None
        if self._pieces or self._parts.answers_come:
            # the counter of unanswered requests restarts: the gateway sends answers, and this engine sent none
            self._parts.asked = 0
            self._parts.placer.report_pull_timeout(source)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the lease after the end of the stream, and record the visible outcome of the answer."""
        self._cancel_pull_timer()
        parts, lease, record, now_s = self._parts, self.lease, self._record, self._parts.clock()
        model = self._question.wanted.model
        outcome = self._watch.outcome(parts.placer.context_tokens(model), heads_told=parts.heads_told)
        if lease is not None and outcome.usage is not None and lease.receipt.leg is not None:
            outcome.usage = lease.receipt.adjust_usage(outcome.usage)
        record.ending, record.usage = record.ending or outcome.ending, outcome.usage
        if not record.status and outcome.ending is EndReason.CLIENT_LEFT:
            record.status = CLIENT_LEFT_STATUS
        if lease is None:
            return
        self._learn(lease.replica, outcome)
        if self._watch.status == 503 and outcome.ending is EndReason.REFUSED_BY_ENGINE:
            parts.placer.set_cooldown(lease.replica, FULL_S, full=True)
        miss = lease.receipt.miss
        if miss is not None and outcome.ending in COMPUTED:
            record.cache.miss = with_actual_usage(miss, outcome.usage)
            record.cache.places = token_fates(record.cache.miss, replay=lease.receipt.replay)
        if record.times.ttft_s is not None:
            record.times.events = self._watch.events
            if lease.first_token_s is not None and record.times.events > 2 and outcome.ending is EndReason.OK:
                record.times.inter_token_s = (now_s - lease.first_token_s) / (record.times.events - 1)
        if self.lingers and not (self._watch.status and not record.stream):
            left_s = self._told_s + _expected_s(lease) - now_s
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._finish, lease, UNOBSERVED)
        else:
            parts.placer.finish(lease, outcome, now_s)

    def _learn(self, replica: str, outcome: Outcome) -> None:
        """Learn from a stream if its replica sends usage without a request for it."""
        question, watch = self._question, self._watch
        left_alone = question.asks_usage and not question.usage_asked and watch.judged and watch.ended
        if watch.usage_unasked or (left_alone and outcome.ending is EndReason.OK and not outcome.unobserved):
            unasked = watch.usage_unasked or question.dialect.stream_usage(watch.tail) is not None
            self._parts.ingress.usage.learn(question, replica, unasked=unasked)

    def _finish(self, lease: LeaseHandle, outcome: Outcome) -> None:
        self._parts.placer.finish(lease, outcome, self._parts.clock())


def _pairs(text: str) -> list[processing_responses.Header]:
    """Return the names and values of header lines."""
    pairs: list[processing_responses.Header] = []
    for line in text.encode().split(b"\r\n"):
        if line:
            name, _, value = line.partition(b": ")
            pairs.append((name, value))
    return pairs


def _expected_s(lease: LeaseHandle) -> float:
    """Return the expected duration of the answer in seconds, by the estimates of its replica; at most LINGER_S_MAX."""
    for each in lease.receipt.candidates:
        if each.id == lease.replica:
            return min((each.first_token_ms + each.decode_ms) / 1e3, LINGER_S_MAX)
    return 0.0
