"""One HTTP request as the edge sees it, what its connection offers, and the refusal that may answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Protocol

# Headers that belong to one connection (RFC 9110 section 7.6.1).
HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"host", b"expect")
)  # fmt: skip

# Headers of an answer that may show where its engine is: RFC 9110 sections 8.7 and 10.2.2, RFC 8288, RFC 7838, and the
# `Refresh` of the HTML standard.
ADDRESS_HEADERS = frozenset((b"location", b"content-location", b"link", b"refresh", b"alt-svc"))
# Headers of our own, which mean nothing from an engine, or from a router that stands between.
OWN_HEADERS = b"x-warmroute-"


class Refusal(Exception):
    """An answer of our own that is an error: the request is no HTTP, over a limit, or cannot be served.

    `param` names the field of the body that is at fault; `retry_after_s` becomes the Retry-After of a 429 or 503;
    `cause` is what failed behind the router, for operators and for clients who may see receipts.
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
        self.model = ""  # the model that was meant, where it is one that replicas serve


class BodySender(Protocol):
    """Whoever sends the body of an answer: told when the client does not read."""

    def pause(self) -> None:
        """Send no more for now: the client does not read."""

    def resume(self) -> None:
        """Go on sending: the client reads again."""

    def gone(self) -> None:
        """The client left; its transport takes no more."""


class Stream(Protocol):
    """Where the pieces of a body go. With `chunked` its sender puts each piece in a chunk of HTTP/1.1."""

    chunked: bool
    sender: BodySender | None

    @property
    def write(self) -> Callable[[bytes], None]:
        """Writes bytes as they are, framed by the sender."""

    def end(self) -> None:
        """End the body: it is whole."""

    def cut(self) -> None:
        """End the body so that the client can tell that it is not whole."""


class Connection(Protocol):
    """Where a request came from, and where its answer goes."""

    def headed(self, request: Request, length: int, *, expects: bool) -> bool:
        """The head of a request came, and not yet all of its body, which is `length` bytes long; -1 where its head does
        not say. With `expects` the client waits for permission to send it (RFC 9110 section 10.1.1). Returns whether
        the body is wanted; one that is not is read and dropped. Raises Refusal."""

    def grows(self, request: Request, body_bytes: int) -> None:
        """A body whose head did not say its length has so many bytes by now. Raises Refusal."""

    def arrived(self, request: Request) -> None:
        """A request was read to its end. Raises Refusal."""

    def hold(self, request: Request) -> bool:
        """Count the request's body (`Request.hold`)."""

    def let_go(self, request: Request) -> None:
        """Count the request's body no longer (`Request.let_go`)."""

    def answer(self, request: Request, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Send a whole answer (`Request.answer`)."""

    def begin(self, request: Request, status: int, lines: Iterable[bytes]) -> Stream:
        """Send the head of an answer (`Request.begin`)."""

    def cut(self) -> None:
        """Break the connection (`Request.cut`)."""


class BodyShare:
    """So many bytes that count as held for a body, in the name of a holder (body_budget.py)."""

    __slots__ = ("held_bytes", "holder")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.held_bytes = 0


class Request(BodyShare):
    """One request, whole. Header names are lower case; of a repeated one the first value counts."""

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
        self.last = False  # nothing that comes behind it on its connection is read
        self.fields: dict[bytes, bytes] = {}
        self.lines: list[tuple[bytes, bytes, bytes]] = []  # (lower-case name, name, value), in the client's order
        self.body_bytes = 0
        self.met: object = None  # what the server has found out about whose request this is
        self._body = b""
        self._pieces: list[bytes | bytearray] = []

    @property
    def body(self) -> bytes:
        """The whole body, joined when it is first asked for, in whichever thread: 8 MB take milliseconds."""
        if self._pieces:
            self._body, self._pieces = b"".join(self._pieces), []
        return self._body

    def bring(self, pieces: list[bytes | bytearray], body_bytes: int) -> None:
        """Give the request a body, or another one."""
        self._pieces, self._body, self.body_bytes = pieces, b"", body_bytes

    def hold(self) -> bool:
        """Count the body as held by `holder`, if it does not count yet. False where there is no room for it."""
        return self.client.hold(self)

    def let_go(self) -> None:
        """Drop the body: nobody needs it any more."""
        self._pieces, self._body = [], b""
        if self.held_bytes:
            self.client.let_go(self)

    def header(self, name: bytes) -> str:
        """A header's value, or "". Bytes that are not UTF-8 become surrogates."""
        value = self.fields.get(name)
        return value.decode("utf-8", "surrogateescape") if value else ""

    # -- the answer ----------------------------------------------------------------------------------------------

    def answer(self, status: int, lines: Iterable[bytes], body: bytes, *, own: bool = False) -> None:
        """Send a whole answer; `lines` are header lines, each with its CRLF. `own`: it is an answer of ours, not of an
        engine, that pages may read where engines let them read theirs. Raises ClientLeft."""
        self.client.answer(self, status, lines, body, own=own)

    def begin(self, status: int, lines: Iterable[bytes]) -> Stream:
        """Send the head of an answer whose length is not known. Its body is written to the stream that this returns,
        in chunks where `chunked` says so, and ended with `end`. Raises ClientLeft."""
        return self.client.begin(self, status, lines)

    def cut(self) -> None:
        """Break the connection, so that the client does not take what it has for a whole answer."""
        self.client.cut()


def is_websocket(request: Request) -> bool:
    """Whether a request wants to go on as a WebSocket (RFC 6455 section 4.1)."""
    return b"websocket" in request.fields.get(b"upgrade", b"").lower()


def no_websockets() -> Refusal:
    """The refusal of such a request."""
    message = "WebSockets are not passed on by this router; connect to an engine directly for its realtime API."
    return Refusal(501, "websocket_unsupported", message)


def date_line() -> bytes:
    """The Date header (RFC 9110 section 6.6.1) of our own answers."""
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()
