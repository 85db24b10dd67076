"""Lines of a router's own log: the place at which each prompt token of the served requests ended.

Such a line has no prompt, so it gives no further findings; its places are those that the router counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from router.cli.audit.log_requests import NotRequest
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import TokenFate
from router.former_names import SPILL_CAUSES, TOKEN_FATES

_OWN = b'"router.'  # bytes in every line of a router's log, and in few other lines
_LOGGER, _EVENT = "router.requests", "request"
_OTHER = "other"  # stands for causes that this release does not know


class ServedLine(Struct):
    """The needed fields of a line of a router's log. `places` is None if the request was not computed."""

    logger: str
    event: str
    places: dict[str, int] | None = None
    held: str = ""  # cause for which the holder was passed over, and the holder: `queue at http://10.0.0.7:8000`


class _Any(Struct):
    logger: str
    event: str


_any = msgspec.json.Decoder(_Any).decode
_decode = msgspec.json.Decoder(ServedLine).decode


def _fates(places: Mapping[str, int]) -> dict[TokenFate, int]:
    """Return tokens by place, with former names of places replaced. Raises ValueError for an unknown place."""
    return {TokenFate(TOKEN_FATES.get(place, place)): tokens for place, tokens in places.items()}


class Served:
    """Sums over the requests that routers served."""

    def __init__(self) -> None:
        self.requests = self.untold = 0  # all requests, and those with a line that has no places
        self.places: Counter[TokenFate] = Counter()
        self.held: Counter[str] = Counter()  # tokens held elsewhere, by the cause for which the holder was passed over

    def add(self, line: bytes) -> bool:
        """Count a line of a router's log; False for any other line. Raises NotRequest for one of a release that has
        other places."""
        if _OWN not in line:
            return False
        try:
            found = _any(line)
        except msgspec.DecodeError:
            return False
        if not found.logger.startswith("router."):
            return False
        if (found.logger, found.event) == (_LOGGER, _EVENT):
            self._count(line)
        return True

    def _count(self, line: bytes) -> None:
        try:
            served = _decode(line)
            places = None if served.places is None else _fates(served.places)
        except (msgspec.DecodeError, ValueError) as error:
            raise NotRequest("its token places have the format of another release") from error
        self.requests += 1
        if places is None:
            self.untold += 1
            return
        self.places.update(places)
        if tokens := places.get(TokenFate.CACHED_ON_OTHER_REPLICA):
            cause = served.held.partition(" at ")[0]
            cause = SPILL_CAUSES.get(cause, cause)
            self.held[cause if cause in set(SpillCause) else _OTHER] += tokens
