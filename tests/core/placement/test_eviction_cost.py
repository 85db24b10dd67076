from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache_state.prefix_index import Holder
from router.core.estimators.reuse import BUCKETS, bucket
from router.core.placement.eviction_cost import RENEWED_MAX, REUSE_PROBABILITY_MAX, SUMS_S, TOUCHES_MAX, EvictionCost

EVEN = [0.5] * BUCKETS


def holder(*uses: tuple[int, float]) -> Holder:
    """One whose cache was used like this: (blocks, when), nothing shared."""
    made, key = Holder(1, 10_000), 0
    for stamp, (blocks, at_s) in enumerate(uses):
        made.recency.touch(range(key, key + blocks), stamp, at_s)
        key += blocks
    return made


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0, 900)), min_size=1, max_size=10),
    st.lists(st.floats(0, 1), min_size=BUCKETS, max_size=BUCKETS),
    st.floats(0.01, 300),
)
def test_what_goes_is_counted_block_by_block(uses: list[tuple[int, float]], odds: list[float], blocks: float) -> None:
    """What is asked for again, and what that pushes out in turn, are the sums over the blocks that go, oldest first;
    where more is wanted than there is, what there is stands for the rest."""
    now_s, left, asked, turns = 1_000.0, blocks, 0.0, 0.0
    for live, at_s in uses:
        goes = min(live, left)
        chance = min(odds[bucket(now_s - at_s)], REUSE_PROBABILITY_MAX)
        asked += goes * chance
        turns += sum(goes * chance**n for n in range(2, 1_000))
        left -= goes
    sums = EvictionCost().sums("a", 1, holder(*uses), odds, now_s)
    assert sums is not None
    gone = blocks - left
    assert sums.compute_shares(blocks) == pytest.approx((asked / gone, turns / gone))


def test_where_nothing_can_go_there_is_no_sum() -> None:
    """An empty cache, and one whose blocks all belong to running requests."""
    pinned = holder((3, 1.0))
    pinned.pins[7] = (0, [0, 1, 2])
    for each in (holder(), pinned):
        assert EvictionCost().sums("a", 1, each, EVEN, 2.0) is None


def test_sums_are_made_once_a_second_and_for_one_cache() -> None:
    """In between they are looked up; a replica that has lost its cache, or left, is looked at anew."""
    displaced, kept = EvictionCost(), holder((3, 1.0))
    first = displaced.sums("a", 1, kept, EVEN, 2.0)
    assert displaced.sums("a", 1, kept, EVEN, 2.0 + SUMS_S / 2) is first
    assert displaced.sums("a", 1, kept, EVEN, 2.0 + SUMS_S) is not first
    assert displaced.sums("a", 2, holder(), EVEN, 2.0 + SUMS_S) is None
    again = displaced.sums("a", 3, kept, EVEN, 2.0 + SUMS_S)
    displaced.forget("a")
    assert displaced.sums("a", 3, kept, EVEN, 2.0 + SUMS_S) is not again


def test_one_request_adds_up_a_few_only() -> None:
    """Before hundreds of full replicas nobody waits until all are added up: the oldest use stands for those that were
    not yet, and each has its turn, however rare requests are. Of each only so much is read."""
    displaced, full = EvictionCost(), holder(*((1, 1.0) for _ in range(2 * TOUCHES_MAX)))
    ids = [f"replica-{n}" for n in range(3 * RENEWED_MAX)]
    first = {id_: displaced.sums(id_, 1, full, EVEN, 2.0) for id_ in ids}
    read = [len(sums.blocks) for sums in first.values() if sums is not None]
    assert read == [TOUCHES_MAX] * RENEWED_MAX + [1] * (2 * RENEWED_MAX)
    for between_s in (SUMS_S / 10, 60.0):
        renewed, now_s = set(), max(sums.at_s for sums in first.values() if sums is not None)
        for request in range(1, 4):
            now = {id_: displaced.sums(id_, 1, full, EVEN, now_s + between_s * request) for id_ in ids}
            renewed |= (changed := {id_ for id_ in ids if now[id_] is not first[id_]})
            assert len(changed) <= RENEWED_MAX
            first = now
        assert renewed >= (set(ids) if between_s > SUMS_S else set(ids[RENEWED_MAX:]))
        assert all(len(sums.blocks) == TOUCHES_MAX for sums in first.values() if sums is not None)
