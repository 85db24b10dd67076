"""Messages of one stream from a gateway, read and parsed one after the other.

gRPC buffers as many bytes of a stream as its window has (64 KB) until a message is read, and then all of that message.
A message is therefore read only after memory for it is reserved (body_budget.py). Messages of any length are parsed
here. A malformed message is counted, and logged at most once a minute, while gRPC's own log would have a traceback of
each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from router.extproc import extproc_pb2 as pb
from router.http.body_budget import BodyBudget
from router.http.request import BodyReservation

log = logging.getLogger(__name__)

SAY_S = 60.0  # minimum interval between two log lines about malformed messages


class MalformedMessage(Exception):
    """Bytes that are no message of Envoy's external processing."""


class MalformedCount:
    """Counter of malformed messages, with a rate-limited log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = -SAY_S
        self._told = 0  # number of messages that were logged
        self.total = 0

    def add(self, why: str) -> None:
        """Count one message. Log the count since the last line, at most once a minute."""
        self.total += 1
        now_s = self._clock()
        if now_s - self._said_s < SAY_S:
            return
        fields = {"count": self.total - self._told, "error": why[:200], "next": "limit access to extproc.port"}
        self._said_s, self._told = now_s, self.total
        log.warning(
            "messages to the picker cannot be decoded", extra={"event": "extproc_malformed_message", "fields": fields}
        )


class Messages:
    """Messages of one stream from a gateway."""

    def __init__(self, context: Any, malformed: MalformedCount) -> None:  # noqa: ANN401 - grpc ships no types
        self._context = context
        self._malformed = malformed

    async def read(self) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """Return the next message, and EOF after the last one. Raises MalformedMessage."""
        raw = await self._context.read()
        return raw if raw is grpc.aio.EOF else self._parse_message(raw)

    async def read_body(self) -> tuple[str, bytes, bool]:
        """Return the kind of the next message. For a piece of the request's body, also return its bytes, and True if it
        is the last one. The kind is "" after the last message. Raises MalformedMessage."""
        message = await self.read()
        if message is grpc.aio.EOF:
            return "", b"", True
        kind = message.WhichOneof("request") or "none"
        if kind != "request_body":
            return kind, b"", False
        return kind, message.request_body.body, message.request_body.end_of_stream

    def _parse_message(self, raw: bytes) -> pb.ProcessingRequest:
        try:
            message: pb.ProcessingRequest = pb.ProcessingRequest.FromString(raw)
        except DecodeError as error:
            self._malformed.add(str(error))
            raise MalformedMessage(str(error)) from None
        return message


async def room_for(budget: BodyBudget, share: BodyReservation, size_bytes: int, wait_s: float) -> bool:
    """Reserve `size_bytes` in total under the share's holder as soon as they are available. Return False after
    `wait_s`; the reservation is then unchanged."""
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
        budget.on_budget_freed(share)
    return True


class _Turn:
    """One waiter for memory."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()  # memory may be available
        self.over = False

    def end(self) -> None:
        """Stop waiting."""
        self.over = True
        self.ready.set()
