"""Replicas by their addresses, and placements that only some of them may take."""

from __future__ import annotations

import pytest

from loadtest.common.in_process_router import join, local_placer, warm_router
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import Confidence
from router.core.types.replicas import Load, address_of, matches_address
from router.core.types.requests import RequestSpec
from router.placement_api import LEFT


def wanted(**more: object) -> PlacementRequest:
    """A request for the model, without a prompt that is known."""
    request = PlacementRequest(RequestSpec("m", stream=True), "m", None, "key")
    for name, value in more.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("id_", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000#dp1", "10.0.0.1:8000"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8000/base", "[fd00::1]:8000"),
        ("http://vllm", "vllm:80"),
    ],
)
def test_addresses(id_: str, address: str) -> None:
    """A replica's address is its URL's host and port, the scheme's own where none is given; ranks share one."""
    assert address_of(id_) == address
    assert matches_address(id_, frozenset((address,)))
    assert matches_address(id_, frozenset((address.rpartition(":")[0],)))
    assert not matches_address(id_, frozenset(("10.0.0.1:1",)))


def test_only_those_named_are_placed_on() -> None:
    """Whoever is named by address may take a request, at first and as a retry; of nobody there is no placement."""
    router = warm_router()
    names = join(router, 4, "m", Load())
    some = frozenset((address_of(names[1]), address_of(names[2])))
    for _ in range(8):
        assert router.route(wanted(), 0.0, only=some).replica in names[1:3]
    assert router.route(wanted(), 0.0, only=some, exclude=frozenset((names[1],))).replica == names[2]
    for nobody in (frozenset[str](), frozenset(("10.9.9.9:1",))):
        with pytest.raises(NoReplicaReady):
            router.route(wanted(), 0.0, only=nobody)


async def test_a_subset_waits_for_its_own() -> None:
    """Admission counts places among the named replicas alone, and a stored response's owner must be one of them."""
    router = warm_router()
    names = join(router, 2, "m", Load())
    placer = local_placer(router, lambda: 0.0)
    first = frozenset((address_of(names[0]),))
    lease = await placer.place(wanted(allowed_addresses=first), frozenset())
    assert lease.replica == names[0]
    placer.finish(lease, LEFT, 0.0)
    placer.register_response_owner("resp_1", names[1], "")
    with pytest.raises(NoReplicaReady):
        await placer.place(wanted(allowed_addresses=first, response_id="resp_1"), frozenset())
    lease = await placer.place(
        wanted(allowed_addresses=frozenset((address_of(names[1]),)), response_id="resp_1"), frozenset()
    )
    assert lease.replica == names[1]


def test_an_answer_that_goes_past_is_graded_and_not_waited_for() -> None:
    """Its lease is not one whose first token would be seen, so that its replica is not stuck for want of one; its grade
    is `unseen`; and the member counts it."""
    router = warm_router()
    (name,) = join(router, 1, "m", Load())
    lease = router.route(wanted(response_bypasses_router=True), 0.0)
    assert not lease.streams
    assert lease.receipt.grade is Confidence.UNSEEN
    seen = router.route(wanted(), 0.0)
    assert seen.streams
    assert seen.receipt.grade is Confidence.ESTIMATED
    member = router.fleet.member(name)
    assert member is not None
    assert member.evidence.unobserved_responses == 1
