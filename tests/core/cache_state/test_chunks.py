"""Blocks that tiers keep together, as vLLM's chunks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache_state.chunk_width import BLOCKS_MAX, EVENTS_MAX, EVENTS_MIN, ChunkWidth
from router.core.cache_state.tier_blocks import TierMatch
from tests.core.cache_state.reporting import _Engine, _gone, _keys, _stored


def test_chunks_are_loaded_whole(engine: _Engine) -> None:
    """Once tiers name three blocks in each event, what they give ends with a whole chunk, and begins with the one in
    which the GPU's blocks end; less than a chunk is not loaded."""
    letters = "abcdefghijkl"
    engine.hears(_stored(list(range(1, 13)), letters))
    for _ in range(EVENTS_MIN):
        engine.hears(_stored([1, 2, 3], "abc", medium="CPU"))
    engine.hears(*(_stored([n, n + 1, n + 2], letters[n - 1 : n + 2], n - 1, medium="CPU") for n in (4, 7, 10)))
    ledger = engine.ledger

    def loads(count: int) -> int:
        keys = _keys(letters[:count])
        bits = [bit for _, bit in ledger.tier_bits()]
        return sum(TierMatch(engine.masks, keys).count_loadable(engine.depth(letters[:count]), bits, ledger.chunk))

    assert ledger.chunk == 3
    shape = ledger.shape(hybrid=False)
    assert shape is not None
    assert shape.chunk == 3
    engine.hears(_gone(*range(5, 13)))  # the GPU has four blocks
    assert [loads(count) for count in (5, 6, 7, 8, 9, 11, 12)] == [0, 0, 0, 0, 5, 5, 8]
    engine.hears(_gone(*range(1, 5)))
    assert [loads(count) for count in (2, 3, 5, 6, 12)] == [0, 3, 3, 6, 12]
    for _ in range(EVENTS_MAX):
        engine.hears(_stored([1], "a", medium="CPU"))
    assert ledger.chunk == 1
    ledger.reset_to(shape)
    assert ledger.chunk == 3, "a process that is handed the blocks knows of chunks too"


def test_what_a_chunk_gives_is_counted_where_it_is(engine: _Engine) -> None:
    """The GPU's blocks end in a chunk of a store, and CPU memory has the next one: the store gives what is left of
    theirs."""
    engine.hears(_stored(list(range(1, 7)), "abcdef"))
    keys = _keys("abcdef")
    engine.hears(_stored([1, 2, 3], "abc", medium="EXTERNAL"), _stored([4, 5, 6], "def", 3, medium="CPU"))
    engine.hears(_gone(*range(2, 7)))
    bits = dict(engine.ledger.tier_bits())
    given = dict(zip(bits, TierMatch(engine.masks, keys).count_loadable(1, list(bits.values()), 3), strict=True))
    assert {tier: count for tier, count in given.items() if count} == {"cpu": 3, "external": 2}


@pytest.mark.parametrize(("blocks", "chunk"), [(64, 64), (65, 1)])
def test_prompts_of_one_length_are_no_chunks(engine: _Engine, blocks: int, chunk: int) -> None:
    """An engine that tells of a whole prompt at once is not taken for one that keeps chunks, however alike prompts
    are: chunks have 64 blocks at most."""
    engine.hears(_stored([1], "a"))  # says how many tokens a block has
    for _ in range(EVENTS_MIN):
        engine.hears(_stored(list(range(1, blocks + 1)), "a" * blocks, medium="CPU"))
    assert engine.ledger.chunk == chunk


def test_one_odd_event_decides_nothing(engine: _Engine) -> None:
    """Neither the end of a prompt, narrower than a chunk, nor a block named without its tokens, as vLLM does for one
    that it brought back and knows nothing else of, however many of these there are."""
    engine.hears(_stored(list(range(1, 13)), "abcdefghijkl"))
    for _ in range(EVENTS_MIN):
        engine.hears(_stored([1, 2, 3], "abc", medium="CPU"))
    engine.hears(_stored([4, 5], "de", 3, medium="CPU"))
    assert engine.ledger.chunk == 3
    for _ in range(2 * EVENTS_MAX):
        engine.hears(_stored([99], "", medium="CPU", size=0))
    assert engine.ledger.chunk == 3
    assert engine.ledger.shape(hybrid=False) is not None


@given(st.lists(st.sampled_from([1, 2, 4, 4, 4, BLOCKS_MAX, BLOCKS_MAX + 1]), max_size=3 * EVENTS_MAX))
def test_the_width_that_most_of_the_last_events_had(widths: list[int]) -> None:
    """Whatever came before them, found out anew from the events themselves."""
    chunk = ChunkWidth()
    for n, width in enumerate(widths):
        chunk.observe(width)
        last = widths[max(0, n + 1 - EVENTS_MAX) : n + 1]
        ((frequent, count),) = Counter(last).most_common(1)
        sure = len(last) >= EVENTS_MIN and 2 * count > len(last) and frequent <= BLOCKS_MAX
        assert chunk.blocks == (frequent if sure else 1)
