"""The service that a gateway calls: one stream of gRPC a request.

Messages go in and out as bytes that this room makes (words.py), under the name that Envoy calls: no stub of Envoy's is
needed for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from router.gateway import extproc_pb2 as pb
from router.gateway.parts import PickerParts
from router.gateway.stream import PickerStream

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"


class Picker:
    """Serves streams, and knows those that are under way."""

    def __init__(self, parts: PickerParts) -> None:
        self._parts = parts
        self._idle = asyncio.Event()
        self._idle.set()
        self._complained: set[str] = set()  # mistakes of a gateway's settings that the log has

    def handler(self) -> Any:  # noqa: ANN401 - grpc ships no types
        """What a server of gRPC calls."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
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
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.observability_mode:
            self._complain("observability_mode", "the gateway only watches: set observability_mode to false")
            return
        if first.WhichOneof("request") != "request_headers":
            self._complain("request_header_mode", "the gateway sends no heads: set request_header_mode to SEND")
            return
        parts = self._parts
        parts.known = parts.known or parts.placer.others_ready(frozenset())
        if not parts.known:
            # Nothing was found out yet, which says nothing of the replicas: the gateway may choose, if it fails open.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no replica is known yet")
        stream, streams = PickerStream(self._parts, context), self._parts.streams
        streams.add(stream)
        self._idle.clear()
        try:
            await stream.serve(first)
        finally:
            streams.discard(stream)
            if not streams:
                self._idle.set()

    def _complain(self, setting: str, what: str) -> None:
        if setting not in self._complained:
            self._complained.add(setting)
            log.error(
                "the gateway cannot be served: %s", what, extra={"event": "gateway_misused", "fields": {"next": what}}
            )
