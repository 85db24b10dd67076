"""Receiving half of a connection: parses bytes into requests.

httptools, which is llhttp, the parser of Node.js, reads heads and chunked bodies. It refuses ambiguous input: two
lengths, bare line feeds, odd codings (RFC 9112 sections 6.3 and 11.2). A body of known length needs no parser: its
pieces are only collected. All input has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import httptools

from router.http.request import Connection, Refusal, Request, is_websocket, no_websockets

HEAD_BYTES_MAX = 64 << 10  # limit of the total size of a head's names, values and target, and of the size of trailers
# Limit of the incomplete bytes of a head, or after a body, white space included: the parser keeps such a line.
UNFINISHED_BYTES_MAX = 96 << 10
VALUE_BYTES_MAX = 16 << 10  # limit of one header's value, and of the target
LENGTH_DIGITS_MAX = 15
LINES_MAX = 256  # header lines in a head
# A piece of a body below the first size is joined to the piece before it, up to the second. Alone, a small piece would
# take many times its size.
PIECE_BYTES_MIN, JOINED_BYTES_MAX = 4 << 10, 64 << 10
# A body in more pieces than this is refused if they have fewer bytes on average: a chunk costs as much as 4 KiB.
TINY_PIECES_MAX, TINY_BYTES = 16_384, 16
BETWEEN, HEAD, BODY = range(3)  # stages: the receiver's position in a request

# A name or an address, and a port (RFC 9110 section 7.2), without the comma that a list of hosts would have.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+;=-]*)(:[0-9]*)?")

# The stubs of httptools declare that no part of a URL is None, and native code would enforce that.
_parse_url: Callable[[bytes], Any] = httptools.parse_url


class _Behind(Exception):
    """A request follows the last one of its connection."""


class Receiver:
    """Parser of the requests of one connection."""

    __slots__ = (
        "_barren_bytes", "_body_bytes_max", "_client", "_ended", "_expects", "_fed_bytes", "_head_bytes", "_host",
        "_known", "_length", "_parser", "_pieces", "_reading", "_unfinished_bytes", "_upgrades", "_wanted", "chunks",
        "left_bytes", "reading_bytes", "requests", "stage",
    )  # fmt: skip

    def __init__(self, client: Connection, body_bytes_max: int) -> None:
        self._client = client
        self._body_bytes_max = body_bytes_max
        self._parser = httptools.HttpRequestParser(self)
        self._reading = _NOTHING  # request that is being read
        self.stage = BETWEEN
        self._upgrades = False  # the request wants another protocol, and will be parsed again without that
        self.reading_bytes = 0  # bytes read so far of the request's body
        self._length = -1  # the body's length by its head; -1: no length in the head
        self.left_bytes = -1  # bytes left of a body of known length; -1: the parser reads
        self._expects = False  # the client waits for permission to send the body
        self._known = False  # the client connection has received this request's head
        self._wanted = True  # the body is kept
        self.chunks = 0  # number of pieces of the body that the parser gave
        self._pieces: list[bytes | bytearray] = []
        self.requests = 0  # number of requests begun
        self._barren_bytes = 0  # bytes after the last byte of a body: chunk extensions, trailers
        self._ended = False  # the last request of the connection has arrived, and later bytes are not parsed
        self._head_bytes = 0  # bytes of names, values and target, or of trailers
        self._unfinished_bytes = 0  # bytes fed since the head began, if it has not ended
        self._host = b""  # last Host header that was found valid
        self._fed_bytes = 0  # size of the last read

    @property
    def unfinished(self) -> Request | None:
        """The request that has arrived in part; None between requests."""
        if self.stage == BETWEEN:
            return None
        if not self._reading.path:
            with suppress(Refusal):
                _locate(self._reading)  # the path determines the dialect of the client
        return self._reading

    def close(self) -> None:
        """Stop reading. Parser, requests and connection are in reference cycles with the receiver, and the collector of
        cycles hardly ever runs (loop.COLLECT)."""
        self._parser, self._reading, self._pieces, self.stage = _NO_PARSER, _NOTHING, [], BETWEEN
        self._client = _NOBODY

    def let_go(self) -> None:
        """Drop the body that was being read."""
        self._pieces = []
        self._reading.release_body()

    def feed(self, data: bytes) -> None:
        """Parse more bytes. Raises Refusal, and must not be called again then."""
        if self.left_bytes >= len(data):
            self._more_body(data)
            return
        while data:
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Parse bytes that need a parser. Return the bytes to parse next: the rewritten head of a request for another
        protocol, and the bytes after it. Raises Refusal."""
        if self._ended:
            return b""
        upgraded = -1  # offset of the bytes after a head that wants another protocol
        try:
            if self.left_bytes >= 0:  # the body ends within these bytes
                end = self.left_bytes
                self._more_body(data[:end])
                data = data[end:]
            self._fed_bytes = len(data)
            before_bytes = self.reading_bytes if self.stage == BODY else -1
            requests = self.requests
            self._parser.feed_data(data)
            self._enforce_limits(before_bytes, self.requests - requests)
        except httptools.HttpParserUpgrade as upgrade:
            upgraded = upgrade.args[0]
        except httptools.HttpParserCallbackError as raised:
            reason = raised.__context__
            if isinstance(reason, _Behind):
                return b""
            raise (reason if isinstance(reason, Refusal) else Refusal(400, "bad_http", str(raised))) from raised
        except httptools.HttpParserError as error:
            if self._ended:
                return b""
            raise Refusal(400, "bad_http", f"This is not HTTP/1.1: {error}") from error
        return self._no_upgrade(data[upgraded:]) if upgraded >= 0 else b""

    def _enforce_limits(self, before_bytes: int, begun: int) -> None:
        """Enforce the limits of an incomplete request. `before_bytes`: bytes that the body had before the parse, -1 for
        no body. `begun`: number of requests that have begun since then."""
        if self.stage == HEAD:
            if before_bytes < 0 and begun <= 1:  # otherwise the head began somewhere within these bytes
                self._unfinished_bytes += self._fed_bytes
            if self._unfinished_bytes > UNFINISHED_BYTES_MAX:
                raise _head_too_large()
        elif self.stage == BODY:
            self._barren_bytes = self._barren_bytes + self._fed_bytes if self.reading_bytes == before_bytes else 0
            if self._barren_bytes > UNFINISHED_BYTES_MAX:
                raise _trailers_too_large()
            if self._length >= 0:
                self.left_bytes = self._length - self.reading_bytes
            if not self._known:
                self._known = True
                self._wanted = self._client.on_head(self._reading, self._length, expects=self._expects)
                if not self._wanted:
                    self._pieces = []
            elif self._wanted and self._length < 0:
                self._client.grows(self._reading, self.reading_bytes)

    def _more_body(self, data: bytes) -> None:
        """Take more of a body of known length, without the parser. The parser that waits for the body is replaced."""
        self._keep(data)
        self.left_bytes -= len(data)
        self.reading_bytes += len(data)
        if not self.left_bytes:
            self._parser = httptools.HttpRequestParser(self)
            self.on_message_complete()

    def _keep(self, data: bytes) -> None:
        """Keep a piece of the body, if it is wanted. Small pieces are joined (PIECE_BYTES_MIN)."""
        if not self._wanted:
            return
        pieces = self._pieces
        if pieces and len(data) < PIECE_BYTES_MIN and len(pieces[-1]) < JOINED_BYTES_MAX:
            last = pieces[-1]
            if not isinstance(last, bytearray):
                last = pieces[-1] = bytearray(last)
            last += data
        else:
            pieces.append(data)

    def _no_upgrade(self, rest: bytes) -> bytes:
        """Ignore a request for another protocol (RFC 9110 section 7.8). The parser stops at such a head and takes the
        body for the new protocol. A new parser therefore gets the head again, without that request, and the `rest`
        after it."""
        request = self._reading
        if request.method == "CONNECT":
            raise Refusal(405, "method_not_allowed", "CONNECT is not supported.")
        if request.method == "GET" and is_websocket(request):
            raise no_websockets()
        self._parser = httptools.HttpRequestParser(self)
        lines = [
            b"%b: %b\r\n" % (name, value if low != b"connection" else _strip_upgrade(value))
            for low, name, value in request.lines
            if low != b"upgrade"
        ]
        head = f"{request.method} {request.target} HTTP/{request.version}\r\n".encode("latin-1")
        return b"".join((head, *lines, b"\r\n", rest))

    # -- parser callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head. Raises _Behind if the last request has already arrived."""
        if self._ended:
            raise _Behind
        self.requests += 1
        self._reading, self.stage = Request(self._client), HEAD
        self._pieces, self.reading_bytes = [], 0
        self._head_bytes = self._unfinished_bytes = 0
        self._known, self._wanted, self.chunks = False, True, 0

    def on_url(self, url: bytes) -> None:
        """Take a part of path and query. The parser has refused non-ASCII bytes."""
        self._reading.target += url.decode("latin-1")
        self._head_bytes += len(url)
        if len(self._reading.target) > VALUE_BYTES_MAX:
            raise Refusal(414, "target_too_long", f"The request's target is longer than {VALUE_BYTES_MAX} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers, which follow the body, are dropped."""
        self._head_bytes += len(name) + len(value)
        if self.stage != HEAD:
            if self._head_bytes > HEAD_BYTES_MAX:
                raise _trailers_too_large()
            return
        low, request = name.lower(), self._reading
        if len(value) > VALUE_BYTES_MAX:
            raise Refusal(431, "header_too_large", f"A header is longer than {VALUE_BYTES_MAX} bytes.")
        if low in request.fields:
            if low == b"host":
                raise Refusal(400, "bad_http", "The request has more than one Host header.")  # RFC 9112 section 3.2
            if low == b"content-type" and value != request.fields[low]:  # a body is parsed and forwarded by one of them
                raise Refusal(400, "bad_http", "The request has more than one Content-Type header.")
            if low == b"connection":  # a list that may be spread over several lines (RFC 9110 sections 5.3 and 7.6.1)
                request.fields[low] += b"," + value
        else:
            request.fields[low] = value
        request.lines.append((low, name, value))
        if len(request.lines) > LINES_MAX:
            raise Refusal(431, "head_too_large", f"The request has more than {LINES_MAX} header lines.")
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        """Handle the end of the head. Raises Refusal for every error that can be found without the body."""
        request, parser = self._reading, self._parser
        self.stage, self._head_bytes, self._upgrades = BODY, 0, parser.should_upgrade()
        request.method, request.version = parser.get_method().decode(), parser.get_http_version()
        request.last = request.version == "1.0" or not parser.should_keep_alive()  # RFC 9112 section 9.6
        host = request.fields.get(b"host")
        if host is not None and host != self._host:
            if not _HOST.fullmatch(host):
                raise Refusal(400, "bad_http", "The Host header is not a valid host with an optional port.")
            self._host = host
        if request.version == "1.1":
            if host is None:
                raise Refusal(400, "bad_http", "The Host header is missing.")  # RFC 9112 section 3.2
        elif request.version != "1.0":
            raise Refusal(505, "bad_http", "Only HTTP/1.1 is supported; send the request in that version.")
        coding = request.fields.get(b"transfer-encoding")
        if coding is not None and (request.version == "1.0" or coding.lower() != b"chunked"):
            raise Refusal(
                501, "bad_http", "The only supported transfer coding is chunked, with HTTP/1.1."
            )  # RFC 9112, 6.1
        length = request.fields.get(b"content-length")  # the parser refuses two lengths, and one that is no number
        if length is None:
            self._length = -1
        elif len(length) > LENGTH_DIGITS_MAX or int(length) > self._body_bytes_max:
            raise self._too_large()
        else:
            self._length = int(length)
        expect = request.fields.get(b"expect")
        self._expects = expect is not None and expect.lower() == b"100-continue" and request.version == "1.1"
        if not self._upgrades:
            _locate(request)

    def on_body(self, data: bytes) -> None:
        """Take a parsed piece of the body."""
        self._keep(data)
        self.reading_bytes += len(data)
        self.chunks += 1
        if self.chunks > TINY_PIECES_MAX and self.reading_bytes < self.chunks * TINY_BYTES:
            raise Refusal(400, "bad_http", f"The body has more than {TINY_PIECES_MAX} very short chunks.")
        if self.reading_bytes > self._body_bytes_max:
            raise self._too_large()

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        if self._upgrades:
            return  # `_no_upgrade` has it parsed again
        request = self._reading
        if self._wanted:
            request.replace_body(self._pieces, self.reading_bytes)
        self._pieces, self.left_bytes, self.stage, self._ended = [], -1, BETWEEN, request.last
        self._reading = _NOTHING  # an idle connection keeps no body
        self._client.on_request(request)

    def _too_large(self) -> Refusal:
        limit = self._body_bytes_max
        return Refusal(413, "body_too_large", f"The request body is larger than {limit} bytes.")


def _locate(request: Request) -> None:
    """Set the path, and the target in the origin form that servers receive. Raises Refusal."""
    target = request.target
    if not target.startswith("/"):
        target = request.target = _origin_form(target)
    path = target.partition("?")[0]
    request.path = unquote(path) if "%" in path else path


def _origin_form(target: str) -> str:
    """Return path and query of a target that is a whole URL: its client takes the router for a forward proxy (RFC 9112
    section 3.2.2). The URL is parsed by its grammar, since a proxy in front of the router may have decided by its path.
    Raises Refusal."""
    if target == "*":  # of OPTIONS (RFC 9112 section 3.2.4): no path, and not answered here
        return target
    try:
        url = _parse_url(target.encode("latin-1"))
    except httptools.HttpParserInvalidURLError as error:
        raise _no_target() from error
    plain = url.userinfo is None and url.fragment is None and url.host
    if not plain or (url.schema or b"").lower() not in (b"http", b"https"):
        raise _no_target()
    path: bytes = url.path or b"/"
    query: bytes = b"?" + url.query if url.query is not None else b""
    return (path + query).decode("latin-1")


def _no_target() -> Refusal:
    return Refusal(400, "bad_http", "The request's target is neither a path nor a plain URL of http or https.")


def _strip_upgrade(value: bytes) -> bytes:
    return b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")


def _head_too_large() -> Refusal:
    return Refusal(431, "head_too_large", f"The request's head is larger than {HEAD_BYTES_MAX} bytes.")


def _trailers_too_large() -> Refusal:
    return Refusal(431, "head_too_large", f"Trailers are larger than {HEAD_BYTES_MAX} bytes.")


_NO_PARSER = httptools.HttpRequestParser(object())
_NOBODY = cast("Connection", None)
_NOTHING = Request(_NOBODY)  # placeholder while no request is being read
