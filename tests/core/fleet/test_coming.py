"""Decode legs whose blocks are on their way: engines count them as waiting, and they are nobody else's."""

from __future__ import annotations

import pytest

from router.core.admission.concurrency_windows import ConcurrencyLimiter, NoLimits
from router.core.fleet.engine_counters import FOREIGN_PROBES
from router.core.fleet.lease import Lease
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason
from router.core.types.replicas import Load
from tests.core.placement.paired import PairedFleet

PREFILLERS = {f"p{n}": Role.PREFILL for n in range(6)}


def coming(count: int, handshake: KvConnector = KvConnector.MOONCAKE) -> tuple[PairedFleet, list[Lease]]:
    """A decode replica with so many legs that have no first token yet, behind streams that go on there."""
    fleet = PairedFleet({**PREFILLERS, "d": Role.DECODE}, pair=False)
    fleet.pair(handshake)
    fleet.streams("d")
    probed(fleet, 0)  # the streams that waited until now are forgotten
    return fleet, [fleet.split(seed)[0] for seed in range(count)]


def probed(fleet: PairedFleet, waiting: int) -> float:
    """Requests of others that wait at the decode replica, after probes that count so many as waiting."""
    member = fleet.router.fleet.members["d"]
    for _ in range(FOREIGN_PROBES):
        load = Load(kv_tokens_max=2_000_000, block_tokens=16, waiting=waiting)
        fleet.router.observations.observe_load("d", load, fleet.now_s)
    return member.counters.untracked_waiting


def test_legs_whose_blocks_are_coming_are_not_foreign() -> None:
    """As many as there are legs without a first token are ours; more are somebody else's, and so are all once the
    legs have ended."""
    fleet, leases = coming(3)
    assert probed(fleet, 3) == 0.0
    assert probed(fleet, 5) == pytest.approx(2.0)
    for lease in leases:
        fleet.finish(lease, EndReason.CLIENT_LEFT)
    probed(fleet, 0)
    assert probed(fleet, 3) == pytest.approx(3.0)


def test_a_leg_that_came_between_two_probes_is_ours() -> None:
    """The engine counted it before its first token, and the probe is heard of afterwards."""
    fleet, leases = coming(2)
    for lease in leases:
        fleet.prefilled(lease)
        fleet.router.first_token(lease, fleet.now_s)
    assert probed(fleet, 2) == pytest.approx(2.0 * (FOREIGN_PROBES - 1) / FOREIGN_PROBES)


def test_answers_that_decode_unseen_hide_nobody() -> None:
    """What does not stream decodes from the end of its prefill: whoever waits then is somebody else."""
    fleet, _ = coming(0)
    for lease in [fleet.split(seed, stream=False)[0] for seed in range(3)]:
        fleet.prefilled(lease)
    probed(fleet, 0)
    assert probed(fleet, 3) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("handshake", "prefilled", "binds"),
    [(KvConnector.MOONCAKE, False, False), (KvConnector.NIXL, False, True), (KvConnector.NIXL, True, False)],
)
def test_a_window_is_not_bound_by_blocks_on_their_way(handshake: KvConnector, prefilled: bool, binds: bool) -> None:
    """Legs that wait for their blocks do not show that the engine is full. With NIXL the engine has not been asked for
    them while they are prefilled: whoever waits there then waits for a place."""
    fleet, leases = coming(5, handshake)
    admission = ConcurrencyLimiter(fleet.router, NoLimits(in_flight_max=64, engine_waiting_max=2), stale_s=10.0)
    for lease in leases if prefilled else ():
        fleet.prefilled(lease)
    probed(fleet, 5)
    admission.tick(fleet.now_s)
    assert (admission.window("d") < 64) is binds
