"""A collector of OpenTelemetry spans: a real HTTP server on port 0 that decodes what it is sent as OTLP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.fakes import listening


@dataclass
class Got:
    """A span as it arrived, with its resource."""

    span: Span
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the span."""
        return self.span.name

    @property
    def id(self) -> str:
        """In hexadecimal, as `traceparent` has it."""
        return self.span.span_id.hex()

    @property
    def trace(self) -> str:
        """Likewise."""
        return self.span.trace_id.hex()

    @property
    def about(self) -> dict[str, Any]:
        """Its attributes."""
        return _plain(self.span.attributes)

    @property
    def parent(self) -> str:
        """Id of its parent, "" without one."""
        return self.span.parent_span_id.hex()

    @property
    def events(self) -> list[str]:
        """Names of its events, in time's order."""
        return [event.name for event in sorted(self.span.events, key=lambda event: event.time_unix_nano)]

    @property
    def failed(self) -> bool:
        """Whether its status says so."""
        return self.span.status.code == self.span.status.STATUS_CODE_ERROR


@dataclass
class Collector:
    """`async with Collector() as collector`."""

    statuses: deque[int] = field(default_factory=deque)  # of the next answers; 200 when there are none left
    spans: list[Got] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[CIMultiDict[str]] = field(default_factory=list)
    holding: bool = False  # answers nothing
    port: int = 0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._news, self._go_on = asyncio.Event(), asyncio.Event()
        self._runner, self.port = await listening(app, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._go_on.set()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """What `tracing.endpoint` is to say."""
        return f"http://127.0.0.1:{self.port}"

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append(CIMultiDict(request.headers))
        if self.holding:
            await self._go_on.wait()
        status = self.statuses.popleft() if self.statuses else 200
        if status == 200:
            self.bodies.append(body)
            message = ExportTraceServiceRequest.FromString(body)
            for of_resource in message.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                self.spans += [Got(span, resource) for scope in of_resource.scope_spans for span in scope.spans]
        self._news.set()
        return web.Response(status=status)

    async def until(self, enough: Callable[[], object]) -> None:
        """Return when it is true; looked at whenever spans came."""
        async with asyncio.timeout(60):
            while not enough():
                self._news.clear()
                await self._news.wait()

    async def trace(self, requests: int = 1) -> list[Got]:
        """All spans of the last request, once so many have come."""
        await self.until(lambda: len(self.named("POST /v1/chat/completions")) >= requests)
        last = self.named("POST /v1/chat/completions")[-1].trace
        return [got for got in self.spans if got.trace == last]

    def asked(self, times: int) -> bool:
        """Whether so many batches came, whatever was made of them."""
        return len(self.headers) >= times

    def named(self, name: str) -> list[Got]:
        """Spans of this name."""
        return [got for got in self.spans if got.name == name]


def _plain(attributes: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value"))

    return {pair.key: value(pair) for pair in attributes}
