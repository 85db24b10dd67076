"""Messages between routers: what one packs the other reads, and whatever else comes is a BadFrame."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.peering.dead_replicas import EVIDENCE_S, DeadReplicaConsensus
from router.peering.frames import (
    FRAME_BYTES_MAX,
    HEAD_BYTES,
    REPLICAS_MAX,
    BadFrame,
    PeerFrame,
    StateMark,
    TenantUsage,
    frame_of,
    head_of,
    pack_frame,
)
from router.peering.peers import numbers_of

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=20)
frames = st.builds(
    PeerFrame,
    name=st.text("abc-:.0123", min_size=1, max_size=20),
    leaving=st.booleans(),
    spent=st.lists(
        st.builds(TenantUsage, words, numbers, numbers, st.none() | numbers, st.none() | numbers),
        max_size=3,
        unique_by=lambda each: each.tenant,
    ),
    dead=st.lists(words, max_size=3),
    asks=words,
    state=st.none() | st.builds(StateMark, st.integers(0, 1 << 60), st.integers(0, 9), numbers),
    core=st.binary(max_size=50),
    replicas=st.sets(st.integers(0, (1 << 64) - 1), max_size=3).map(lambda each: numbers_of(frozenset(each))),
)


@given(frames, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.floats(0, 1e9))
def test_what_is_packed_is_read(frame: PeerFrame, origin: int, seq: int, at_s: float) -> None:
    """Every message comes out as it went in."""
    message = pack_frame(frame, origin, seq, at_s)
    head = head_of(message)
    assert head is not None
    assert (head.origin, head.seq, head.at_s) == (origin, seq, at_s)
    assert frame_of(message) == frame


@given(frames, st.data())
@settings(max_examples=300)
def test_what_is_damaged_is_a_bad_frame_or_another_one(frame: PeerFrame, data: st.DataObject) -> None:
    """A message with other bytes, cut or grown: read, of another release, or a BadFrame; never another error."""
    message = bytearray(pack_frame(frame, 1, 1, 0.0))
    for _ in range(data.draw(st.integers(0, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(message[: data.draw(st.integers(0, len(message)))]) + data.draw(st.binary(max_size=3))
    try:
        if head_of(cut) is not None:
            frame_of(cut)
    except BadFrame:
        pass


@pytest.mark.parametrize(
    "frame",
    [
        PeerFrame(name=""),
        PeerFrame(name="a\nb"),
        PeerFrame(name="a" * 300),
        PeerFrame(name="a", dead=["x"] * 300),
        PeerFrame(name="a", dead=["x" * 2_000]),
        PeerFrame(name="a", spent=[TenantUsage("t", float("nan"), 0.0)]),
        PeerFrame(name="a", spent=[TenantUsage("t", 0.0, 0.0, float("inf"))]),
        PeerFrame(name="a", spent=[TenantUsage("t", 0.0, 0.0), TenantUsage("t", 1e9, 0.0)]),
        PeerFrame(name="a", replicas=b"x" * 9),
        PeerFrame(name="a", replicas=b"x" * 8 * (REPLICAS_MAX + 1)),
        PeerFrame(name="a", asks="x" * 2_000),
        PeerFrame(name="a", state=StateMark(0, 0, float("nan"))),
        PeerFrame(name="a", core=b"x" * FRAME_BYTES_MAX),
    ],
)
def test_no_message_is_beyond_limits(frame: PeerFrame) -> None:
    """Names that are none, lists and words that are too long, and numbers that are none are refused."""
    message = pack_frame(frame, 1, 1, 0.0)
    with pytest.raises(BadFrame):
        frame_of(message) if len(message) <= FRAME_BYTES_MAX else head_of(message)


def test_another_release_is_no_error() -> None:
    """A message of another version is not for us."""
    assert head_of(b"\x02") is None
    with pytest.raises(BadFrame):
        head_of(b"\x03" * HEAD_BYTES)


def test_three_routers_find_a_replica_dead_and_say_so_once() -> None:
    """Two are not enough, this router may be the third; the same evidence counts once, and again when it has been
    taken back; what is old, or of a router that is gone, does not count."""
    notices = DeadReplicaConsensus()
    own: frozenset[str] = frozenset()
    notices.hear(1, ["x", "y"], 0.0)
    notices.hear(2, ["x"], 0.0)
    assert notices.confirmed(own, 0.0) == []
    assert notices.confirmed(frozenset("x"), 0.0) == [("x", 2)]
    notices.hear(3, ["x"], 0.1)
    assert notices.confirmed(own, 0.1) == []
    notices.hear(3, [], 0.2)
    assert notices.confirmed(own, 0.2) == []
    notices.hear(3, ["x"], 0.3)
    assert notices.confirmed(own, 0.3) == [("x", 3)]
    notices.forget(1)
    assert notices.confirmed(own, 0.4) == []
    notices.hear(1, ["x"], EVIDENCE_S + 0.35)
    assert notices.confirmed(own, EVIDENCE_S + 0.35) == []
