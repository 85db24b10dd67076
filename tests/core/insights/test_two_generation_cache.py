"""The memory of blocks and prompts, against a plain dict that forgets nothing."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights import two_generation_cache
from router.core.insights.two_generation_cache import Generations, depth

paths = st.lists(st.integers(0, 2), max_size=12)  # which child of each block is the next


def keys_of(path: list[int]) -> list[int]:
    """A key for each block, which names the whole prefix."""
    return list(accumulate([1, *path], lambda key, child: key * 4 + child + 1))[1:]


@given(st.lists(st.tuples(paths, st.integers(0, 12)), max_size=60), st.integers(1, 80))
def test_what_it_says_is_true_and_it_stays_within_its_bound(
    puts: list[tuple[list[int], int]], entries_max: int
) -> None:
    """Whatever chains it is given, it never has more entries than allowed, tells of no block that it was not given,
    and of each that it knows has the latest value; the chain given last is known, as far as one may be long."""
    it: Generations[int] = Generations(entries_max)
    given_: dict[int, int] = {}
    for value, (path, kept) in enumerate(puts, 1):
        keys = keys_of(path)
        young, known = it.depths(keys)
        assert young <= known
        assert all(key in given_ for key in keys[:known])
        values = [given_[key] for key in keys[:known]]
        assert [it.get(key) for key in keys[:known]] == values

        kept = min(kept, known)
        it.put_chain(keys, young, kept, value)
        remembered = keys[: max(1, max(1, entries_max // 2) // 2)]
        given_.update(dict.fromkeys(remembered[kept:], value))
        assert it.depths(keys)[1] >= len(remembered)
        assert len(it) <= max(2, entries_max)


@given(st.lists(paths, max_size=20))
def test_nothing_is_forgotten_while_there_is_room(chains: list[list[int]]) -> None:
    """As long as all fits into one generation, the depth found is the true one."""
    it: Generations[int] = Generations(10_000)
    seen: set[int] = set()
    for path in chains:
        keys = keys_of(path)
        true = next((n for n, key in enumerate(keys) if key not in seen), len(keys))
        young, known = it.depths(keys)
        assert young == known == true
        it.put_chain(keys, young, 0, 7)
        seen.update(keys)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=300), st.integers(0, 300))
def test_depth_is_where_a_chain_stops_being_known(keys: list[int], known: int) -> None:
    """Of a chain whose first keys are known the depth is their number, wherever that is."""
    assert depth(dict.fromkeys(keys[:known], 1), keys) == min(known, len(keys))


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 9)), max_size=200))
def test_single_keys(puts: list[tuple[int, float]]) -> None:
    """Keys without a chain: the latest value or none, the last ones always, and never more than allowed."""
    it: Generations[float] = Generations(16)
    given_: dict[int, float] = {}
    for key, value in puts:
        it.put(key, value)
        given_[key] = value
        assert it.get(key) == value
        assert len(it) <= 16
        assert all(it.get(each) in (None, given_[each]) for each in given_)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40), st.integers(0, 9), st.integers(0, 3))
def test_what_is_dropped(puts: list[tuple[int, int]], key: int, value: int) -> None:
    """A key is forgotten if that is what is known of it, and no other is."""
    it: Generations[int] = Generations(8)
    for each in puts:
        it.put(*each)
    before = {n: it.get(n) for n in range(10)}
    it.drop(key, value)
    assert it.get(key) == (None if before[key] == value else before[key])
    assert all(it.get(n) == before[n] for n in range(10) if n != key)


@pytest.mark.inside
def test_of_a_long_chain_the_beginning_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of its keys, however much room there is, and as often as it comes."""
    monkeypatch.setattr(two_generation_cache, "CHAIN_MAX", 100)
    known: Generations[int] = Generations(10_000)
    keys = list(range(1_000))
    for _ in range(2):
        young, _ = known.depths(keys)
        known.put_chain(keys, young, 0, 7)
        assert known.depths(keys) == (100, 100)
        assert len(known) == 100
