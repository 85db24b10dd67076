"""Main flow of one request, in the order of `Proxy._serve`.

    understand   parse the body into identity and blocks (reader)
    record       the facts known so far for metrics, log and trace
    begin        match and place (a lease), then call the replica, with retries on others if allowed (attempts)
    deliver      send the whole answer or its head
    relay        bytes as they arrive (relay)
    close        the lease at the end of the answer, with one metrics call and one log line

The client receives nothing before the first body bytes of the replica, so until then another replica can replace a
failed one. After that, a broken stream is continued on another replica if the client opted in, and otherwise ends in an
error event. Bodies pass byte for byte in both directions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from router.config.api_keys import ANONYMOUS, Caller
from router.core.dialects import Dialect, dialect_of, errors
from router.core.dialects.failover import FailoverPlan
from router.core.insights.breakdown import with_actual_usage
from router.core.insights.token_funnel import token_fates
from router.core.types.placements import EndReason, Outcome, Usage
from router.http.client_connection import ClientDisconnected
from router.http.failures import Stalled, StreamInterrupted, UnattributedInterruption
from router.http.request import ADDRESS_HEADERS, Refusal, Request
from router.http.upstream import Upstream
from router.ingress.local_responses import (
    CLIENT_LEFT_STATUS,
    COMPUTED,
    DRAINED,
    copy_to_record,
    final_receipt,
    hide_cross_tenant,
    receipt_text,
    refuse,
    request_id,
    route_of,
)
from router.ingress.parser import RequestParser
from router.ingress.proxied_request import ProxiedRequest
from router.ingress.token_estimate import estimate_body_tokens, estimate_stream_tokens, validate_usage
from router.ingress.upstream_headers import FINAL_RECEIPT
from router.ingress.usage import UsageAsking
from router.placement_api import LEFT, PlacementService
from router.proxy.attempts import Attempts, UpstreamCall, stream_dialect
from router.proxy.failover_sink import FailoverSink
from router.proxy.relay import TOLD, Relay
from router.proxy.stream_failover import StreamFailover
from router.telemetry.request_record import RequestRecord, begin_record
from router.telemetry.spans import RequestTrace
from router.telemetry.tracing import Tracer

log = logging.getLogger(__name__)

SILENT = Outcome(EndReason.REFUSED_BY_ENGINE)  # outcome of a lease after its stream fell silent


class Proxy:
    """Proxies requests to engines."""

    def __init__(
        self,
        placer: PlacementService,
        reader: RequestParser,
        attempts: Attempts,
        upstream: Upstream,
        continuations: StreamFailover,
        report: Callable[[RequestRecord], None],
        *,
        clock: Callable[[], float],
        receipts: bool,
        usage: UsageAsking,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer` None: no traces, and clients' trace headers pass unchanged. `receipts`, which may be changed:
        clients receive the replica of their request."""
        self.receipts = receipts
        self._placer = placer
        self._reader = reader
        self._attempts = attempts
        self._upstream = upstream
        self._continuations = continuations
        self._report = report
        self._clock = clock
        self._usage = usage
        self._tracer = tracer
        self.in_flight = 0
        # reason for which the router cancels requests; "": a cancelled request means that its client left
        self.cut_why = ""
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: Request, caller: Caller = ANONYMOUS) -> None:
        """Answer one request, also after an unexpected error, and report it once."""
        started_s = self._clock()
        route = route_of(request.path)
        record = begin_record(request_id(request), route, time.time(), caller.name)
        trace = self._tracer.begin(request, started_s) if self._tracer is not None else None
        if not self.in_flight:
            self._idle.clear()
        self.in_flight += 1
        try:
            await self._serve(request, caller, record, started_s, trace)
        except Refusal as refusal:
            record.model = record.model or refusal.model
            told = self.receipts and (caller.tenant is None or caller.tenant.receipts)
            refuse(request, record, refusal, dialect_of(request.path), tells_cause=told)
        except (asyncio.CancelledError, ClientDisconnected) as error:
            if self.cut_why and isinstance(error, asyncio.CancelledError):
                self._abort_for_shutdown(request, record)
            else:
                record.status, record.ending = CLIENT_LEFT_STATUS, EndReason.CLIENT_LEFT
                raise
        except Exception:
            log.exception("bug: request failed", extra={"event": "bug", "fields": {"request_id": record.id}})
            if record.status:
                request.abort()  # an answer that has begun cannot become an error page: break the connection
            else:
                bug = Refusal(500, "internal_error", "Internal error of the router; see its log for this request id.")
                refuse(request, record, bug, dialect_of(request.path))
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            record.times.duration_s = self._clock() - started_s
            if trace is not None and self._tracer is not None:
                record.trace_id = f"{trace.trace_id:032x}"
                trace.tenant = caller.tenant.name if caller.tenant is not None else ""
                self._tracer.schedule_export(trace, record)
            self._report(record)

    async def idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    def _abort_for_shutdown(self, request: Request, record: RequestRecord) -> None:
        """End a request because the router stops. The client gets an error if no answer has begun. Otherwise the
        connection is broken, which the client can distinguish from a complete answer."""
        if not record.status:
            with suppress(ClientDisconnected):
                refuse(request, record, Refusal(503, DRAINED, self.cut_why), dialect_of(request.path))
        else:
            request.abort()
            record.error, record.detail = DRAINED, self.cut_why
        record.ending = DRAINED

    async def _serve(
        self, request: Request, caller: Caller, record: RequestRecord, started_s: float, trace: RequestTrace | None
    ) -> None:
        question = await self._reader.parse(request, record.id, caller)
        self._record(question, record, trace)
        call = await self._attempts.begin(question, record, started_s)
        question.release_body()
        try:
            self._send_head(call, caller, record)
            if call.relay is not None:
                if question.plan is None:
                    await self._relay(call, call.relay, record)
                else:
                    await self._relay_with_failover(call, call.relay, question.plan, record)
        finally:
            self._close(call, record)

    def _record(self, question: ProxiedRequest, record: RequestRecord, trace: RequestTrace | None) -> None:
        """Record the facts that are known before placement."""
        if trace is not None:
            wanted = question.wanted
            question.trace, trace.parsed_s = trace, self._clock()
            kinds = list(self._placer.engines(wanted.model)) if wanted.model else []
            trace.provider = kinds[0] if len(kinds) == 1 else ""
        copy_to_record(question, record)

    def _outcome(self, call: UpstreamCall) -> Outcome:
        """Return the outcome of an answer that was delivered to its end."""
        answer, question, relay = call.answer, call.question, call.relay
        dialect = question.dialect
        if answer.status >= 500:
            return Outcome(EndReason.FAILED)
        if answer.status >= 400:
            return Outcome(EndReason.REFUSED_BY_ENGINE)
        if answer.streams and relay is not None:
            if relay.ending in TOLD:
                return Outcome(relay.ending)
            if (status := dialect.event_error(answer.head)) is not None:  # a stream that is not judged at its end
                return Outcome(errors.ending_of(status, answer.head))
            usage = self._validated_usage(dialect.stream_usage(relay.tail), call, relay.bytes)
            events = relay.events if usage is not None else _estimate_output_tokens(call, relay)
            return Outcome(EndReason.OK, usage, events)
        # An answer that was not buffered whole was relayed, and has its usage at the end.
        size, end = (len(answer.head), answer.head) if relay is None else (relay.bytes, relay.tail)
        usage = self._validated_usage(dialect.usage(end), call, size)
        if usage is not None or not question.metered:
            return Outcome(EndReason.OK, usage)
        tokens = estimate_body_tokens(end) if relay is None else estimate_stream_tokens(relay)
        return Outcome(EndReason.OK, None, tokens)

    def _delivered_tokens(self, call: UpstreamCall, relay: Relay) -> int:
        """Return the number of tokens that were delivered before the client left. Engines may have counted them in each
        event."""
        question = call.question
        if question.metered:
            usage = self._validated_usage(question.dialect.stream_usage(relay.tail), call, relay.bytes)
            if usage is not None:
                return usage.completion_tokens
        return _estimate_output_tokens(call, relay)

    def _validated_usage(self, usage: Usage | None, call: UpstreamCall, answer_bytes: int) -> Usage | None:
        if usage is None:
            return None
        question = call.question
        context_tokens = self._placer.context_tokens(question.wanted.model)
        usage = validate_usage(usage, len(question.body), answer_bytes, context_tokens)
        return call.lease.receipt.adjust_usage(usage) if usage is not None else None

    # -- answer --------------------------------------------------------------------------------------------------

    def _send_head(self, call: UpstreamCall, caller: Caller, record: RequestRecord) -> None:
        """Send an answer that is whole. Of any other answer send the head, and prepare the relay of its body."""
        question, answer = call.question, call.answer
        record.status = answer.status
        lines = self._lines(call, caller, record)
        if answer.whole:
            question.request.answer(answer.status, lines, answer.head)
            call.outcome = self._outcome(call)
            return
        streams = question.wanted.ask.stream or (answer.streams and question.request.method == "POST")
        record.stream = record.stream or streams
        last = None
        if FINAL_RECEIPT in question.request.fields and self.receipts and question.receipts:
            last = final_receipt(
                question.dialect, call.lease.receipt, record, isolated=hide_cross_tenant(caller, record)
            )
        takes_out = answer.streams and self._usage.takes_out(question, answer.replica)
        call.relay = Relay(
            answer,
            question.request.begin(answer.status, lines),
            begun=self._first_token_hook(call, record) if streams else None,
            strip_usage=question.dialect if takes_out else None,
            judge=stream_dialect(question, answer),
            speaks=question.dialect,
            last=last,
        )

    async def _relay(self, call: UpstreamCall, relay: Relay, record: RequestRecord) -> None:
        """Relay the body as it arrives. If it breaks or the router cuts it, the client receives an error event."""
        try:
            await call.answer.relay(relay)
            relay.end()
        except StreamInterrupted as error:
            if not self._ended_cleanly(call, relay, error, record):
                return
        except asyncio.CancelledError:
            if self.cut_why:  # the client is still there
                call.answer.disable_fast_path()
                relay.end_with_error(_make_drained_event)
            raise
        call.outcome = self._outcome(call)

    async def _relay_with_failover(
        self, call: UpstreamCall, relay: Relay, plan: FailoverPlan, record: RequestRecord
    ) -> None:
        """Relay a body with failover, if it is a stream of readable events."""
        if stream_dialect(call.question, call.answer) is None:
            await self._relay(call, relay, record)
            return
        try:
            broke = await self._continuations.relay(call, FailoverSink(plan, call.question, relay, call.answer), record)
        except asyncio.CancelledError:
            if self.cut_why:  # the client is still there
                relay.end_with_error(_make_drained_event)
            raise
        if broke is None or self._ended_cleanly(call, relay, broke, record):
            call.outcome = outcome = self._outcome(call)
            if record.failover.continued[0] and outcome.usage is not None:  # the cached tokens are of a longer prompt
                counts = Usage(outcome.usage.prompt_tokens, outcome.usage.completion_tokens)
                call.outcome = Outcome(outcome.ending, counts, outcome.events)

    def _ended_cleanly(self, call: UpstreamCall, relay: Relay, broke: StreamInterrupted, record: RequestRecord) -> bool:
        """Return True if the answer was complete before it broke. If not, report an error to the client, and attribute
        the failure to the replica unless the break has another cause."""
        if relay.end_with_error(_make_stalled_event if isinstance(broke, Stalled) else _make_broken_event):
            return True
        record.error = f"{broke.kind}: {broke}"
        if not isinstance(broke, UnattributedInterruption):
            self._placer.count_attempt_failure(call.lease.replica, broke.kind)
        if isinstance(broke, Stalled):  # silence alone is no replica's fault
            self._placer.finish(call.lease, SILENT, self._clock())
        call.outcome = Outcome(EndReason.FAILED)
        return False

    def _lines(self, call: UpstreamCall, caller: Caller, record: RequestRecord) -> list[bytes]:
        """Return the header lines for the client: the engine's and the router's."""
        lines = call.answer.lines
        if self.receipts and call.question.receipts:
            lines.append(receipt_text(call.lease.receipt, record, isolated=hide_cross_tenant(caller, record)).encode())
        else:
            if call.answer.tells_where:
                lines = [line for line in lines if line[: line.index(b":")].lower() not in ADDRESS_HEADERS]
            lines.append(f"x-warmroute-request-id: {record.id}\r\n".encode())
        if record.warning:
            lines.append(f"x-warmroute-warning: {record.warning}\r\n".encode())
        return lines

    def _first_token_hook(self, call: UpstreamCall, record: RequestRecord) -> Callable[[bytes], bool]:
        """Return a function that takes a piece of a stream. It returns True, and notes the first token, when the piece
        shows that prefill is done. It does not refer to `call`, which would be a reference cycle through the relay."""
        dialect, lease, called_s, trace = call.question.dialect, call.lease, call.called_s, call.question.trace
        due_s, asked = call.question.wanted.due_s, call.question.wanted.ask.stream

        def begun(piece: bytes) -> bool:
            if not dialect.has_output(piece):
                return False
            now_s = self._clock()
            if asked:  # the lengths of other prompts may be estimates, from which no speed may be learned
                self._placer.first_token(lease, now_s)
            record.times.ttft_s = now_s - called_s
            if trace is not None:
                trace.record_first_token(now_s)
            if due_s is not None:
                record.times.in_time = now_s <= due_s
            return True

        return begun

    def _learn_usage(self, call: UpstreamCall, relay: Relay, outcome: Outcome | None) -> None:
        """Learn from a stream if its replica sends usage without a request for it."""
        question, unasked = call.question, relay.usage_unasked
        if not unasked:
            if question.usage_asked or relay.ending is not EndReason.OK or outcome is None:
                return
            unasked = outcome.usage is not None or question.dialect.stream_usage(relay.tail) is not None
        self._usage.learn(question, call.lease.replica, unasked=unasked)

    def _close(self, call: UpstreamCall, record: RequestRecord) -> None:
        """Release the connection and the lease, and record the outcome."""
        self._upstream.done(call.answer)
        call.question.request.release_body()
        lease, relay, outcome, now_s = call.lease, call.relay, call.outcome, self._clock()
        if relay is not None and call.question.asks_usage and not record.failover.continued[0]:
            self._learn_usage(call, relay, outcome)
        if outcome is None:  # the client left, or the router stops; delivered events count against a tenant's rate
            outcome = (
                Outcome(EndReason.CLIENT_LEFT, events=self._delivered_tokens(call, relay))
                if relay is not None
                else LEFT
            )
        self._placer.finish(lease, outcome, now_s)
        if (trace := call.question.trace) is not None and call.answer.status < 400:
            trace.head, trace.tail = call.answer.head, relay.tail if relay is not None else None
            if relay is not None and not call.answer.streams:
                trace.head, trace.tail = relay.tail, None
            trace.stored = call.question.wanted.ask.stored or False
        record.ending = outcome.ending
        record.usage = outcome.usage
        miss = lease.receipt.miss
        if miss is not None and outcome.ending in COMPUTED:
            record.cache.miss = with_actual_usage(miss, outcome.usage)
            record.cache.places = token_fates(record.cache.miss, replay=lease.receipt.replay)
        if record.times.ttft_s is not None and relay is not None:
            record.times.events = relay.events
            first_s = None if record.failover.continued[0] else lease.first_token_s
            if first_s is not None and relay.events > 2 and outcome.ending is EndReason.OK:
                # The time of the last event is taken from the end of the stream, since events are not timed one by one.
                record.times.inter_token_s = (now_s - first_s) / (relay.events - 1)


def _estimate_output_tokens(call: UpstreamCall, relay: Relay) -> int:
    """Count the tokens of a stream without usage: an estimate if its tenant pays for them, else its number of
    events."""
    return estimate_stream_tokens(relay) if call.question.metered else relay.events


def _make_broken_event(dialect: Dialect, tail: bytes) -> bytes:
    return dialect.error_event(
        502, "stream_broken", "The answer is incomplete: the replica failed during the answer.", tail
    )


def _make_stalled_event(dialect: Dialect, tail: bytes) -> bytes:
    return dialect.error_event(504, "stream_stalled", "The answer is incomplete: the replica stopped sending.", tail)


def _make_drained_event(dialect: Dialect, tail: bytes) -> bytes:
    return dialect.error_event(503, DRAINED, "The answer is incomplete: the router is shutting down.", tail)
