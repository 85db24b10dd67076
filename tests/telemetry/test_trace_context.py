from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.telemetry.trace_context import Parent, is_sampled, parse, traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_IDS, SPAN_IDS = st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1)
# Almost right, so that it is the details that decide.
ODD = st.one_of(
    st.text(max_size=80),
    st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[a-z]{0,3})?", fullmatch=True),
    st.from_regex(r"(00|01|ff)-[0-9a-fA-F]{31,33}-[0-9a-f]{15,17}-0?[0-9a-f][ \t.]?", fullmatch=True),
)


@given(TRACE_IDS, SPAN_IDS, st.booleans())
def test_what_is_written_is_read_again(trace_id: int, span_id: int, sampled: bool) -> None:
    """A `traceparent` of ours says what it was made of."""
    value = traceparent(trace_id, span_id, sampled=sampled)
    assert len(value) == 55
    assert parse(value) == Parent(trace_id, span_id, sampled)


@pytest.mark.promise("An invalid trace header fails no request and reaches no engine.", "records")
@given(st.binary(max_size=100))
def test_anything_may_come(value: bytes) -> None:
    """No bytes make the parser fail; what it takes has ids."""
    parent = parse(value)
    assert parent is None or (parent.trace_id > 0 and parent.span_id > 0)


@given(ODD)
def test_it_is_read_as_opentelemetry_reads_it(value: str) -> None:
    """The reference implementation finds the same parent, or none, in what is right or almost so."""
    value = "".join(c for c in value if c not in "\r\n")  # no header has them
    theirs = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": value})).get_span_context()
    ours = parse(value.encode())
    if ours is None:
        assert not theirs.is_valid
    else:
        assert ours == Parent(theirs.trace_id, theirs.span_id, bool(theirs.trace_flags & 1))


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # flags of a later level
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"01-{TRACE}-{SPAN}-01-what-the-future-holds", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f" 00-{TRACE}-{SPAN}-01\t", True),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"01-{TRACE}-{SPAN}-01.more", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"0-{TRACE}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_forms(value: str, sampled: bool | None) -> None:
    """Those of the W3C's own suite: versions, lengths, case, zeros."""
    parent = parse(value.encode())
    assert parent == (None if sampled is None else Parent(int(TRACE, 16), int(SPAN, 16), sampled))


@given(TRACE_IDS, st.floats(0, 1))
def test_the_ratio_decides_as_everywhere(trace_id: int, ratio: float) -> None:
    """The same traces are sampled as by OpenTelemetry's own sampler, so services of one ratio agree."""
    theirs = TraceIdRatioBased(ratio).should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
    assert is_sampled(trace_id, ratio) is theirs


@given(TRACE_IDS)
def test_all_or_none(trace_id: int) -> None:
    """1 samples every trace, 0 none."""
    assert is_sampled(trace_id, 1.0)
    assert not is_sampled(trace_id, 0.0)
