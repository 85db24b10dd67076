"""Messages are small, however large the fleet and whatever happens at once: each is taken in within a moment."""

from __future__ import annotations

from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import SharedMessage, body_of, row_of, sender_of
from router.core.types.placements import EndReason, Outcome, Usage
from tests.core.peer_sync.several import TOKENS_A_BLOCK, Several, keys

REPLICAS = 40
LIMITS = SharingLimits(rows_max=8, keys_max=200, row_keys=4, placement_keys=10, end_keys=10, first_token_keys=5)
BLOCKS = 20


def _body(message: bytes) -> SharedMessage:
    sender = sender_of(message)
    assert sender is not None
    return body_of(message, sender[2])


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
        routers["b"].hear(message, 2.0)
    assert routers["b"].count_remote_leases() == [(REPLICAS, REPLICAS * BLOCKS)]
    index = routers.router("b").index
    assert all(index.depth(id_, keys(group, BLOCKS)) == BLOCKS for group, id_ in enumerate(routers.ids))


def test_a_circle_comes_to_all_replicas_in_small_steps() -> None:
    """Whoever missed all that happened knows it after the arcs of one circle, each of which has few rows; what has
    gone in the meantime is gone there too."""
    routers = _fleet()
    _all_said(routers, 1.02)  # all of it lost
    for n in range(REPLICAS):
        message = routers.say("a", 2.0 + 0.06 * n)
        assert len(_body(message).rows) <= LIMITS.rows_max
        routers["b"].hear(message, 2.0 + 0.06 * n)
        if len(routers["b"].peers(2.0)) and routers["b"].peers(2.0)[0].open == REPLICAS:
            break
    assert n <= 2 * REPLICAS // LIMITS.rows_max
    assert all(routers.member("b", id_).open_leases == 1 for id_ in routers.ids)


def test_the_replicas_of_an_arc_that_are_not_in_it_are_idle() -> None:
    """Ends that nobody heard of are made good by the next circle."""
    routers = Several("a", "b", replicas=REPLICAS, limits=LIMITS)
    leases = [routers.place("a", prompt_tokens=1_000, now_s=1.0, only=id_) for id_ in routers.ids]
    for message in _all_said(routers, 1.02):
        routers["b"].hear(message, 1.5)
    assert sum(peer.open for peer in routers["b"].peers(1.5)) == REPLICAS
    for lease in leases:
        routers.router("a").first_token(lease, 2.0)
        routers.router("a").finish(lease, Outcome(EndReason.OK, Usage(1_000, 10, 0)), 2.0)
    _all_said(routers, 2.1)  # lost
    for n in range(2 * REPLICAS):
        if (message := routers["a"].say(3.0 + 0.06 * n)) is not None:
            routers["b"].hear(message, 3.0 + 0.06 * n)
    assert sum(peer.open for peer in routers["b"].peers(6.0)) == 0
    assert all(routers.member("b", id_).open_leases == 0 for id_ in routers.ids)


def test_what_has_not_changed_is_the_same_bytes() -> None:
    """A row that is told again is as it was, so that nobody takes it apart twice; one that has changed is not."""
    routers = Several("a", "b", replicas=2, limits=LIMITS)
    for id_ in routers.ids:
        routers.place("a", prompt_tokens=1_000, now_s=1.0, only=id_)
    first, second = (set(_body(routers.say("a", at_s)).rows) for at_s in (1.3, 1.6))
    assert first == second
    routers.place("a", prompt_tokens=1_000, now_s=1.7, only=routers.ids[0])
    third = set(_body(routers.say("a", 1.9)).rows)
    assert len(first & third) == 1
    assert sorted(row_of(row).sums.open for row in third) == [1, 2]


def test_a_row_without_tokens_to_see_goes_on_with_the_clock() -> None:
    """Where the first token of a prompt is not seen, it leaves the queue when its time is over, though nothing
    happens there: what is told follows."""
    routers = Several("a", "b", replicas=1, limits=LIMITS)
    routers.place("a", prompt_tokens=8_000, now_s=1.0, stream=False)
    rows = [_body(routers.say("a", at_s)).rows for at_s in (1.0, 30.0)]
    assert [row_of(row[0]).sums.waiting for row in rows] == [1, 0]


def test_a_large_gap_is_filled_in_several_messages() -> None:
    """Whoever missed more than fits into a message gets it in the next ones, all of it."""
    routers = _fleet()
    _all_said(routers, 1.02)  # lost
    routers["b"].hear(routers.say("a", 2.0), 2.0)
    assert routers["b"].count_remote_leases() != [(REPLICAS, REPLICAS * BLOCKS)]
    routers["a"].hear(routers.say("b", 2.1), 2.1)
    for message in _all_said(routers, 2.2):
        assert sum(len(again.placements) for again in _body(message).again) <= LIMITS.keys_max // LIMITS.placement_keys
        routers["b"].hear(message, 3.0)
    assert routers["b"].count_remote_leases() == [(REPLICAS, REPLICAS * BLOCKS)]


def test_a_long_prompt_is_taken_in_a_step_at_a_time() -> None:
    """Of a prompt that has more keys than a message the beginning is held at once, and the rest with each tick; it is
    unproven until it is computed, and if it fails nothing of it stays."""
    routers = Several("a", "b", replicas=1, limits=LIMITS)
    routers.tell_all(1.0)
    (id_,), blocks = routers.ids, 5 * LIMITS.keys_max // 2
    lease = routers.place("a", prompt_tokens=blocks * TOKENS_A_BLOCK, now_s=1.0, group=1)
    for message in _all_said(routers, 1.02):
        routers["b"].hear(message, 1.5)
    index, held = routers.router("b").index, []
    for n in range(4):
        held.append(index.depth(id_, keys(1, blocks)))
        routers["b"].tick(1.5 + 0.01 * n)
    assert held == [LIMITS.keys_max, 2 * LIMITS.keys_max, blocks, blocks]
    assert index.holders[id_].unproven.counts() == dict.fromkeys(keys(1, blocks), 1)
    routers.router("a").finish(lease, Outcome(EndReason.FAILED), 2.0)
    for message in _all_said(routers, 2.02):
        routers["b"].hear(message, 2.1)
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
        routers["b"].hear(message, 1.5)
    for n in range(4):
        routers["b"].tick(1.5 + 0.01 * n)
    index = routers.router("b").index
    assert index.blocks(id_) == index.depth(id_, keys(1, blocks)) == LIMITS.keys_max
    assert not index.holders[id_].unproven
