"""One request, understood: what was asked, in which dialect, and what placing needs."""

from __future__ import annotations

from msgspec import Struct

from router.core.dialects import Dialect
from router.core.placement.wanted import Wanted
from router.http.request import Request
from router.telemetry.spans import Moments

RESPONSES = "/v1/responses"
STORED = RESPONSES + "/"  # and the id of one


class Question(Struct, eq=False):  # see core/facts/requests.py
    """A request as far as it is understood before placing."""

    request: Request
    lines: list[bytes]  # header lines for the engine
    body: bytes
    dialect: Dialect
    wanted: Wanted
    strip_usage: bool
    receipts: bool = True  # whether its caller may be told where the prompt was found
    trace: Moments | None = None  # of one that is traced
    repairs: tuple[str, ...] = ()  # that its body needed
    warning: str = ""  # for the client

    @property
    def stored(self) -> bool:
        """Whether the engine may keep the answer, so that it must not be made twice."""
        return self.request.path.startswith(RESPONSES) and self.wanted.ask.stored is not False
