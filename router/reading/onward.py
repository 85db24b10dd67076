"""What goes on to an engine besides the body: header lines, and whether its usage is asked for."""

from __future__ import annotations

from router.http.request import HOP_HEADERS, Request
from router.placer import Placer
from router.reading.deadlines import WITHIN

TELL_USAGE = frozenset(("vllm", "sglang"))  # kinds of engines that end a stream with its usage where they are asked to
CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
TENANT, PRIORITY = b"x-warmroute-tenant", b"x-warmroute-priority"  # headers for the router, not sent on
FINAL_RECEIPT = b"x-warmroute-final-receipt"  # likewise: the client reads a comment behind its stream

_NOT_SENT_ON = HOP_HEADERS | {b"x-request-id", TENANT, PRIORITY, FINAL_RECEIPT, WITHIN}


class HeadersOn:
    """Which header lines of clients go on to engines."""

    def __init__(self, step_header: bytes, *, passed_on: bool, api_key: str) -> None:
        """Clients' own credentials are `passed_on` or not. An `api_key` is sent in place of a client's. The header that
        names an agent's step stays here."""
        kept = _NOT_SENT_ON | {step_header}
        self._not_sent_on = kept if passed_on and not api_key else kept | CREDENTIALS
        self._own_lines = [f"Authorization: Bearer {api_key}\r\n".encode()] if api_key else []

    def lines(self, request: Request, request_id: str) -> list[bytes]:
        """Header lines for the engine: the client's, without those that are for us or for this connection alone."""
        not_sent_on = self._not_sent_on
        if b"connection" in request.fields:  # the header's value names more headers that are for this connection alone
            named = request.fields[b"connection"].split(b",")
            not_sent_on = not_sent_on.union([token.strip().lower() for token in named])
        lines = [b"%b: %b\r\n" % (name, value) for low, name, value in request.lines if low not in not_sent_on]
        lines += self._own_lines
        lines.append(f"X-Request-Id: {request_id}\r\n".encode())
        return lines


def asks_usage(asks: bool | str, placer: Placer, model: str | None, *, metered: bool) -> bool:
    """Whether to ask for the usage of a stream whose client did not. Where tokens are `metered`, engines are asked that
    are known to tell, whatever the setting says."""
    if isinstance(asks, bool) and (asks or not metered):
        return asks
    kinds = placer.engines(model) if model is not None else ()
    return bool(kinds) and TELL_USAGE.issuperset(kinds)
