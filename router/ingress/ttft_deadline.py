"""Deadline for the first token: from a header of this router or of llm-d, or from the API key.

Both frontends read it here. It counts from the moment at which the complete request was read, on the clock of
time.monotonic.
"""

from __future__ import annotations

from router.config.api_keys import TTFT_MS_MAX, Caller
from router.http.request import Refusal, Request

WITHIN = b"x-warmroute-ttft-ms"  # header for the router, not forwarded
HEADERS = (WITHIN, b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")  # the first one that is present applies
_DIGITS_MAX = 20


def ttft_ms_of(request: Request, caller: Caller) -> float | None:
    """Return the milliseconds within which the first token is wanted; None without a deadline. Raises Refusal."""
    fields = request.fields
    for name in HEADERS:
        if name in fields:
            return _read(name, fields[name])
    return caller.tenant.ttft_ms if caller.tenant is not None else None


def _read(name: bytes, value: bytes) -> float:
    try:
        wanted_ms = float(value[: _DIGITS_MAX + 1]) if len(value) <= _DIGITS_MAX else 0.0
    except ValueError:
        wanted_ms = 0.0
    if not 0 < wanted_ms <= TTFT_MS_MAX:  # NaN fails as well
        what = f"{name.decode()} must be a number of milliseconds above 0 and up to {TTFT_MS_MAX}"
        raise Refusal(400, "bad_ttft", f"{what}: it is the deadline of the first token.")
    return wanted_ms
