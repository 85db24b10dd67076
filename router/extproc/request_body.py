"""Request in Envoy's messages: reads its body, in any pieces, and reserves memory for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from router.extproc import processing_responses
from router.extproc.stream_messages import Messages, room_for
from router.http.body_budget import BodyBudget, no_room
from router.http.client_connection import ClientDisconnected
from router.http.read_flow import GROWS_BYTES
from router.http.request import Refusal, Request, Stream

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = range(5)  # pb.ProcessingMode.BodySendMode, as plain numbers


class ExtProcClient:
    """Client of one request behind a gateway (http.request.Connection). It can be answered once, with a whole
    answer."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.code = ""  # reason for an answer that does not come from an engine
        self.said: bytes | None = None  # the encoded answer, once there is one

    def hold(self, request: Request) -> bool:
        """Account for the part of the request's body that has arrived."""
        return self._budget.take(request, request.body_bytes)

    async def make_room(self, request: Request, body_bytes: int, wait_s: float) -> bool:
        """Reserve `body_bytes` for the body as soon as they are available. False after `wait_s`."""
        return await room_for(self._budget, request, body_bytes, wait_s)

    def release_body(self, request: Request) -> None:
        """Stop accounting for the request's body."""
        self._budget.give_back(request)

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Answer at once, in place of an engine."""
        self.said = processing_responses.immediate_response(
            status, lines, b"" if request.method == "HEAD" else body, self.code
        )

    def on_head(self, request: Request, length: int, *, expects: bool) -> NoReturn:
        """Not used, since Envoy has read the head."""
        raise NotImplementedError

    def grows(self, request: Request, body_bytes: int) -> NoReturn:
        """Not used, since Envoy has read the head."""
        raise NotImplementedError

    def on_request(self, request: Request) -> NoReturn:
        """Not used, since Envoy has read the head."""
        raise NotImplementedError

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> Stream:
        """Not used, since Envoy carries the answer."""
        raise NotImplementedError

    def abort_response(self) -> NoReturn:
        """Not used, since Envoy carries the answer."""
        raise NotImplementedError


def length_of(request: Request) -> int:
    """Return the length of the body by its head; -1 if the head does not have it."""
    length = request.fields.get(b"content-length", b"")
    return int(length[:20]) if length.isdigit() else -1


def check_length(request: Request, body_bytes_max: int) -> None:
    """Raise Refusal for a body that is too long by its head, before it arrives."""
    if length_of(request) > body_bytes_max:
        raise _too_large(body_bytes_max)


def _too_large(body_bytes_max: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The request body is larger than {body_bytes_max} bytes.")


async def await_room(client: ExtProcClient, request: Request, mode: int, body_bytes_max: int, wait_s: float) -> None:
    """Return once memory for the body is reserved, before any of it is read. The reservation is the length in the head.
    If the head has no length, it is the maximum for a body in one message, and else GROWS_BYTES. Raises Refusal after
    `wait_s`."""
    length = length_of(request)
    if length < 0:
        length = body_bytes_max if mode == BUFFERED else GROWS_BYTES
    if not await client.make_room(request, length, wait_s):
        raise no_room()


async def read_body(
    messages: Messages, client: ExtProcClient, request: Request, mode: int, body_bytes_max: int, wait_s: float
) -> bool:
    """Read the request's body; memory for its beginning is reserved. Return True if trailers ended it, which must be
    answered too. Raises Refusal if it is too long or exceeds the memory budget, and ClientDisconnected if it is
    incomplete."""
    pieces, size, trailers = list[bytes | bytearray](), 0, False
    open_ended = length_of(request) < 0
    while not trailers:
        grown = min(size + GROWS_BYTES, body_bytes_max) if open_ended else 0
        if grown > request.held_bytes and not await client.make_room(request, grown, wait_s):
            raise no_room()
        kind, part, last = await messages.read_body()
        if not kind:
            raise ClientDisconnected
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
    request.replace_body(pieces, size)
    if not request.hold():  # the whole body takes at most the memory that was reserved for it
        raise no_room()
    return trailers
