"""The messages of one stream, as a gateway sends them: read one after the other, and parsed here.

gRPC holds as many bytes of a stream as its window has (64 KB) until a message is read, and all of that message then. So
nothing is read before there is room for it (body_budget.py), and a message of whatever length is parsed by us: one that
is no message of Envoy's is counted and told once a minute, while gRPC's own log would have a traceback of each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from router.gateway import extproc_pb2 as pb
from router.gateway.wire import bytes_and_end
from router.http.body_budget import BodyBudget
from router.http.request import BodyShare

log = logging.getLogger(__name__)

LONG = 64 << 10  # bytes of a message from which on its body is cut out of it, which copies it once instead of twice
SAY_S = 60.0  # between two lines about messages that cannot be read


class MalformedMessage(Exception):
    """Bytes that are no message of Envoy's external processing."""


class MalformedCount:
    """How many messages could not be read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = -SAY_S
        self._told = 0  # how many the log has
        self.total = 0

    def add(self, why: str) -> None:
        """Count one, and tell the log of those since its last line, at most once a minute."""
        self.total += 1
        now_s = self._clock()
        if now_s - self._said_s < SAY_S:
            return
        fields = {"count": self.total - self._told, "error": why[:200], "next": "see who may reach gateway.port"}
        self._said_s, self._told = now_s, self.total
        log.warning("messages to the picker cannot be read", extra={"event": "gateway_malformed", "fields": fields})


class Messages:
    """What a gateway sends by one stream."""

    def __init__(self, context: Any, malformed: MalformedCount) -> None:  # noqa: ANN401 - grpc ships no types
        self._context = context
        self._malformed = malformed

    async def read(self) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """The next message, and EOF behind the last one. Raises MalformedMessage."""
        raw = await self._context.read()
        return raw if raw is grpc.aio.EOF else self._parsed(raw)

    async def read_body(self) -> tuple[str, bytes, bool]:
        """Kind of the next message, and of a piece of the request's body its bytes, and whether it is the last one.
        The kind is "" behind the last message. Raises MalformedMessage."""
        raw = await self._context.read()
        if raw is grpc.aio.EOF:
            return "", b"", True
        if len(raw) > LONG and (found := bytes_and_end(raw, REQUEST_BODY)) is not None:
            return "request_body", *found
        message = self._parsed(raw)
        kind = message.WhichOneof("request") or "none"
        if kind != "request_body":
            return kind, b"", False
        return kind, message.request_body.body, message.request_body.end_of_stream

    def _parsed(self, raw: bytes) -> pb.ProcessingRequest:
        try:
            message: pb.ProcessingRequest = pb.ProcessingRequest.FromString(raw)
        except DecodeError as error:
            self._malformed.add(str(error))
            raise MalformedMessage(str(error)) from None
        return message


REQUEST_BODY = 4  # field of a ProcessingRequest


async def room_for(budget: BodyBudget, share: BodyShare, size_bytes: int, wait_s: float) -> bool:
    """Hold so many bytes in all in the name of the share's holder as soon as there is room for them, and wait for that.
    False after `wait_s`, and nothing has changed."""
    if budget.take(share, size_bytes):
        return True
    turn = _Turn()
    timer = asyncio.get_running_loop().call_later(wait_s, turn.end)
    budget.wait(share, turn.ready.set)
    try:
        while not budget.take(share, size_bytes):
            if turn.over:
                return False
            turn.ready.clear()
            await turn.ready.wait()
    finally:
        timer.cancel()
        budget.go(share)
    return True


class _Turn:
    """Somebody who waits for room."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()  # there may be room
        self.over = False

    def end(self) -> None:
        """Wait no longer."""
        self.over = True
        self.ready.set()
