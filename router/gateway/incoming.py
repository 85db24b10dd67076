"""A request that comes in messages of Envoy: its body, in whatever pieces, and room for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import grpc

from router.gateway import extproc_pb2 as pb
from router.gateway import words
from router.http.body_budget import BodyBudget, no_room
from router.http.client_connection import ClientLeft
from router.http.request import Refusal, Request, Stream

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = range(5)  # pb.ProcessingMode.BodySendMode, as plain numbers


class GatewayClient:
    """The client of one request, as far as a gateway lets it be seen (http.request.Connection): it can be answered
    once, at once."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.code = ""  # why there is no other answer
        self.said: bytes | None = None  # the answer, once there is one

    def hold(self, request: Request) -> bool:
        """Count the request's body, as far as it has come."""
        return self._budget.take(request, request.body_bytes)

    def let_go(self, request: Request) -> None:
        """Count the request's body no longer."""
        self._budget.give_back(request)

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Answer at once, in place of an engine."""
        self.said = words.immediate(status, lines, b"" if request.method == "HEAD" else body, self.code)

    def headed(self, request: Request, length: int, *, expects: bool) -> NoReturn:
        """Not for a request whose head Envoy has read."""
        raise NotImplementedError

    def grows(self, request: Request, body_bytes: int) -> NoReturn:
        """Likewise."""
        raise NotImplementedError

    def arrived(self, request: Request) -> NoReturn:
        """Likewise."""
        raise NotImplementedError

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> Stream:
        """Not where Envoy carries the answer."""
        raise NotImplementedError

    def cut(self) -> NoReturn:
        """Likewise."""
        raise NotImplementedError


def check_length(request: Request, body_bytes_max: int) -> None:
    """Raises Refusal for a body that is too long by its head, before it comes."""
    length = request.fields.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > body_bytes_max:
        raise _too_large(body_bytes_max)


def _too_large(body_bytes_max: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The request body is larger than {body_bytes_max} bytes.")


async def read_body(context: Any, request: Request, mode: int, body_bytes_max: int) -> bool:  # noqa: ANN401 - grpc ships no types
    """Read the request's body. Returns whether trailers ended it, which are to be answered too. Raises Refusal for one
    that is too long or has no room, and ClientLeft where it ends unfinished."""
    pieces, size = list[bytes | bytearray](), 0
    while True:
        message = await context.read()
        if message is grpc.aio.EOF:
            raise ClientLeft
        kind = message.WhichOneof("request")
        if kind == "request_trailers":
            request.bring(pieces, size)
            return True
        if kind != "request_body":
            continue
        part: pb.HttpBody = message.request_body
        pieces.append(part.body)
        size += len(part.body)
        if size > body_bytes_max:
            raise _too_large(body_bytes_max)
        request.body_bytes = size
        if not request.hold():
            raise no_room()
        if part.end_of_stream or mode == BUFFERED:
            request.bring(pieces, size)
            return False
