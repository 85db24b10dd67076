"""Which replicas each of several routers takes first, and how soon others hear of a placement."""

from __future__ import annotations

from collections.abc import Collection

from router.core.types.replicas import Replica
from tests.core.peer_sync.several import TOKENS_A_BLOCK, Several


def owned(routers: Several, names: str) -> list[Collection[str]]:
    """What each of these routers takes first."""
    return [routers.router(name).own for name in names]


def test_routers_divide_the_replicas() -> None:
    """Each takes others first, and together they take all; who falls silent leaves its part to the rest, and who is
    alone has none."""
    routers = Several("a", "b", "c", replicas=8)
    assert not any(owned(routers, "abc"))
    for now_s in (1.0, 1.25):
        routers.tell_all(now_s)
        for name in "abc":
            routers[name].tick(now_s)
    of_each = owned(routers, "abc")
    assert sorted(map(len, of_each)) == [2, 3, 3]
    assert sorted(id_ for own in of_each for id_ in own) == sorted(routers.ids)
    late_s = 3.0
    for name in "ab":
        message = routers.say(name, late_s)
        for other in "ab":
            if other != name:
                routers.hear(name, other, message, late_s)
            routers[other].forget("c", late_s)
            routers[other].tick(late_s)
    assert sorted(id_ for own in owned(routers, "ab") for id_ in own) == sorted(routers.ids)
    routers["a"].on_disconnected(late_s)
    assert not routers.router("a").own


def test_replicas_that_come_are_divided_too() -> None:
    """A replica that joins is some router's own, once all know of it."""
    routers = Several("a", "b", replicas=3)
    routers.tell_all(1.0)
    ids = [*routers.ids, "http://r3"]
    for name in "ab":
        routers[name].tick(1.0)
        routers.router(name).replace(Replica(id_) for id_ in ids)
        routers[name].tick(1.25)
    assert sorted(id_ for own in owned(routers, "ab") for id_ in own) == ids


def test_a_placement_for_each_32_replicas_is_worth_a_message() -> None:
    """However short its prefill is: in a small fleet every one, in one of 64 every second."""
    for replicas, most in ((3, 0), (64, 1)):
        routers = Several("a", "b", replicas=replicas)
        routers.say("a", 0.9)
        for n in range(most + 1):
            assert not routers.urgent["a"], n
            routers.place("a", prompt_tokens=2 * TOKENS_A_BLOCK, now_s=1.0 + n / 1e3)
        assert routers.urgent["a"] == 1
