"""One client's connection: requests one after the other, answers, a client that does not read or is gone.

A request's handler is a task. It ends when its answer does, and is cancelled when the client leaves. Requests that a
client sends ahead wait their turn; beyond a few the connection is not read until they are answered.
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
from router.http.deadlines import ClientLimits, Patience, acknowledged
from router.http.outbox import Outbox
from router.http.receiver import BETWEEN, Receiver
from router.http.request import BodySender, Refusal, Request

WAITING_MAX = 8  # requests sent ahead
WAITING_BYTES_MAX = 1 << 20  # of their bodies; the one that goes beyond is kept
WRITE_BUFFER_BYTES_MAX = 256 << 10  # unread by the client; above it the engine is not read either
NEXT_S = 0.5  # for which a connection stays open behind an answer that did not say it would be the last, but is
LINGER_S = 2.0  # what a refused client still sends is read for so long, so that it gets to see why
NO_LINGER = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed is reset

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)  # nor a length of one (RFC 9110 section 8.6)

Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Request, Refusal], None]


class ClientLeft(Exception):
    """The client is gone; nobody reads what would be written."""


class Owner(Protocol):
    """Whose connection it is: see server.py."""

    handler: Handler
    refuse: Refuse
    limits: ClientLimits
    loop: asyncio.AbstractEventLoop
    outbox: Outbox
    clients: set[ClientConnection]
    closing: bool

    def lets_in(self, address: str) -> bool:
        """Whether there is room for one more; it is then counted until `left`."""

    def left(self, address: str) -> None:
        """A connection from there is gone."""


class ClientConnection(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_clogged", "_discarding", "_holding", "_last", "_next_until_s", "_patience", "_receiver", "_refusal",
        "_request", "_server", "_transport", "_waiting", "address", "chunked", "sender", "task", "write",
    )  # fmt: skip

    def __init__(self, server: Owner, address: str | None = None) -> None:
        """`address`: the client's, when the server has let it in."""
        self._server = server
        self._receiver = Receiver(self, server.limits.body_bytes_max)
        self._patience = Patience()
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None  # what is being answered
        self._waiting: deque[Request] = deque()
        self._refusal: Refusal | None = None  # answered behind what waits; nothing more is read
        self.task: asyncio.Task[None] | None = None
        self._holding = False  # the client is not read: it sent too far ahead
        self._discarding = False
        self._clogged = False  # the client does not read
        self._last = False  # the head of the answer under way said that the connection ends with it
        self._next_until_s = 0.0  # it did not, though it is the last: till then the next request may be on its way
        self.address = address
        self.chunked = False
        self.sender: BodySender | None = None
        self.write: Callable[[bytes], None] = _nowhere

    # -- the transport's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sockets have TCP_NODELAY from asyncio: a stream on a warm connection would else wait 40 ms for an ACK."""
        if self.address is None:
            peer = transport.get_extra_info("peername")
            address = str(peer[0]) if peer else ""
            if not self._server.lets_in(address):
                _reset(cast("asyncio.Transport", transport))
                return
            self.address = address
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self.write = self._transport.write
        self._server.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: its work is cancelled."""
        if self.address is not None:
            self._server.left(self.address)
            self.address = None
        if self.sender is not None:
            self.sender.gone()
        self._transport, self.write, self.sender = None, _nowhere, None
        self._server.clients.discard(self)
        self._waiting.clear()
        # What refers to itself, bodies and all, waits for the collector of cycles, and that hardly ever comes.
        self._receiver.close()
        self._refusal = None  # its traceback holds us
        task, self._request, self.task = self.task, None, None
        if task is not None:
            task.cancel()

    def pause_writing(self) -> None:
        """The client does not read: whoever sends must wait, and so must its next request."""
        self._clogged = True
        if self.sender is not None:
            self.sender.pause()

    def resume_writing(self) -> None:
        """It reads again."""
        self._clogged = False
        if self.sender is not None:
            self.sender.resume()
        if self._request is None:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._refusal is not None or self._discarding:
            return
        try:
            self._receiver.feed(data)
        except Refusal as error:
            self._refuse(error)

    # -- the receiver's side -------------------------------------------------------------------------------------

    def expected(self) -> None:
        """See request.Connection; a client that has sent ahead waits for nothing."""
        if self._request is None and not self._clogged:
            self._server.outbox.flush()
            self.write(_CONTINUE)

    def arrived(self, request: Request) -> None:
        """A request is whole: it is answered, or waits its turn."""
        if self._request is None and not self._clogged:
            self._start(request)
            return
        self._waiting.append(request)
        if self._far_ahead() and not self._holding and self._transport is not None:
            self._holding = True
            self._transport.pause_reading()

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
        self._request = self.task = self.sender = None
        if not self._clogged:  # else answers that nobody reads would pile up
            self._go_on()

    def _go_on(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._discarding:
            return
        if self._waiting:
            self._start(self._waiting.popleft())
            if self._holding and not self._far_ahead():
                self._holding = False
                transport.resume_reading()
        elif self._refusal is not None:
            self._say(self._refusal)

    def _refuse(self, error: Refusal) -> None:
        """Said behind what still waits; no more is read, since nobody knows where the next request would begin."""
        self._refusal = error
        self._receiver.let_go()
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
            self._server.loop.call_later(LINGER_S, self.abort if can_end else self.close)  # TLS says goodbye in `close`

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes) -> None:
        """See Request.answer."""
        if self._transport is None:
            raise ClientLeft
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
        """See Request.begin."""
        if self._transport is None:
            raise ClientLeft
        self.chunked = request.version == "1.1"
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        self._last = self._closes(request)
        closes = b"connection: close\r\n\r\n" if self._last else b"\r\n"
        self._server.outbox.flush()
        self.write(b"".join((b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), *lines, framing, closes)))
        return self

    def end(self) -> None:
        """The body that was begun is whole. Whoever was not told that it is the last answer may send a request with
        its last byte; were the connection closed then, that request would fail. It is told so by the next answer."""
        if self.chunked:
            self.write(_LAST_CHUNK)
        if self._request is not None and self._last:
            self._finish()
        elif self._server.closing:
            self._next_until_s = self._server.loop.time() + NEXT_S

    @property
    def unread_bytes(self) -> int:
        """Written and not yet taken by the client's socket."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _closes(self, request: Request) -> bool:
        connection = request.fields.get(b"connection")
        return (
            request.version == "1.0"
            or self._server.closing
            or (connection is not None and b"close" in connection.lower())
        )

    def _finish(self) -> None:
        """Close once all is written. What the client still sends is not lost on it as a reset: see LINGER_S."""
        self._waiting.clear()
        self._server.outbox.flush()
        if self._transport is not None and not self._discarding:
            self._transport.close()

    def close(self) -> None:
        """Close once all is written."""
        self._server.outbox.flush()
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """See Request.cut. Without chunks only a reset tells the client that something is missing; and over TLS only
        an end without a close_notify, which is what `close` would send."""
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
        """Close now, read or not."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def busy(self) -> bool:
        """A request is being answered or may be on its way, or the client has yet to take an answer."""
        if self._request is not None or self._waiting or self.unread_bytes:
            return True
        return self._next_until_s > 0.0 and self._server.loop.time() < self._next_until_s

    @property
    def new(self) -> bool:
        """No request has come yet."""
        return not self._receiver.requests and not self.busy

    @property
    def idle(self) -> bool:
        """Nothing is being read or answered."""
        return self._request is None and self._receiver.stage == BETWEEN

    def overdue(self, now_s: float) -> str:
        """Why it has taken too long, one of deadlines.REASONS, or ""."""
        limits, receiver, unread_bytes = self._server.limits, self._receiver, self.unread_bytes
        taken_bytes = 0
        if unread_bytes and self._transport is not None:
            taken_bytes = acknowledged(self._transport.get_extra_info("socket"), unread_bytes)
        if not self._patience.reads(now_s, limits, unread_bytes, taken_bytes):
            return deadlines.SEND_TIMEOUT
        answering = receiver.stage == BETWEEN and self.busy
        if answering or unread_bytes or self._holding or self._discarding or self._refusal is not None:
            self._patience.pause()
            return ""
        return self._patience.sends(now_s, limits, receiver.stage, receiver.requests, receiver.reading_bytes)

    def expire(self, why: str) -> None:
        """Close it, and say why where that can still be said."""
        if why in (deadlines.HEAD_TIMEOUT, deadlines.BODY_TIMEOUT):
            self._refuse(Refusal(408, "request_timeout", "The request came too slowly."))
        elif why == deadlines.SEND_TIMEOUT and self._transport is not None:
            _reset(self._transport)  # or the kernel would keep for it what it does not read
        else:
            self.abort()


def _nowhere(_: bytes) -> None:
    """Writes of a connection that is gone."""


def _do_not_linger(transport: asyncio.Transport) -> None:
    """When it is closed the other end sees a reset."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)


def _reset(transport: asyncio.Transport) -> None:
    """Close it now, with a reset."""
    _do_not_linger(transport)
    transport.abort()
