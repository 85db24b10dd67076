"""Bytes that anybody may have written."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.peer_sync.messages import BadMessage, pack_keys, unpack_keys
from router.core.types.placements import EndReason, Outcome
from router.core.types.requests import ConversationRef
from tests.core.peer_sync.several import Several
from tests.support.examples import examples

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-2, 300)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=14),
    max_leaves=40,
)


def _message() -> bytes:
    routers = Several("a", "b")
    for group in range(3):
        lease = routers.place(
            "a", prompt_tokens=4_000, now_s=1.0, group=group, kin=ConversationRef(group + 1, 0, group == 1)
        )
    routers.router("a").finish(lease, Outcome(EndReason.FAILED), 1.1)
    return routers.say("a", 1.2)


@settings(max_examples=examples(200), deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise_is_a_bad_message_or_none_of_ours(noise: bytes) -> None:
    """Whatever comes raises BadMessage or is ignored, and whoever heard it works as before."""
    routers = Several("b", "c")
    with suppress(BadMessage):
        routers.hear("c", "b", noise, 1.0)
    assert routers.place("b", prompt_tokens=1_000, now_s=2.0)


@settings(max_examples=examples(200), deadline=None)
@given(body=VALUES)
def test_any_shape_is_a_bad_message_or_taken(body: object) -> None:
    """Well-formed msgpack of the wrong shape, or with figures that cannot be, never raises anything else."""
    routers = Several("b", "c")
    with suppress(BadMessage):
        routers.hear("c", "b", msgspec.msgpack.encode(body), 1.0)
    assert routers.place("b", prompt_tokens=1_000, now_s=2.0)


@settings(max_examples=examples(300), deadline=None)
@given(place=st.integers(0), byte=st.integers(0, 255), more=st.data())
def test_a_damaged_message_does_no_damage(place: int, byte: int, more: st.DataObject) -> None:
    """One byte of a good message is another: it is bad, or says something else, and placing goes on."""
    good = bytearray(_MESSAGE)
    good[place % len(good)] = byte
    routers = Several("b", "c")
    with suppress(BadMessage):
        routers.hear("c", "b", bytes(good), more.draw(st.floats(1.0, 100.0)))
    assert routers.place("b", prompt_tokens=1_000, now_s=200.0)
    routers["b"].forget("c", 1_000.0)
    for id_ in routers.ids:
        assert routers.member("b", id_).others.open == 0


_MESSAGE = _message()


def test_what_is_to_be_said_is_announced_once_before_each_message() -> None:
    """Whoever carries messages need not ask meanwhile: the first change after a message is announced."""
    routers = Several("a", "b")
    routers.say("a", 0.5)
    first, second = (routers.place("a", prompt_tokens=1_000, now_s=now_s) for now_s in (1.0, 1.01))
    assert routers.changed["a"] == 1
    routers.say("a", 1.1)
    assert routers.changed["a"] == 1
    routers.router("a").first_token(first, 1.2)
    routers.router("a").first_token(second, 1.2)
    assert routers.changed["a"] == 2


def test_keys_travel_as_they_are() -> None:
    """What is packed comes out again, and half a key is none."""
    keys = [0, 1, (1 << 64) - 1]
    assert unpack_keys(pack_keys(keys)) == keys
    with pytest.raises(BadMessage):
        unpack_keys(pack_keys(keys)[:-1])
