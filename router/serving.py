"""The main listener: HTTP/1.1 from clients, at a third of what a general server costs.

aiohttp's server takes 40 us of a short request and 110 us more to read a body of 200 KB (loadtest overhead, when it
was tried); a router that is to cost less than 100 us in all cannot spend that. httptools, which is llhttp, the parser
of Node.js, reads heads and chunked bodies and refuses what could be read in two ways: two lengths, bare line feeds,
odd codings (RFC 9112 sections 6.3 and 11.2). What is left to do is here: one request at a time per connection, limits
on everything that comes in, and writing answers.

A request's handler is a task. It ends when its answer does, and is cancelled when the client leaves. Requests that a
client sends ahead wait their turn; beyond a few the connection is not read until they are answered.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from router.outbox import Outbox

HEAD_BYTES_MAX = 64 << 10
VALUE_BYTES_MAX = 16 << 10  # of a header, or of the target
WAITING_MAX = 8  # requests sent ahead
WRITE_BUFFER_BYTES_MAX = 256 << 10  # unread by the client; above it the engine is not read either
LINGER_S = 2.0  # what a refused client still sends is read for so long, so that it gets to see why
LENGTH_DIGITS_MAX = 15
SWEEP_S = 1.0
BACKLOG = 1_024
BETWEEN, HEAD, BODY = range(3)  # where in a request the reader is

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)  # nor a length of one (RFC 9110 section 8.6)
_NO_LINGER = struct.pack("ii", 1, 0)


class ClientLeft(Exception):
    """The client is gone; nobody reads what would be written."""


class BadRequest(Exception):
    """What came is not HTTP, or over a limit."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Sender(Protocol):
    """Who stops sending while a client does not read."""

    def pause(self) -> None:
        """Send no more for now."""

    def resume(self) -> None:
        """Go on."""

    def gone(self) -> None:
        """The client left."""


class Request:
    """One request, whole. Header names are lower case; of a repeated one the first value counts."""

    __slots__ = ("_body", "_client", "_pieces", "body_bytes", "fields", "lines", "method", "path", "target", "version")

    def __init__(self, client: Client) -> None:
        self._client = client
        self.method = ""
        self.target = ""  # path and query as the client encoded them
        self.path = ""  # decoded, without the query
        self.version = "1.1"
        self.fields: dict[bytes, bytes] = {}
        self.lines: list[tuple[bytes, bytes, bytes]] = []  # (lower-case name, name, value) as they came
        self.body_bytes = 0
        self._body = b""
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        """All of it, put together when first asked for: of 8 MB that takes milliseconds, and any thread may ask."""
        if self._pieces:
            self._body, self._pieces = b"".join(self._pieces), []
        return self._body

    def bring(self, pieces: list[bytes], body_bytes: int) -> None:
        """What its body consists of."""
        self._pieces, self.body_bytes = pieces, body_bytes

    def header(self, name: bytes) -> str:
        """A header's value, "" without one; bytes that are not UTF-8 are kept as surrogates."""
        return self.fields.get(name, b"").decode("utf-8", "surrogateescape")

    # -- the answer ----------------------------------------------------------------------------------------------

    def answer(self, status: int, lines: Iterable[bytes], body: bytes) -> None:
        """A whole answer; `lines` are header lines, each with its CRLF. Raises ClientLeft."""
        self._client.answer(self, status, lines, body)

    def begin(self, status: int, lines: Iterable[bytes]) -> Client:
        """Send the head of an answer whose length is not known; its body is written to what this returns, chunked
        where `chunked` says so, and ended with `end`. Raises ClientLeft."""
        return self._client.begin(self, status, lines)

    def cut(self) -> None:
        """Break the connection: the client must not take what it has for a whole answer."""
        self._client.cut()


Handler = Callable[[Request], Awaitable[None]]
Refuse = Callable[[Request, BadRequest], None]


class Client(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_clogged", "_discarding", "_fed_bytes", "_head_bytes", "_holding", "_left_bytes", "_moved", "_parser",
        "_pieces", "_reading", "_reading_bytes", "_refusal", "_request", "_server", "_stage", "_task", "_transport",
        "_unread_bytes", "_upgrades", "_waiting", "chunked", "idle_since_s", "sender", "write",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._reading = Request(self)  # what is being read, or was
        self._stage = BETWEEN
        self._upgrades = False
        self._reading_bytes = 0  # of its body
        self._left_bytes = -1  # of a body of known length whose pieces need no parser
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._fed_bytes = 0  # in the last read
        self._request: Request | None = None  # what is being answered
        self._waiting: deque[Request] = deque()
        self._refusal: BadRequest | None = None  # answered behind what waits; nothing more is read
        self._task: asyncio.Task[None] | None = None
        self._holding = False  # the client is not read: it sent too far ahead
        self._discarding = False
        self._clogged = False  # the client does not read
        self._moved = False  # something came since the last sweep
        self._unread_bytes = 0  # at the last sweep
        self.idle_since_s = server.loop.time()
        self.chunked = False
        self.sender: Sender | None = None
        self.write: Callable[[bytes], None] = _nowhere

    # -- the transport's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sockets have TCP_NODELAY from asyncio: a stream on a warm connection would else wait 40 ms for an ACK."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self.write = self._transport.write
        self._server.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: its work is cancelled."""
        if self.sender is not None:
            self.sender.gone()
        self._transport, self.write, self.sender = None, _nowhere, None
        self._server.clients.discard(self)
        self._waiting.clear()
        self._parser = _NO_PARSER  # ours holds us: nobody would free the two for a long time
        if self._task is not None:
            self._task.cancel()

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
        self._moved = True
        if self._refusal is not None or self._discarding:
            return
        if self._left_bytes >= len(data):
            self._more_body(data)
            return
        if self._stage != BODY:
            self._head_bytes += len(data)
        try:
            if self._left_bytes >= 0:  # the body ends in here
                end = self._left_bytes
                self._more_body(data[:end])
                data = data[end:]
            self._fed_bytes = len(data)
            self._parser.feed_data(data)
            self._after_feed()
        except httptools.HttpParserUpgrade as upgrade:
            self._no_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            reason = error.__context__
            self._refuse(reason if isinstance(reason, BadRequest) else BadRequest(400, "bad_http", str(error)))
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(400, "bad_http", f"This is not HTTP/1.1: {error}"))
        except BadRequest as error:
            self._refuse(error)

    def _after_feed(self) -> None:
        if self._stage == HEAD:
            if self._head_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
        elif self._stage == BODY:
            length = self._reading.fields.get(b"content-length")
            if length is not None:  # the parser has seen to it that it is a number, and the only one
                self._left_bytes = int(length) - self._reading_bytes

    def _more_body(self, data: bytes) -> None:
        """A body of known length needs no parser. The parser that waits for it is left behind."""
        self._pieces.append(data)
        self._left_bytes -= len(data)
        self._reading_bytes += len(data)
        if not self._left_bytes:
            self._parser = httptools.HttpRequestParser(self)
            self.on_message_complete()

    def _no_upgrade(self, rest: bytes) -> None:
        """We speak nothing else (RFC 9110 section 7.8 lets a server ignore Upgrade), but the parser stops at such a
        head and takes its body for the new protocol: it is given the head again, without that wish."""
        request = self._reading
        if request.method == "CONNECT":
            self._refuse(BadRequest(405, "method_not_allowed", "There is no tunnel here."))
            return
        self._parser = httptools.HttpRequestParser(self)
        lines = [
            b"%b: %b\r\n" % (name, value if low != b"connection" else _without_upgrade(value))
            for low, name, value in request.lines
            if low != b"upgrade"
        ]
        head = f"{request.method} {request.target} HTTP/{request.version}\r\n".encode("latin-1")
        self.data_received(b"".join((head, *lines, b"\r\n", rest)))

    # -- the parser's side ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        self._reading, self._stage = Request(self), HEAD
        self._pieces, self._reading_bytes = [], 0

    def on_url(self, url: bytes) -> None:
        """Path and query; what is not ASCII the parser refused."""
        self._reading.target += url.decode("latin-1")
        if len(self._reading.target) > VALUE_BYTES_MAX:
            raise BadRequest(414, "target_too_long", f"The request's target is longer than {VALUE_BYTES_MAX} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; behind the body they are trailers, which nobody here needs."""
        if self._stage != HEAD:
            return
        low, request = name.lower(), self._reading
        if len(value) > VALUE_BYTES_MAX:
            raise BadRequest(431, "header_too_large", f"A header is longer than {VALUE_BYTES_MAX} bytes.")
        if low in request.fields:
            if low == b"host":
                raise BadRequest(400, "bad_http", "There is more than one Host.")  # RFC 9112 section 3.2
        else:
            request.fields[low] = value
        request.lines.append((low, name, value))

    def on_headers_complete(self) -> None:
        """What can be refused without the body is refused now."""
        request, parser, head_bytes = self._reading, self._parser, self._head_bytes
        self._stage, self._head_bytes, self._upgrades = BODY, 0, parser.should_upgrade()
        request.method, request.version = parser.get_method().decode(), parser.get_http_version()
        if request.version == "1.1":
            if b"host" not in request.fields:
                raise BadRequest(400, "bad_http", "There is no Host.")  # RFC 9112 section 3.2
        elif request.version != "1.0":
            raise BadRequest(505, "bad_http", "This is a server of HTTP/1.1.")
        coding = request.fields.get(b"transfer-encoding")
        if coding is not None and (request.version == "1.0" or coding.lower() != b"chunked"):
            raise BadRequest(501, "bad_http", "Bodies may be chunked, by HTTP/1.1, and nothing else.")  # section 6.1
        if max(self._fed_bytes, head_bytes) > HEAD_BYTES_MAX < sum(len(n) + len(v) for _, n, v in request.lines):
            raise _head_too_large()
        length = request.fields.get(b"content-length", b"0")
        if len(length) > LENGTH_DIGITS_MAX or int(length) > self._server.body_bytes_max:
            raise self._too_large()
        expects = request.fields.get(b"expect", b"").lower() == b"100-continue" and request.version == "1.1"
        if expects and not self._upgrades and self._request is None and not self._clogged:
            self._server.outbox.flush()
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(data)
        self._reading_bytes += len(data)
        if self._reading_bytes > self._server.body_bytes_max:
            raise self._too_large()

    def on_message_complete(self) -> None:
        """The request is whole: it is answered, or waits its turn."""
        if self._upgrades:
            return  # it will be read again: see _no_upgrade
        request = self._reading
        request.bring(self._pieces, self._reading_bytes)
        self._pieces, self._left_bytes, self._stage = [], -1, BETWEEN
        _locate(request)
        if self._request is None and not self._clogged:
            self._start(request)
            return
        self._waiting.append(request)
        if len(self._waiting) >= WAITING_MAX and not self._holding and self._transport is not None:
            self._holding = True
            self._transport.pause_reading()

    def _too_large(self) -> BadRequest:
        limit = self._server.body_bytes_max
        return BadRequest(413, "body_too_large", f"The request body is larger than {limit} bytes.")

    # -- one after the other -------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._request = request
        self._task = self._server.loop.create_task(self._serve(request))

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
        self._request = self._task = self.sender = None
        self.idle_since_s = self._server.loop.time()
        if not self._clogged:  # else answers that nobody reads would pile up
            self._go_on()

    def _go_on(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._discarding:
            return
        if self._waiting:
            self._start(self._waiting.popleft())
            if self._holding and len(self._waiting) < WAITING_MAX:
                self._holding = False
                transport.resume_reading()
        elif self._refusal is not None:
            self._say(self._refusal)

    def _refuse(self, error: BadRequest) -> None:
        """Said behind what still waits; no more is read, since nobody knows where the next request would begin."""
        self._refusal, self._pieces = error, []
        if self._request is None and not self._waiting:
            self._say(error)

    def _say(self, error: BadRequest) -> None:
        request = self._reading if self._stage != BETWEEN else Request(self)
        request.version = "1.0"  # the last answer of this connection
        if not request.path:
            _locate(request)  # it says which dialect the client speaks
        self._discarding = True
        self._server.refuse(request, error)
        self._server.outbox.flush()
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._server.loop.call_later(LINGER_S, self.abort)

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

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> Client:
        """See Request.begin."""
        if self._transport is None:
            raise ClientLeft
        self.chunked = request.version == "1.1"
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        closes = b"connection: close\r\n\r\n" if self._closes(request) else b"\r\n"
        self._server.outbox.flush()
        self.write(b"".join((b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), *lines, framing, closes)))
        return self

    def end(self) -> None:
        """The body that was begun is whole."""
        if self.chunked:
            self.write(_LAST_CHUNK)
        if self._request is not None and self._closes(self._request):
            self._finish()

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
        """See Request.cut. Without chunks only a reset tells the client that something is missing."""
        self._server.outbox.flush()
        if self._transport is not None:
            if not self.chunked and (sock := self._transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.close()

    def abort(self) -> None:
        """Close now, read or not."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """Nothing is being read or answered."""
        return self._request is None and self._stage == BETWEEN

    def stale(self, now_s: float, keepalive_s: float) -> bool:
        """Nothing is being answered, and for so long nothing came (also not more of half a request) or was read."""
        if self._request is not None:
            return False
        unread_bytes = self.unread_bytes
        if self._moved or unread_bytes != self._unread_bytes:
            self._moved, self._unread_bytes, self.idle_since_s = False, unread_bytes, now_s
        return now_s - self.idle_since_s > keepalive_s


class Server:
    """A listener and its connections."""

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        *,
        body_bytes_max: int,
        keepalive_s: float,
        outbox: Outbox | None = None,
    ) -> None:
        """`handler` answers a request; `refuse` says what is wrong with one that cannot be read, its method and path
        empty where they are not known. Without an `outbox` it has one of its own."""
        self.handler = handler
        self.refuse = refuse
        self.body_bytes_max = body_bytes_max
        self.loop = asyncio.get_running_loop()
        self.outbox = outbox or Outbox(self.loop)
        self.clients: set[Client] = set()
        self.closing = False
        self._keepalive_s = keepalive_s
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listen; returns address and port. Raises OSError."""
        return self._begin(await self.loop.create_server(lambda: Client(self), host, port, backlog=BACKLOG, ssl=tls))

    async def take(self, listening: socket.socket, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Accept on a socket that listens already; others may accept on it too."""
        return self._begin(
            await self.loop.create_server(lambda: Client(self), sock=listening, backlog=BACKLOG, ssl=tls)
        )

    def _begin(self, listener: asyncio.Server) -> tuple[str, int]:
        self._listener = listener
        self._sweep()
        bound = listener.sockets[0].getsockname()
        return bound[0], bound[1]

    def _sweep(self) -> None:
        """Coarse on purpose: one timer for all connections, none for each."""
        now_s = self.loop.time()
        for client in list(self.clients):
            if client.stale(now_s, self._keepalive_s):
                client.abort()
            elif self.closing and client.idle:
                client.close()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Accept no more, and close what is idle; what is being answered ends with `Connection: close`."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for client in list(self.clients):
            if client.idle:
                client.close()

    async def close(self) -> None:
        """Close everything."""
        self.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for client in list(self.clients):
            client.abort()
        await asyncio.sleep(0)  # transports close in the next turn of the loop


def date_line() -> bytes:
    """The Date header (RFC 9110 section 6.6.1) of our own answers."""
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()


def _locate(request: Request) -> None:
    """Path and target, in the form that servers are given."""
    target = request.target
    if not target.startswith("/"):  # a client that takes us for a forward proxy (RFC 9112 section 3.2.2)
        target = request.target = "/" + target.partition("://")[2].partition("/")[2]
    path = target.partition("?")[0]
    request.path = unquote(path) if "%" in path else path


def _without_upgrade(value: bytes) -> bytes:
    return b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")


def _head_too_large() -> BadRequest:
    return BadRequest(431, "head_too_large", f"The request's head is larger than {HEAD_BYTES_MAX} bytes.")


_NO_PARSER = httptools.HttpRequestParser(object())


def _nowhere(_: bytes) -> None:
    """Writes of a connection that is gone."""
