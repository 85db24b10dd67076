"""CORS policy of the engines, for a router that has no list of origins. Preflights (CORS: WHATWG Fetch, section 3.2)
are forwarded to an engine. The router remembers if engines let every page read answers, and does the same for its own.

vLLM answers a preflight with `*`. SGLang, which also allows cookies, names the origin of the request. So engines that
name an origin get a preflight for an origin that cannot exist: if it is allowed, every page is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.http.cors import EnginesCors
from router.http.exchange import UpstreamResponse
from router.http.failures import UpstreamError
from router.http.request import Request
from router.http.upstream import Upstream
from router.placement_api import MODELS, PlacementService

WAIT_S = 1.0  # longest wait for an engine, and for a free slot
AT_ONCE_MAX = 8  # concurrent preflights at engines
KNOWN_S = 60.0  # seconds for which the probed policy applies to pages that come without a preflight
_PASSED = frozenset(
    (b"origin", b"access-control-request-method", b"access-control-request-headers",
     b"access-control-request-private-network")
)  # fmt: skip
_ALLOW = b"access-control-allow-origin:"
_NOWHERE = b"https://every-page.invalid"  # RFC 6761 section 6.4: no page can have this origin
_ANY_PAGE = (b"origin: %b\r\n" % _NOWHERE, b"access-control-request-method: POST\r\n")


class Preflights:
    """Forwards preflights of all pages to one ready replica."""

    def __init__(self, placer: PlacementService, upstream: Upstream, cors: EnginesCors) -> None:
        """`cors.every_page` is kept up to date."""
        self._placer, self._upstream, self._cors = placer, upstream, cors
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._asking = asyncio.Lock()
        self._asked_s = float("-inf")

    async def ask(self, request: Request, *, known: bool) -> UpstreamResponse | None:
        """Return an engine's answer to a preflight. None if it grants the page nothing, or does not answer. Paths that
        are not `known` are sent as MODELS, since engines answer the same on all paths."""
        lines = [b"%b: %b\r\n" % (low, value) for low, _, value in request.lines if low in _PASSED]
        answer = await self._call(request.target if known else MODELS, lines)
        if answer is None:
            return None
        allowed = _find_allowed_origin(answer)
        if allowed in (b"", b"*"):
            self._cors.every_page = allowed == b"*"
        else:
            await self._learn()
        return answer if allowed else None

    async def learn(self) -> None:
        """Probe if every page is allowed, unless that was done within KNOWN_S."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s <= KNOWN_S:
            return
        async with self._asking:
            if self._asked_s < now_s:
                await self._learn()

    async def _learn(self) -> None:
        answer = await self._call(MODELS, _ANY_PAGE)
        if answer is not None:
            self._cors.every_page = _find_allowed_origin(answer) in (b"*", _NOWHERE)

    async def _call(self, target: str, lines: Sequence[bytes]) -> UpstreamResponse | None:
        replica, answer = self._placer.ready_one(), None
        if replica is None:
            return None
        self._asked_s = asyncio.get_running_loop().time()  # also if the engine does not answer: pages wait once
        try:
            async with asyncio.timeout(WAIT_S), self._places:
                answer = await self._upstream.ask(replica, "OPTIONS", target, lines)
        except (TimeoutError, UpstreamError):
            return None
        self._upstream.done(answer)
        return answer if answer.whole and not answer.tells_where else None


def _find_allowed_origin(answer: UpstreamResponse) -> bytes:
    """Return the origin that an answer allows; b"" if it allows none, or is no answer that browsers take as a
    permission."""
    return next((line[len(_ALLOW) :].strip() for line in answer.lines if line[: len(_ALLOW)].lower() == _ALLOW), b"")
