"""What goes on to an engine besides the body: header lines, and whether its usage is asked for.

Header lines are the client's, without those that are for the router, for one connection alone, or that an engine must
not see.
"""

from __future__ import annotations

from router.http.request import HOP_HEADERS, Request
from router.placer import Placer
from router.reading.continuing import CONTINUE
from router.reading.deadlines import WITHIN
from router.reading.gateway_rules import CREDENTIALS, FORGEABLE

TELL_USAGE = frozenset(("vllm", "sglang"))  # kinds of engines that end a stream with its usage where they are asked to
TENANT, PRIORITY = b"x-warmroute-tenant", b"x-warmroute-priority"  # headers for the router, not sent on
FINAL_RECEIPT = b"x-warmroute-final-receipt"  # likewise: the client reads a comment behind its stream

_FOR_US = {b"x-request-id", TENANT, PRIORITY, FINAL_RECEIPT, CONTINUE, WITHIN}
_NOT_SENT_ON = HOP_HEADERS | _FOR_US | {name.encode() for name in FORGEABLE}


class Forwarding:
    """Which lines are sent on. `step_header`, in small letters, which may be replaced: the header that names the step
    of an agent; b"" for none. Clients' own credentials are sent on until it is told otherwise."""

    def __init__(self) -> None:
        self.step_header = b""
        self._kept = _NOT_SENT_ON
        self._own_lines: list[bytes] = []

    def credentials(self, *, passed_on: bool, api_key: str) -> None:
        """Pass clients' own credentials on to replicas, or do not. An `api_key` is sent in place of a client's."""
        self._kept = _NOT_SENT_ON if passed_on and not api_key else _NOT_SENT_ON | CREDENTIALS
        self._own_lines = [f"Authorization: Bearer {api_key}\r\n".encode()] if api_key else []

    def lines(self, request: Request, request_id: str) -> list[bytes]:
        """The lines that go on with a request, each with its CRLF."""
        not_sent_on, step = self._kept, self.step_header
        if b"connection" in request.fields:  # the header's value names more headers that are for this connection alone
            named = request.fields[b"connection"].split(b",")
            not_sent_on = not_sent_on.union([token.strip().lower() for token in named])
        lines = [
            b"%b: %b\r\n" % (name, value)
            for low, name, value in request.lines
            if low not in not_sent_on and low != step
        ]
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
