from __future__ import annotations

import random
import tracemalloc
from itertools import permutations

import pytest

from router.core.cache_state.engine_blocks import BLOCK_BYTES, JOIN_BLOCKS
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.prompts.block_keys import token_chain, token_root
from tests.core.cache_state.reporting import SIZE, _Engine, _gone, _ids, _keys, _stored


def test_stored_blocks_match_and_removed_ones_do_not(engine: _Engine) -> None:
    """A prompt matches as many leading blocks as are held; a hole ends the match, and is filled again."""
    engine.hears(_stored([1, 2, 3], "abc"), _stored([4], "d", parent=3))
    assert engine.depth("abcd") == 4
    assert engine.depth("abx") == 2
    engine.hears(_gone(2))
    assert engine.depth("abcd") == 1
    assert engine.ledger.blocks == 3
    engine.hears(_stored([2], "b", parent=1))
    assert engine.depth("abcd") == 4
    assert (engine.ledger.stored, engine.ledger.removed, engine.ledger.unknown_removals) == (5, 1, 0)


def test_identities_do_not_match_each_other(engine: _Engine) -> None:
    """Adapter, salt and block size make another chain of the same tokens."""
    engine.hears(_stored([1], "a"), _stored([2], "a", adapter="ad"), _stored([3], "b", salt=b"s"))
    assert engine.depth("a") == engine.depth("a", adapter="ad") == engine.depth("b", salt=b"s") == 1
    assert engine.depth("a", adapter="x") == engine.depth("b") == engine.depth("a", salt=b"s") == 0
    assert engine.masks.match(token_chain(_ids("a"), 1, token_root("", b"", 1))) == {}


def test_images_match_no_plain_prompt(engine: _Engine) -> None:
    """What sets a block apart is part of its key, and of every key behind it."""
    engine.hears(_stored([1, 2, 3], "abc", extras=(None, b"image", None)))
    assert engine.depth("abc") == 1
    engine.hears(_stored([4, 5, 6], "abc", extras=(None, b"other", None)))
    assert engine.ledger.blocks == 6
    assert len(engine.masks) == 5


def test_a_second_copy_outlives_the_first(engine: _Engine) -> None:
    """vLLM removes one physical copy at a time, SGLang stores one per extra_key: the block stays until the last."""
    engine.hears(_stored([1], "a"), _stored([1], "a"), _gone(1))
    assert engine.depth("a") == 1
    engine.hears(_gone(1))
    assert engine.depth("a") == 0
    engine.hears(_gone(1))
    assert engine.ledger.unknown_removals == 1


def test_two_hashes_of_one_key(engine: _Engine) -> None:
    """The key stays until every hash that has it is gone."""
    engine.hears(_stored([1], "a"), _stored([2], "a"), _gone(1))
    assert engine.depth("a") == 1
    engine.hears(_gone(2))
    assert engine.depth("a") == 0


def test_tiers_hold_on_their_own(engine: _Engine) -> None:
    """A block moved to the CPU's memory can be loaded until it is gone from there as well."""
    engine.hears(_stored([1, 2], "ab"), _stored([1, 2], medium="CPU"), _gone(1, 2), _gone(2, medium="EXTERNAL"))
    assert (engine.depth("ab"), engine.loads("ab")) == (0, {"cpu": 2})
    assert engine.ledger.unknown_removals == 1
    engine.hears(_gone(2, medium="CPU"))
    assert (engine.depth("ab"), engine.loads("ab")) == (0, {"cpu": 1})


def test_a_tier_may_speak_after_the_copy_is_gone(engine: _Engine) -> None:
    """The name of a removed block is kept, so a tier's event without tokens still finds its key."""
    engine.hears(_stored([1, 2], "ab"), _gone(1, 2), _stored([1, 2], medium="CPU"))
    assert engine.loads("ab") == {"cpu": 2}


def test_a_tier_that_speaks_first_is_named_later(engine: _Engine) -> None:
    """Hashes without tokens count from the moment that their tokens are known, and copies taken meanwhile are gone."""
    engine.hears(_stored([9], "z"), _stored([1, 2], medium="CPU"))
    assert engine.loads("ab") == {}
    engine.hears(_gone(2, medium="CPU"), _stored([1, 2], "ab"), _gone(1, 2))
    assert engine.loads("ab") == {"cpu": 1}


def test_a_tier_makes_no_root(engine: _Engine) -> None:
    """vLLM's offloading leaves out the salt, so a salted root must not become a plain one."""
    engine.hears(_stored([1], "a", salt=b"s"), _stored([1], "a", medium="CPU"), _stored([2], "b", medium="CPU"))
    assert engine.depth("a") == engine.depth("b") == 0
    assert engine.loads("a") == engine.loads("b") == {}
    engine.hears(_gone(1))
    assert engine.loads("a", salt=b"s") == {"cpu": 1}
    assert engine.ledger.conflicts == 0


def test_a_tier_renames_nothing(engine: _Engine) -> None:
    """A tier's event that leaves out what set the block apart does not make it a plain one."""
    engine.hears(_stored([1, 2], "ab", extras=(None, b"image")), _gone(2), _stored([2], "b", 1, medium="CPU"))
    assert (engine.ledger.blocks, engine.ledger.tiers["cpu"].blocks) == (2, 1)
    assert (engine.depth("ab"), engine.loads("ab")) == (1, {})


def test_one_hash_of_two_contents_is_credited_to_neither(engine: _Engine) -> None:
    """Older SGLang: a block under two salts has one hash, and which copy goes first is not said."""
    engine.hears(_stored([1, 2], "ab"), _stored([1, 2], "ab", salt=b"s"))
    assert engine.depth("ab") == engine.depth("ab", salt=b"s") == 0
    assert engine.ledger.conflicts == 2
    engine.hears(_gone(1, 2), _gone(1, 2), _stored([1, 2], "ab", salt=b"s"))
    assert engine.depth("ab", salt=b"s") == 2
    assert engine.depth("ab") == 0


def test_all_groups_that_matter_must_hold(engine: _Engine) -> None:
    """A model with two full-attention groups reuses what both have; windows and mamba say nothing of prefixes."""
    window = {"group": 2, "prefix": False}
    engine.hears(_stored([1, 2], "ab"), _stored([1, 2], group=2, prefix=False), _stored([3], "z", **window))
    assert engine.depth("ab") == 2
    engine.hears(_gone(1, 2, group=2))
    assert engine.depth("ab") == 2
    engine.hears(_stored([1, 2], "ab", group=1))
    assert engine.depth("ab") == 2
    engine.hears(_gone(2, group=1))
    assert engine.depth("ab") == 1
    engine.hears(_gone(2), _stored([2], "b", parent=1, group=1), _stored([5], "x"))
    assert engine.depth("ab") == 1
    assert engine.depth("x") == 0
    engine.hears(_stored([2], "b", parent=1), _stored([5], "x", group=1))
    assert engine.depth("ab") == 2
    assert engine.depth("x") == 1
    assert engine.ledger.unknown_removals == 0


def test_a_second_group_takes_credit_back_until_it_has_the_blocks(engine: _Engine) -> None:
    """What only the first group is known to hold is of no use once a second is seen."""
    engine.hears(_stored([1, 2], "ab"), _stored([1], "a", group=1))
    assert engine.depth("ab") == 1
    assert engine.ledger.blocks == 1


def test_a_tier_need_not_say_which_kind_of_group_it_is(engine: _Engine) -> None:
    """A group known not to matter does not begin to when a tier's event leaves out its kind."""
    engine.hears(_stored([1], "a"), _stored([1], group=1, prefix=False), _stored([1], group=1, medium="CPU"), _gone(1))
    assert engine.depth("a") == 0
    engine.hears(_stored([1], group=3, medium="CPU"), _stored([2], "b", 1, group=4, medium="CPU"))
    assert engine.depth("a") == 0
    engine.hears(_stored([1], "a"), _stored([9], "z", group=1))
    assert engine.depth("a") == 1


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_orphans_join_in_any_order(order: tuple[int, ...]) -> None:
    """A block whose parent is unknown waits for it, and is found whatever the order of events."""
    engine = _Engine()
    events = [_stored([1, 2], "ab"), _stored([3], "c", 2), _stored([4, 5], "de", 3), _stored([6], "f", 3)]
    for index in order:
        engine.hears(events[index])
    assert engine.depth("abcde") == 5
    assert engine.depth("abcf") == 4
    assert engine.ledger.aside == 0
    assert engine.ledger.blocks == 6


def test_many_orphans_join_a_few_at_a_time() -> None:
    """One event never keys more than about JOIN_BLOCKS of them; later events, or a quiet hour, see to the rest."""
    engine = _Engine(blocks_max=5_000, aside_max=5_000)
    engine.hears(*(_stored([n], "x", n - 1) for n in range(2, 2_002)), _stored([1], "x"))
    assert engine.ledger.blocks == 1 + JOIN_BLOCKS
    engine.hears(_gone(9_999))
    assert engine.ledger.blocks == 1 + 2 * JOIN_BLOCKS
    assert engine.ledger.attach_orphans(1)
    assert not engine.ledger.attach_orphans(5_000)
    assert engine.ledger.blocks == 2_001
    assert engine.ledger.aside == 0
    assert not engine.ledger._waiting


def test_an_orphan_is_never_a_root(engine: _Engine) -> None:
    """Its tokens match no prompt that begins with them, and it counts for nothing while it waits."""
    engine.hears(_stored([2, 3], "ab", parent=1))
    assert engine.depth("ab") == 0
    assert engine.ledger.blocks == 0
    assert engine.ledger.aside == 2
    assert len(engine.masks) == 0


def test_removals_reach_what_is_aside(engine: _Engine) -> None:
    """A block removed while it waited is not held when the parent comes; its children are keyed through it."""
    engine.hears(_stored([2, 3], "bc", parent=1), _gone(2), _stored([4], "d", parent=3), _stored([1], "a"))
    assert engine.depth("abcd") == 1
    engine.hears(_stored([2], "b", parent=1))
    assert engine.depth("abcd") == 4
    assert engine.ledger.unknown_removals == 0


def test_children_of_a_removed_block_are_keyed(engine: _Engine) -> None:
    """The parent's name is enough: nothing matches before the parent is held again."""
    engine.hears(_stored([1, 2], "ab"), _gone(2), _stored([3], "c", parent=2))
    assert engine.depth("abc") == 1
    assert engine.ledger.aside == 0
    engine.hears(_stored([2], "b", parent=1))
    assert engine.depth("abc") == 3


def test_what_is_aside_has_a_bound() -> None:
    """The oldest is dropped and counted, whole; blocks of many tokens weigh more."""
    engine = _Engine(aside_max=4)
    engine.hears(*(_stored([10 * n, 10 * n + 1], "xy", parent=10 * n - 1) for n in range(1, 5)))
    assert engine.ledger.aside == 4
    assert engine.ledger.aside_dropped == 4
    engine.hears(_stored([9], "a"), _stored([39], "b"))
    assert engine.depth("axy") == 1
    assert engine.depth("bxy") == 3
    large = _Engine(aside_max=4)
    large.hears(_stored([1], "a", parent=7, size=5 * 128))
    assert large.ledger.aside == 0
    assert large.ledger.aside_dropped == 1


def test_what_is_dropped_from_aside_is_only_what_has_no_key() -> None:
    """An event of a held block and an unknown one: the held one stays, with its two copies."""
    engine = _Engine(aside_max=1)
    engine.hears(_stored([1], "a"), _stored([1, 5], "ab", parent=77))
    assert engine.ledger.aside_dropped == 2
    engine.hears(_gone(1))
    assert engine.depth("a") == 1
    engine.hears(_gone(1))
    assert engine.depth("a") == 0


def test_blocks_have_a_bound() -> None:
    """More is not taken, the ledger is no longer complete, and a clear makes it so again."""
    engine = _Engine(blocks_max=2)
    engine.hears(_stored([1, 2, 3], "abc"), _stored([4], "d", parent=3))
    assert engine.depth("abcd") == 2
    assert engine.ledger.forgotten == 2
    assert not engine.ledger.complete
    engine.hears(_gone(1), _stored([3], "c", parent=2), _stored([1], "a"))
    assert engine.ledger.blocks == 2
    engine.hears(Cleared())
    assert engine.ledger.complete
    assert engine.depth("a") == 0


def test_what_is_shed_is_the_newest() -> None:
    """Beginnings of prompts stay; what was forgotten is not credited, whatever is removed or stored later, and the
    ledger is incomplete until a clear."""
    engine = _Engine()
    engine.hears(_stored([1, 2, 3, 4], "abcd"), _stored([4], "d", 3), _stored([9], "z", parent=8))
    before = engine.ledger.bytes_used
    engine.ledger.shed_blocks(5 * BLOCK_BYTES)  # the orphan takes three
    assert before - engine.ledger.bytes_used >= 5 * BLOCK_BYTES
    assert not engine.ledger.complete
    assert engine.ledger.aside == 0
    assert engine.ledger.blocks == engine.ledger.gpu_blocks == engine.depth("abcd") == 2
    engine.hears(_stored([4], "d", 3), _gone(4, 3))
    assert engine.depth("abcd") == 2
    engine.ledger.shed_blocks(1 << 30)
    assert engine.ledger.bytes_used == engine.ledger.gpu_blocks == engine.depth("abcd") == 0
    engine.hears(Cleared(), _stored([1], "a"))
    assert engine.ledger.complete
    assert engine.depth("a") == 1


@pytest.mark.parametrize("blocks", [30_000, pytest.param(90_000, marks=pytest.mark.long)])
def test_a_ledger_takes_no_more_than_it_says(blocks: int) -> None:
    """Filled, and after much churn: blocks, names of blocks that are gone, and orphans, by what Python allocates."""
    rng = random.Random(blocks)
    tracemalloc.start()
    try:
        engine = _Engine(*[1 << 20] * 3)
        empty = tracemalloc.get_traced_memory()[0]
        for turn in range(3):
            for _ in range(blocks // 8):
                ids, hashes = rng.randbytes(8 * 4 * SIZE), [rng.getrandbits(64) for _ in range(8)]
                engine.hears(Stored(hashes, None, ids, SIZE, "", b"", None, "GPU", 0, prefix=True))
            for _ in range(blocks // 100):
                ids, hashes = rng.randbytes(4 * 128), [rng.getrandbits(64)]
                engine.hears(Stored(hashes, rng.getrandbits(64), ids, 128, "", b"", None, "GPU", 0, prefix=True))
            taken = tracemalloc.get_traced_memory()[0] - empty
            assert engine.ledger.bytes_used / 3 < taken < engine.ledger.bytes_used
            if turn < 2:
                engine.hears(Removed(list(engine.ledger._held)[::2], "GPU", 0))
    finally:
        tracemalloc.stop()


def test_names_have_a_bound() -> None:
    """Of blocks no longer held about `names_max` names are kept, the latest; a child of an older one has to wait."""
    engine = _Engine(names_max=80)
    engine.hears(*(_stored([n], chr(n)) for n in range(1_000, 1_200)))
    engine.hears(*(_gone(n) for n in range(1_000, 1_200)))
    assert 80 <= len(engine.ledger._names) <= 90
    engine.hears(_stored([1], "a", parent=1_199), _stored([2], "b", parent=1_000))
    assert engine.ledger.aside == 1


def test_repetitions_are_no_copies() -> None:
    """Where somebody has the engine repeat what it stored, whoever that is and whenever: a store that may be such a
    repetition takes what is unknown, and is the same copy of what is held. A tier's is a copy of its own."""
    engine = _Engine(repeats=True)
    engine.hears(_stored([2], "b", parent=1))
    engine.hears(*[_stored([1, 2], "ab", again=None)] * 3, _stored([1], medium="CPU"))
    assert engine.depth("ab") == 2
    engine.hears(_gone(2))
    assert engine.depth("ab") == 1
    engine.hears(_gone(1))
    assert (engine.depth("ab"), engine.loads("ab")) == (0, {"cpu": 1})
    engine.hears(_gone(1, medium="CPU"))
    assert engine.loads("ab") == {}


@pytest.mark.parametrize(("repeats", "again", "copies"), [(True, False, 2), (False, True, 1), (False, None, 2)])
def test_what_an_engine_says_of_a_store_counts(repeats: bool, again: bool | None, copies: int) -> None:
    """A store that surely is new is a second copy, also where others may be repetitions (vLLM computes the last block
    of a prompt again each time); one that surely is a repetition never is; and where nobody asks for repetitions, one
    of which nothing is known is a copy."""
    engine = _Engine(repeats=repeats)
    engine.hears(_stored([1, 2], "ab"), _stored([2], "b", 1, again=again))
    for _ in range(copies):
        assert engine.depth("ab") == 2
        engine.hears(_gone(2))
    assert engine.depth("ab") == 1
    assert engine.ledger.unknown_removals == 0


def test_only_copies_on_the_gpu_take_room_there(engine: _Engine) -> None:
    """A second copy takes a block more and one without a key takes one too; a tier's takes none, and counts as held."""
    engine.hears(_stored([1, 2, 3], "abc"), _stored([1, 2, 3], medium="CPU"), _stored([3], "c", 2))
    engine.hears(_stored([8], "x", parent=7))
    assert (engine.ledger.blocks, engine.ledger.gpu_blocks) == (3, 5)
    engine.hears(_gone(1, 2, 3))
    assert (engine.ledger.blocks, engine.ledger.gpu_blocks) == (3, 2)
    engine.hears(_gone(3, 8), _gone(1, medium="CPU"))
    assert (engine.ledger.blocks, engine.ledger.gpu_blocks) == (2, 0)
    assert engine.ledger.tiers["cpu"].blocks == 2


def test_a_block_of_two_groups_takes_room_once(engine: _Engine) -> None:
    """The pool's tokens are told for all groups together, so what one group has and what both have take the same."""
    engine.hears(_stored([1, 2], "ab"), _stored([1], "a", group=1))
    assert engine.ledger.gpu_blocks == 2
    engine.hears(_stored([2], "b", 1, group=1))
    assert engine.ledger.gpu_blocks == 2


def test_a_tiers_chunks_do_not_set_the_block_size(engine: _Engine) -> None:
    """A tier that is heard first, in chunks of many blocks, is passed over; the GPU's blocks are what counts."""
    engine.hears(_stored([50], "p", size=16 * SIZE, medium="CPU"), _stored([51], "q", 50, size=16 * SIZE, medium="CPU"))
    assert engine.ledger.block_tokens is None
    engine.hears(_stored([1, 2], "ab"))
    assert engine.ledger.block_tokens == SIZE
    assert engine.depth("ab") == 2
    assert engine.ledger.other_size == 0
    engine.hears(_stored([52], "r", size=16 * SIZE, medium="CPU"))
    assert engine.ledger.other_size == 1
    assert engine.depth("ab") == 2


def test_another_block_size_is_not_taken(engine: _Engine) -> None:
    """Blocks of part of the usual length are counted, and nothing hangs on them."""
    engine.hears(_stored([1, 2], "ab"), _stored([3], "c", parent=2, size=1))
    assert engine.ledger.block_tokens == SIZE
    assert engine.ledger.other_size == 1
    assert engine.depth("abc") == 2
    engine.hears(Cleared(), _stored([1], "a", size=1))
    assert engine.ledger.block_tokens == 1
    assert engine.masks.match(_keys("a", size=1)) == {"r": 1}
