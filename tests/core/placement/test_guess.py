"""Several routers: what one does not know of, another may have sent to its place on the ring."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.core.estimators.fleet_means import GUESS_LEAST, RING_GUESS_PRIOR
from router.core.fleet.lease import Lease
from router.core.placement.policies.warm.constants import ELSEWHERE_MIN
from router.core.placement.ring import Ring
from router.core.types.placements import Usage
from router.core.types.replicas import Load
from tests.core.placement.placing import World, chat

IDS = "abcd"


def text(seed: int, tokens: int = 8_000) -> str:
    """Text of that many tokens that nothing else begins with."""
    return f"{seed:07d} " * (tokens // 2)


def beside_others(factor: float, first: int = 0) -> World:
    """Every replica has computed `factor` times what this router sent it."""
    world = World(IDS, blocks_max=100_000)
    for n in range(8):
        for i, id_ in enumerate(IDS):
            sent = 8_000 * n
            world.router.observations.observe_load(id_, Load(prompt_tokens_total=factor * sent))
            world.serve(chat(text(first + 100 * i + n)), only=id_)
    world.now_s += 10.0
    world.router.observations.check(world.now_s)
    return world


def unknown(world: World, seed: int) -> Lease:
    """A prompt of 8,000 tokens that this router never saw."""
    return world.place(chat(text(seed)), session=f"session {seed}")


def answered(world: World, lease: Lease, cached_tokens: int | None, took: float) -> None:
    """Its first token came in so many times what was modelled."""
    world.first_token(lease, after_s=took * lease.prefill_ms / 1e3)
    world.finish(lease, usage=Usage(lease.prompt_tokens, 5, cached_tokens))


def test_alone_nothing_is_guessed() -> None:
    """Where engines count what we sent, or do not count, an unknown prompt is nobody's."""
    for world in (beside_others(1.0), World(IDS)):
        assert world.router.fleet.other_router_probability == 0
        leases = [unknown(world, seed) for seed in range(5_000, 5_010)]
        assert not any(lease.guessed for lease in leases)


def test_routers_agree_on_what_neither_knows() -> None:
    """Two that each send half, with books of their own, send an unknown prompt to its place on the ring; two that
    believe to be alone do not agree."""
    seeds = range(5_000, 5_012)

    def placed(factor: float) -> list[list[str]]:
        found = []
        for busy in ("ab", "cd"):
            world = beside_others(factor, first=ord(busy[0]))
            for n, id_ in enumerate(busy):
                world.place(chat(text(4_000 + n, 1_000)), only=id_)
            leases = []
            for seed in seeds:
                leases.append(unknown(world, seed))
                assert leases[-1].guessed is (factor > 1)
                world.finish(leases[-1])
            found.append([lease.replica for lease in leases])
        return found

    one, other = placed(2.0)
    assert one == other == [Ring().walk(f"session {seed}", dict.fromkeys(IDS))[0] for seed in seeds]
    one, other = placed(1.0)
    assert one != other


def test_what_is_known_is_not_guessed() -> None:
    """The next turn of a conversation goes to whoever holds it."""
    world = beside_others(2.0)
    home = unknown(world, 5_000)
    answered(world, home, None, 1.0)
    again = world.place(chat(text(5_000), "ok", "go on"), session="another")
    assert not again.guessed
    assert again.replica == home.replica


def test_a_guess_is_not_worth_any_wait() -> None:
    """Where the place on the ring has more to do than the prompt takes, it goes elsewhere."""
    world = beside_others(2.0)
    place = Ring().walk("session 5000", dict.fromkeys(IDS))[0]
    for n in range(4):
        world.place(chat(text(4_000 + n)), only=place)
    lease = unknown(world, 5_000)
    assert not lease.guessed
    assert lease.replica != place


@pytest.mark.parametrize("cached_tokens", [0, None], ids=["the engine says so", "its first token comes as late"])
def test_wrong_guesses_end(cached_tokens: int | None) -> None:
    """After some seventy that were wrong a guess counts for next to nothing, whichever way it is seen; when guesses are
    right again, it counts again."""
    world, guesses = beside_others(2.0), 0
    for seed in range(5_000, 5_090):
        lease = unknown(world, seed)
        guesses += lease.guessed
        answered(world, lease, cached_tokens, 1.0)
    assert guesses >= 60
    assert world.router.fleet.other_router_probability == GUESS_LEAST > ELSEWHERE_MIN
    for seed in range(6_000, 6_050):
        lease = unknown(world, seed)
        if lease.guessed:
            answered(world, lease, lease.prompt_tokens - 20, 1.0)
        else:
            answered(world, lease, cached_tokens, 1.0)
    assert world.router.fleet.other_router_probability > 2 * GUESS_LEAST


@pytest.mark.parametrize(
    ("usage", "took"), [(lambda lease: lease.prompt_tokens - 20, 1.0), (lambda _: None, 0.1)], ids=["engine", "time"]
)
def test_right_guesses_are_believed(usage: Callable[[Lease], int | None], took: float) -> None:
    """Each that finds most of its prompt raises the chance that is reckoned with; the engine's word goes first."""
    world, chances = beside_others(2.0), [RING_GUESS_PRIOR]
    for seed in range(5_000, 5_008):
        lease = unknown(world, seed)
        assert lease.guessed
        answered(world, lease, usage(lease), took)
        chances.append(world.router.fleet.other_router_probability)
    assert chances == sorted(set(chances))


def test_who_has_no_choice_guesses_nothing() -> None:
    """A request that belongs to one replica, or that may not go to all, says nothing of the others' ring."""
    world = beside_others(2.0)
    held_back = [{"only": "a"}, {"exclude": frozenset("b")}, {"full": {"c"}}]
    for seed, how in enumerate(held_back, 5_000):
        assert not world.place(chat(text(seed)), session=f"session {seed}", **how).guessed


def test_an_answer_that_proves_nothing_teaches_nothing() -> None:
    """It does not stream, and the engine does not say what it found."""
    world = beside_others(2.0)
    lease = unknown(world, 5_000)
    world.now_s += 3.0
    world.finish(lease, usage=Usage(8_000, 5))
    assert lease.guessed
    assert world.router.fleet.other_router_probability == RING_GUESS_PRIOR
