"""Main flow of one request from a gateway: one gRPC stream, from its head to the end of its answer.

    head         caller, rate limit and path; a page of the router or a refusal is sent at once
    body         in the gateway's mode (whole / in pieces / not at all)
    pick         understand and place: a lease and endpoints in order of price
    tell         send the endpoint as a header and as metadata with the mutations of head and body
    follow       the visible part of the answer: endpoint and status, and its body if the picker can see it
    close        the lease at the end of the stream (the answer has ended or the client left)

A stream that ends before its answer began means that the client left. This must be detected while a request is read and
waits for a slot. `_listen` does so. It starts in the next turn of the loop, so that it costs nothing for a request that
is placed at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import msgspec

from router.config.api_keys import ANONYMOUS, Caller
from router.core.dialects import dialect_of
from router.core.dialects.p2p_body import SOURCE_HEADER
from router.core.dialects.rank_field import for_rank
from router.core.disagg.bodies import PREFILLER_HEADER
from router.core.prompts.lenient_json import is_object
from router.core.types.placements import EndReason, Outcome
from router.core.types.replicas import Replica
from router.extproc import extproc_pb2 as pb
from router.extproc import metadata, processing_responses
from router.extproc.endpoints import destinations, endpoint_of
from router.extproc.picker_context import ServiceContext
from router.extproc.request_body import BUFFERED, DUPLEX, NONE, ExtProcClient, await_room, check_length, read_body
from router.extproc.request_headers import HEADERS_MAX, header_mutations, request_of
from router.extproc.response_tracker import ResponseTracker
from router.extproc.stream_messages import MalformedMessage, Messages
from router.http.client_connection import ClientDisconnected
from router.http.request import Refusal, Request, date_line, is_websocket, no_websockets
from router.ingress import local_responses
from router.ingress.local_responses import (
    CLIENT_LEFT_STATUS,
    DRAINED,
    filter_models,
    no_replica_ready,
    principal_of,
    refuse,
    request_id,
)
from router.ingress.paths import is_for_engines, strip_trailing_slash
from router.ingress.placement_call import place_or_refuse
from router.ingress.proxied_request import ProxiedRequest
from router.ingress.rate_reservation import reserve_rate
from router.placement_api import LEFT, MODELS, REQUESTS, LeaseHandle
from router.telemetry.request_record import RequestRecord, begin_record
from router.telemetry.spans import RequestTrace

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StreamHandler:
    """One stream. `serve` always answers it, also after an error, and reports its request once."""

    def __init__(self, parts: ServiceContext, context: Any, messages: Messages) -> None:  # noqa: ANN401 - grpc ships no types
        self._parts = parts
        self._context = context
        self._messages = messages
        self._received = b""  # body as it arrived, until the gateway has received the body for the engine
        self.answered = False  # the gateway has received an answer
        self._task = asyncio.current_task()
        self._next: asyncio.Task[Any] | None = None  # read of the next message, started by `_listen`
        self._picking = self._left = self._released = self._late = False
        self._caller: Caller = ANONYMOUS
        self._following: ResponseTracker | None = None  # None until the request has a lease
        self._trace: RequestTrace | None = None

    async def serve(self, first: pb.ProcessingRequest) -> None:
        """Serve the request of the first message."""
        parts, started_s = self._parts, self._parts.clock()
        client = ExtProcClient(parts.bodies)
        request = request_of(first.request_headers.headers.headers, client)
        metadata.apply(request, parts.objectives)
        record = begin_record(request_id(request), "other", time.time())
        answered = False  # by one of the router's pages
        try:
            answered, refusal = await self._outcome(first, request, client, record, started_s)
            if refusal is not None:
                await self._refuse(request, client, record, refusal)
        finally:
            self._end(request, record, started_s, report=not answered)

    async def _outcome(
        self,
        first: pb.ProcessingRequest,
        request: Request,
        client: ExtProcClient,
        record: RequestRecord,
        started_s: float,
    ) -> tuple[bool, Refusal | None]:
        """Return True if one of the router's pages was the answer, and the refusal to send. The refusal is not raised,
        since native code must not await while it handles an exception (deploy/compiled.py)."""
        try:
            return await self._serve(first, request, client, record, started_s), None
        except Refusal as refusal:
            record.model = record.model or refusal.model
            return False, refusal
        except (ClientDisconnected, MalformedMessage):
            record.status, record.ending = record.status or CLIENT_LEFT_STATUS, EndReason.CLIENT_LEFT
        except asyncio.CancelledError:
            if not self._released:
                self._record_cancellation(record)
                raise
        except Exception:
            fields = {"request_id": record.id}
            log.exception("bug: request failed", extra={"event": "bug", "fields": fields})
            what = "Internal error of the router; see its log for this request id."
            return False, Refusal(500, "internal_error", what)
        return False, None

    def release(self) -> None:
        """Release a stream if its answer bypasses the picker, because the router stops and Envoy carries the answer."""
        if self._task is not None and self._following is not None and self._following.can_detach:
            self._released = True
            self._task.cancel()

    # -- the request ---------------------------------------------------------------------------------------------

    async def _serve(
        self,
        first: pb.ProcessingRequest,
        request: Request,
        client: ExtProcClient,
        record: RequestRecord,
        started_s: float,
    ) -> bool:
        """Return True if one of the router's pages was the answer. Raises Refusal."""
        parts, settings = self._parts, self._parts.settings
        if len(request.lines) > HEADERS_MAX:
            raise Refusal(431, "head_too_large", f"The request has more than {HEADERS_MAX} headers.")
        if len(parts.streams) > settings.extproc.streams_max:
            raise Refusal(503, "too_many_streams", "The picker has too many open requests; try again.")
        strip_trailing_slash(
            request
        )  # affects only the request as parsed here; the engine's path is set by the gateway
        self._caller = caller = parts.ingress.callers.authenticate_head(request)
        record.client.tenant = request.budget_owner = caller.name
        if not settings.extproc.conformance and not is_for_engines(request, parts.inference):
            await self._page(request, client, caller)
            return True
        if not parts.known:
            raise no_replica_ready("", "no result yet")
        record.route = local_responses.route_of(request.path)
        if parts.ingress.tracer is not None:
            self._trace = parts.ingress.tracer.begin(request, started_s)
        head: pb.HttpHeaders = first.request_headers
        config = first.protocol_config if first.HasField("protocol_config") else None
        mode = BUFFERED if config is None else config.request_body_mode
        whole, trailers = head.end_of_stream or mode in (BUFFERED, DUPLEX), False
        if whole and not head.end_of_stream:
            limits = settings.limits
            check_length(request, limits.body_bytes_max)
            reserve_rate(parts.placer, request, caller)
            await await_room(client, request, mode, limits.body_bytes_max, limits.body_budget_timeout_s)
            if mode == BUFFERED:
                await self._context.write(processing_responses.CONTINUE_HEADERS)
            trailers = await self._body(client, request, mode)
        self._received, read_s = request.body, parts.clock()
        answers = NONE if config is None else config.response_body_mode
        subset = metadata.subset_of(first, request, conformance=settings.extproc.conformance)
        question = await self._while_there(self._pick(request, record, whole=whole, answers=answers, subset=subset))
        if self._following is None:  # `_pick` has set it, or raised
            raise RuntimeError("a request without a lease")
        record.times.overhead_s = parts.clock() - read_s - record.times.queued_s
        await self._answer(question, mode if whole and not head.end_of_stream else NONE, trailers=trailers)
        with suppress(TimeoutError):
            read = self._messages.read if self._next is None else self._read
            await self._within(settings.extproc.stream_s_max, self._following.follow(read, self._context.write))
        self._following.lingers = mode == DUPLEX and answers == NONE
        return False

    async def _body(self, client: ExtProcClient, request: Request, mode: int) -> bool:
        limits, within_s = self._parts.settings.limits, self._parts.settings.listen.body_timeout_s
        try:
            bytes_max, wait_s = limits.body_bytes_max, limits.body_budget_timeout_s
            return await self._within(within_s, read_body(self._messages, client, request, mode, bytes_max, wait_s))
        except TimeoutError:
            raise Refusal(408, "request_timeout", "The request's body did not arrive in time.") from None

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, _T]) -> _T:
        """Await this for at most `limit_s`. Raises TimeoutError. It is `asyncio.timeout` for the current task, at half
        the price."""
        timer = asyncio.get_running_loop().call_later(limit_s, self._too_late)
        try:
            return await work
        except asyncio.CancelledError:
            if self._late and self._task is not None and not self._task.uncancel():
                self._late = False
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def _too_late(self) -> None:
        if self._task is not None:
            self._late = True
            self._task.cancel()

    async def _page(self, request: Request, client: ExtProcClient, caller: Caller) -> None:
        """Answer with one of the router's pages that clients know. Raises Refusal if there is no such page."""
        if is_websocket(request):
            raise no_websockets()
        path, placer = request.path, self._parts.placer
        page = None
        if request.method in ("GET", "HEAD") and path.startswith((MODELS, REQUESTS)):
            receipts = self._parts.settings.api.receipts
            owner = principal_of(caller, receipts=receipts) if path.startswith(REQUESTS) else None
            page = await placer.page(path, owner)
        if page is None:
            raise Refusal(404, "unknown_path", f"{request.method} {path[:200]} does not exist here.")
        if caller.tenant is not None and path.startswith(MODELS):
            page = filter_models(page, path, caller.tenant.allows)
        request.answer(page.status, (date_line(), f"content-type: {page.content_type}\r\n".encode()), page.body)
        await self._say(client)

    # -- picking -------------------------------------------------------------------------------------------------

    async def _pick(
        self, request: Request, record: RequestRecord, *, whole: bool, answers: int, subset: frozenset[str] | None
    ) -> ProxiedRequest:
        """Understand and place. `whole`: its body has arrived. `answers`: the gateway's mode for the body of the
        answer."""
        parts, caller = self._parts, self._caller
        reader, relayed = parts.ingress.reader, answers != NONE
        model = metadata.model_of(request)
        if whole and is_for_engines(request, parts.inference):
            if model and request.body_bytes:
                body = with_model(request.body, model)
                request.replace_body([body], len(body))
            question = await reader.parse(request, record.id, caller, relayed=relayed)
        else:
            question = await reader.parse_headers_only(request, record.id, caller, model or None)
        local_responses.copy_to_record(question, record)
        if self._trace is not None:
            question.trace, self._trace.parsed_s = self._trace, parts.clock()
        wanted = question.wanted
        following = ResponseTracker(parts, question, record, caller, answers)
        wanted.allowed_addresses, wanted.response_bypasses_router = subset, not following.shown
        wanted.may_pull = wanted.may_pull and following.shows_stalls
        try:
            lease = await place_or_refuse(parts.placer, wanted, frozenset(), parts.clock)
        finally:
            record.times.queued_s = wanted.queued_s
        try:
            self._check(lease)
        except Refusal:
            parts.placer.finish(lease, LEFT, parts.clock())
            raise
        self._following = following
        following.begin(lease)
        return question

    def _check(self, lease: LeaseHandle) -> None:
        """Raise Refusal for a replica without an address for gateways."""
        if not endpoint_of(lease.replica):
            what = f"The replica {lease.replica} has a host name, but a gateway needs an IP address"
            raise Refusal(503, "no_address", f"{what}; configure its IP address.")

    async def _while_there(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await this, unless the client leaves in the meantime. Raises ClientDisconnected."""
        handle = asyncio.get_running_loop().call_soon(self._listen)
        self._picking = True
        try:
            return await work
        except asyncio.CancelledError:
            if not self._left or self._task is None:
                raise
            self._task.uncancel()
            raise ClientDisconnected from None
        finally:
            self._picking = False
            handle.cancel()

    def _listen(self) -> None:
        if self._picking:
            self._next = asyncio.ensure_future(self._messages.read())
            self._next.add_done_callback(self._on_message)

    def _on_message(self, message: asyncio.Task[Any]) -> None:
        gone = message.cancelled() or message.exception() is not None or message.result() is grpc.aio.EOF
        if gone and self._picking and self._task is not None:
            self._left = True
            self._task.cancel()

    async def _read(self) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """Return the message that `_listen` has read, then those after it."""
        listened, self._next = self._next, None
        return await (listened if listened is not None else self._messages.read())

    # -- answers -------------------------------------------------------------------------------------------------

    async def _answer(self, question: ProxiedRequest, mode: int, *, trailers: bool) -> None:
        """Send the gateway the mutated request for the engine. No body is kept, since the stream lasts until the end of
        the answer."""
        said = self._tell(question, mode, trailers=trailers)
        question.release_body()
        self._received = b""
        for at in range(len(said)):
            each, said[at] = said[at], b""
            await self._context.write(each)
        self.answered = True

    def _tell(self, question: ProxiedRequest, mode: int, *, trailers: bool) -> list[bytes]:
        """Return the responses that send the request to its replica. `mode`: the mode of the body that arrived; NONE if
        none did."""
        following, parts = self._following, self._parts
        if following is None or following.lease is None:
            raise RuntimeError("a request without a lease")
        lease, request = following.lease, question.request
        lines, body, received = question.lines, question.body, self._received
        if self._trace is not None:
            lines = [*lines, self._trace.record_call(lease.receipt, parts.clock())]
        if "#" in lease.replica and (rank := Replica(lease.replica).rank) is not None:
            lines, body = for_rank(rank, request.path, lines, body)
        if (leg := lease.receipt.leg) is not None:
            if prefiller := endpoint_of(leg.replica):
                lines = [*lines, b"%b: %b\r\n" % (PREFILLER_HEADER, prefiller.encode())]
            else:  # a replica with a host name, which the header must not have
                leg.alone = True
                parts.placer.finish_prefill(lease, Outcome(EndReason.REFUSED_BY_ENGINE), parts.clock())
        if lease.receipt.pull is not None:
            lines = [*lines, b"%b: %b\r\n" % (SOURCE_HEADER, lease.receipt.pull.address.encode())]
        listed = destinations(lease.receipt, lease.replica, parts.settings.extproc.fallbacks_max)
        destination = ",".join(listed)
        set_, removed = header_mutations(request, lines)
        if mode == DUPLEX or (mode == BUFFERED and body is not received):
            # Without it Envoy sends chunks in full duplex, and refuses a modified body.
            set_.append((b"content-length", b"%d" % len(body)))
        if mode == BUFFERED:
            changed = None if body is received else body
            return [processing_responses.body_response(destination, set_, removed, changed)]
        said = [processing_responses.headers_response(destination, set_, removed)]
        if mode == DUPLEX:
            said += processing_responses.request_body_chunks(body, end=not trailers)
            if trailers:
                said.append(processing_responses.CONTINUE_TRAILERS)
        return said

    # -- the end -------------------------------------------------------------------------------------------------

    async def _refuse(self, request: Request, client: ExtProcClient, record: RequestRecord, refusal: Refusal) -> None:
        tenant = self._caller.tenant
        told = self._parts.settings.api.receipts and (tenant is None or tenant.receipts)
        client.code = refusal.code
        refuse(request, record, refusal, dialect_of(request.path), tells_cause=told)
        await self._say(client)

    async def _say(self, client: ExtProcClient) -> None:
        if client.said is not None:
            self.answered = True
            with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the stream has ended, so the answer is dropped
                await self._context.write(client.said)

    def _record_cancellation(self, record: RequestRecord) -> None:
        """Record a cancelled stream: by the gateway, since the client left, or by the router."""
        if self._parts.cut_why:
            record.ending, record.error, record.detail = DRAINED, DRAINED, self._parts.cut_why
        elif not record.status:
            record.status, record.ending = CLIENT_LEFT_STATUS, EndReason.CLIENT_LEFT

    def _end(self, request: Request, record: RequestRecord, started_s: float, *, report: bool) -> None:
        """Release all resources, and report."""
        parts = self._parts
        if self._next is not None:
            self._next.cancel()
        request.release_body()
        if self._following is not None:
            self._following.close()
        record.times.duration_s = parts.clock() - started_s
        if self._trace is not None and parts.ingress.tracer is not None:
            record.trace_id = f"{self._trace.trace_id:032x}"
            self._trace.tenant = self._caller.tenant.name if self._caller.tenant is not None else ""
            parts.ingress.tracer.schedule_export(self._trace, record)
        if report:
            parts.ingress.record_request(record)


def with_model(body: bytes, model: str) -> bytes:
    """Return the same request for another model: of two equal keys, engines and the router take the last
    (tenant_isolation.py). A body that is no object stays unchanged, and is refused by its reader."""
    end = body.rfind(b"}")
    if end < 0 or not is_object(body):
        return body
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b"".join((body[:end], comma, b'"model":', msgspec.json.encode(model), body[end:]))
