"""One client's connection: requests one after the other, their answers, and a client that does not read or is gone.

A request's handler is a task. It ends with its answer, and is cancelled when the client leaves. Requests that a client
sends ahead wait for their turn; while there are many, the connection is not read (intake.py).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Protocol, cast

from router.http import deadlines
from router.http.body_budget import BodyBudget, no_room
from router.http.cors import Cors
from router.http.deadlines import ClientLimits, Patience, acknowledged
from router.http.intake import Admit, Intake
from router.http.outbox import Outbox
from router.http.pace import Pace
from router.http.receiver import BETWEEN
from router.http.request import BodySender, Refusal, Request

# Requests sent ahead, and bytes of their bodies, at which the connection is not read until some are answered.
WAITING_MAX, WAITING_BYTES_MAX = 8, 1 << 20
WRITE_BUFFER_BYTES_MAX = 256 << 10  # bytes that the client has not read; above, its engine is not read either
# Grace after a last answer sent without `Connection: close`: the client may already be sending its next request.
NEXT_S = 0.5
# A refused client's bytes are read for so long: a reset would take its answer away before it is read.
LINGER_S = 2.0
NO_LINGER = struct.pack("ii", 1, 0)  # value of SO_LINGER with which closing resets the connection

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)  # answers without a body or a Content-Length (RFC 9110 section 8.6)

Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Request, Refusal], None]


class ClientLeft(Exception):
    """The client is gone, so nobody would read an answer."""


class Owner(Protocol):
    """What a connection needs of its server."""

    handler: Handler
    refuse: Refuse
    admit: Admit
    bodies: BodyBudget
    limits: ClientLimits
    loop: asyncio.AbstractEventLoop
    outbox: Outbox
    pace: Pace
    clients: set[ClientConnection]
    closing: bool
    cors: Cors | None

    def lets_in(self, address: str) -> bool:
        """Whether one more connection from this address is allowed. It is then counted until `left`."""

    def left(self, address: str) -> None:
        """A connection from this address is gone."""


class ClientConnection(asyncio.Protocol):
    """One client's connection to a server. Requests are answered one at a time, in the order in which they came."""

    __slots__ = (
        "_clogged", "_discarding", "_intake", "_last", "_next_until_s", "_patience", "_receiver", "_refusal",
        "_request", "_server", "_transport", "_waiting", "address", "chunked", "sender", "task", "write",
    )  # fmt: skip

    def __init__(self, server: Owner, address: str | None = None) -> None:
        """`address` is given for a client that the server has let in already."""
        self._server = server
        self._intake = Intake(self, self, server)
        self._receiver = self._intake.receiver
        self._patience = Patience()
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None  # the request that is being answered
        self._waiting: deque[Request] = deque()
        self._refusal: Refusal | None = None  # error to send after the answers that wait; nothing more is read then
        self.task: asyncio.Task[None] | None = None
        self._discarding = False  # we read and drop: a refusal was the last answer
        self._clogged = False  # the client does not read
        self._last = False  # the answer under way said `Connection: close`
        self._next_until_s = 0.0  # end of the grace NEXT_S, on the loop's clock; 0 = none
        self.address = address
        self.chunked = False
        self.sender: BodySender | None = None
        self.write: Callable[[bytes], None] = _nowhere

    # -- the transport's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has set TCP_NODELAY; without it a stream on a warm connection would wait 40 ms for an ACK."""
        if self.address is None:
            peer = transport.get_extra_info("peername")
            address = str(peer[0]) if peer else ""
            if not self._server.lets_in(address):
                _reset(cast("asyncio.Transport", transport))
                return
            self.address = address
        self._transport = cast("asyncio.Transport", transport)
        self._intake.open(self._transport, self.address)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self.write = self._transport.write
        self._server.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: the task that answers it is cancelled."""
        if self.address is not None:
            self._server.left(self.address)
            self.address = None
        if self.sender is not None:
            self.sender.gone()
        self._transport, self.write, self.sender = None, _nowhere, None
        self._server.clients.discard(self)
        self._forget_waiting()
        if self._request is not None and self._request.held_bytes:
            self.let_go(self._request)
        # Cycles, with the bodies in them, wait for the collector, which hardly ever runs (loop.COLLECT).
        self._intake.close()
        self._refusal = None
        task, self._request, self.task = self.task, None, None
        if task is not None:
            task.cancel()

    def pause_writing(self) -> None:
        """The client does not read: the sender of its answer must wait, and so must its next request."""
        self._clogged = True
        if self.sender is not None:
            self.sender.pause()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._clogged = False
        if self.sender is not None:
            self.sender.resume()
        if self._request is None:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests came."""
        if self._refusal is not None or self._discarding:
            if self._transport is not None:
                self._server.pace.dropped(self._transport, len(data))
            return
        try:
            self._intake.feed(data)
        except Refusal as error:
            self.refuse(error)

    # -- the receiver's side -------------------------------------------------------------------------------------

    def headed(self, request: Request, length: int, *, expects: bool) -> bool:
        """A head came without all of its body."""
        return self._intake.headed(request, length, expects=expects)

    def grows(self, request: Request, body_bytes: int) -> None:
        """More came of a body whose length is not known."""
        self._intake.grows(request, body_bytes)

    def arrived(self, request: Request) -> None:
        """A request was read to its end: answer it now, or in its turn. Whoever is not let in gets no turn."""
        if self._request is None and not self._clogged:
            self._start(request)
            return
        self._intake.stands(request)
        self._waiting.append(request)
        if self._far_ahead():
            self._intake.wait()

    def permit(self) -> None:
        """Permit the client to send a body. Not told to one that has sent ahead: it does not wait."""
        if self._request is None and not self._clogged:
            self._server.outbox.flush()
            self.write(_CONTINUE)

    def hold(self, request: Request) -> bool:
        """Count the body of a request."""
        return self._intake.hold(request)

    def let_go(self, request: Request) -> None:
        """Count it no longer."""
        self._intake.let_go(request)

    def _far_ahead(self) -> bool:
        waiting = self._waiting
        return len(waiting) >= WAITING_MAX or sum(each.body_bytes for each in waiting) >= WAITING_BYTES_MAX

    # -- one after the other -------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._request = request
        self.task = self._server.loop.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            await self._server.handler(request)
        except ClientLeft:
            pass
        except Exception as error:
            self._server.loop.call_exception_handler({"message": "bug: a request failed", "exception": error})
            self.cut()
        finally:
            if self._request is request:
                self._next()

    def _next(self) -> None:
        if self._request is not None and self._request.held_bytes:
            self.let_go(self._request)
        self._request = self.task = self.sender = None
        if not self._clogged:  # start no request while the client leaves answers unread: they would pile up
            self._go_on()

    def _go_on(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._discarding:
            return
        if self._waiting:
            self._start(self._waiting.popleft())
            if not self._far_ahead():
                self._intake.go_on()
        elif self._refusal is not None:
            self._say(self._refusal)

    def refuse(self, error: Refusal) -> None:
        """Refuse behind the answers that wait. No more is read: nobody knows where the next request would begin."""
        error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames hold what was read
        self._refusal = error
        self._intake.discard()
        if self._request is None and not self._waiting:
            self._say(error)

    def _say(self, error: Refusal) -> None:
        request = self._receiver.unfinished or Request(self)
        self._receiver.close()
        request.version = "1.0"  # the last answer of this connection
        self._discarding = True
        self._server.refuse(request, error)
        self._server.outbox.flush()
        if self._transport is not None:
            can_end = self._transport.can_write_eof()
            if can_end:
                self._transport.write_eof()
            # TLS cannot end one direction alone, and sends its close_notify in `close`.
            self._server.loop.call_later(LINGER_S, self.abort if can_end else self.close)

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Send a whole answer. Raises ClientLeft."""
        if self._transport is None:
            raise ClientLeft
        if self._server.cors is not None:
            lines = self._server.cors.lines(request, lines, own=own)
        closes = self._closes(request)
        head = b"".join(
            (b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), *lines,
             b"content-length: %d\r\n" % len(body) if status not in _NO_BODY else b"",
             b"connection: close\r\n\r\n" if closes else b"\r\n")
        )  # fmt: skip
        if request.method == "HEAD" or status in _NO_BODY:
            body = b""
        self._server.outbox.put(self._transport, head, body)
        if closes:
            self._finish()

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> ClientConnection:
        """Send the head of an answer; its body is written to this connection. Raises ClientLeft."""
        if self._transport is None:
            raise ClientLeft
        if self._server.cors is not None:
            lines = self._server.cors.lines(request, lines, own=False)
        self.chunked = request.version == "1.1"
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        self._last = self._closes(request)
        closes = b"connection: close\r\n\r\n" if self._last else b"\r\n"
        self._server.outbox.flush()
        self.write(b"".join((b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), *lines, framing, closes)))
        return self

    def end(self) -> None:
        """End the body that was begun. A client that was not told that this answer is the last may be sending a request
        by now, which would fail if the connection were closed: the next answer tells it."""
        if self.chunked:
            self.write(_LAST_CHUNK)
        if self._request is not None and self._last:
            self._finish()
        elif self._server.closing:
            self._next_until_s = self._server.loop.time() + NEXT_S

    @property
    def unread_bytes(self) -> int:
        """Bytes that were written, and that the client's socket has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _closes(self, request: Request) -> bool:
        return request.last or request.version == "1.0" or self._server.closing

    def _finish(self) -> None:
        """Close once all is written, unless a refusal is to be read first (LINGER_S)."""
        self._forget_waiting()
        self._server.outbox.flush()
        if self._transport is not None and not self._discarding:
            self._transport.close()

    def _forget_waiting(self) -> None:
        for request in self._waiting:
            request.let_go()
        self._waiting.clear()

    def close(self) -> None:
        """Close once all is written."""
        self._server.outbox.flush()
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Break the connection, so that the client can tell that its answer is not whole: a missing last chunk says so;
        without chunks, only a reset; over TLS, only an end without the close_notify that `close` would send."""
        self._server.outbox.flush()
        if self._transport is None:
            return
        if self.chunked:
            self._transport.close()
        elif self._transport.get_extra_info("ssl_object") is not None:
            _reset(self._transport)
        else:
            _do_not_linger(self._transport)
            self._transport.close()

    def abort(self) -> None:
        """Close now, whether or not the client has read everything."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or may be on its way, or an answer is not yet taken."""
        if self._request is not None or self._waiting or self.unread_bytes:
            return True
        return self._next_until_s > 0.0 and self._server.loop.time() < self._next_until_s

    @property
    def new(self) -> bool:
        """Whether no request has come yet."""
        return not self._receiver.requests and not self.busy

    @property
    def idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self._request is None and self._receiver.stage == BETWEEN

    def overdue(self, now_s: float) -> str:
        """Why the client has taken too long, of deadlines.REASONS; or ""."""
        limits, receiver, unread_bytes = self._server.limits, self._receiver, self.unread_bytes
        taken_bytes = 0
        if unread_bytes and self._transport is not None:
            taken_bytes = acknowledged(self._transport.get_extra_info("socket"), unread_bytes)
        if not self._patience.reads(now_s, limits, unread_bytes, taken_bytes):
            return deadlines.SEND_TIMEOUT
        intake = self._intake
        answering = receiver.stage == BETWEEN and self.busy
        if answering or unread_bytes or intake.waits or self._discarding or self._refusal is not None:
            self._patience.pause()
            return deadlines.NO_ROOM if intake.roomless_for_s(now_s) > limits.bodies_wait_s else ""
        return self._patience.sends(now_s, limits, receiver.stage, receiver.requests, receiver.reading_bytes)

    def expire(self, why: str) -> None:
        """Close the connection of a client that took too long, and say why where an answer can still be read."""
        if why in (deadlines.HEAD_TIMEOUT, deadlines.BODY_TIMEOUT):
            self.refuse(Refusal(408, "request_timeout", "The request came too slowly."))
        elif why == deadlines.NO_ROOM:
            self.refuse(no_room())
        elif why == deadlines.SEND_TIMEOUT and self._transport is not None:
            _reset(self._transport)  # a plain close would leave the unread bytes in the kernel
        else:
            self.abort()


def _nowhere(_: bytes) -> None:
    """Drops the writes of a connection that is gone."""


def _do_not_linger(transport: asyncio.Transport) -> None:
    """Let closing reset the connection."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)


def _reset(transport: asyncio.Transport) -> None:
    """Close now, with a reset."""
    _do_not_linger(transport)
    transport.abort()
