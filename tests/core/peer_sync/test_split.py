"""Routers that tell each other of requests in two legs."""

from __future__ import annotations

import pytest

from router.core.peer_sync.sync import PeerSyncCore
from router.core.types.placements import EndReason
from tests.core.placement.paired import PairedFleet


@pytest.mark.parametrize("seen", [True, False])
def test_both_legs_are_told(seen: bool) -> None:
    """What another router prefills at one replica waits there, its decode leg is open at the other one and has no
    prefill to wait for there, both are believed to hold the prompt, and nothing is left when it has ended. Of prefills
    others hear when they are over only where that was `seen`, and of none at the decode leg's replica."""
    fleets = PairedFleet(), PairedFleet()
    ours, theirs = (PeerSyncCore(fleet.router, name) for fleet, name in zip(fleets, ("ours", "theirs"), strict=True))
    fleet, other = fleets
    streams = fleet.streams("d", "e")

    def tell() -> None:
        for _ in range(3):
            fleet.now_s += 1.0
            other.now_s = fleet.now_s
            if (message := ours.say(fleet.now_s)) is not None:
                theirs.hear("ours", message, 0.0, fleet.now_s)

    tell()
    lease, leg = fleet.split()
    tell()
    members = other.router.fleet.members
    first, second = members[leg.replica], members[lease.replica]
    assert (first.others.open, first.others.waiting) == (1, 1)
    assert first.others.waiting_ms == int(leg.uncached_ms)
    assert (second.others.open, second.others.waiting, second.others.waiting_ms) == (5, 1, 0)
    assert other.depth(leg.replica) == other.depth(lease.replica) == len(lease.prompt.keys)
    computed = first.others.computed_tokens, second.others.computed_tokens
    if seen:
        fleet.prefilled(lease)
    fleet.router.first_token(lease, fleet.now_s)
    tell()
    assert second.others.computed_tokens == computed[1]
    assert first.others.computed_tokens - computed[0] == (lease.prompt_tokens if seen else 0)
    assert (first.others.waiting, second.others.waiting, second.others.decoding) == (0, 0, 5)
    fleet.finish(lease)
    for each in streams:
        fleet.finish(each, EndReason.OK)
    tell()
    for member in members.values():
        assert (member.others.open, member.others.waiting_ms, member.others.context_tokens) == (0, 0, 0)
    assert other.depth(leg.replica) == other.depth(lease.replica) == len(lease.prompt.keys)
    assert other.idle()


@pytest.mark.parametrize("alone", [True, False])
def test_what_became_of_a_prefill_is_told(alone: bool) -> None:
    """An answer that does not stream decodes when its prefill is over; a prompt that nobody prefilled waits where it
    decodes: others hear of either with the next message."""
    fleets = PairedFleet(), PairedFleet()
    ours, theirs = (PeerSyncCore(fleet.router, name) for fleet, name in zip(fleets, ("ours", "theirs"), strict=True))
    fleet, other = fleets
    fleet.streams("d", "e")
    lease, leg = fleet.split(stream=False)
    for step in range(6):
        fleet.now_s += 0.1
        if step == 3:
            leg.alone = alone
            fleet.prefilled(lease, ending=EndReason.REFUSED_BY_ENGINE if alone else EndReason.OK)
        if (message := ours.say(fleet.now_s)) is not None:
            theirs.hear("ours", message, 0.0, fleet.now_s)
    told, truth = (each.router.fleet.members[lease.replica] for each in (other, fleet))
    assert (told.others.decoding, told.others.waiting) == (truth.work.decoding, truth.queue.count_waiting())
    assert bool(told.others.waiting_ms) is alone
