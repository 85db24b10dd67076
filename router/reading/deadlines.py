"""By when a client wants its first token: a header of ours or of llm-d's, or what its API key says.

Both faces read it here. It counts from the moment at which all of the request was read, on the clock of time.monotonic,
which hub and workers share.
"""

from __future__ import annotations

from router.http.request import Refusal, Request
from router.settings.keys import TTFT_MS_MAX, Caller

WITHIN = b"x-warmroute-ttft-ms"  # header for the router, not sent on
HEADERS = (WITHIN, b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")  # the first that is there holds
_DIGITS_MAX = 20


def ttft_ms_of(request: Request, caller: Caller) -> float | None:
    """Milliseconds within which the first token is wanted; None where nobody says. Raises Refusal."""
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
    if not 0 < wanted_ms <= TTFT_MS_MAX:  # what is no number at all fails as well
        what = f"{name.decode()} is a number of milliseconds over 0, at most {TTFT_MS_MAX}"
        raise Refusal(400, "bad_ttft", f"{what}: the first token is wanted within it.")
    return wanted_ms
