from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from router.core.cache_state.prefix_index import RENEWS_MAX, PrefixIndex
from tests.compiled import COMPILED

CHAIN = list(range(100, 110))


def test_every_holder_is_matched_in_one_call() -> None:
    """Each holder's longest prefix; who has nothing of it is not named."""
    index = PrefixIndex(1 << 20)
    for name, depth in {"a": 4, "b": 1, "c": 10, "d": 0}.items():
        index.add(name, 20)
        index.touch(name, CHAIN[:depth], 1.0)
    index.touch("d", [999], 1.0)
    assert index.match(CHAIN) == {"a": 4, "b": 1, "c": 10}
    assert index.match(CHAIN[:2]) == {"a": 2, "b": 1, "c": 2}
    assert index.match([]) == index.match([1, 2]) == PrefixIndex(1).match(CHAIN) == {}


def test_leaves_go_before_their_prefix_and_old_before_new() -> None:
    """Eviction takes the least recently used prompt from its end."""
    index = PrefixIndex(1 << 20)
    index.add("a", 8)
    index.touch("a", CHAIN[:5], 1.0)
    index.touch("a", [1, 2, 3], 2.0)
    index.touch("a", [4, 5], 3.0)
    assert (index.match(CHAIN), index.match([1, 2, 3]), index.match([4, 5])) == ({"a": 3}, {"a": 3}, {"a": 2})
    assert index.holders["a"].next_out(9) == [(3, 1.0), (3, 2.0), (2, 3.0)]


def test_a_running_request_keeps_its_prefix() -> None:
    """Pinned blocks outlast newer ones, even over capacity; after the lease they age like all others."""
    index = PrefixIndex(1 << 20)
    index.add("a", 6)
    index.pin("a", 1, CHAIN[:5], 1.0)
    index.touch("a", [1, 2, 3], 2.0)
    assert (index.match(CHAIN), index.match([1, 2, 3])) == ({"a": 5}, {"a": 1})
    index.resize("a", 2)
    assert index.blocks("a") == 5
    index.unpin("a", 1, 3.0)
    assert index.match(CHAIN) == {"a": 2}


def test_a_hole_is_no_credit() -> None:
    """Behind a block that was dropped nothing matches, and running requests do not bring it back."""
    index = PrefixIndex(1 << 20)
    index.add("a", 12)
    index.pin("a", 1, CHAIN, 1.0)
    assert index.drop("a", [CHAIN[3], CHAIN[3], 555]) == 1
    assert index.match(CHAIN) == {"a": 3}
    index.touch("a", list(range(10)), 2.0)
    assert index.match(CHAIN) == {"a": 3}


def test_the_byte_budget_is_kept() -> None:
    """Whatever holders may have each, all together stay within the budget, oldest first, pinned or not."""
    index = PrefixIndex(300 * 500)
    for n in range(4):
        index.add(str(n), 10_000)
        index.pin(str(n), n, list(range(n * 1_000, n * 1_000 + 400)), float(n))
        assert index.bytes_used <= index.bytes_max
    assert index.blocks("0") == 0
    assert index.blocks("3") == 400


def test_one_prompt_larger_than_the_budget_still_ends() -> None:
    """An index too small for anything holds what fits and goes on."""
    index = PrefixIndex(1_000)
    index.add("a", 10_000)
    index.touch("a", range(5_000), 1.0)
    assert index.bytes_used <= 1_000


@pytest.mark.parametrize("holders", [1, 4])
def test_an_entry_costs_what_the_budget_says(holders: int) -> None:
    """KEY_BYTES and HELD_BYTES are honest: the memory of a full index in which blocks come and go, where dicts are
    at their largest, is at most the estimate and at least two thirds of it. Compiled, a touch is larger."""
    blocks_max, rng = 12_500, Random(1)
    index = PrefixIndex(1 << 30)

    def churn() -> None:
        for name in range(holders):
            index.add(str(name), blocks_max)
        for prompt in range(4 * blocks_max // 100):
            keys = [rng.getrandbits(64) for _ in range(100)]
            for name in range(holders):
                index.touch(str(name), keys, float(prompt))

    measured = traced_bytes(churn)
    assert index.keys == blocks_max
    assert 2 / 3 < measured / index.bytes_used < (1.06 if COMPILED else 1), measured / index.bytes_used


def traced_bytes(action: Callable[[], None]) -> int:
    """Memory that is left in use by an action."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_who_comes_second_vouches_for_what_is_under_way() -> None:
    """Of two leases with one prompt the first fails and the second does not: its blocks were computed, and stay when a
    third fails."""
    index = PrefixIndex(10**6)
    index.add("a", 100)
    for lease, keys in ((1, [1, 2, 3]), (2, [1, 2, 3, 4])):
        index.pin("a", lease, keys, 1.0)
    index.retract("a", 1)
    assert index.depth("a", [1, 2, 3, 4]) == 4
    index.unpin("a", 2, 2.0)
    index.pin("a", 3, [1, 2, 3, 4, 5], 3.0)
    index.retract("a", 3)
    assert index.depth("a", [1, 2, 3, 4, 5]) == 4


def test_an_eviction_moves_few_pins_and_capacity_is_kept_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests run, one change moves RENEWS_MAX pins out of its way at most, be there nothing to evict or
    much behind them; when all have ended the holder is within its capacity again, whatever their end."""
    moved = 0
    renew = PrefixIndex._renew

    def counted(index: PrefixIndex, *pinned: Any) -> None:
        nonlocal moved
        moved += 1
        renew(index, *pinned)

    monkeypatch.setattr(PrefixIndex, "_renew", counted)
    index, most = PrefixIndex(1 << 30), 0
    index.add("a", 100)
    leases = 40

    def change(what: Callable[[], object]) -> None:
        nonlocal moved, most
        moved = 0
        what()
        most = max(most, moved)

    for lease in range(leases):  # all share a prefix; each has ten blocks of its own
        keys = [*CHAIN, *range(1_000 + 10 * lease, 1_010 + 10 * lease)]
        change(partial(index.pin, "a", lease, keys, float(lease)))
    assert index.blocks("a") == 10 + 10 * leases
    change(partial(index.touch, "a", list(range(200)), 50.0))
    for lease in range(leases):
        end = partial(index.retract, "a", lease) if lease % 3 else partial(index.unpin, "a", lease, 60.0 + lease)
        change(end)
        assert index.depth("a", list(CHAIN)) == len(CHAIN), "a running request keeps its prefix"
        if lease == leases - 2:
            assert index.blocks("a") <= 100
    assert index.blocks("a") <= 100
    assert most == RENEWS_MAX
