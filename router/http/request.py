"""One HTTP request, the interface to its connection, and the refusal that may answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Protocol

# Headers that belong to one connection (RFC 9110 section 7.6.1).
HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"host", b"expect")
)  # fmt: skip

# Headers of an answer that may reveal its engine's address: RFC 9110 sections 8.7 and 10.2.2, RFC 8288, RFC 7838, and
# the `Refresh` of the HTML standard.
ADDRESS_HEADERS = frozenset((b"location", b"content-location", b"link", b"refresh", b"alt-svc"))
# The router's own headers, which are ignored from an engine, or from a router in between.
OWN_HEADERS = b"x-warmroute-"


class Refusal(Exception):
    """An error that the router answers itself: the request is no HTTP, over a limit, or cannot be served.

    - `param`: the field of the body that is at fault.
    - `retry_after_s`: the Retry-After of a 429 or 503.
    - `cause`: the failure of the replica, for operators and for clients that may see receipts.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: float | None = None,
        cause: str = "",
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
        self.model = ""  # the requested model, if it is one that replicas serve


class BodySender(Protocol):
    """Sender of the body of an answer, which receives backpressure from the client."""

    def pause(self) -> None:
        """Pause, because the client does not read."""

    def resume(self) -> None:
        """Continue, because the client reads again."""

    def on_client_disconnect(self) -> None:
        """Stop, because the client left and its transport accepts no bytes."""


class Stream(Protocol):
    """Destination of the pieces of a body. With `chunked` the sender puts each piece in a chunk of HTTP/1.1."""

    chunked: bool
    sender: BodySender | None

    @property
    def write(self) -> Callable[[bytes], None]:
        """Function that writes bytes unchanged; the sender has framed them."""

    def end(self) -> None:
        """End the body, which is whole."""

    def abort_response(self) -> None:
        """End the body in such a way that the client detects that it is incomplete."""


class Connection(Protocol):
    """Connection of a request, which also takes its answer."""

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """Handle a head that arrived before all of its body. Return True if the body is wanted; otherwise it is read
        and dropped. Raises Refusal.

        - `length`: length of the body; -1 if the head does not have it.
        - `expects`: the client waits for permission to send the body (RFC 9110 section 10.1.1).
        """

    def grows(self, request: Request, body_bytes: int) -> None:
        """Handle growth of a body of unknown length to `body_bytes`. Raises Refusal."""

    def on_request(self, request: Request) -> None:
        """Handle a request that was read to its end. Raises Refusal."""

    def hold(self, request: Request) -> bool:
        """Account for the request's body (`Request.hold`)."""

    def release_body(self, request: Request) -> None:
        """Stop accounting for the request's body (`Request.release_body`)."""

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Send a whole answer (`Request.answer`)."""

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> Stream:
        """Send the head of an answer (`Request.begin`)."""

    def abort_response(self) -> None:
        """Break the connection (`Request.abort`)."""


class BodyReservation:
    """Number of bytes that are accounted for a body, and the name of its holder (body_budget.py)."""

    __slots__ = ("budget_owner", "held_bytes")

    def __init__(self, holder: str) -> None:
        self.budget_owner = holder
        self.held_bytes = 0


class Request(BodyReservation):
    """One complete request. Header names are lower case; of a repeated header the first value counts."""

    __slots__ = (
        "_body", "_pieces", "body_bytes", "client", "fields", "last", "lines", "met", "method", "path", "target",
        "version",
    )  # fmt: skip

    def __init__(self, client: Connection) -> None:
        super().__init__("")
        self.client = client
        self.method = ""
        self.target = ""  # path and query as the client encoded them
        self.path = ""  # decoded, without the query
        self.version = "1.1"
        self.last = False  # bytes that follow it on its connection are not read
        self.fields: dict[bytes, bytes] = {}
        self.lines: list[tuple[bytes, bytes, bytes]] = []  # (lower-case name, name, value), in the client's order
        self.body_bytes = 0
        self.met: object = None  # result of the server's authentication of the request
        self._body = b""
        self._pieces: list[bytes | bytearray] = []

    @property
    def body(self) -> bytes:
        """The whole body, joined at the first access, in the calling thread: 8 MB take milliseconds."""
        if self._pieces:
            self._body, self._pieces = b"".join(self._pieces), []
        return self._body

    def replace_body(self, pieces: list[bytes | bytearray], body_bytes: int) -> None:
        """Set or replace the body."""
        self._pieces, self._body, self.body_bytes = pieces, b"", body_bytes

    def hold(self) -> bool:
        """Account for the body under `holder`, unless that was done. Return False if it exceeds the memory budget."""
        return self.client.hold(self)

    def release_body(self) -> None:
        """Drop the body, because it is no longer needed."""
        self._pieces, self._body = [], b""
        if self.held_bytes:
            self.client.release_body(self)

    def header(self, name: bytes) -> str:
        """Return a header's value, or "". Bytes that are not UTF-8 become surrogates."""
        value = self.fields.get(name)
        return value.decode("utf-8", "surrogateescape") if value else ""

    # -- the answer ----------------------------------------------------------------------------------------------

    def answer(self, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Send a whole answer. Raises ClientDisconnected.

        - `lines`: header lines, each with its CRLF.
        - `own`: the answer is the router's and not an engine's, and pages may read it if engines let them read theirs.
        """
        self.client.answer(self, status, lines, body, own=own)

    def begin(self, status: int, lines: Iterable[bytes]) -> Stream:
        """Send the head of an answer of unknown length. Its body is written to the returned stream, in chunks if
        `chunked` is True, and ended with `end`. Raises ClientDisconnected."""
        return self.client.begin(self, status, lines)

    def abort(self) -> None:
        """Break the connection, so that the client does not take a partial answer for a whole one."""
        self.client.abort_response()


def is_websocket(request: Request) -> bool:
    """True if a request wants to switch to a WebSocket (RFC 6455 section 4.1)."""
    return b"websocket" in request.fields.get(b"upgrade", b"").lower()


def no_websockets() -> Refusal:
    """Return the refusal of a WebSocket request."""
    message = "WebSockets are not supported by this router; connect directly to an engine for its realtime API."
    return Refusal(501, "websocket_unsupported", message)


def date_line() -> bytes:
    """Return the Date header (RFC 9110 section 6.6.1) of the router's own answers."""
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()
