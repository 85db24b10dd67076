"""One client's connection: its requests in order, their answers, and backpressure from the client.

A request's handler is a task. It ends with its answer, and is cancelled when the client leaves. Pipelined requests wait
for their turn. While many are waiting, the connection is not read (read_flow.py).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Protocol, cast

from router.http import client_timeouts
from router.http.body_budget import BodyBudget, no_room
from router.http.client_timeouts import ClientLimits, ClientTimer, count_acked_bytes
from router.http.cors import Cors
from router.http.outbox import Outbox
from router.http.read_fairness import ReadFairness
from router.http.read_flow import Admit, ReadFlow
from router.http.receiver import BETWEEN
from router.http.request import BodySender, Refusal, Request

# Limits of pipelined requests and of bytes of their bodies. At the limit the connection is not read until some are
# answered.
WAITING_MAX, WAITING_BYTES_MAX = 8, 1 << 20
WRITE_BUFFER_BYTES_MAX = 256 << 10  # bytes that the client has not read; above, its engine is not read either
# Grace after a last answer sent without `Connection: close`: the client may already be sending its next request.
NEXT_S = 0.5
# Time for which a refused client's bytes are read: a reset would discard its answer before it is read.
LINGER_S = 2.0
NO_LINGER = struct.pack("ii", 1, 0)  # value of SO_LINGER that makes a close reset the connection

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)  # answers without a body or a Content-Length (RFC 9110 section 8.6)

Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Request, Refusal], None]


class ClientDisconnected(Exception):
    """The client is gone, and no answer can be delivered."""


class ConnectionOwner(Protocol):
    """The part of the server that a connection uses."""

    handler: Handler
    refuse: Refuse
    admit: Admit
    bodies: BodyBudget
    limits: ClientLimits
    loop: asyncio.AbstractEventLoop
    outbox: Outbox
    pace: ReadFairness
    clients: set[ClientConnection]
    closing: bool
    cors: Cors | None

    def try_admit(self, address: str) -> bool:
        """True if one more connection from this address is allowed. It is then counted until `left`."""

    def on_connection_closed(self, address: str) -> None:
        """Note that a connection from this address has closed."""


class ClientConnection(asyncio.Protocol):
    """One client's connection to a server. Requests are answered one at a time, in order of arrival."""

    __slots__ = (
        "_discarding",
        "_intake",
        "_last",
        "_next_until_s",
        "_patience",
        "_receiver",
        "_refusal",
        "_request",
        "_server",
        "_transport",
        "_waiting",
        "_write_paused",
        "address",
        "chunked",
        "sender",
        "task",
        "write",
    )  # fmt: skip

    def __init__(self, server: ConnectionOwner, address: str | None = None) -> None:
        """`address`: given if the server has already admitted this client."""
        self._server = server
        self._intake = ReadFlow(self, self, server)
        self._receiver = self._intake.receiver
        self._patience = ClientTimer()
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None  # request that is being answered
        self._waiting: deque[Request] = deque()
        self._refusal: Refusal | None = None  # error to send after the waiting answers; later bytes are not parsed
        self.task: asyncio.Task[None] | None = None
        self._discarding = False  # bytes are read and dropped, because the last answer was a refusal
        self._write_paused = False  # the client does not read
        self._last = False  # the answer in flight has `Connection: close`
        self._next_until_s = 0.0  # end of the grace NEXT_S, on the loop's clock; 0 = none
        self.address = address
        self.chunked = False
        self.sender: BodySender | None = None
        self.write: Callable[[bytes], None] = _nowhere

    # -- transport side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the transport. Asyncio has set TCP_NODELAY; without it a stream on a warm connection would wait 40
        ms for an ACK."""
        if self.address is None:
            peer = transport.get_extra_info("peername")
            address = str(peer[0]) if peer else ""
            if not self._server.try_admit(address):
                _reset(cast("asyncio.Transport", transport))
                return
            self.address = address
        self._transport = cast("asyncio.Transport", transport)
        self._intake.open(self._transport, self.address)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self.write = self._transport.write
        self._server.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the task that answers the client, which has left."""
        if self.address is not None:
            self._server.on_connection_closed(self.address)
            self.address = None
        if self.sender is not None:
            self.sender.on_client_disconnect()
        self._transport, self.write, self.sender = None, _nowhere, None
        self._server.clients.discard(self)
        self._forget_waiting()
        if self._request is not None and self._request.held_bytes:
            self.release_body(self._request)
        # Reference cycles, and the bodies in them, wait for the garbage collector, which hardly ever runs
        # (loop.COLLECT).
        self._intake.close()
        self._refusal = None
        task, self._request, self.task = self.task, None, None
        if task is not None:
            task.cancel()

    def pause_writing(self) -> None:
        """Pause the sender of the answer, and delay the next request, because the client does not read."""
        self._write_paused = True
        if self.sender is not None:
            self.sender.pause()

    def resume_writing(self) -> None:
        """Resume the sender, because the client reads again."""
        self._write_paused = False
        if self.sender is not None:
            self.sender.resume()
        if self._request is None:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests."""
        if self._refusal is not None or self._discarding:
            if self._transport is not None:
                self._server.pace.note_dropped(self._transport, len(data))
            return
        try:
            self._intake.feed(data)
        except Refusal as error:
            self.refuse(error)

    # -- receiver side -------------------------------------------------------------------------------------------

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """Handle a head that arrived without all of its body."""
        return self._intake.on_head(request, length, expects=expects)

    def grows(self, request: Request, body_bytes: int) -> None:
        """Handle more bytes of a body of unknown length."""
        self._intake.on_body_growth(request, body_bytes)

    def on_request(self, request: Request) -> None:
        """Handle a complete request: answer it now, or after the waiting ones. A client that is not admitted does not
        wait."""
        if self._request is None and not self._write_paused:
            self._start(request)
            return
        self._intake.is_stalled(request)
        self._waiting.append(request)
        if self._far_ahead():
            self._intake.wait()

    def may_read_body(self) -> None:
        """Send `100 Continue`, unless the client has sent other requests ahead: such a client does not wait."""
        if self._request is None and not self._write_paused:
            self._server.outbox.flush()
            self.write(_CONTINUE)

    def hold(self, request: Request) -> bool:
        """Count the body of a request against the budget."""
        return self._intake.hold(request)

    def release_body(self, request: Request) -> None:
        """Stop counting the body of a request."""
        self._intake.let_go(request)

    def _far_ahead(self) -> bool:
        waiting = self._waiting
        return len(waiting) >= WAITING_MAX or sum(each.body_bytes for each in waiting) >= WAITING_BYTES_MAX

    # -- requests in order ---------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._request = request
        self.task = self._server.loop.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            await self._server.handler(request)
        except ClientDisconnected:
            pass
        except Exception as error:
            self._server.loop.call_exception_handler({"message": "bug: a request failed", "exception": error})
            self.abort_response()
        finally:
            if self._request is request:
                self._next()

    def _next(self) -> None:
        if self._request is not None and self._request.held_bytes:
            self.release_body(self._request)
        self._request = self.task = self.sender = None
        if not self._write_paused:  # start no request while the client leaves answers unread: they would pile up
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
        """Refuse after the waiting answers. Reading stops, because the start of the next request is unknown."""
        # their frames refer to the bytes that were read
        error.__traceback__ = error.__cause__ = error.__context__ = None
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
        """Send a whole answer. Raises ClientDisconnected."""
        if self._transport is None:
            raise ClientDisconnected
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
        """Send the head of an answer. Its body is written to this connection. Raises ClientDisconnected."""
        if self._transport is None:
            raise ClientDisconnected
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
        """End the body. If its head did not announce a close, the client may already be sending a request, which would
        fail if the connection were closed now. The next answer announces the close."""
        if self.chunked:
            self.write(_LAST_CHUNK)
        if self._request is not None and self._last:
            self._finish()
        elif self._server.closing:
            self._next_until_s = self._server.loop.time() + NEXT_S

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that were written, and that the client's socket has not accepted."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _closes(self, request: Request) -> bool:
        return request.last or request.version == "1.0" or self._server.closing

    def _finish(self) -> None:
        """Close after all bytes are written, unless the client must still read a refusal (LINGER_S)."""
        self._forget_waiting()
        self._server.outbox.flush()
        if self._transport is not None and not self._discarding:
            self._transport.close()

    def _forget_waiting(self) -> None:
        for request in self._waiting:
            request.release_body()
        self._waiting.clear()

    def close(self) -> None:
        """Close after all bytes are written."""
        self._server.outbox.flush()
        if self._transport is not None:
            self._transport.close()

    def abort_response(self) -> None:
        """Break the connection, so that the client detects an incomplete answer. With chunks, the missing last chunk
        shows it. Without chunks, only a reset does. Over TLS, only an end without the close_notify that `close` would
        send does."""
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
        """Close now, even if the client has not read everything."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def busy(self) -> bool:
        """True if a request is being answered or may be on its way, or if an answer is not delivered yet."""
        if self._request is not None or self._waiting or self.unread_bytes:
            return True
        return self._next_until_s > 0.0 and self._server.loop.time() < self._next_until_s

    @property
    def new(self) -> bool:
        """True if no request has arrived yet."""
        return not self._receiver.requests and not self.busy

    @property
    def idle(self) -> bool:
        """True if no request is being read or answered."""
        return self._request is None and self._receiver.stage == BETWEEN

    def overdue(self, now_s: float) -> str:
        """Return the reason of deadlines.REASONS if the client has exceeded a time limit, else ""."""
        limits, receiver, unread_bytes = self._server.limits, self._receiver, self.unread_bytes
        taken_bytes = 0
        if unread_bytes and self._transport is not None:
            taken_bytes = count_acked_bytes(self._transport.get_extra_info("socket"), unread_bytes)
        if not self._patience.reads(now_s, limits, unread_bytes, taken_bytes):
            return client_timeouts.SEND_TIMEOUT
        intake = self._intake
        answering = receiver.stage == BETWEEN and self.busy
        if answering or unread_bytes or intake.waits or self._discarding or self._refusal is not None:
            self._patience.pause()
            return client_timeouts.BODY_BUDGET_FULL if intake.blocked_for_s(now_s) > limits.bodies_wait_s else ""
        return self._patience.sends(now_s, limits, receiver.stage, receiver.requests, receiver.reading_bytes)

    def expire(self, why: str) -> None:
        """Close the connection of a client that exceeded a limit. Send an error first if the client can still read
        it."""
        if why in (client_timeouts.HEAD_TIMEOUT, client_timeouts.BODY_TIMEOUT):
            self.refuse(Refusal(408, "request_timeout", "The request arrived too slowly."))
        elif why == client_timeouts.BODY_BUDGET_FULL:
            self.refuse(no_room())
        elif why == client_timeouts.SEND_TIMEOUT and self._transport is not None:
            _reset(self._transport)  # a plain close would leave the unread bytes in the kernel
        else:
            self.abort()


def _nowhere(_: bytes) -> None:
    """Drop the writes of a connection that is gone."""


def _do_not_linger(transport: asyncio.Transport) -> None:
    """Make a close reset the connection."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)


def _reset(transport: asyncio.Transport) -> None:
    """Close now, with a reset."""
    _do_not_linger(transport)
    transport.abort()
