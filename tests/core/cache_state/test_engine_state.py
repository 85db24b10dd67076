"""What one engine holds, made into pages and taken in by another process (core/kv_events/event_state_codec.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import TierMatch
from router.core.kv_events.batch_decoder import Cleared, Event, Removed, Stored
from router.core.kv_events.event_state_codec import BlockPage, CopyPage, EngineShape, UnreadableState, pack_numbers
from router.core.prompts.block_keys import token_chain, token_root
from router.core.types.placements import Confidence

SIZE, PROMPTS, BLOCKS = 4, 4, 12
MEDIA = ("GPU", "CPU")


def ids(prompt: int, blocks: int) -> bytes:
    """Token ids of a prompt: of each two prompts the first half is the same."""
    shared = [prompt // 2 * 1_000 + n for n in range(BLOCKS // 2 * SIZE)]
    own = [50_000 + prompt * 1_000 + n for n in range(BLOCKS // 2 * SIZE)]
    return b"".join(n.to_bytes(4, "little") for n in (shared + own)[: blocks * SIZE])


def keys(prompt: int) -> list[int]:
    """Keys of the whole prompt."""
    return token_chain(ids(prompt, BLOCKS), SIZE, token_root("", b"", SIZE))


def name(prompt: int, block: int) -> int:
    """The engine's name of a block."""
    return 1 + (prompt // 2 if block < BLOCKS // 2 else 10 + prompt) * 100 + block


def stored(prompt: int, start: int, blocks: int, medium: str, group: int) -> Stored:
    """Blocks of a prompt from there on."""
    names = [name(prompt, n) for n in range(start, start + blocks)]
    parent = name(prompt, start - 1) if start else None
    tokens = ids(prompt, start + blocks)[start * SIZE * 4 :]
    return Stored(names, parent, tokens, SIZE, "", b"", None, medium, group, prefix=True)


def behind(blocks: EngineBlocks, masks: HolderBitmap, prompt: int) -> list[int]:
    """How many blocks of a prompt each tier gives behind what the GPU has."""
    depth = masks.match(keys(prompt)).get("e", 0)
    return TierMatch(masks, keys(prompt)).count_following(depth, [bit for _, bit in blocks.tier_bits()])


numbers = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear"]),
    st.integers(0, PROMPTS - 1),
    st.integers(0, BLOCKS - 1),
    st.integers(1, BLOCKS),
    st.sampled_from(MEDIA),
    st.integers(0, 1),
)


def event(what: str, prompt: int, start: int, blocks: int, medium: str, group: int) -> Event:
    """One of all that may be said."""
    if what == "clear":
        return Cleared()
    blocks = min(blocks, BLOCKS - start)
    if what == "remove":
        return Removed([name(prompt, n) for n in range(start, start + blocks)], medium, group)
    return stored(prompt, 0, start + blocks, medium, group)


def engine(masks: HolderBitmap) -> EngineBlocks:
    """An engine's blocks, of which there may be many."""
    return EngineBlocks(masks, "e", blocks_max=1_000, aside_max=100, names_max=1_000)


def copied(blocks: EngineBlocks) -> tuple[EngineBlocks, HolderBitmap]:
    """The same in another process."""
    masks = HolderBitmap()
    other = engine(masks)
    shape = blocks.shape(hybrid=False)
    if shape is not None:
        other.reset_to(shape)
        for page in blocks.pages():
            other.import_page(page)
    return other, masks


@given(st.lists(numbers, max_size=20), st.lists(numbers, max_size=12))
def test_another_process_goes_on_as_this_one_would(before: list[tuple], after: list[tuple]) -> None:  # type: ignore[type-arg]  # of `numbers`
    """Whatever was said before and is said after, second copies, tiers and groups of layers included: every prompt
    matches as deep on the GPU and behind it, and the pool is as full. Where blocks had no key yet, none matches deeper.
    """
    masks = HolderBitmap()
    one = engine(masks)
    for each in before:
        one.apply(event(*each))
    two, others = copied(one)
    if None in one._held.values():
        _no_deeper(one, two, masks, others, after)
        return
    for each in [None, *after]:
        if each is not None:
            one.apply(event(*each))
            two.apply(event(*each))
        assert (two.blocks, two.gpu_blocks, two.complete) == (one.blocks, one.gpu_blocks, one.complete)
        assert two.shape(hybrid=False) == one.shape(hybrid=False)
        assert (two.tier_blocks(), two.kept_share) == (one.tier_blocks(), one.kept_share)
        for prompt in range(PROMPTS):
            assert others.match(keys(prompt)) == masks.match(keys(prompt))
            assert behind(two, others, prompt) == behind(one, masks, prompt)


def _no_deeper(
    one: EngineBlocks, two: EngineBlocks, masks: HolderBitmap, others: HolderBitmap, after: list[tuple]
) -> None:  # type: ignore[type-arg]  # likewise
    for each in after:
        one.apply(event(*each))
        two.apply(event(*each))
        for prompt in range(PROMPTS):
            assert others.match(keys(prompt)).get("e", 0) <= masks.match(keys(prompt)).get("e", 0)


def test_blocks_that_wait_for_their_parent_are_left_out() -> None:
    """They have no key yet, and are credited to nobody."""
    one = engine(HolderBitmap())
    one.apply(stored(0, 0, 3, "GPU", 0))
    one.apply(stored(2, 4, 3, "GPU", 0))
    two, masks = copied(one)
    assert two.blocks == one.blocks == 3
    assert masks.match(keys(2)) == {}


def test_changes_between_two_pages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied is what is held at one moment, or an error."""
    monkeypatch.setattr("router.core.cache_state.engine_blocks.PAGE_BLOCKS", 2)
    one = engine(HolderBitmap())
    one.apply(stored(0, 0, 8, "GPU", 0))
    pages = one.pages()
    next(pages)
    one.shed_blocks(1)
    with pytest.raises(RuntimeError):
        list(pages)


@pytest.mark.parametrize(
    "shape",
    [
        EngineShape(SIZE, True, False, [("CPU", 0)], []),
        EngineShape(SIZE, True, False, [("GPU", 0), ("GPU", 0)], []),
        EngineShape(SIZE, True, False, [("GPU", 0), ("CPU", 1)], []),
        EngineShape(SIZE, True, False, [("GPU", 0), ("STORAGE", 0)], []),
        EngineShape(SIZE, True, False, [("GPU", 0), ("STORAGE/REMOTE", 0)], []),
    ],
)
def test_places_that_cannot_be_are_refused(shape: EngineShape) -> None:
    """A group of layers has its place on the GPU first, and each place is there once. Copies in files are not counted:
    an older release did, and would be believed for ever."""
    with pytest.raises(UnreadableState):
        engine(HolderBitmap()).reset_to(shape)


@pytest.mark.parametrize(
    "page",
    [
        BlockPage(pack_numbers([1]), pack_numbers([1, 2])),
        BlockPage(b"123", b"123"),
        BlockPage(bytes(8 * 100_000), bytes(8 * 100_000)),
        CopyPage(pack_numbers([7]), b""),
        CopyPage(pack_numbers([7]), (1 << 300).to_bytes(64, "little")),
        CopyPage(pack_numbers([7]), bytes(64)),
    ],
)
def test_pages_that_nobody_has_made_are_refused(page: BlockPage | CopyPage) -> None:
    """One error, and no other."""
    one = engine(HolderBitmap())
    one.reset_to(EngineShape(SIZE, True, False, [("GPU", 0)], []))
    with pytest.raises(UnreadableState):
        one.import_page(page)


def test_blocks_that_are_there_twice_cost_the_grade() -> None:
    """A page that cannot be true leaves too little credit, and is not called complete."""
    one = engine(HolderBitmap())
    one.reset_to(EngineShape(SIZE, True, False, [("GPU", 0)], []))
    one.import_page(BlockPage(pack_numbers([7, 7]), pack_numbers([1, 2])))
    assert not one.complete


def test_what_has_drifted_is_not_handed_on() -> None:
    """Events whose predictions did not come true are no good for another process either."""
    known = EventIndex(
        blocks_max=100,
        aside_max=10,
        names_max=10,
        graded=lambda *_: None,
        resync=lambda _: None,
        restarted=lambda _: None,
    )
    known.set_untokenizable("e", "")
    known.apply("e", stored(0, 0, 8, "GPU", 0), 0.0)
    known.grade("e", Confidence.EXACT, "joined at batch 0", 0.0)
    assert known.shape("e") is not None
    known._get_or_create("e").distrust("it counted otherwise", 1.0)
    assert known.shape("e") is None
