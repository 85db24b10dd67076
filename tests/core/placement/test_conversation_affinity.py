"""What clients say of their conversations, and what becomes of it: sub-agents go where their parents are, and what is
over is not expected back."""

from __future__ import annotations

from random import Random

import pytest

from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import Confidence
from router.core.types.requests import ConversationRef, RequestSpec
from tests.core.placement.placing import MODEL, World, chat, words

MAIN, CHILD, OTHER = 11, 12, 13
FORK = "x " * 4_000  # some 2,000 tokens that a sub-agent has in common with whoever started it


def unread(world: World, kin: ConversationRef | None, ring_key: str = "r") -> Lease:
    """A request whose body did not come by here."""
    return world.router.route(
        PlacementRequest(RequestSpec(MODEL), MODEL, None, ring_key, body_tokens=100, conversation=kin), world.now_s
    )


def run(seed: int, *, told: bool) -> tuple[int, int]:
    """Sessions that each start sub-agents on a fleet that shares their system prompt: sub-agents' first requests that
    landed where their parent's prefix is, of those for which there was room; the fleet has nothing else to do."""
    rng, world = Random(seed), World("abcdefgh")
    system, there, all_ = words(1, 400), 0, 0
    for session in range(1, 25):
        task = words(1_000 + session, rng.randrange(50, 400))
        parent = world.serve(chat(task, system=system), conversation=ConversationRef(session) if told else None)
        world.now_s += rng.uniform(0.1, 5)
        for number in range(rng.randrange(1, 4)):
            kin = ConversationRef(session * 100 + number, session) if told else None
            child = world.serve(chat(words(session * 100 + number, 60), system=system), conversation=kin)
            there += child.replica == parent.replica
            all_ += 1
    return there, all_


def test_a_sub_agent_begins_where_its_parent_is() -> None:
    """Where several replicas hold as much of its first prompt and there is room, at least 95 % of sub-agents land on
    their parent's; without being told the router has no way to know, and fewer do."""
    counts = [run(seed, told=True) for seed in range(5)]
    blind = [run(seed, told=False) for seed in range(5)]
    assert sum(there for there, _ in counts) >= 0.95 * sum(all_ for _, all_ in counts)
    assert sum(there for there, _ in blind) < 0.8 * sum(all_ for _, all_ in blind)


def test_a_fork_goes_to_its_parent_by_price_alone() -> None:
    """A sub-agent that begins with all of its parent's prompt is cheapest there, told or not."""
    for kin in (None, ConversationRef(CHILD, MAIN)):
        world = World()
        parent = world.serve(chat(FORK, "Yes"), conversation=ConversationRef(MAIN))
        assert world.serve(chat(FORK, "Yes", "Now do this part"), conversation=kin).replica == parent.replica


def test_the_price_decides() -> None:
    """A sub-agent does not wait behind its parent's long prompts for a prefix that is cheap to compute."""
    world = World()
    parent = world.serve(chat("Plan it", system=words(1, 300)), conversation=ConversationRef(MAIN))
    for number in range(4):
        member = world.router.fleet.members[parent.replica]
        lease = world.place(chat(words(number, 30_000)), only=parent.replica)
        assert member.leases[lease.id] is lease
    child = world.place(chat("Do it", system=words(1, 300)), conversation=ConversationRef(CHILD, MAIN))
    assert child.replica != parent.replica


def test_a_prefix_that_nobody_holds_is_no_reason() -> None:
    """A sub-agent whose prompt shares nothing with its parent's is spread like any other."""
    world, places = World("abcdefgh"), set[str]()
    world.serve(chat("Plan it"), conversation=ConversationRef(MAIN))
    for number in range(40):
        places.add(world.serve(chat(words(number, 300)), conversation=ConversationRef(100 + number, MAIN)).replica)
    assert len(places) > 3


def test_unread_requests_stay_where_their_conversation_is() -> None:
    """Of a body that does not come by here the conversation is all there is: its requests, and its sub-agents' first
    ones, go where it was, wherever the ring would have them."""
    for session in range(20):
        world = World("abcdefgh")
        first = unread(world, ConversationRef(MAIN), f"r{session}")
        world.finish(first)
        again, child = (
            unread(world, ConversationRef(MAIN), "elsewhere"),
            unread(world, ConversationRef(CHILD, MAIN), "elsewhere"),
        )
        assert {again.replica, child.replica} == {first.replica}
        assert again.receipt.grade is Confidence.ESTIMATED


def test_another_models_conversation_is_another() -> None:
    """A client that asks a small model for titles under the same name does not move its conversation."""
    world = World()
    world.router.observations.observe_models("a", [])
    home = world.serve(chat("Hello", system=words(1, 200)), conversation=ConversationRef(MAIN))
    world.serve(chat("Title", system=words(2, 200)), conversation=ConversationRef(MAIN), model=None)
    child = world.serve(chat("Sub", system=words(1, 200)), conversation=ConversationRef(CHILD, MAIN))
    assert child.replica == home.replica


# -- the end of a conversation ---------------------------------------------------------------------------------------


def odds(world: World, idle_s: float = 0.0) -> float:
    """The chance that what was idle for so long is asked for again."""
    from router.core.estimators.reuse import bucket

    return world.router.reuse.reuse_probability(world.now_s)[bucket(idle_s)]


def expected_back(world: World, id_: str) -> list[tuple[int, bool]]:
    """(blocks, whether somebody is expected to ask for them) in the order of their eviction."""
    return [(blocks, at_s > float("-inf")) for blocks, at_s in world.router.index.holders[id_].next_out(100)]


@pytest.mark.inside
@pytest.mark.parametrize("dedicated", [False, True], ids=["last turn", "a request of its own"])
def test_nothing_of_a_conversation_that_is_over_is_expected_back(dedicated: bool) -> None:
    """Its mark waits no longer, so that it does not speak of others, and evicting what is its alone costs nothing; what
    it began with like others is expected as before, and all of it is held until it is evicted."""
    world, system = World("a"), words(1, 600)
    world.serve(chat(words(5, 300), system=system))  # somebody else's conversation with the same beginning
    shared = world.depth(chat("", system=system), "a")
    world.serve(chat(words(2, 600), system=system), conversation=ConversationRef(MAIN))
    held, marks = world.depth(chat(words(2, 600), system=system), "a"), len(world.router.reuse)
    assert all(back for _, back in expected_back(world, "a"))
    end = chat("bye") if dedicated else chat(words(2, 600), "Yes", "Thanks", system=system)
    world.serve(end, conversation=ConversationRef(MAIN, 0, True))
    assert len(world.router.reuse) == marks - 1
    gone = sum(blocks for blocks, back in expected_back(world, "a") if not back)
    assert held - shared <= gone <= held - shared + 3
    assert world.depth(chat(words(2, 600), system=system), "a") >= held
    assert not len(world.router.conversations)


@pytest.mark.inside
def test_a_conversation_that_goes_on_after_its_end_is_expected_again() -> None:
    """Clients are believed, and may be wrong: who asks again is like anybody."""
    world = World("a")
    world.serve(chat(words(2, 600)), conversation=ConversationRef(MAIN, 0, True))
    assert not any(back for _, back in expected_back(world, "a"))
    world.serve(chat(words(2, 600), "Yes", "One more"), conversation=ConversationRef(MAIN))
    assert all(back for _, back in expected_back(world, "a"))
    assert len(world.router.reuse) == 1


@pytest.mark.inside
def test_a_fork_outlives_the_conversation_it_came_from() -> None:
    """What a sub-agent goes on from is its own too: the end of its parent takes nothing from it, nor does its end take
    anything from the parent."""
    world = World("a")
    world.serve(chat(FORK), conversation=ConversationRef(MAIN))
    world.serve(chat(FORK, "Yes", "Part"), conversation=ConversationRef(CHILD, MAIN))
    world.serve(chat("bye"), conversation=ConversationRef(MAIN, 0, True))
    assert all(back for blocks, back in expected_back(world, "a") if blocks > 1)
    world.serve(chat("bye, too"), conversation=ConversationRef(CHILD, MAIN, True))
    assert sum(blocks for blocks, back in expected_back(world, "a") if back) >= 14


@pytest.mark.inside
def test_odds_are_of_those_that_may_return() -> None:
    """Where every conversation says when it is over, those that have not said so are known to come back."""
    ends, blind = World("a"), World("a")
    for world, told in ((ends, True), (blind, False)):
        for number in range(60):
            kin = ConversationRef(number + 1)
            world.serve(chat(words(number, 300)), conversation=kin)
            world.now_s += 2
            last = ConversationRef(number + 1, 0, told)
            world.serve(chat(words(number, 300), "Yes", "Go on"), conversation=last)
            world.now_s += 2
    assert odds(ends) > 0.9
    assert odds(blind) < odds(ends) - 0.2


def test_memory_of_conversations_is_bounded() -> None:
    """The least recent make room; of a parent that is forgotten nothing is known."""
    world = World()
    for number in range(1, 2_500):
        world.serve(chat("x"), conversation=ConversationRef(number))
    assert len(world.router.conversations) == 1_000
