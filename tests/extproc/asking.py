"""A gateway as the picker sees one: a client of gRPC that sends what Envoy sends, in any mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from router.cli.config_loader import load
from router.config.runtime import resolve
from router.extproc import extproc_pb2 as pb
from router.extproc.metadata import DESTINATION, LB, SERVED, SUBSET, SUBSET_HINT
from router.extproc.request_body import BUFFERED, DUPLEX, NONE, PARTIAL, STREAMED, ExtProcClient
from router.http.body_budget import BodyBudget
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine
from tests.support.waiting import until

MODES = {"none": NONE, "streamed": STREAMED, "buffered": BUFFERED, "partial": PARTIAL, "duplex": DUPLEX}
PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHAT = "/v1/chat/completions"


def chat(text: str = "hello", **more: Any) -> bytes:
    """The body of a chat."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


@asynccontextmanager
async def picking(*engines: FakeEngine, **settings: Any) -> AsyncIterator[RouterServer]:
    """A router whose frontend is the picker, before these engines, once they are known to be ready."""
    flat = {
        "replicas": tuple(engine.url for engine in engines),
        "listen.mode": "extproc",
        "listen.port": 0,
        "listen.admin_port": 0,
        "listen.lame_duck_s": 0,
        "extproc.port": 0,
        "extproc.health_port": 0,
        "probe.interval_s": 0.05,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    async with RouterServer(resolve(load(overrides=flat))) as app:
        await app.control.probe_now()
        await until(lambda: len(app.router.fleet.ready()) == sum(engine.healthy for engine in engines))
        yield app


class Asking:
    """One request of a gateway: `async with asking(app, ...) as it`."""

    def __init__(self, call: Any, request: str, response: str) -> None:
        self._call = call
        self._request, self._response = request, response

    async def raw(self, message: bytes) -> None:
        """Send bytes in place of a message."""
        await self._call.write(message)

    async def send(self, **message: Any) -> None:
        """Send a message."""
        await self._call.write(pb.ProcessingRequest(**message))

    async def hear(self) -> pb.ProcessingResponse | None:
        """The next answer; None at the end of the stream."""
        async with asyncio.timeout(60):
            message = await self._call.read()
        return None if message is grpc.aio.EOF else message

    async def failure(self) -> str:
        """The status by which the stream ends with an error, as gRPC names it. Raises AssertionError if it does not."""
        try:
            answer = await self.hear()
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        raise AssertionError(f"no error: {answer}")

    async def head(
        self,
        path: str = CHAT,
        *,
        method: str = "POST",
        end: bool = False,
        headers: Mapping[str, str] | None = None,
        subset: Iterable[str] | None = None,
    ) -> None:
        """Send the head of a request."""
        pairs = {":method": method, ":path": path, ":authority": "gateway", ":scheme": "http", **(headers or {})}
        message = pb.ProcessingRequest()
        for key, value in pairs.items():
            message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        message.request_headers.end_of_stream = end
        message.protocol_config.request_body_mode = MODES[self._request]
        message.protocol_config.response_body_mode = MODES[self._response]
        if subset is not None:
            listed = message.metadata_context.filter_metadata[SUBSET_HINT].fields[SUBSET].list_value
            for each in subset:
                listed.values.add(string_value=each)
        await self._call.write(message)

    async def body(self, body: bytes, *, end: bool = True) -> None:
        """Send a piece of the body."""
        await self.send(request_body=pb.HttpBody(body=body, end_of_stream=end))

    async def answer(
        self,
        status: int = 200,
        *,
        served: str = "",
        end: bool = False,
        content_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the head of an answer."""
        message = pb.ProcessingRequest()
        for key, value in {":status": str(status), "content-type": content_type, **(headers or {})}.items():
            message.response_headers.headers.headers.add(key=key, raw_value=value.encode())
        message.response_headers.end_of_stream = end
        if served:
            message.metadata_context.filter_metadata[LB].fields[SERVED].string_value = served
        await self._call.write(message)

    async def piece(self, body: bytes, *, end: bool = False) -> None:
        """Send a piece of the answer's body."""
        await self.send(response_body=pb.HttpBody(body=body, end_of_stream=end))

    async def finish(self) -> None:
        """End the stream, as Envoy does at the end of the request."""
        await self._call.done_writing()
        while await self.hear() is not None:
            pass

    def leave(self) -> None:
        """Break the stream off."""
        self._call.cancel()

    async def pick(self, body: bytes | None = None, **head: Any) -> pb.ProcessingResponse:
        """Ask with a whole body, buffered, and return what says where it goes."""
        body = chat() if body is None else body
        await self.head(**head)
        first = await self.hear()
        assert first is not None
        if first.HasField("immediate_response"):
            return first
        assert first.HasField("request_headers")
        assert not first.request_headers.response.header_mutation.set_headers
        await self.body(body)
        second = await self.hear()
        assert second is not None
        return second


def nobody() -> ExtProcClient:
    """A client of whom only a head is read: there is no room for its body, and nobody waits for any."""
    loop = asyncio.new_event_loop()
    loop.close()
    return ExtProcClient(BodyBudget(loop, 0))


@asynccontextmanager
async def asking(app: RouterServer, request: str = "buffered", response: str = "none") -> AsyncIterator[Asking]:
    """A stream of a gateway that shows bodies in these modes."""
    options = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.extproc.port}", options=options) as channel:
        method = channel.stream_stream(
            PATH,
            request_serializer=_serialized,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        call = method()
        try:
            yield Asking(call, request, response)
        finally:
            call.cancel()


def _serialized(message: pb.ProcessingRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def set_headers(response: pb.ProcessingResponse) -> dict[str, str]:
    """Headers that an answer sets, wherever it has them."""
    kind = response.WhichOneof("response")
    part = getattr(response, str(kind))
    mutation = part.headers if kind == "immediate_response" else part.response.header_mutation
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def removed(response: pb.ProcessingResponse) -> set[str]:
    """Headers that an answer removes."""
    part = getattr(response, str(response.WhichOneof("response")))
    return set(part.response.header_mutation.remove_headers)


def destinations(response: pb.ProcessingResponse) -> list[str]:
    """The endpoints that an answer names, the same in its header and its metadata."""
    header = set_headers(response)[DESTINATION]
    assert response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value == header
    return header.split(",")


def endpoint(engine: FakeEngine) -> str:
    """The engine's address as gateways name it."""
    return f"127.0.0.1:{engine.port}"


def error_of(response: pb.ProcessingResponse) -> tuple[int, Any]:
    """Status and body of an answer of the picker's own."""
    assert response.HasField("immediate_response")
    return response.immediate_response.status.code, json.loads(response.immediate_response.body)
