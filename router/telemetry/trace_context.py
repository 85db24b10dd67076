"""W3C Trace Context (https://www.w3.org/TR/trace-context/): reads and writes trace headers, and decides sampling.

`traceparent: 00-{trace id}-{id of the calling span}-{flags}`. A header that does not parse counts as not sent (section
3.2): the trace begins anew, and the `tracestate` that came with it is dropped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1  # the only flag of version 00
TRACE_ID_BITS, SPAN_ID_BITS = 128, 64
_RATIO_BITS = 64  # the lower bits of a trace id decide, as in OpenTelemetry's TraceIdRatioBased

_FORM = re.compile(rb"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\r\n]*)?[ \t]*")


class Parent(NamedTuple):
    """The calling span, as the client names it."""

    trace_id: int
    span_id: int
    sampled: bool  # True if the client traces the request; the router then does too


def parse(value: bytes) -> Parent | None:
    """Parse a `traceparent`; None if it is invalid. Of later versions the first four fields count (section 3.2.4)."""
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def traceparent(trace_id: int, span_id: int, *, sampled: bool) -> bytes:
    """Return the value of a `traceparent` header of version 00."""
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, SAMPLED if sampled else 0)


def is_sampled(trace_id: int, ratio: float) -> bool:
    """True if a trace without a parent is sampled: the same result for the same id, in any process."""
    return trace_id % (1 << _RATIO_BITS) < round(ratio * (1 << _RATIO_BITS))
