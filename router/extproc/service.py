"""gRPC service that a gateway calls: one stream per request.

Messages are exchanged as bytes, which this package encodes (processing_responses.py), under the service name that Envoy
calls. No stub of Envoy's is needed for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from router.extproc.first_message_limit import HeadTurns
from router.extproc.picker_context import ServiceContext
from router.extproc.stream_handler import StreamHandler
from router.extproc.stream_messages import MalformedMessage, Messages

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"


class ExtProcService:
    """Serves streams, and tracks those in flight."""

    def __init__(self, parts: ServiceContext, heads: HeadTurns) -> None:
        self._parts = parts
        self._heads = heads
        self._idle = asyncio.Event()
        self._idle.set()
        self._complained: set[str] = set()  # errors of a gateway's settings that were logged

    def handler(self) -> Any:  # noqa: ANN401 - grpc ships no types
        """Return the handler for a gRPC server."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=None, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: process})

    @property
    def in_flight(self) -> int:
        """Number of streams in flight."""
        return len(self._parts.streams)

    async def idle(self) -> None:
        """Return when no stream is in flight."""
        await self._idle.wait()

    def release(self) -> None:
        """Release streams with answers that Envoy carries without the picker."""
        for stream in list(self._parts.streams):
            stream.release()

    async def _process(self, _: Any, context: Any) -> None:  # noqa: ANN401 - grpc ships no types
        parts, messages = self._parts, Messages(context, self._parts.malformed)
        first, why = await self._first(context, messages)
        if first is grpc.aio.EOF:
            return
        if first is None:
            await context.abort(*why)
        parts.known = parts.known or parts.placer.has_other_ready(frozenset())
        if not parts.known and parts.ingress.keys is None:
            # No replica has been probed yet, so nothing is known of them: the gateway may choose, if it fails open.
            # With keys it must not, and gets a refusal (StreamHandler).
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no replica is known yet")
        stream, streams = StreamHandler(parts, context, messages), parts.streams
        streams.add(stream)
        self._idle.clear()
        try:
            await stream.serve(first)
        finally:
            streams.discard(stream)
            if not streams:
                self._idle.set()
        if not stream.answered:
            # If a stream ends well and unanswered, Envoy lets the request pass, even if the gateway fails closed while
            # no picker answers.
            await context.abort(grpc.StatusCode.ABORTED, "the request was not answered")

    async def _first(self, context: Any, messages: Messages) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401 - likewise
        """Return the first message, or EOF. Otherwise return None, and the status that ends the stream."""
        try:
            first = await self._heads.read(messages, self._parts.settings.listen.head_timeout_s)
        except TimeoutError:
            return None, (grpc.StatusCode.DEADLINE_EXCEEDED, "no request headers received")
        except MalformedMessage:
            return None, (grpc.StatusCode.INVALID_ARGUMENT, "a message could not be decoded")
        if first is grpc.aio.EOF:
            return first, ()
        if first.observability_mode:
            what = "the gateway ignores responses: set observability_mode to false"
            return None, self._complain("observability_mode", what)
        if first.WhichOneof("request") != "request_headers":
            what = "the gateway sends no request headers: set request_header_mode to SEND"
            return None, self._complain("request_header_mode", what)
        return first, ()

    def _complain(self, setting: str, what: str) -> tuple[Any, ...]:
        """Return the status that ends a stream in such a way that Envoy does not let the request pass."""
        if setting not in self._complained:
            self._complained.add(setting)
            log.error(
                "the gateway's configuration is not usable: %s",
                what,
                extra={"event": "extproc_misconfigured", "fields": {"next": what}},
            )
        return grpc.StatusCode.FAILED_PRECONDITION, what
