"""Messages are small, however large the fleet and whatever happens at once: each is taken in within a moment."""

from __future__ import annotations

from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import SharedMessage, decode_message, row_of
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Replica
from tests.core.peer_sync.several import TOKENS_A_BLOCK, Several, keys

REPLICAS = 40
LIMITS = SharingLimits(rows_max=8, keys_max=200, row_keys=4, placement_keys=10, end_keys=10, first_token_keys=5)
BLOCKS = 20


def _body(message: bytes) -> SharedMessage:
    return decode_message(message)


def _fleet() -> Several:
    """Two routers that know each other, in front of many replicas, at each of which one of them has a lease."""
    routers = Several("a", "b", replicas=REPLICAS, limits=LIMITS)
    routers.tell_all(1.0)
    for group, id_ in enumerate(routers.ids):
        routers.place("a", prompt_tokens=BLOCKS * TOKENS_A_BLOCK, now_s=1.0, group=group, only=id_)
    return routers


def _all_said(routers: Several, begin_s: float, messages_max: int = 200) -> list[bytes]:
    """Messages that a says until it has nothing urgent to say any more."""
    said: list[bytes] = []
    for n in range(messages_max):
        before = routers.urgent["a"]
        if (message := routers["a"].say(begin_s + 0.011 * n)) is not None:
            said.append(message)
        if said and routers.urgent["a"] == before:
            return said
    raise AssertionError("it presses and presses")


def test_a_message_has_no_more_than_is_heard_in_a_moment() -> None:
    """What happened at 40 replicas at once is told in many messages, all of it within the limits, and nothing that
    another router would not understand: a placement comes with the row of its replica or behind it."""
    routers = _fleet()
    messages = _all_said(routers, 1.02)
    for message in messages:
        body = _body(message)
        taken = LIMITS.placement_keys * len(body.placements) + sum(len(each.keys) // 8 for each in body.placements)
        assert taken <= LIMITS.keys_max
        routers.hear("a", "b", message, 2.0)
    assert routers["b"].count_remote_leases() == [(REPLICAS, REPLICAS * BLOCKS)]
    index = routers.router("b").index
    assert all(index.depth(id_, keys(group, BLOCKS)) == BLOCKS for group, id_ in enumerate(routers.ids))


def test_a_state_is_applied_in_small_steps() -> None:
    """Whoever missed all that happened knows it after the steps of one state, each of which has few rows; what has
    ended in the meantime is gone there too."""
    routers = _fleet()
    for message in _all_said(routers, 1.02)[:2]:  # the others are lost
        routers.hear("a", "b", message, 1.5)
    for lease in list(routers.member("a", routers.ids[0]).leases.values()):
        routers.router("a").finish(lease, Outcome(EndReason.FAILED), 1.6)
    steps = list(routers["b"].restore("a", routers["a"].state(2.0), 0.0, 2.0))
    assert len(steps) == REPLICAS // LIMITS.rows_max
    assert [routers.member("b", id_).open_leases for id_ in routers.ids] == [0] + [1] * (REPLICAS - 1)


def test_what_has_not_changed_is_the_same_bytes() -> None:
    """A state has rows as they were sent; one that has changed is another."""
    routers = Several("a", "b", replicas=2, limits=LIMITS)
    for id_ in routers.ids:
        routers.place("a", prompt_tokens=1_000, now_s=1.0, only=id_)
    first, second = set(_body(routers.say("a", 1.3)).rows), set(_body(routers["a"].state(1.6)).rows)
    assert first == second
    routers.place("a", prompt_tokens=1_000, now_s=1.7, only=routers.ids[0])
    (changed,) = _body(routers.say("a", 1.9)).rows
    assert changed not in first
    assert row_of(changed).sums.open == 2


def test_the_row_of_a_replica_that_has_left_is_idle() -> None:
    """Other routers may still know the replica, by their own discovery: the sender has nothing open there."""
    routers = Several("a", "b", replicas=2, limits=LIMITS)
    for id_ in routers.ids:
        routers.place("a", prompt_tokens=1_000, now_s=1.0, only=id_)
    routers.tell("a", "b", 1.1, 1.1)
    routers.router("a").replace([Replica(routers.ids[0])])
    routers.tell("a", "b", 1.6, 1.6)
    assert [routers.member("b", id_).open_leases for id_ in routers.ids] == [1, 0]


def test_a_row_without_tokens_to_see_goes_on_with_the_clock() -> None:
    """Where the first token of a prompt is not seen, it leaves the queue when its time is over, though nothing
    happens there: what is told follows."""
    routers = Several("a", "b", replicas=1, limits=LIMITS)
    routers.place("a", prompt_tokens=8_000, now_s=1.0, stream=False)
    rows = [_body(routers.say("a", at_s)).rows for at_s in (1.0, 30.0)]
    assert [row_of(row[0]).sums.waiting for row in rows] == [1, 0]


def test_a_long_prompt_is_taken_in_a_step_at_a_time() -> None:
    """Of a prompt that has more keys than a message the beginning is held at once, and the rest with each tick; it is
    unproven until it is computed, and if it fails nothing of it stays."""
    routers = Several("a", "b", replicas=1, limits=LIMITS)
    routers.tell_all(1.0)
    (id_,), blocks = routers.ids, 5 * LIMITS.keys_max // 2
    lease = routers.place("a", prompt_tokens=blocks * TOKENS_A_BLOCK, now_s=1.0, group=1)
    for message in _all_said(routers, 1.02):
        routers.hear("a", "b", message, 1.5)
    index, held = routers.router("b").index, []
    for n in range(4):
        held.append(index.depth(id_, keys(1, blocks)))
        routers["b"].tick(1.5 + 0.01 * n)
    assert held == [LIMITS.keys_max, 2 * LIMITS.keys_max, blocks, blocks]
    assert index.holders[id_].unproven.counts() == dict.fromkeys(keys(1, blocks), 1)
    routers.router("a").finish(lease, Outcome(EndReason.FAILED), 2.0)
    for message in _all_said(routers, 2.02):
        routers.hear("a", "b", message, 2.1)
    assert (index.blocks(id_), bool(index.holders[id_].unproven)) == (0, False)


def test_a_long_prompt_that_ends_early_is_held_as_far_as_it_was() -> None:
    """Its answer is not held behind a gap, and what is known of it is proved."""
    routers = Several("a", "b", replicas=1, limits=LIMITS)
    routers.tell_all(1.0)
    (id_,), blocks = routers.ids, 3 * LIMITS.keys_max
    lease = routers.place("a", prompt_tokens=blocks * TOKENS_A_BLOCK, now_s=1.0, group=1)
    routers.router("a").first_token(lease, 1.0)
    routers.router("a").finish(lease, Outcome(EndReason.OK, Usage(lease.prompt_tokens, 2_000, 0)), 1.01)
    for message in _all_said(routers, 1.02):
        routers.hear("a", "b", message, 1.5)
    for n in range(4):
        routers["b"].tick(1.5 + 0.01 * n)
    index = routers.router("b").index
    assert index.blocks(id_) == index.depth(id_, keys(1, blocks)) == LIMITS.keys_max
    assert not index.holders[id_].unproven
