"""Sums that routers tell each other."""

from __future__ import annotations

import pytest

from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import BadMessage
from router.core.types.placements import EndReason, Outcome, Usage
from tests.core.peer_sync.several import Several


def test_others_see_what_one_router_has_open() -> None:
    """After one message the other router counts the leases, the waiting work and the contexts as its own."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=4_000, now_s=1.0)
    routers.tell_all(1.0)
    here, there = routers.member("a", lease.replica), routers.member("b", lease.replica)
    assert there.open_leases == 1
    assert there.others.context_tokens == here.work.context_tokens == lease.prompt_tokens
    assert there.wait_ms(1.0) == pytest.approx(here.queue.pending_ms(1.0), abs=1)


def test_the_work_of_others_fades_as_ours_does() -> None:
    """The prefill under way goes on without a message, and what waits behind it does not."""
    routers = Several("a", "b", replicas=1)
    for _ in range(2):
        lease = routers.place("a", prompt_tokens=8_000, now_s=1.0)
    routers.tell_all(1.0)
    for at_s in (1.1, 1.5, 2.0, 9.0):
        here, there = routers.member("a", lease.replica), routers.member("b", lease.replica)
        assert there.wait_ms(at_s) == pytest.approx(here.queue.pending_ms(at_s), abs=2)


def test_what_has_ended_is_gone_with_the_next_message() -> None:
    """An ended lease is no more, though nobody says so: its row is idle, or not there."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=4_000, now_s=1.0)
    routers.tell_all(1.0)
    routers.router("a").first_token(lease, 1.4)
    routers.router("a").finish(lease, Outcome(EndReason.OK, Usage(4_000, 10, 0)), 1.5)
    routers.tell_all(1.6)
    there = routers.member("b", lease.replica)
    assert (there.open_leases, there.others.context_tokens, there.wait_ms(1.6)) == (0, 0, 0)


def test_a_router_that_is_forgotten_leaves_nothing() -> None:
    """It is there no more, with all that it had open."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=4_000, now_s=1.0)
    routers.tell_all(1.0)
    assert routers.member("b", lease.replica).open_leases == 1
    routers["b"].forget("a", 2.1)
    assert routers.member("b", lease.replica).open_leases == 0
    assert routers["b"].peers() == []


def test_a_state_replaces_all_messages() -> None:
    """A router that missed messages reads the state in their place: nothing counts twice, and what has ended in the
    meantime is gone."""
    routers = Several("a", "b")
    leases = [routers.place("a", prompt_tokens=4_000, now_s=1.0, only=id_) for id_ in routers.ids]
    routers.tell("a", "b", 1.0, 1.0)
    routers.router("a").finish(leases[0], Outcome(EndReason.FAILED), 1.1)
    routers.place("a", prompt_tokens=4_000, now_s=1.2, only=routers.ids[1])
    routers.say("a", 1.3)  # nobody receives it
    routers.restore("a", "b", 1.4)
    assert [routers.member("b", id_).open_leases for id_ in routers.ids] == [0, 2, 1]
    assert [(peer.known, peer.open) for peer in routers["b"].peers()] == [(True, 3)]


def test_a_router_that_is_forgotten_while_its_state_is_read_stays_forgotten() -> None:
    """The state is read in steps, and the router falls silent between two of them."""
    routers = Several("a", "b", limits=SharingLimits(rows_max=1))
    for id_ in routers.ids:
        routers.place("a", prompt_tokens=4_000, now_s=1.0, only=id_)
    steps = routers["b"].restore("a", routers["a"].state(1.1), 0.0, 1.1)
    next(steps)
    routers["b"].forget("a", 1.2)
    assert not list(steps)
    assert sum(routers.member("b", id_).open_leases for id_ in routers.ids) == 0
    assert not routers["b"].peers()


def test_what_cannot_be_read_is_a_bad_message() -> None:
    """Broken bytes raise BadMessage, and nothing of them is applied."""
    routers = Several("a", "b")
    routers.place("a", prompt_tokens=4_000, now_s=1.0)
    good = routers.say("a", 1.0)
    for bad in (b"", good[:1], good[:3], good[:-1], b"\xc1" + good, good[:3] + b"\xc1" + good[4:]):
        with pytest.raises(BadMessage):
            routers.hear("a", "b", bad, 1.0)
    assert [peer.open for peer in routers["b"].peers()] == [0]


def test_a_prompt_that_came_to_two_routers_at_once_is_one_prefill() -> None:
    """Both sent it to the same replica before they heard of each other, and the engine computes it once: so do they,
    and what they say waits there is that, and little more."""
    routers = Several("a", "b", "c", replicas=1)
    routers.tell_all(0.5)
    leases = {name: routers.place(name, prompt_tokens=32_768, now_s=1.0, group=1) for name in ("a", "b")}
    once_ms = leases["a"].prefill_ms
    routers.tell_all(1.01)
    routers.tell_all(1.1)
    (id_,) = routers.ids
    for name in ("a", "b", "c"):
        assert routers.member(name, id_).wait_ms(1.1) == pytest.approx(once_ms - 100, abs=100)
    assert sorted(lease.uncached_tokens > 1_000 for lease in leases.values()) == [False, True]
    for name, lease in leases.items():
        routers.router(name).first_token(lease, 1.0 + once_ms / 1e3)
    routers.tell_all(5.0)
    assert [routers.member(name, id_).wait_ms(5.0) for name in ("a", "b", "c")] == [0, 0, 0]


def test_a_prompt_that_was_sent_behind_another_one_changes_nothing_of_that() -> None:
    """Whoever knew that the beginning is under way counted the rest alone: the first one is computed for it too."""
    routers = Several("a", "b", replicas=1)
    routers.tell_all(0.5)
    first = routers.place("a", prompt_tokens=32_768, now_s=1.0, group=1)
    routers.tell_all(1.01)
    second = routers.place("b", prompt_tokens=32_768, now_s=1.02, group=1)
    told_ms = first.prefill_ms, second.prefill_ms
    routers.tell_all(1.1)
    assert (first.prefill_ms, second.prefill_ms) == told_ms
    assert second.uncached_tokens < 1_000 < first.uncached_tokens
