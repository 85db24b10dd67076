"""What somebody may say who writes to the store that routers share: it takes no router's time, memory or places."""

from __future__ import annotations

import pytest

from router.core.fleet.engine_counters import UNCOUNTED_MAX
from router.core.fleet.lease import Lease
from router.core.peer_sync.cache_epochs import number_of
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import (
    NEWS_MAX,
    BadMessage,
    ReplicaLoadRow,
    SharedEnd,
    SharedMessage,
    SharedPlacement,
    encode_message,
    pack_keys,
    row_bytes,
)
from router.core.types.peer_load import PeerLoad
from router.core.types.replicas import Load
from tests.core.admission.fleet import Fleet
from tests.core.peer_sync.several import Several, keys

pytestmark = pytest.mark.promise("No request waits for the shared store or fails with it.", "store")

LIMITS = SharingLimits()
MOST = LIMITS.heard_factor * LIMITS.keys_max


def message(routers: Several, **news: object) -> bytes:
    """A message of a router `x`, with a row of each replica."""
    rows = [row_bytes(ReplicaLoadRow(number_of(id_), 0, 0, False, PeerLoad(open=1))) for id_ in routers.ids]
    body = SharedMessage(rows)
    for name, value in news.items():
        setattr(body, name, value)
    return encode_message(body)


def placements(routers: Several, count: int, blocks: int, first: int = 1) -> list[SharedPlacement]:
    """Prompts that share nothing, of so many blocks each, and of one token that is theirs: so open ones are counted."""
    number = number_of(routers.ids[0])
    return [SharedPlacement(first + n, number, 1, 100, pack_keys(keys(first + n, blocks))) for n in range(count)]


def test_a_message_that_takes_long_to_hear_is_heard_in_part() -> None:
    """As much of it is taken as routers of ours say at once, some times over; the next message is heard as ever. One of
    very many prompts is not read."""
    routers = Several("b", "c")
    with pytest.raises(BadMessage):
        routers.hear("x", "b", message(routers, placements=placements(routers, NEWS_MAX + 1, 1)), 1.0)
    routers.hear("x", "b", message(routers, placements=placements(routers, NEWS_MAX, 100)), 1.0)
    live = routers.member("b", routers.ids[0]).work.kv
    assert 0 < live.own_tokens <= MOST // (100 + LIMITS.placement_keys) + 1
    assert routers["b"].long == 1
    before = live.own_tokens
    routers.hear("x", "b", message(routers, placements=placements(routers, 1, 10, first=9_000)), 1.1)
    assert live.own_tokens == before + 1
    assert routers["b"].long == 1


def test_ends_without_number_are_heard_in_part() -> None:
    """Likewise: what they teach of answers is bounded for each message."""
    routers = Several("b", "c")
    ends = [SharedEnd(n, number_of(routers.ids[0]), True, n + 1, 10, 10, 1) for n in range(NEWS_MAX)]
    routers.hear("x", "b", message(routers, ends=ends), 1.0)
    assert len(routers.router("b").answers) <= MOST // LIMITS.end_keys
    assert routers["b"].long == 1


def test_one_prompt_may_be_long() -> None:
    """The first prompt of a message is taken whatever its length, as routers of ours say them."""
    routers = Several("b", "c")
    routers.hear("x", "b", message(routers, placements=placements(routers, 1, MOST * 2)), 1.0)
    assert routers.member("b", routers.ids[0]).work.kv.own_tokens == 1
    assert not routers["b"].long


@pytest.mark.parametrize("claimed", [1 << 53, 5_000])
def test_claims_that_an_engine_does_not_bear_out_take_no_places(claimed: int) -> None:
    """Another router says that it has very much open: where the engine counts its requests, no more than those count,
    and some that it may not have seen yet."""
    fleet = Fleet(in_flight_max=1_024)
    member = fleet.world.router.fleet.members["a"]
    member.apply_peer_load("x", PeerLoad(open=claimed), 0.0, 0.0)
    fleet.world.router.observations.observe_load("a", Load(running=10, waiting=0))
    fleet.admission.tick()
    assert member.open_leases == 10 + UNCOUNTED_MAX
    answers = [fleet.ask() for _ in range(100)]
    assert all(isinstance(each[0], Lease) for each in answers)


def test_where_an_engine_does_not_tell_there_is_room_for_one() -> None:
    """Its requests are not counted, and others say that it is full: each router has one there nevertheless."""
    fleet = Fleet("ab", in_flight_max=8)
    for id_ in "ab":
        fleet.world.router.fleet.members[id_].apply_peer_load("x", PeerLoad(open=1 << 53), 0.0, 0.0)
    fleet.admission.tick()
    answers = [fleet.ask() for _ in range(3)]
    assert [len(each) for each in answers] == [1, 1, 0]
    assert {each[0].replica for each in answers[:2]} == {"a", "b"}


def test_what_others_really_have_open_fills_an_engine() -> None:
    """Where the engine counts as much as they say, its places are taken."""
    fleet = Fleet(in_flight_max=8)
    member = fleet.world.router.fleet.members["a"]
    member.apply_peer_load("x", PeerLoad(open=8), 0.0, 0.0)
    fleet.world.router.observations.observe_load("a", Load(running=8, waiting=0))
    fleet.admission.tick()
    assert fleet.ask() == []
