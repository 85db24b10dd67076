"""Blocks that only open leases vouch for: as a run where one lease does, and each by itself where several do."""

from __future__ import annotations

from router.core.cache_state.prefix_index import PrefixIndex
from router.core.cache_state.speculative import RUNS_MAX

LONG = 32


def keys(group: int, blocks: int) -> list[int]:
    """Keys of a prompt; prompts of one group begin alike."""
    return [(group << 32) + n + 1 for n in range(blocks)]


def index_of() -> PrefixIndex:
    """An index with one holder."""
    index = PrefixIndex(1 << 30)
    index.add("a", 100_000)
    return index


def test_a_prompt_that_fails_takes_its_own_blocks_and_no_others() -> None:
    """Two open leases share the beginning of a prompt: the first one's failure leaves what the second one computes,
    and the second one's leaves nothing."""
    index = index_of()
    first, second = keys(1, LONG), [*keys(1, LONG)[: LONG // 2], *keys(2, LONG)]
    index.pin("a", 1, first, 1.0)
    index.pin("a", 2, second, 2.0)
    index.retract("a", 1)
    assert (index.depth("a", first), index.depth("a", second)) == (LONG // 2, len(second))
    assert index.holders["a"].unproven.counts() == dict.fromkeys(second, 1)
    index.retract("a", 2)
    assert (index.blocks("a"), bool(index.holders["a"].unproven)) == (0, False)


def test_what_another_prompt_computed_stays_when_the_first_one_fails() -> None:
    """The second of two leases with a common beginning ends well: the first one's failure takes only the rest of it."""
    index = index_of()
    first, second = keys(1, LONG), keys(1, LONG // 2)
    index.pin("a", 1, first, 1.0)
    index.pin("a", 2, second, 2.0)
    index.unpin("a", 2, 3.0)
    assert index.holders["a"].unproven.counts() == dict.fromkeys(first[LONG // 2 :], 1)
    index.retract("a", 1)
    assert index.depth("a", first) == LONG // 2


def test_an_answer_proves_the_blocks_that_a_prompt_quotes_it_with() -> None:
    """A prompt goes on through the answer to another one, which is still open: the answer's end proves its blocks."""
    index, answer = index_of(), keys(9, LONG)
    index.touch("a", keys(1, LONG), 1.0)
    index.pin("a", 1, keys(1, LONG), 2.0)
    index.pin("a", 2, [*keys(1, LONG), *answer, *keys(3, LONG)], 3.0)
    index.unpin("a", 1, 4.0, grown=answer)
    assert index.holders["a"].unproven.counts() == dict.fromkeys(keys(3, LONG), 1)
    index.retract("a", 2)
    assert index.depth("a", [*keys(1, LONG), *answer, *keys(3, LONG)]) == 2 * LONG


def test_whatever_is_under_way_is_not_told_as_known() -> None:
    """Blocks under way are left out of a use's keys, whether they are a run or count one by one."""
    index = index_of()
    unproven = index.holders["a"].unproven
    assert unproven.exclude_pending(keys(1, LONG)) == keys(1, LONG)
    index.touch("a", keys(1, 4), 1.0)
    index.pin("a", 1, keys(1, LONG), 2.0)
    assert unproven.exclude_pending(keys(1, LONG)) == keys(1, 4)
    index.pin("a", 2, keys(1, LONG), 3.0)
    assert unproven.exclude_pending(keys(1, LONG)) == keys(1, 4)


def test_runs_are_few_and_what_is_beyond_counts_one_by_one() -> None:
    """More open leases than there are runs are vouched for all the same."""
    index = index_of()
    for lease in range(RUNS_MAX + 3):
        index.pin("a", lease, keys(10 + lease, LONG), 1.0)
    assert len(index.holders["a"].unproven.counts()) == (RUNS_MAX + 3) * LONG
    for lease in range(RUNS_MAX + 3):
        index.retract("a", lease)
    assert (index.blocks("a"), bool(index.holders["a"].unproven)) == (0, False)
