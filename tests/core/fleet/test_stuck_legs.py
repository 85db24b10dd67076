"""Which of two replicas is blamed for a request in two legs of which nothing comes."""

from __future__ import annotations

import pytest

from router.core.fleet import stall_detector
from router.core.fleet.breaker import Cause
from router.core.types.disagg_types import KvConnector
from router.core.types.placements import EndReason
from tests.core.placement.paired import PairedFleet


def silent(handshake: KvConnector, *hung: str) -> tuple[PairedFleet, dict[str, Cause]]:
    """A fleet of which all show life but the `hung` ones, two minutes after four requests went in two legs beside
    streams; and whose breakers are open, with the cause."""
    fleet = PairedFleet(pair=False)
    fleet.pair(handshake)
    fleet.streams("d", "e")
    fleet.router.fleet.members["d"].speeds.prefill.observations = 100
    for seed in range(4):
        fleet.split(seed)
    for _ in range(120):
        fleet.now_s += 1.0
        for name in set("pqde") - set(hung):
            fleet.router.observations.alive(name, fleet.now_s)
            fleet.router.fleet.members[name].evidence.on_time_s = fleet.now_s
        for _ in fleet.router.scan_for_stalls(fleet.now_s):
            pass
    members = fleet.router.fleet.members
    return fleet, {name: members[name].breaker.cause for name in "pqde" if members[name].breaker.backoff_s}


@pytest.mark.parametrize("handshake", [KvConnector.MOONCAKE, KvConnector.SGLANG])
def test_hung_decoders_are_not_their_prefill_replicas_fault(handshake: KvConnector) -> None:
    """Their prefill legs wait for them, and so do those of clients that leave: the prefill replicas stay in. SGLang's
    end when the blocks were taken, and show whose fault it is."""
    fleet, blamed = silent(handshake, "p", "q", "d", "e")
    assert not blamed.keys() & {"p", "q"}
    assert bool(blamed) is (handshake is KvConnector.SGLANG)
    for id_, prefill in list(fleet.router.disaggregator.pairs.open.items()):
        lease = next(m.leases[id_] for m in fleet.router.fleet.members.values() if id_ in m.leases)
        fleet.finish(lease, EndReason.CLIENT_LEFT)
        assert fleet.router.fleet.members[prefill.replica].evidence.late_disconnects == 0
    assert not fleet.router.disaggregator.pairs.decoders


@pytest.mark.parametrize("handshake", list(KvConnector))
def test_a_hung_prefill_replica_is_found(handshake: KvConnector) -> None:
    """Its legs are late where the replicas that are to decode show life."""
    _, blamed = silent(handshake, "p", "q")
    assert blamed == {"p": Cause.STUCK, "q": Cause.STUCK}


def test_a_prefill_leg_of_its_own_is_late_whatever_becomes_of_the_decoder() -> None:
    """With NIXL the prefill leg waits for nobody."""
    assert set(silent(KvConnector.NIXL, "p", "q", "d", "e")[1]) == {"p", "q"}


def test_blocks_on_their_way_make_no_prompt_behind_them_less_late() -> None:
    """A prompt that a replica computes itself is late as soon whether blocks for an older request come or not."""
    late_s = []
    for with_leg in (False, True):
        fleet = PairedFleet()
        fleet.streams("d", "e")
        if with_leg:
            fleet.split()[0].effective_start_s = fleet.now_s + 60.0
        members = fleet.router.fleet.members
        replica = members["e" if any(lease.effective_start_s for lease in members["e"].leases.values()) else "d"]
        replica.speeds.prefill.observations = 100
        lease = fleet.place(7, 1_000, may_split=False, only=replica.id)
        since_s = fleet.now_s
        while not stall_detector.is_late(replica, lease, fleet.now_s, 3.0):
            fleet.now_s += 0.5
        late_s.append(fleet.now_s - since_s)
    assert late_s[0] == late_s[1]


@pytest.mark.parametrize("streams", [True, False])
def test_a_decoder_of_sglangs_that_hangs_is_found(streams: bool) -> None:
    """Whether answers were under way there or not: its prefill replicas work for others, and wait for it alone."""
    fleet = PairedFleet(pair=False)
    fleet.pair(KvConnector.SGLANG)
    if streams:
        fleet.streams("d", "e")
    members = fleet.router.fleet.members
    members["d"].speeds.prefill.observations = 100
    hung = fleet.split(0)[0].replica
    for _ in range(120):
        fleet.now_s += 1.0
        for name in set("pqde") - {hung}:
            fleet.router.observations.alive(name, fleet.now_s)
            members[name].evidence.on_time_s = fleet.now_s
        for _ in fleet.router.scan_for_stalls(fleet.now_s):
            pass
    assert {name for name in "pqde" if members[name].breaker.backoff_s} == {hung}
