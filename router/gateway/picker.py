"""The service that a gateway calls: one stream of gRPC a request.

Messages go in and out as bytes that this room makes (words.py), under the name that Envoy calls: no stub of Envoy's is
needed for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from router.gateway.heads import HeadTurns
from router.gateway.messages import MalformedMessage, Messages
from router.gateway.parts import PickerParts
from router.gateway.stream import PickerStream

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"


class Picker:
    """Serves streams, and knows those that are under way."""

    def __init__(self, parts: PickerParts, heads: HeadTurns) -> None:
        self._parts = parts
        self._heads = heads
        self._idle = asyncio.Event()
        self._idle.set()
        self._complained: set[str] = set()  # mistakes of a gateway's settings that the log has

    def handler(self) -> Any:  # noqa: ANN401 - grpc ships no types
        """What a server of gRPC calls."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=None, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: process})

    @property
    def in_flight(self) -> int:
        """Streams under way."""
        return len(self._parts.streams)

    async def idle(self) -> None:
        """Return when no stream is under way."""
        await self._idle.wait()

    def release(self) -> None:
        """Let go of streams whose answers Envoy carries on without us."""
        for stream in list(self._parts.streams):
            stream.release()

    async def _process(self, _: Any, context: Any) -> None:  # noqa: ANN401 - grpc ships no types
        parts, messages = self._parts, Messages(context, self._parts.malformed)
        first, why = await self._first(context, messages)
        if first is grpc.aio.EOF:
            return
        if first is None:
            await context.abort(*why)
        parts.known = parts.known or parts.placer.others_ready(frozenset())
        if not parts.known and parts.desk.keys is None:
            # Nothing was found out yet, which says nothing of the replicas: the gateway may choose, if it fails open.
            # With keys it must not, and gets a refusal (PickerStream).
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no replica is known yet")
        stream, streams = PickerStream(parts, context, messages), parts.streams
        streams.add(stream)
        self._idle.clear()
        try:
            await stream.serve(first)
        finally:
            streams.discard(stream)
            if not streams:
                self._idle.set()
        if not stream.answered:
            # To Envoy a stream that ends well and unanswered says that the request may pass, whatever the gateway does
            # while no picker answers.
            await context.abort(grpc.StatusCode.ABORTED, "the request was not answered")

    async def _first(self, context: Any, messages: Messages) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401 - likewise
        """The first message, or EOF, or None and the status to end the stream with."""
        try:
            first = await self._heads.read(messages, self._parts.rules.head_timeout_s)
        except TimeoutError:
            return None, (grpc.StatusCode.DEADLINE_EXCEEDED, "no head came")
        except MalformedMessage:
            return None, (grpc.StatusCode.INVALID_ARGUMENT, "a message could not be read")
        if first is grpc.aio.EOF:
            return first, ()
        if first.observability_mode:
            what = "the gateway only watches: set observability_mode to false"
            return None, self._complain("observability_mode", what)
        if first.WhichOneof("request") != "request_headers":
            what = "the gateway sends no heads: set request_header_mode to SEND"
            return None, self._complain("request_header_mode", what)
        return first, ()

    def _complain(self, setting: str, what: str) -> tuple[Any, ...]:
        """The status to end a stream with, by which Envoy does not let the request pass."""
        if setting not in self._complained:
            self._complained.add(setting)
            log.error(
                "the gateway cannot be served: %s", what, extra={"event": "gateway_misused", "fields": {"next": what}}
            )
        return grpc.StatusCode.FAILED_PRECONDITION, what
