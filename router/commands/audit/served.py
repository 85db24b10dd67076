"""Lines of a router's own log: in which place each prompt token of the requests that it served ended.

Such a line has no prompt, so nothing more is learned of it; its places are those that the router counted.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec import Struct

from router.commands.audit.requests import NotRequest
from router.core.facts.misses import TokenPlace
from router.core.placement.spill import SpillCause

_OWN = b'"router.'  # bytes in every line of a router's log, and in few other lines
_LOGGER, _EVENT = "router.requests", "request"
_OTHER = "other"  # stands for causes that this release does not know


class ServedLine(Struct):
    """What is needed of a line of a router's log. `places` is None where the request was not computed."""

    logger: str
    event: str
    places: dict[TokenPlace, int] | None = None
    held: str = ""  # why not there, and who holds it: `queue at http://10.0.0.7:8000`


class _Any(Struct):
    logger: str
    event: str


_any = msgspec.json.Decoder(_Any).decode
_decode = msgspec.json.Decoder(ServedLine).decode


class Served:
    """Sums over the requests that routers served."""

    def __init__(self) -> None:
        self.requests = self.untold = 0  # requests in all, and those whose line has no places
        self.places: Counter[TokenPlace] = Counter()
        self.held: Counter[str] = Counter()  # tokens held elsewhere by why not there

    def add(self, line: bytes) -> bool:
        """Count a line of a router's log; False where it is none. Raises NotRequest for one of a release that has
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
        except msgspec.DecodeError as error:
            raise NotRequest("its places are those of another release") from error
        self.requests += 1
        if served.places is None:
            self.untold += 1
            return
        self.places.update(served.places)
        if tokens := served.places.get(TokenPlace.HELD_ELSEWHERE):
            cause = served.held.partition(" at ")[0]
            self.held[cause if cause in set(SpillCause) else _OTHER] += tokens
