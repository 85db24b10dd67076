"""Lines of a router's own log: the place at which each prompt token of the served requests ended.

Such a line has no prompt, so it gives no further findings; its places are those that the router counted.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec import Struct

from router.cli.audit.log_requests import NotRequest
from router.core.placement.spill import SpillCause
from router.core.types.misses import TokenFate

_OWN = b'"router.'  # bytes in every line of a router's log, and in few other lines
_LOGGER, _EVENT = "router.requests", "request"
_OTHER = "other"  # stands for causes that this release does not know


class ServedLine(Struct):
    """The needed fields of a line of a router's log. `places` is None if the request was not computed."""

    logger: str
    event: str
    places: dict[TokenFate, int] | None = None
    held: str = ""  # cause for which the holder was passed over, and the holder: `queue at http://10.0.0.7:8000`


class _Any(Struct):
    logger: str
    event: str


_any = msgspec.json.Decoder(_Any).decode
_decode = msgspec.json.Decoder(ServedLine).decode


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
        except msgspec.DecodeError as error:
            raise NotRequest("its places are those of another release") from error
        self.requests += 1
        if served.places is None:
            self.untold += 1
            return
        self.places.update(served.places)
        if tokens := served.places.get(TokenFate.HELD_ELSEWHERE):
            cause = served.held.partition(" at ")[0]
            self.held[cause if cause in set(SpillCause) else _OTHER] += tokens
