"""CORS headers, which allow pages of other origins to read answers (CORS: WHATWG Fetch, section 3.2).

A browser requests permission before most requests to an API, with an OPTIONS request without credentials. It also hides
an answer from the page unless the answer names the page's origin. Each answer of the main listener therefore carries
these headers, including errors and streams. An engine's own CORS headers are dropped, since its list does not know the
router's origins. If the router has no list, engines' headers pass, and the router's own answers grant the same
(`EnginesCors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.config.origins import EVERY, OPAQUE, origin_of
from router.http.request import Request

MAX_AGE_S = 600  # seconds for which a browser caches a permission
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"retry-after, x-request-id, x-should-retry"  # in addition to the router's own headers of an answer
_ASKED, _ASKED_HEADERS = b"access-control-request-method", b"access-control-request-headers"
_ASKED_PRIVATE = b"access-control-request-private-network"  # sent by a public page to an address in a private network
_PERMISSIONS = b"access-control-"
_OURS = re.compile(rb"^x-warmroute-[\w-]+", re.MULTILINE)
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, \t-]{1,4096}", re.ASCII)


def asks_permission(request: Request) -> bool:
    """True if this is a browser's preflight."""
    return request.method == "OPTIONS" and _ASKED in request.fields and b"origin" in request.fields


class Cors:
    """Allows these origins to use the listener. `*` allows every origin, but without cookies and certificates."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins` have been validated (config/origins.py)."""
        named = {origin.encode() for each in origins if (origin := origin_of(each)) is not None}
        self._every = EVERY.encode() in named
        self._named = frozenset(named)

    def allows(self, request: Request) -> bool:
        """True if the requesting page may read the answer."""
        return self._every or request.fields.get(b"origin", b"").lower() in self._named

    def lines(self, request: Request, lines: Iterable[bytes], *, own: bool) -> Iterable[bytes]:
        """Return the header lines of an answer with the router's CORS headers in place of the engine's. `own`: the
        answer is the router's own, which pages may read if engines let them read theirs."""
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
        ours = _OURS.findall(b"".join(kept))  # a receipt consists of several lines in one piece
        kept.append(b"access-control-expose-headers: %b\r\n" % b", ".join((*ours, _EXPOSED)))
        return kept


class EnginesCors(Cors):
    """Policy of the engines: their answers pass unchanged, and the router's may be read by every page if theirs may."""

    def __init__(self) -> None:
        super().__init__((EVERY,))
        self.every_page = False  # result of the latest probe of an engine

    def lines(self, request: Request, lines: Iterable[bytes], *, own: bool) -> Iterable[bytes]:
        """Return the header lines of an answer. If it is the router's own and answers a page, every page is allowed if
        engines allow every page."""
        if not own or not self.every_page or b"origin" not in request.fields:
            return lines
        return [*lines, b"access-control-allow-origin: *\r\n"]


def _permission(request: Request) -> list[bytes]:
    """Return the methods and headers that an allowed page may send."""
    lines = [b"access-control-allow-methods: %b\r\n" % _METHODS, b"access-control-max-age: %d\r\n" % MAX_AGE_S]
    headers = request.fields.get(_ASKED_HEADERS, b"")
    if _NAMES.fullmatch(headers):
        lines.append(b"access-control-allow-headers: %b\r\n" % headers)  # `*` would not allow Authorization
    if request.fields.get(_ASKED_PRIVATE, b"").lower() == b"true":
        lines.append(b"access-control-allow-private-network: true\r\n")
    return lines


def _varies(line: bytes) -> bool:
    """True if this line already declares that the answer depends on the origin."""
    name, _, value = line.partition(b":")
    return name.lower() == b"vary" and not {b"origin", b"*"}.isdisjoint(
        word.strip().lower() for word in value.split(b",")
    )
