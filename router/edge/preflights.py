"""What engines let pages in browsers do, where the router has no list of its own: their preflights (CORS: WHATWG Fetch,
section 3.2) are passed on, and whether engines let every page read answers is remembered for our own answers.

vLLM answers a preflight with `*`; SGLang, which also allows cookies, names the page that asks. So engines that name it
are asked for a page that cannot be: one that is let in as well is every page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.http.cors import EnginesCors
from router.http.exchange import EngineAnswer
from router.http.failures import Failure
from router.http.request import Request
from router.http.upstream import Upstream
from router.placer import MODELS, Placer

WAIT_S = 1.0  # longest wait for an engine, and for a place among those that ask
AT_ONCE_MAX = 8  # preflights that are with engines
KNOWN_S = 60.0  # seconds for which an engine is not asked again for a page that comes without a preflight
_PASSED = frozenset(
    (b"origin", b"access-control-request-method", b"access-control-request-headers",
     b"access-control-request-private-network")
)  # fmt: skip
_ALLOW = b"access-control-allow-origin:"
_NOWHERE = b"https://every-page.invalid"  # RFC 6761 section 6.4: no page can be there
_ANY_PAGE = (b"origin: %b\r\n" % _NOWHERE, b"access-control-request-method: POST\r\n")


class Preflights:
    """Preflights of pages, with one replica for all."""

    def __init__(self, placer: Placer, upstream: Upstream, cors: EnginesCors) -> None:
        """`cors.every_page` is kept up to date."""
        self._placer, self._upstream, self._cors = placer, upstream, cors
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._asking = asyncio.Lock()
        self._asked_s = float("-inf")

    async def ask(self, request: Request, *, known: bool) -> EngineAnswer | None:
        """An engine's answer to a preflight; None where it lets the page do nothing, or does not answer. Paths of
        clients' own making (not `known`) are sent as MODELS: engines answer the same on all."""
        lines = [b"%b: %b\r\n" % (low, value) for low, _, value in request.lines if low in _PASSED]
        answer = await self._call(request.target if known else MODELS, lines)
        if answer is None:
            return None
        allowed = _allowed(answer)
        if allowed in (b"", b"*"):
            self._cors.every_page = allowed == b"*"
        else:
            await self._learn()
        return answer if allowed else None

    async def learn(self) -> None:
        """Learn whether every page is let in, unless that was asked just now."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s <= KNOWN_S:
            return
        async with self._asking:
            if self._asked_s < now_s:
                await self._learn()

    async def _learn(self) -> None:
        answer = await self._call(MODELS, _ANY_PAGE)
        if answer is not None:
            self._cors.every_page = _allowed(answer) in (b"*", _NOWHERE)

    async def _call(self, target: str, lines: Sequence[bytes]) -> EngineAnswer | None:
        replica, answer = self._placer.ready_one(), None
        if replica is None:
            return None
        self._asked_s = asyncio.get_running_loop().time()  # also of an engine that says nothing: pages wait once
        try:
            async with asyncio.timeout(WAIT_S), self._places:
                answer = await self._upstream.ask(replica, "OPTIONS", target, lines)
        except (TimeoutError, Failure):
            return None
        self._upstream.done(answer)
        return answer if answer.whole and not answer.tells_where else None


def _allowed(answer: EngineAnswer) -> bytes:
    """The pages that an answer names; b"" for none, or for an answer that browsers do not take for a permission."""
    return next((line[len(_ALLOW) :].strip() for line in answer.lines if line[: len(_ALLOW)].lower() == _ALLOW), b"")
