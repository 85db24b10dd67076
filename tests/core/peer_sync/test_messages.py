"""Bytes that anybody may have written."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import VERSION, BadMessage, head, pack_keys, unpack_keys
from router.core.types.placements import EndReason, Outcome
from router.core.types.requests import ConversationRef
from tests.core.peer_sync.several import Several
from tests.support.examples import examples

HEAD = head("a", 1)
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
    for message in (noise, bytes([VERSION]) + noise, HEAD + noise):
        with suppress(BadMessage):
            routers["b"].hear(message, 1.0)
    assert routers.place("b", prompt_tokens=1_000, now_s=2.0)


@settings(max_examples=examples(200), deadline=None)
@given(body=VALUES)
def test_any_shape_is_a_bad_message_or_taken(body: object) -> None:
    """Well-formed msgpack of the wrong shape, or with figures that cannot be, never raises anything else."""
    routers = Several("b", "c")
    with suppress(BadMessage):
        routers["b"].hear(HEAD + msgspec.msgpack.encode(body), 1.0)
    assert routers.place("b", prompt_tokens=1_000, now_s=2.0)


@settings(max_examples=examples(300), deadline=None)
@given(place=st.integers(0), byte=st.integers(0, 255), more=st.data())
def test_a_damaged_message_does_no_damage(place: int, byte: int, more: st.DataObject) -> None:
    """One byte of a good message is another: it is bad, or says something else, and placing goes on."""
    good = bytearray(_MESSAGE)
    good[place % len(good)] = byte
    routers = Several("b", "c")
    with suppress(BadMessage):
        routers["b"].hear(bytes(good), more.draw(st.floats(1.0, 100.0)))
    assert routers.place("b", prompt_tokens=1_000, now_s=200.0)
    routers["b"].tick(1_000.0)
    for id_ in routers.ids:
        assert routers.member("b", id_).others.open == 0


_MESSAGE = _message()


def test_what_is_to_be_said_is_announced_once_before_each_message() -> None:
    """Whoever carries messages need not ask meanwhile: the first change after a message is announced, and a router that
    is new is one."""
    routers = Several("a", "b")
    routers.say("a", 0.5)
    first, second = (routers.place("a", prompt_tokens=1_000, now_s=now_s) for now_s in (1.0, 1.01))
    assert routers.changed["a"] == 1
    routers.say("a", 1.1)
    assert routers.changed["a"] == 1
    routers.router("a").first_token(first, 1.2)
    routers.router("a").first_token(second, 1.2)
    assert routers.changed["a"] == 2
    routers.say("a", 1.3)
    routers["a"].hear(routers.say("b", 1.4), 1.4)
    assert routers.changed["a"] == 3


def test_the_next_arc_of_a_circle_is_announced() -> None:
    """What has not changed comes in arcs, one with each message: whoever carries messages asks for the next one."""
    routers = Several("a", replicas=5, limits=SharingLimits(rows_max=2))
    for id_ in routers.ids:
        routers.place("a", prompt_tokens=100, now_s=1.0, only=id_)
    now_s, announced = 1.0, []
    for _ in range(12):
        now_s += 0.05 if routers.changed["a"] else 0.25
        routers.changed["a"] = 0
        announced.append(routers["a"].say(now_s) is not None and routers.changed["a"] > 0)
    assert announced[-6:].count(True) == 4


def test_a_name_has_a_length() -> None:
    """A name that no message could carry is refused at the start."""
    for name in ("", "x" * 256):
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            head(name, 1)


def test_keys_travel_as_they_are() -> None:
    """What is packed comes out again, and half a key is none."""
    keys = [0, 1, (1 << 64) - 1]
    assert unpack_keys(pack_keys(keys)) == keys
    with pytest.raises(BadMessage):
        unpack_keys(pack_keys(keys)[:-1])
