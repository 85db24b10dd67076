"""What open leases keep in a KV pool, against sets of blocks; how long a prompt waits for room in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.kv_reservations import STRIDE, KvReservations, shared_prefix_marks
from router.core.placement.kv_pressure import shortage
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Usage
from router.core.types.replicas import Load
from tests.core.placement.placing import World, chat, words
from tests.support.examples import examples

BLOCK_TOKENS = BLOCK_BYTES // 4
FORKS = (0, 3, 4, 9, 17)  # blocks before prompts part, on marks and beside them


def keys_of(fork: int, branch: int, length: int) -> list[int]:
    """A prompt that has `fork` blocks in common with all, and the others with those of its branch and fork."""
    return [block if block < fork else 1_000 * (10 * fork + branch + 1) + block for block in range(length)]


PROMPTS = st.builds(keys_of, st.sampled_from(FORKS), st.integers(0, 2), st.integers(0, 40))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.integers(0, 500), st.booleans(), st.integers(0, 30), st.booleans()), max_size=30))
def test_what_is_live_is_the_union_of_prompts(steps: list[tuple[list[int], int, bool, int, bool]]) -> None:
    """After any openings and closings: blocks up to each prompt's last mark count once however many share them, to a
    mark, own tokens and unshared blocks add up, and the longest live prefix of any prompt is found to the mark,
    however seldom that is asked; all closed, nothing is left."""
    live, leases = KvReservations(), list[tuple[int, list[int], int]]()

    def agree(asked: list[int]) -> None:
        union = {key for _, keys, _ in leases for key in keys[: shared_prefix_marks(len(keys))]}
        parted = (STRIDE - 1) * max(0, len(leases) - 1)  # blocks that are common, between a mark and where they part
        assert len(union) <= live.blocks <= len(union) + parted
        longest = max((common(asked, keys) for _, keys, _ in leases), default=0)
        assert live.count_live_blocks(asked) == longest // STRIDE * STRIDE

    for number, (keys, own_tokens, closes, which, asks) in enumerate(steps):
        if closes and leases:
            live.close(*leases.pop(which % len(leases)))
        else:
            live.open(number, keys, own_tokens)
            leases.append((number, keys, own_tokens))
        assert live.own_tokens == sum(own for _, _, own in leases)
        assert live.unshared_blocks == sum(shared_prefix_marks(len(keys)) for _, keys, _ in leases)
        if asks:
            agree(keys)
    while leases:
        live.close(*leases.pop())
    agree(list(range(40)))
    assert (live.blocks, live.own_tokens, live.unshared_blocks) == (0, 0, 0)


# -- waiting for room --------------------------------------------------------------------------------------------

KV_TOKENS = 20_000
SYSTEM = words(1, 8_000)


def served(decode_s: float = 10.0, answer_tokens: int = 500, kv_usage: float | None = None) -> World:
    """Two replicas that have seen answers which took so long, and whose probes have said this."""
    world = World("ab")
    for id_ in "ab":
        lease = world.place(chat(words(90, 500)), only=id_)
        world.first_token(lease, after_s=0.1)
        world.now_s += decode_s
        world.finish(lease, usage=Usage(500, answer_tokens, 0))
        world.router.observations.observe_load(id_, Load(kv_tokens_max=KV_TOKENS, kv_usage=kv_usage))
    return world


def kv_wait_ms(world: World, prompt: str, *, system: str = "") -> float:
    """Of a prompt at `a`, which it is placed on."""
    (at_a,) = world.place(chat(prompt, system=system), only="a").receipt.candidates
    return at_a.kv_wait_ms


def test_where_there_is_room_nobody_waits() -> None:
    """An empty pool, one with room for the prompt, and one whose size is not known."""
    world = served()
    assert kv_wait_ms(world, words(2, 8_000)) == 0
    assert kv_wait_ms(world, words(3, 8_000)) == 0
    world = World("a")
    for seed in range(4):
        (candidate,) = world.place(chat(words(seed, 8_000))).receipt.candidates
        assert candidate.kv_wait_ms == 0


def test_a_prompt_waits_for_what_it_lacks() -> None:
    """Of three prompts of 8,000 tokens the third lacks 4,000 of 20,000: a fifth of an answer's time."""
    world = served(decode_s=10.0, answer_tokens=0)
    waits_ms = [kv_wait_ms(world, words(seed, 8_000)) for seed in (2, 3, 4)]
    assert waits_ms == [0, 0, pytest.approx(2_000, rel=0.02)]


def test_room_has_a_price_before_it_is_short() -> None:
    """What a prompt keeps of a pool costs those who will come nothing where most of the pool is free, and more the less
    of it is; where it is short, as much as they wait. Who joins open leases keeps less of it than a stranger."""
    world = served(answer_tokens=0)
    prices = []
    for seed in range(2, 9):
        (at_a,) = world.place(chat(words(seed, 3_000)), only="a").receipt.candidates
        prices.append(at_a.room_ms)
    assert prices[0] == 0 < prices[2]
    assert prices[2:] == sorted(prices[2:])
    (joins,) = world.place(chat(words(8, 3_000)), only="a").receipt.candidates
    assert joins.room_ms < prices[-1]


def test_a_long_prompt_takes_nothing_from_a_pool_that_is_nearly_empty() -> None:
    """Whatever part of the pool it is of, nobody waits there whom it could delay: one short request is open."""
    world = served(answer_tokens=0)
    world.place(chat(words(2, 30)), only="a")
    (at_a,) = world.place(chat(words(3, 8_000)), only="a").receipt.candidates
    assert 0 <= at_a.room_ms < 200  # of answers of ten seconds


@given(st.floats(-1, 4), st.floats(0, 1))
def test_expected_shortage(over: float, more: float) -> None:
    """At least what lacks now, never negative, more where more lacks, and what lacks where that is sure."""
    assert max(0.0, over) <= shortage(over) <= shortage(over + more)
    assert shortage(over) - max(0.0, over) <= shortage(0.0)
    assert shortage(4.0 + over + 1) == 4.0 + over + 1


def test_a_shared_prefix_takes_room_once() -> None:
    """Ten prompts of 8,300 tokens, 8,000 of which they have in common, run on 20,000, and there is room for 5,000 more;
    another prompt of theirs needs less than a stranger of that length."""
    world = served(answer_tokens=0)
    assert [kv_wait_ms(world, words(seed, 300), system=SYSTEM) for seed in range(10, 20)] == [0] * 10
    assert kv_wait_ms(world, words(50, 5_000)) == 0
    assert kv_wait_ms(world, words(51, 8_300)) > 0
    assert 0 < kv_wait_ms(world, words(20, 300), system=SYSTEM) < kv_wait_ms(world, words(52, 8_300)) / 2


def test_answers_take_room_as_they_grow() -> None:
    """What decodes has half an answer each, on the mean, besides its prompt."""
    world = served(answer_tokens=4_000)
    leases = [world.place(chat(words(seed, 8_000)), only="a") for seed in (2, 3)]
    before_ms = world.place(chat("hi"), only="a").receipt.candidates[0].kv_wait_ms
    for lease in leases:
        world.first_token(lease, after_s=1.0)
    assert before_ms == 0
    assert world.place(chat(words(4, 500)), only="a").receipt.candidates[0].kv_wait_ms > 0


@pytest.mark.parametrize(("usage", "waits"), [(0.5, False), (0.95, True)])
def test_what_others_use_counts_by_the_engines_own_word(usage: float, waits: bool) -> None:
    """We sent nothing there, and yet there is no room."""
    assert (kv_wait_ms(served(kv_usage=usage), words(2, 8_000)) > 0) is waits


def test_room_comes_back_as_fast_as_answers_end() -> None:
    """Three times as long a decode is three times the wait."""
    short_ms, long_ms = (kv_wait_ms(served(s, kv_usage=1.0), words(2, 8_000)) for s in (5.0, 15.0))
    assert long_ms == pytest.approx(3 * short_ms)
    assert short_ms == pytest.approx(5_000 * 8_000 / KV_TOKENS, rel=0.02)


def test_who_keeps_room_delays_those_who_wait_for_it() -> None:
    """By as much longer as it keeps more than the others there do, and nobody where there is room. Of a shared prefix
    each that is open keeps its part, so a copy of it delays others by far more than one more that joins many."""
    world = served(answer_tokens=0)
    open_there = [world.place(chat(words(seed, 300), system=SYSTEM), only="a") for seed in range(10, 20)]
    world.place(chat(words(50, 8_000)), only="a")
    free, joins, copy = (
        world.place(chat(prompt, system=system), only=only).receipt.candidates[0]
        for prompt, system, only in (
            (words(1, 300), SYSTEM, "b"),
            (words(2, 300), SYSTEM, "a"),
            (words(3, 8_300), "", "a"),
        )
    )
    assert (free.kv_wait_ms, free.room_ms) == (0, 0)
    kept_tokens = 300 + 8_000 / (1 + len(open_there))  # marks are 500 tokens apart
    used_tokens = 8_000 + 10 * 300 + 8_000
    joins_ms, copy_ms = (1e4 * shortage(each.kv_wait_ms / 1e4) for each in (joins, copy))  # answers take ten seconds
    assert joins.room_ms == pytest.approx(joins_ms * kept_tokens * 11 / used_tokens, rel=0.15)
    assert copy.room_ms / copy_ms > 6 * joins.room_ms / joins_ms


def test_waiting_for_room_is_not_taken_for_slow_prefill() -> None:
    """First tokens that come after twenty seconds because the pool was full, or because somebody who waits for room is
    ahead of them, leave the learned speed as it was; once there is room again, speed is learned again."""
    world = served(answer_tokens=0)
    running = [world.place(chat(words(seed, 8_000)), only="a") for seed in (2, 3)]
    for lease in running:
        world.first_token(lease, after_s=1.0)
        world.finish(lease) if lease is running[0] else None
    before = world.router.fleet.members["a"].prefill_model
    world.place(chat(words(4, 8_000)), only="a")
    waits = [world.place(chat(words(seed, 6_000)), only="a") for seed in (5, 6)]
    behind = world.place(chat(words(7, 1_500)), only="a")
    assert waits[0].receipt.candidates[0].kv_wait_ms > 0
    for lease in (*waits, behind):
        world.first_token(lease, after_s=20.0)
        world.finish(lease, usage=Usage(lease.prompt_tokens, 100, 0))
    assert world.router.fleet.members["a"].prefill_model == before


def test_a_prompt_longer_than_an_empty_pool_is_priced() -> None:
    """Nobody keeps anything there, so nobody is delayed; the engine will refuse it."""
    world = served(kv_usage=0.0)
    (at_a,) = world.place(chat(words(2, 25_000)), only="a").receipt.candidates
    assert at_a.room_ms == 0
