"""A request that comes in messages of Envoy: its body, in whatever pieces, and room for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from router.gateway import words
from router.gateway.messages import Messages, room_for
from router.http.body_budget import BodyBudget, no_room
from router.http.client_connection import ClientLeft
from router.http.intake import GROWS_BYTES
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

    async def make_room(self, request: Request, body_bytes: int, wait_s: float) -> bool:
        """Count the body as so long, as soon as there is room for it. False where there is none in time."""
        return await room_for(self._budget, request, body_bytes, wait_s)

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


def length_of(request: Request) -> int:
    """Bytes of the body by its head; -1 where that does not say."""
    length = request.fields.get(b"content-length", b"")
    return int(length[:20]) if length.isdigit() else -1


def check_length(request: Request, body_bytes_max: int) -> None:
    """Raises Refusal for a body that is too long by its head, before it comes."""
    if length_of(request) > body_bytes_max:
        raise _too_large(body_bytes_max)


def _too_large(body_bytes_max: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The request body is larger than {body_bytes_max} bytes.")


async def await_room(client: GatewayClient, request: Request, mode: int, body_bytes_max: int, wait_s: float) -> None:
    """Return once there is room for the body, before any of it is read: as long as its head says, or as it may be
    where it comes in one message and its head does not say. Raises Refusal where there is none in time."""
    length = length_of(request)
    if length < 0:
        length = body_bytes_max if mode == BUFFERED else GROWS_BYTES
    if not await client.make_room(request, length, wait_s):
        raise no_room()


async def read_body(
    messages: Messages, client: GatewayClient, request: Request, mode: int, body_bytes_max: int, wait_s: float
) -> bool:
    """Read the request's body, for whose beginning there is room. Returns whether trailers ended it, which are to be
    answered too. Raises Refusal for one that is too long or has no room, and ClientLeft where it ends unfinished."""
    pieces, size, trailers = list[bytes | bytearray](), 0, False
    open_ended = length_of(request) < 0
    while not trailers:
        grown = min(size + GROWS_BYTES, body_bytes_max) if open_ended else 0
        if grown > request.held_bytes and not await client.make_room(request, grown, wait_s):
            raise no_room()
        kind, part, last = await messages.read_body()
        if not kind:
            raise ClientLeft
        trailers = kind == "request_trailers"
        if kind != "request_body":
            continue
        pieces.append(part)
        size += len(part)
        if size > body_bytes_max:
            raise _too_large(body_bytes_max)
        if size > request.held_bytes and not await client.make_room(request, size, wait_s):
            raise no_room()
        if last or mode == BUFFERED:
            break
    request.bring(pieces, size)
    if not request.hold():  # the whole body takes no more room than was kept for it
        raise no_room()
    return trailers
