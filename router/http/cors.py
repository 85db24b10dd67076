"""What tells a browser that a page of another origin may read an answer (CORS: WHATWG Fetch, section 3.2).

A browser asks for permission before most requests to an API, with an OPTIONS request without credentials; and it hides
an answer from the page that does not name the page's origin. So each answer of the main listener does, errors and
streams too. What an engine says of this is dropped: its own list cannot know of the router's. Without a list of ours
what engines say passes, and answers of our own say no more than they do (`EnginesCors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.http.request import Request
from router.settings.origins import EVERY, OPAQUE, origin_of

MAX_AGE_S = 600  # seconds for which a browser remembers a permission
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"retry-after, x-request-id, x-should-retry"  # besides our own headers that an answer has
_ASKED, _ASKED_HEADERS = b"access-control-request-method", b"access-control-request-headers"
_ASKED_PRIVATE = b"access-control-request-private-network"  # sent by a public page to an address in a private network
_PERMISSIONS = b"access-control-"
_OURS = re.compile(rb"^x-warmroute-[\w-]+", re.MULTILINE)
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, \t-]{1,4096}", re.ASCII)


def asks_permission(request: Request) -> bool:
    """Whether this is a browser's question whether a page may send a request."""
    return request.method == "OPTIONS" and _ASKED in request.fields and b"origin" in request.fields


class Cors:
    """Pages of these origins may use the listener; of all with `*`, but then not with cookies or certificates."""

    def __init__(self, origins: Iterable[str]) -> None:
        """The origins are checked (settings/origins.py)."""
        named = {origin.encode() for each in origins if (origin := origin_of(each)) is not None}
        self._every = EVERY.encode() in named
        self._named = frozenset(named)

    def allows(self, request: Request) -> bool:
        """Whether the page that asks may read the answer."""
        return self._every or request.fields.get(b"origin", b"").lower() in self._named

    def lines(self, request: Request, lines: Iterable[bytes], *, own: bool) -> Iterable[bytes]:
        """Header lines of an answer, with what a browser has to know, and without what an engine said of it. `own`: it
        is an answer of ours that pages may read where engines let them read theirs."""
        kept = [line for line in lines if line[: len(_PERMISSIONS)].lower() != _PERMISSIONS]
        asks = asks_permission(request)
        if asks:
            kept.append(b"vary: Origin, Access-Control-Request-Headers, Access-Control-Request-Private-Network\r\n")
        elif not self._every and not any(map(_varies, kept)):
            kept.append(b"vary: Origin\r\n")
        if not self.allows(request):
            return kept
        origin = request.fields.get(b"origin", b"")
        kept.append(b"access-control-allow-origin: %b\r\n" % (b"*" if self._every else origin))
        if not self._every and origin != OPAQUE.encode():
            kept.append(b"access-control-allow-credentials: true\r\n")
        if asks:
            return kept + _permission(request)
        ours = _OURS.findall(b"".join(kept))  # a receipt is several lines in one piece
        kept.append(b"access-control-expose-headers: %b\r\n" % b", ".join((*ours, _EXPOSED)))
        return kept


class EnginesCors(Cors):
    """Engines decide: their answers pass as they are, and ours may be read by every page if theirs may."""

    def __init__(self) -> None:
        super().__init__((EVERY,))
        self.every_page = False  # as engines have said last

    def lines(self, request: Request, lines: Iterable[bytes], *, own: bool) -> Iterable[bytes]:
        """Header lines of an answer, with those of every page for one of ours to a page."""
        if not own or not self.every_page or b"origin" not in request.fields:
            return lines
        return [*lines, b"access-control-allow-origin: *\r\n"]


def _permission(request: Request) -> list[bytes]:
    """What a page that is allowed may send."""
    lines = [b"access-control-allow-methods: %b\r\n" % _METHODS, b"access-control-max-age: %d\r\n" % MAX_AGE_S]
    headers = request.fields.get(_ASKED_HEADERS, b"")
    if _NAMES.fullmatch(headers):
        lines.append(b"access-control-allow-headers: %b\r\n" % headers)  # `*` would not allow Authorization
    if request.fields.get(_ASKED_PRIVATE, b"").lower() == b"true":
        lines.append(b"access-control-allow-private-network: true\r\n")
    return lines


def _varies(line: bytes) -> bool:
    """Whether this line says already that the answer depends on the origin."""
    name, _, value = line.partition(b":")
    return name.lower() == b"vary" and not {b"origin", b"*"}.isdisjoint(
        word.strip().lower() for word in value.split(b",")
    )
