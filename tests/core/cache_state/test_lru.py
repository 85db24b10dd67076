from __future__ import annotations

from router.core.cache_state.lru import NEVER, PrefixLru


def order(recency: PrefixLru) -> list[int]:
    """All keys in the order of their eviction; nothing is held afterwards."""
    gone = []
    while recency.oldest():
        gone += reversed(recency.evict(1))
    assert not recency.owner
    assert not recency.touches
    return gone


def used(*prompts: list[int]) -> PrefixLru:
    """Prompts, used one after the other."""
    recency = PrefixLru()
    for stamp, keys in enumerate(prompts):
        recency.touch(keys, stamp, float(stamp))
    return recency


def test_only_what_changes_hands_is_written() -> None:
    """A prompt that shares most of an earlier one takes over its touch; the rest stays in its place, under its age."""
    recency = used([1, 2, 3, 4], [9])
    shared = recency.owner[1]
    assert recency.touch([1, 2, 3, 5], 2, 2.0) == [5]
    assert {recency.owner[key] for key in (1, 2, 3, 5)} == {shared}
    assert recency.oldest_few([], 1) == [(1, 0.0)]
    assert order(recency) == [4, 9, 5, 3, 2, 1]


def test_a_short_prefix_of_a_long_prompt_leaves_it() -> None:
    """A system prompt asked for by itself takes a few keys away from the conversation that had them last."""
    recency = used([1, *range(100, 140)])
    long = recency.owner[100]
    recency.touch([1, 2], 1, 1.0)
    assert recency.owner[1] != long
    assert recency.owner[139] == long
    assert order(recency) == [*reversed(range(100, 140)), 2, 1]


def test_runs_of_several_owners_become_one() -> None:
    """A prompt through what three others used last is the most recent in whole."""
    recency = used([1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 8])
    assert recency.depth([1, 2, 3, 4, 5, 0]) == 5
    recency.touch([1, 2, 3, 4, 5], 3, 3.0)
    assert len({recency.owner[key] for key in range(1, 6)}) == 1
    assert order(recency) == [6, 7, 8, 5, 4, 3, 2, 1]


def test_a_prompt_made_to_collide_with_itself() -> None:
    """Keys that occur twice in a prompt are held once, and go like any other."""
    recency = used([1, 2, 1, 3, 3], [1, 2, 1, 4])
    assert len(recency) == 4
    assert recency.depth([1, 2, 3]) == 3
    assert sorted(order(recency)) == [1, 2, 3, 4]


def test_keys_out_of_the_middle() -> None:
    """What is dropped out of the middle of a touch is not held, and neither depth nor order trip over the hole."""
    recency = used([1, 2, 3, 4])
    assert recency.drop(2)
    assert not recency.drop(2)
    assert (recency.depth([1, 2, 3, 4]), recency.depth([1, 3, 4])) == (1, 3)
    assert recency.touch([1, 2], 1, 1.0) == [2]
    assert recency.depth([1, 2, 3, 4]) == 4
    assert order(recency) == [4, 3, 2, 1]


def test_the_oldest_that_are_not_pinned() -> None:
    """Touches with pinned stamps are passed by, wherever they are, and stamps whose touch is gone do not matter."""
    recency = used([1], [2], [3], [2, 4])
    assert recency.oldest_few([], 2) == [(1, 0.0), (1, 2.0)]
    assert recency.oldest_few([0, 1], 9) == [(1, 2.0), (2, 3.0)]
    assert recency.oldest_few([0, 1, 2], 9) == [(2, 3.0)]
    assert recency.oldest_few([0, 2, 3], 9) == []


def test_touching_again_is_touching() -> None:
    """What was touched at a known time is touched again as if nobody knew, whatever became of it meanwhile."""
    for meanwhile in ([], [1, 2, 3], [1, 2, 9], [1], [7, 8]):
        for dropped in ([], [3], [2]):
            for grown in ([], [4], [4, 5], [8], [4, 4]):
                ours, plain = used([1, 2, 3], meanwhile), used([1, 2, 3], meanwhile)
                for key in dropped:
                    assert ours.drop(key) == plain.drop(key)
                assert ours.retouch(0, [1, 2, 3], grown, 9, 9.0) == plain.touch([1, 2, 3, *grown], 9, 9.0)
                assert order(ours) == order(plain)


def test_a_depth_asked_for_is_of_its_moment() -> None:
    """The same list touched after it was asked for finds what was dropped or evicted in between."""
    for change in (lambda r: r.drop(2), lambda r: r.evict(1), lambda r: r.touch([7, 2], 5, 5.0)):
        asked, recency, plain = [1, 2, 3], used([1, 2, 3]), used([1, 2, 3])
        assert recency.depth(asked) == 3
        change(recency)
        change(plain)
        assert recency.touch(asked, 9, 9.0) == plain.touch([1, 2, 3], 9, 9.0)
        assert order(recency) == order(plain)


def test_what_is_over_is_told_apart() -> None:
    """Released keys keep their place; they are told as never used again, leaf first as they are evicted, and any use of
    them takes that back. Keys before the first are not released."""
    recency = used([1, 2, 3, 4], [9])
    assert recency.release(3, 4, 0.0) == 2
    assert recency.oldest_few([], 9) == [(2, NEVER), (2, 0.0), (1, 1.0)]
    assert recency.evict(1) == [4]
    assert recency.oldest_few([], 9) == [(1, NEVER), (2, 0.0), (1, 1.0)]
    recency.touch([1, 2, 3], 2, 2.0)
    assert recency.oldest_few([], 9) == [(1, 1.0), (3, 2.0)]
    assert recency.release(0, 9, 1.0) == 1, "a first key that is not held: all of it is over"
    assert order(recency) == [9, 3, 2, 1]


def test_only_the_last_use_is_released() -> None:
    """Nothing is released that somebody used since, or goes on from, or that is not held; what another prompt takes
    over of what was released is not released in its touch."""
    recency = used([1, 2, 3], [1, 2, 3, 4])
    assert recency.release(1, 3, 0.0) == recency.release(1, 3, 1.0) == recency.release(1, 7, 1.0) == 0
    assert recency.release(1, 4, 1.0) == 4
    recency.touch([1, 2, 8], 2, 2.0)
    assert recency.oldest_few([], 9) == [(2, NEVER), (3, 2.0)]
