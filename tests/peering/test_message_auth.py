"""Marks of messages: by whom they hold, and for how long."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.peering.frames import PeerFrame, pack_frame
from router.peering.message_auth import (
    FRESH_S,
    GRACE_S,
    MARK_BYTES,
    MESSAGE,
    OWNER,
    PARCEL,
    SECRETS_MAX,
    STATE,
    NotSealed,
    Seals,
    owner_bytes,
    secret_of_keys,
)
from router.peering.peers import PAST_MAX, SILENT_S, Arrival, PeerRegistry

ONE, TWO = b"1" * 32, b"2" * 32
MESSAGE_BYTES = pack_frame(PeerFrame(name="a"), 1, 1, 0.0)


def seals(*secrets: bytes, fleet: str = "f") -> Seals:
    """Of a router with these secrets."""
    return Seals(fleet, secrets, time.monotonic)


def test_a_message_is_of_who_has_the_secret() -> None:
    """Of this fleet alone, and with the sender's clock; another secret, another fleet, none, or no mark is refused."""
    sealed = seals(ONE).seal(MESSAGE, MESSAGE_BYTES, 12.5)
    assert seals(ONE).unseal(MESSAGE, sealed) == (MESSAGE_BYTES, 12.5)
    for other in (seals(TWO), seals(ONE, fleet="g"), seals()):
        with pytest.raises(NotSealed):
            other.unseal(MESSAGE, sealed)
    with pytest.raises(NotSealed):
        seals(ONE).unseal(MESSAGE, MESSAGE_BYTES)
    assert seals().unseal(MESSAGE, seals().seal(MESSAGE, MESSAGE_BYTES, 1.0)) == (MESSAGE_BYTES, None)


def test_a_mark_counts_for_one_purpose() -> None:
    """A message is no state, no owner, and no parcel."""
    one = seals(ONE)
    for purpose in (MESSAGE, STATE, OWNER, PARCEL):
        mark = one.mark(purpose, b"x")
        assert [one.holds(each, b"x", mark) for each in (MESSAGE, STATE, OWNER, PARCEL)].count(True) == 1
        assert not one.holds(purpose, b"y", mark)
    assert (
        len({owner_bytes(*each) for each in [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "ab", "c")]}) == 4
    )


@given(st.data())
def test_whatever_is_damaged_is_refused(data: st.DataObject) -> None:
    """Any other byte, a cut, more bytes: NotSealed, and nothing else."""
    sealed = bytearray(seals(ONE).seal(MESSAGE, MESSAGE_BYTES, 12.5))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    cut = bytes(sealed[: data.draw(st.integers(0, len(sealed)))]) + data.draw(st.binary(max_size=3))
    with pytest.raises(NotSealed):
        seals(ONE).unseal(MESSAGE, cut)


def test_two_secrets_while_one_is_exchanged() -> None:
    """A router with the new and the old one is heard by those with either, and hears both."""
    old, both, new = seals(ONE), seals(TWO, ONE), seals(TWO)
    for one, other in ((old, both), (both, new)):
        assert one.unseal(MESSAGE, other.seal(MESSAGE, MESSAGE_BYTES, 1.0))[0] == MESSAGE_BYTES
        assert other.unseal(MESSAGE, one.seal(MESSAGE, MESSAGE_BYTES, 1.0))[0] == MESSAGE_BYTES
    with pytest.raises(NotSealed):
        old.unseal(MESSAGE, new.seal(MESSAGE, MESSAGE_BYTES, 1.0))


def test_the_keys_of_before_count_for_a_while() -> None:
    """Keys files are reloaded router by router: one that has the new file says everything by both, and after GRACE_S by
    the new one only."""
    now_s = 0.0
    one, other = (Seals("f", [ONE], lambda: now_s) for _ in range(2))
    assert not one.renew([ONE])
    assert one.renew([TWO])
    assert other.unseal(MESSAGE, one.seal(MESSAGE, MESSAGE_BYTES, 1.0))
    assert one.unseal(MESSAGE, other.seal(MESSAGE, MESSAGE_BYTES, 1.0))
    now_s = GRACE_S
    late = one.seal(MESSAGE, MESSAGE_BYTES, 1.0)
    with pytest.raises(NotSealed):
        other.unseal(MESSAGE, late)
    assert other.renew([TWO])
    assert other.unseal(MESSAGE, late)
    for n in range(10):
        one.renew([b"%d" % n])
    assert len(one.mark(OWNER, b"x")) == SECRETS_MAX * MARK_BYTES


def test_the_secret_of_keys_is_known_by_nobody_who_has_one_of_them() -> None:
    """It is the same in whatever order they are, and another one without one of them."""
    assert secret_of_keys(["a", "b"]) == secret_of_keys(["b", "a"])
    assert len({secret_of_keys(each) for each in (["a"], ["b"], ["a", "b"], ["ab"], ["a", "b", "c"])}) == 5


def test_what_was_recorded_does_not_count_again() -> None:
    """Of a process that is heard, was forgotten, or has left, no message counts that is not later; and of one that was
    never heard none that was said long ago by the wall clock."""
    peers = PeerRegistry("a", 1, 8)
    assert not peers.detect_replay(2, 10, 5.0)
    peers.note_message(2, "b", 10, 0.0)
    assert peers.detect_replay(2, 9, 0.0)
    assert peers.note_message(2, "b", 10, 0.1) is Arrival.IGNORED
    assert not peers.detect_replay(2, 11, FRESH_S + 1)  # its clock was set while it was heard
    assert peers.expire_silent(SILENT_S) == [2]
    assert peers.detect_replay(2, 9, 0.0)
    assert peers.detect_replay(2, 11, FRESH_S + 1)
    assert peers.note_message(2, "b", 10, 0.1) is Arrival.IGNORED
    peers.remove_peer(2)
    assert peers.detect_replay(2, 9, 0.0)
    assert peers.note_message(2, "b", 10, 0.1) is Arrival.IGNORED
    assert not peers.needs_state(2, 10)
    assert not peers.detect_replay(2, 11, 0.0)
    for apart_s in (FRESH_S + 1, float("nan"), float("inf")):
        assert peers.detect_replay(3, 1, apart_s)
    for origin in range(10, 10 + 2 * PAST_MAX):
        peers.note_message(origin, str(origin), 1, 0.0)
        peers.remove_peer(origin)
    assert len(peers._past) == PAST_MAX
