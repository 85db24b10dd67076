"""Data for an engine in addition to the body: header lines, and the decision to request its usage.

Header lines are those of the client. Lines for the router, lines for one connection, and lines that an engine must not
see are removed.
"""

from __future__ import annotations

from router.http.request import HOP_HEADERS, Request
from router.ingress.failover_policy import FORMER_STREAM_FAILOVER, STREAM_FAILOVER
from router.ingress.gateway_rules import CREDENTIALS, FORGEABLE
from router.ingress.ttft_deadline import WITHIN
from router.placement_api import PlacementService

TELL_USAGE = frozenset(("vllm", "sglang"))  # kinds of engines that end a stream with its usage on request
TENANT, PRIORITY = b"x-warmroute-tenant", b"x-warmroute-priority"  # headers for the router, not forwarded
FINAL_RECEIPT = b"x-warmroute-final-receipt"  # the same: the client reads a comment at the end of its stream

_FOR_US = {b"x-request-id", TENANT, PRIORITY, FINAL_RECEIPT, STREAM_FAILOVER, FORMER_STREAM_FAILOVER, WITHIN}
_NOT_SENT_ON = HOP_HEADERS | _FOR_US | {name.encode() for name in FORGEABLE}


class UpstreamHeaders:
    """Selects the lines that are forwarded. `step_header` is the lower-case header that names the step of an agent; b""
    for none. It may be replaced. Clients' own credentials are forwarded until `credentials` changes that."""

    def __init__(self) -> None:
        self.step_header = b""
        self._kept = _NOT_SENT_ON
        self._own_lines: list[bytes] = []

    def credentials(self, *, passed_on: bool, api_key: str) -> None:
        """Decide on clients' own credentials: with `passed_on` they are forwarded to replicas. An `api_key` is sent in
        place of a client's."""
        self._kept = _NOT_SENT_ON if passed_on and not api_key else _NOT_SENT_ON | CREDENTIALS
        self._own_lines = [f"Authorization: Bearer {api_key}\r\n".encode()] if api_key else []

    def lines(self, request: Request, request_id: str) -> list[bytes]:
        """Return the lines that are forwarded with a request, each with its CRLF."""
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


def should_request_usage(asks: bool | str, placer: PlacementService, model: str | None, *, metered: bool) -> bool:
    """True if usage must be requested for a stream when its client did not request it. If tokens are `metered`, it is
    requested from engines that are known to report it, regardless of the setting."""
    if isinstance(asks, bool) and (asks or not metered):
        return asks
    kinds = placer.engines(model) if model is not None else ()
    return bool(kinds) and TELL_USAGE.issuperset(kinds)
