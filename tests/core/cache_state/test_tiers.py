"""Blocks behind the GPU: own memory, own files, and a store that several replicas reach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache_state.engine_blocks import TIER_PART
from router.core.cache_state.holder_bitmap import STRIDE_KEYS, HolderBitmap
from router.core.cache_state.tier_blocks import BlockStore, TierBlocks, TierMatch
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.kv_events.event_state_codec import UnreadableState
from router.core.kv_events.stream import RESTARTED
from router.core.placement.scoring import round_to_blocks
from router.core.types.placements import Confidence
from router.core.types.replicas import Load
from router.core.types.tiers import tier_of
from tests.core.cache_state.known import BLOCK, World, prompt_of
from tests.core.cache_state.reporting import _Engine, _gone, _keys, _stored

REMOTE = "STORAGE/REMOTE"
HASHES = list(range(1, 11))


def _says(world: World, replica: str, medium: str, blocks: range = range(10), *, seed: int = 0) -> None:
    """The replica has these blocks of `prompt_of(160)` there now; its engine's hashes are those of a seed."""
    prompt = prompt_of(160)
    hashes = [HASHES[n] + 1_000 * seed for n in blocks]
    parent = hashes[0] - 1 if blocks.start else None
    ids = prompt.ids[4 * BLOCK * blocks.start : 4 * BLOCK * blocks.stop]
    world.knowledge.apply(replica, Stored(hashes, parent, ids, BLOCK, "", b"", None, medium, 0, True), 0.0)


def _evicts(world: World, replica: str, medium: str = "GPU", *, seed: int = 0) -> None:
    world.knowledge.apply(replica, Removed([each + 1_000 * seed for each in HASHES], medium, 0), 0.0)


def _offloaded(medium: str = "CPU") -> World:
    """Replica `a`, which has the blocks in that tier alone."""
    world = World()
    world.join()
    _says(world, "a", "GPU")
    _says(world, "a", medium)
    _evicts(world, "a")
    return world


def _loads(world: World, replica: str) -> dict[str, int] | None:
    """Tokens of the prompt that the replica is believed to load, by tier."""
    said = world.said(prompt_of(160)).get(replica)
    return said.tiers if said is not None else None


def test_mediums_have_tiers() -> None:
    """Every name that an engine gives a medium, of today and of older releases."""
    named = ["GPU", "CPU", "CPU_PINNED", "CPU_TIER1", "STORAGE", "FS", "OBJ", "DISK", "EXTERNAL", "X", REMOTE]
    assert [tier_of(medium) for medium in named] == ["", *["cpu"] * 3, *["storage"] * 4, *["external"] * 2, "shared"]


def test_a_prompt_is_cut_where_tiers_take_over(engine: _Engine) -> None:
    """What the GPU has from the first block on, then what tiers have in a row, the quickest that has a block giving it.
    A block that only the GPU has behind that is of no use, and neither is anything behind a hole."""
    engine.hears(
        _stored([1, 2, 3, 4, 5, 6, 7], "abcdefg"),
        _stored([2, 3, 5], medium="CPU"),
        _stored([3, 4], medium="STORAGE"),
        _gone(3, 4, 5, 6),
    )
    assert (engine.depth("abcdefg"), engine.loads("abcdefg")) == (2, {"cpu": 2, "storage": 1})
    engine.hears(_stored([6], medium="CPU"))
    assert engine.loads("abcdefg") == {"cpu": 3, "storage": 1}
    engine.hears(_gone(5, medium="CPU"))
    assert engine.loads("abcdefg") == {"cpu": 1, "storage": 1}
    engine.hears(_gone(1))
    assert (engine.depth("abcdefg"), engine.loads("abcdefg")) == (0, {})


def test_chunks_that_overlap_are_counted(engine: _Engine) -> None:
    """vLLM announces shared blocks once for each chunk that has them, and takes each announcement back."""
    engine.hears(_stored([1, 2, 3], "abc"), _gone(1, 2, 3))
    engine.hears(_stored([1, 2], "ab", medium="CPU"), _stored([2, 3], "bc", 1, medium="CPU"), _gone(1, 2, medium="CPU"))
    assert engine.loads("abc") == {}
    engine.hears(_stored([1], "a", medium="CPU"))
    assert engine.loads("abc") == {"cpu": 3}
    engine.hears(_gone(2, 3, 77, medium="CPU"))
    assert engine.loads("abc") == {"cpu": 1}
    assert engine.ledger.unknown_removals == 1


def test_two_tiers_of_one_kind_count_apart(engine: _Engine) -> None:
    """Older SGLang has two kinds of CPU memory: a block is there until it has left both."""
    engine.hears(_stored([1], "a"), _stored([1], "a", medium="CPU_TIER1"), _stored([1], "a", medium="CPU_TIER2"))
    engine.hears(_gone(1), _gone(1, medium="CPU_TIER1"))
    assert engine.loads("a") == {"cpu": 1}
    engine.hears(_gone(1, medium="CPU_TIER2"))
    assert engine.loads("a") == {}


def test_what_is_on_the_gpu_and_in_a_tier_is_kept(engine: _Engine) -> None:
    """Part of the GPU's blocks that can be loaded again when they are evicted."""
    engine.hears(_stored([1, 2, 3, 4], "abcd"), _stored([1, 2, 9], medium="CPU"))
    assert engine.ledger.kept_share == 0.5
    engine.hears(_gone(1), _gone(2, medium="CPU"))
    assert engine.ledger.kept_share == 0.0
    engine.hears(Cleared())
    assert engine.ledger.kept_share == 0.0


def test_a_tier_leaves_room_for_the_gpu() -> None:
    """However much a tier has, the ledger is whole as long as there is room for all that the GPU says."""
    engine = _Engine(blocks_max=100)
    engine.hears(*(_stored([n], chr(n)) for n in range(1_000, 1_020)))
    engine.hears(*(_stored([n], chr(n), n - 1, medium="CPU") for n in range(1_020, 1_200)))
    assert len(engine.ledger._held) == int(TIER_PART * 100)
    assert engine.ledger.complete
    engine.hears(*(_stored([n], chr(n)) for n in range(2_000, 2_026)))
    assert not engine.ledger.complete


def test_files_say_what_comes_and_not_what_goes() -> None:
    """What a replica does not find in files that were believed to have it is believed no longer; memory, which says
    what goes, is believed all the same."""
    world = _offloaded("STORAGE")
    stored = world.said(prompt_of(160))["a"]
    assert stored.tiers == {"storage": 160}
    world.knowledge.tiered.drop_missing("a", stored, prompt_of(160), 64)
    assert _loads(world, "a") == {"storage": 64}
    _says(world, "a", "CPU", range(4, 8))
    world.knowledge.tiered.drop_missing("a", world.said(prompt_of(160))["a"], prompt_of(160), 64)
    assert _loads(world, "a") == {"storage": 64, "cpu": 64}


def test_a_shared_store_is_everybodys() -> None:
    """What one replica wrote every other can load that speaks of the store too, also when the writer has left; one that
    never spoke of it is credited with nothing."""
    world = World()
    for name in "abc":
        world.join(name)
        world.knowledge.tiered.serves(name, "model")
    _says(world, "a", "GPU")
    _says(world, "a", REMOTE)
    _says(world, "b", "GPU", range(1))
    assert _loads(world, "b") is None
    _says(world, "b", REMOTE, range(1))
    assert world.said(prompt_of(160))["b"].gpu_tokens == 16
    assert _loads(world, "b") == {"shared": 144}
    world.knowledge.forget("a")
    assert _loads(world, "b") == {"shared": 144}
    assert _loads(world, "c") is None


def test_a_store_is_shared_by_replicas_of_the_same_models() -> None:
    """Tokens of two models may be the same, and their blocks are not."""
    world = World()
    for name, model in (("a", "one"), ("b", "two")):
        world.join(name)
        world.knowledge.tiered.serves(name, model)
        _says(world, name, "GPU", range(10 if name == "a" else 1))
        _says(world, name, REMOTE, range(10 if name == "a" else 1))
    _evicts(world, "a")
    assert _loads(world, "a") == {"shared": 160}
    assert _loads(world, "b") is None


def test_another_seed_finds_nothing_in_the_store() -> None:
    """Two engines that name one block differently look for it under different names: the second is credited with
    nothing that the first wrote."""
    world = World()
    for name, seed in (("a", 0), ("b", 1)):
        world.join(name)
        world.knowledge.tiered.serves(name, "model")
        _says(world, name, "GPU", range(10 if name == "a" else 1), seed=seed)
        _says(world, name, REMOTE, range(10 if name == "a" else 1), seed=seed)
    assert _loads(world, "b") is None
    _says(world, "b", REMOTE, range(1), seed=1)
    assert _loads(world, "b") is None
    _evicts(world, "a")
    assert _loads(world, "a") == {"shared": 160}


def test_a_store_has_a_bound() -> None:
    """The oldest blocks are forgotten, and their keys with them."""
    masks = HolderBitmap()
    store = BlockStore(masks, "store", blocks_max=2_000)
    assert store.add(range(1, 3_001), range(1, 3_001))
    assert len(store) == len(masks) == 3_000 - 1_024
    assert store.drop([1, 3_000, None]) == 1
    store.close()
    while masks.pending_sweep:
        masks.sweep(100)
    assert not masks.of
    assert masks.held == 0


def test_nothing_is_loaded_while_a_stream_is_in_doubt() -> None:
    """A suspended stream is credited with nothing, and neither is a replica whose own word does not count."""
    world = _offloaded()
    assert _loads(world, "a") == {"cpu": 160}
    world.knowledge.suspend("a", "gap", 1.0, doubt=True)
    assert not _loads(world, "a")
    world.knowledge.resume("a", 2.0)
    assert _loads(world, "a") == {"cpu": 160}
    world.knowledge.set_untokenizable("a", "no tokenizer")
    assert not _loads(world, "a")


def test_what_is_being_loaded_counts_as_on_the_gpu() -> None:
    """The next request of the same prefix finds it there: it waits for the load that is under way, not for another."""
    world = _offloaded()
    prompt = prompt_of(160)
    world.knowledge.expect_blocks("a", 1, prompt, world.said(prompt)["a"])
    held = world.said(prompt)["a"]
    assert (held.gpu_tokens, held.tiers) == (160, None)
    world.knowledge.settle("a", 1, prompt, 1.0, computed=False)
    assert _loads(world, "a") == {"cpu": 160}


def test_tiers_are_no_matter_where_they_are_off() -> None:
    """The setting turns them off: only what GPUs hold counts."""
    world = World(tiers=False)
    world.join()
    _says(world, "a", "GPU")
    _says(world, "a", "CPU")
    _evicts(world, "a")
    assert world.held(prompt_of(160)) == {"a": 0}
    assert world.said(prompt_of(160))["a"].kept_share == 0.0


def test_a_tier_that_gives_less_is_no_drift() -> None:
    """A block may leave a tier between placement and arrival, so a count between what the GPU has and all of it says
    nothing of the stream; one below what the GPU has does."""
    world = _offloaded()
    _says(world, "a", "GPU", range(4))
    prompt = prompt_of(170)
    for actual, checks in ((64, 0), (100, 0), (160, 1), (0, 2)):
        world.knowledge.check_prediction("a", world.said(prompt)["a"], 160, actual, 170)
        assert world.knowledge.checks("a")[1] == checks


def test_counters_leave_loads_out() -> None:
    """Engines count what is loaded apart from what they find, so a window with loads is compared with nothing."""
    world = _offloaded()
    load = Load(cache_query_tokens_total=0.0, cache_hit_tokens_total=0.0)
    world.knowledge.on_probe("a", load, 0.0)
    for _ in range(600):
        world.knowledge.check_prediction("a", world.said(prompt_of(160))["a"], 144, None, 160)
    world.knowledge.on_probe("a", Load(cache_query_tokens_total=96_000.0, cache_hit_tokens_total=0.0), 1.0)
    assert world.resyncs == []


@given(data=st.data(), tiers=st.integers(1, 3), blocks=st.integers(0, 3 * STRIDE_KEYS))
def test_a_walk_finds_what_a_plain_loop_finds(data: st.DataObject, tiers: int, blocks: int) -> None:
    """Whatever tiers hold of a prompt, wherever its strides begin and end, and from whatever depth."""
    masks, keys = HolderBitmap(), list(range(1, blocks + 1))
    stores = [TierBlocks(masks, f"tier {n}") for n in range(tiers)]
    held = [data.draw(st.sets(st.sampled_from(keys), max_size=8)) if keys else set() for _ in stores]
    whole = data.draw(st.booleans())
    for store, gone in zip(stores, held, strict=True):
        for key in keys if whole else ():
            if key not in gone:
                store.add(key)
        for key in () if whole else gone:
            store.add(key)
    depth = data.draw(st.integers(0, blocks))
    expected = [0] * tiers
    for key in keys[depth:]:
        having = [n for n, store in enumerate(stores) if masks.of.get(key, 0) & store.bit]
        if not having:
            break
        expected[having[0]] += 1
    found = TierMatch(masks, keys).count_following(depth, [store.bit for store in stores])
    assert found == expected


def test_a_ledger_without_tiers_has_nothing_of_theirs(engine: _Engine) -> None:
    """A block that no tier has costs what it did: one entry in the ledger, one in the map."""
    engine.hears(_stored([1, 2], "ab"))
    assert not engine.ledger.tiers
    assert not engine.ledger._copies
    assert list(engine.masks.of) == _keys("ab")


def _restored(world: World, *, tiers: bool = True) -> World:
    """A router that goes on from what another one knew of replica `a`."""
    other, shape = World(tiers=tiers), world.knowledge.shape("a")
    assert shape is not None
    other.knowledge.set_untokenizable("a", "")
    other.knowledge.reset_to("a", shape)
    for page in world.knowledge.pages("a"):
        other.knowledge.import_page("a", page)
    other.knowledge.grade("a", Confidence.EXACT, "gone on", 0.0)
    return other


def test_a_restored_replica_is_credited_with_the_medium_that_has_a_block() -> None:
    """What only the CPU's memory has is loaded, as before: it is not on the GPU, and not lost until more is said of it.
    What files are believed to have is left out, as nobody says what went meanwhile."""
    world = World()
    world.join()
    _says(world, "a", "GPU")
    _says(world, "a", "CPU", range(6))
    _says(world, "a", "STORAGE")
    _evicts(world, "a")
    assert _loads(world, "a") == {"cpu": 96, "storage": 64}
    other = _restored(world)
    assert (other.held(prompt_of(160)), _loads(other, "a")) == ({"a": 96}, {"cpu": 96})
    _says(other, "a", "GPU", range(2))
    assert (other.held(prompt_of(160)), _loads(other, "a")) == ({"a": 96}, {"cpu": 64})
    _evicts(other, "a", "CPU")
    assert _loads(other, "a") is None


def test_a_router_without_tiers_takes_no_copies_of_them_over() -> None:
    """It would not hear when they go."""
    world = World()
    world.join()
    _says(world, "a", "GPU")
    _says(world, "a", "CPU")
    with pytest.raises(UnreadableState, match=r"tiers\.enabled"):
        _restored(world, tiers=False)


def test_a_whole_prompt_is_loaded_once_an_answer_showed_it() -> None:
    """An engine that counted all blocks of a prompt as cached, as vLLM does where the last one is in a tier, is
    believed to do so again, until it does not."""
    world = World()
    world.join()
    _says(world, "a", "GPU")
    _says(world, "a", "CPU", range(8, 10))

    def said(tokens: int = 160) -> tuple[int, int, bool]:
        found = world.said(prompt_of(tokens))["a"]
        return found.tokens, found.gpu_tokens, found.whole

    tiered = world.knowledge.tiered
    assert said() == (160, 160, False)
    tiered.check_last_block("a", BLOCK, 160, 144, 144)
    assert said() == (160, 160, False)
    tiered.check_last_block("a", BLOCK, 160, 144, 160)
    assert said() == (160, 144, True)
    assert said(170) == (160, 160, False)
    assert said(128) == (128, 128, False)
    tiered.check_last_block("a", BLOCK, 160, 160, 96)
    assert said() == (160, 144, True)
    tiered.check_last_block("a", BLOCK, 160, 160, 144)
    assert said() == (160, 160, False)
    tiered.check_last_block("a", BLOCK, 160, 144, 160)
    world.knowledge.clear("a", f"{RESTARTED}: by its metrics", 1.0)
    assert not world.knowledge.tiered.replicas["a"].whole
    assert [
        round_to_blocks(160, 160, BLOCK),
        round_to_blocks(160, 160, BLOCK, whole=True),
        round_to_blocks(160, 168, BLOCK),
    ] == [144, 160, 160]
