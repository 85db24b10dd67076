"""Clears, blocks that are expected, and any sequence of events against a plain model."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.core.cache_state import expected_blocks
from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.kv_events.batch_decoder import Cleared
from tests.core.cache_state.reporting import MANY, _Engine, _gone, _keys, _stored
from tests.support.examples import examples


def test_a_clear_takes_everything_at_once(engine: _Engine) -> None:
    """Blocks, orphans, names, expectations: none is left, and what comes after counts anew."""
    engine.hears(_stored([1, 2], "ab"), _stored([1], "a"), _stored([8], "x", parent=7), _stored([2], medium="CPU"))
    engine.ledger.expect(5, _keys("xyz"))
    engine.ledger.clear()
    assert engine.depth("ab") == engine.depth("xyz") == 0
    assert (engine.ledger.blocks, engine.ledger.aside) == (0, 0)
    engine.ledger.settle(5)
    engine.hears(_stored([3], "c", parent=2), _stored([1], "a"), _stored([7], "w"))
    assert engine.ledger.blocks == 2
    assert engine.depth("a") == 1
    engine.hears(_gone(1))
    assert engine.depth("a") == 0


def test_expected_blocks_count_until_settled(engine: _Engine) -> None:
    """A burst of one prefix finds it where the first was sent; nothing is left if nothing was computed."""
    engine.hears(_stored([1], "a"))
    engine.ledger.expect(1, _keys("abc"))
    engine.ledger.expect(2, _keys("abcd"))
    assert engine.depth("abcd") == 4
    assert engine.ledger.blocks == 1
    engine.ledger.settle(1)
    assert engine.depth("abcd") == 4
    engine.ledger.settle(2)
    engine.ledger.settle(2)
    assert engine.depth("abcd") == 1
    assert engine.ledger.holds(_keys("a")[0])


def test_a_stored_block_confirms_an_expectation(engine: _Engine) -> None:
    """From then on the engine's word counts alone: settled it stays, removed it goes, whoever still expects it."""
    engine.ledger.expect(1, _keys("ab"))
    engine.hears(_stored([1, 2], "ab"))
    engine.ledger.settle(1)
    assert engine.depth("ab") == 2
    engine.ledger.expect(2, _keys("abc"))
    engine.hears(_stored([3], "c", parent=2), _gone(3))
    assert engine.depth("abc") == 2
    engine.ledger.expect(3, _keys("abc"))
    engine.ledger.settle(2)
    assert engine.depth("abc") == 3


def test_a_long_prompt_is_confirmed_chunk_by_chunk(engine: _Engine) -> None:
    """What came is the engine's word, what did not is expected; a block that came and went is held no more, and what
    was not heard of is gone with the lease."""
    letters = "ab" * 50
    engine.ledger.expect(1, _keys(letters))
    assert engine.depth(letters) == 100
    engine.hears(_stored([*range(1, 41)], letters[:40]), _stored([*range(41, 61)], letters[40:60], parent=40))
    assert engine.depth(letters) == 100
    engine.hears(_gone(50))
    assert engine.depth(letters) == 49
    engine.hears(_stored([50], letters[49:50], parent=49), _stored([900], "x", parent=60))
    assert engine.depth(letters) == 100
    engine.ledger.settle(1)
    assert engine.depth(letters) == 60
    assert engine.ledger.blocks == 61


def test_a_lease_that_expects_again_what_went_settles_once(engine: _Engine) -> None:
    """A block that came, went and is expected by the same lease again is not held when the lease is over."""
    engine.ledger.expect(1, _keys("a"))
    engine.hears(_stored([1], "a"), _gone(1))
    engine.ledger.expect(1, _keys("a"))
    assert engine.depth("a") == 1
    engine.ledger.settle(1)
    assert engine.depth("a") == 0


def test_expectations_have_a_bound() -> None:
    """As many as blocks may be held."""
    engine = _Engine(blocks_max=2)
    engine.ledger.expect(1, _keys("abc"))
    assert engine.depth("abc") == 2


def test_two_engines_do_not_mix() -> None:
    """Each has its own bit, block size and copies, and one that goes leaves the other alone."""
    masks = HolderBitmap()
    one, two = (EngineBlocks(masks, name, blocks_max=MANY, aside_max=MANY, names_max=MANY) for name in ("one", "two"))
    one.apply(_stored([1, 2], "ab"))
    two.apply(_stored([7, 8], "ab"))
    two.apply(_gone(8))
    assert masks.match(_keys("ab")) == {"one": 2, "two": 1}
    one.clear()
    assert masks.match(_keys("ab")) == {"two": 1}
    two.close()
    one.apply(_stored([1], "a"))
    assert masks.match(_keys("ab")) == {"one": 1}
    assert "two" not in masks
    while masks.pending_sweep:
        masks.sweep(1)
    assert masks.held == len(masks) == 1


Block = tuple[int, str]  # namespace (SGLang's extra_key: other hashes, same tokens), letters from the root on


Place = tuple[str, int]


PLACES: list[Place] = [("GPU", 0), ("GPU", 1), ("CPU", 0), ("CPU", 1)]


BLOCKS = st.tuples(st.integers(0, 1), st.text("ab", min_size=1, max_size=4))


AGAIN = st.sampled_from([False, False, None, True])


def _hash(block: Block) -> int:
    return block[0] << 32 | int.from_bytes(block[1].encode(), "big")


ROOMY = (MANY, MANY, MANY)


@cache
def _key(letters: str) -> int:
    return _keys(letters)[-1]


class Machine(RuleBasedStateMachine):
    """Whatever is stored, removed, announced, expected or cleared, in whatever order parents and children come."""

    bounds = ROOMY

    @initialize(groups=st.integers(1, 2), repeats=st.booleans())
    def _begin(self, groups: int, repeats: bool) -> None:
        self.groups, self.repeats = groups, repeats
        self.engine = _Engine(*self.bounds, repeats=repeats)
        self._forget_all()

    def _forget_all(self) -> None:
        self.copies: Counter[tuple[Place, Block]] = Counter()
        self.told: set[Block] = set()  # tokens and parent were given
        self.named: set[Block] = set()
        self.opened: set[int] = set()
        self.expected: dict[str, set[int]] = {}  # letters -> leases

    def _store(self, block: Block, count: int, place: Place, with_tokens: bool, again: bool | None = False) -> None:
        medium, group = place
        if group >= self.groups:
            return
        space, letters = block
        first = max(1, len(letters) - count + 1)
        blocks = [(space, letters[:end]) for end in range(first, len(letters) + 1)]
        tokens = letters[first - 1 :] if with_tokens else ""
        parent = _hash((space, letters[: first - 1])) if first > 1 else None
        hashes = [_hash(one) for one in blocks]
        self.engine.hears(_stored(hashes, tokens, parent, medium=medium, group=group, again=again))
        if group not in self.opened:
            if medium != "GPU" or not with_tokens:
                return
            self.opened.add(group)
        for one in blocks:
            if not ((self.repeats if again is None else again) and self.copies[place, one]):
                self.copies[place, one] += 1
        if with_tokens and not (medium == "CPU" and parent is None):
            self.told.update(blocks)
        self._settle_names()

    def _settle_names(self) -> None:
        for block in sorted(self.told, key=lambda one: len(one[1])):
            space, letters = block
            # A tier's root is not told, so a parent may be missing for ever.
            if len(letters) == 1 or (space, letters[:-1]) in self.named:
                self.named.add(block)
        if self.bounds == ROOMY:
            for letters in self._useful():
                self.expected.pop(letters, None)

    def _useful(self) -> set[str]:
        return {letters for _, letters in self._useful_blocks()}

    def _useful_blocks(self, medium: str = "GPU") -> set[Block]:
        return {
            block
            for block in self.named
            if self.opened and all(self.copies[(medium, group), block] for group in self.opened)
        }

    @rule(block=BLOCKS, count=st.integers(1, 4), again=AGAIN)
    def _stored(self, block: Block, count: int, again: bool | None) -> None:
        for group in range(self.groups):
            self._store(block, count, ("GPU", group), True, again)

    @rule(block=BLOCKS, count=st.integers(1, 4), place=st.sampled_from(PLACES), with_tokens=st.booleans())
    def _stored_somewhere(self, block: Block, count: int, place: Place, with_tokens: bool) -> None:
        self._store(block, count, place, with_tokens)

    @rule(data=st.data())
    def _removed(self, data: st.DataObject) -> None:
        there = sorted(+self.copies)
        if there:
            place, block = data.draw(st.sampled_from(there))
            self.copies[place, block] -= 1
            self.engine.hears(_gone(_hash(block), medium=place[0], group=place[1]))

    @rule(block=BLOCKS, place=st.sampled_from(PLACES))
    def _removed_unheard_of(self, block: Block, place: Place) -> None:
        if not self.copies[place, block]:
            self.engine.hears(_gone(_hash(block), medium=place[0], group=place[1]))

    @rule(block=BLOCKS)
    def _window_group(self, block: Block) -> None:
        self.engine.hears(_stored([_hash(block)], group=7, prefix=False), _gone(_hash(block), group=7))

    @rule(letters=st.text("ab", min_size=1, max_size=5), lease=st.integers(1, 3))
    def _expect(self, letters: str, lease: int) -> None:
        self.engine.ledger.expect(lease, _keys(letters))
        for end in range(1, len(letters) + 1):
            if letters[:end] not in self._useful() or self.bounds != ROOMY:
                self.expected.setdefault(letters[:end], set()).add(lease)

    @rule(letters=st.text("ab", min_size=1, max_size=5), lease=st.integers(1, 3))
    def _expect_rest(self, letters: str, lease: int) -> None:
        keys, depth = _keys(letters), self.engine.depth(letters)
        self.engine.ledger.expect(lease, keys[depth:], depth)
        for end in range(depth + 1, len(letters) + 1):
            if letters[:end] not in self._useful() or self.bounds != ROOMY:
                self.expected.setdefault(letters[:end], set()).add(lease)

    @rule(lease=st.integers(1, 3))
    def _settle(self, lease: int) -> None:
        self.engine.ledger.settle(lease)
        for owners in self.expected.values():
            owners.discard(lease)
        self.expected = {letters: owners for letters, owners in self.expected.items() if owners}

    @rule()
    def _clear(self) -> None:
        self._forget_all()
        self.engine.hears(Cleared())

    def _believed(self) -> set[int]:
        """Keys with the engine's bit, the swept excepted."""
        while self.engine.masks.pending_sweep:
            self.engine.masks.sweep(7)
        masks, runs = self.engine.masks, self.engine.ledger._credit._runs
        assert sorted(map(id, runs)) == sorted(id(run) for found in masks._ahead.values() for run in found)
        bit = self.engine.ledger._credit._bit
        assert not any(masks.of.get(run.keys[0], 0) & run.bit for run in runs)
        return {key for key, mask in masks.of.items() if mask & bit}.union(*[run.keys for run in runs])

    def _loadable(self) -> set[int]:
        """Keys with the bit of the tier."""
        masks, tier = self.engine.masks, self.engine.ledger.tiers.get("cpu")
        return {key for key, mask in masks.of.items() if tier is not None and mask & tier.bit}

    @invariant()
    def _agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        truth = {_key(letters) for letters in self._useful() | set(self.expected)}
        assert self._believed() == truth
        for letters in ("aaaa", "abab", "babab"):
            keys = _keys(letters)
            assert self.engine.depth(letters) == next((n for n, key in enumerate(keys) if key not in truth), len(keys))
        ledger = self.engine.ledger
        in_tier = self._useful_blocks("CPU")
        assert ledger.blocks == len(in_tier | self._useful_blocks())
        assert self._loadable() == {_key(letters) for _, letters in in_tier}
        assert ledger._kept == len(in_tier & self._useful_blocks())
        on_gpu = sum(copies for (place, _), copies in self.copies.items() if place[0] == "GPU")
        assert ledger.gpu_blocks == -(-on_gpu // max(1, len(self.opened)))
        # The overlays hold what is rare, and nothing else.
        assert ledger._usual not in ledger._copies.values()
        assert not ledger._names.keys() & ledger._held.keys()
        assert not ledger._ripe
        assert ledger.forgotten == ledger.aside_dropped == 0


class Bounded(Machine):
    """With room for little, some is forgotten, and nothing is made up. A block that there was no room for confirms no
    expectation: that lasts until its lease is settled."""

    bounds = (5, 3, 2)

    @rule(size=st.integers(1, 4_000))
    def _shed(self, size: int) -> None:
        left = max(0, self.engine.ledger.bytes_used - size)
        self.engine.ledger.shed_blocks(size)
        assert self.engine.ledger.bytes_used <= left

    @invariant()
    def _agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        possible = {_key(letters) for letters in self._useful() | set(self.expected)}
        assert self._believed() <= possible
        assert self._loadable() <= {_key(letters) for _, letters in self._useful_blocks("CPU")}
        ledger = self.engine.ledger
        assert len(ledger._held) <= 5
        counts = [ledger._copies.get(given, ledger._usual) for given in ledger._held]
        assert ledger._gpu_copies == sum(map(ledger._on_gpu, counts))
        assert ledger.aside <= 3
        assert ledger._copies.keys() <= ledger._held.keys()


MODEL = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, phases=[Phase.reuse, Phase.generate, Phase.shrink]
)


@pytest.mark.parametrize("run_keys_min", [1, expected_blocks.RUN_KEYS_MIN])
@pytest.mark.parametrize("machine", [Machine, Bounded])
def test_model(machine: type[RuleBasedStateMachine], run_keys_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger equals a naive multiset of copies, whether prompts are expected as runs or key by key; with tight
    limits it believes no more than that."""
    monkeypatch.setattr(expected_blocks, "RUN_KEYS_MIN", run_keys_min)
    run_state_machine_as_test(machine, settings=MODEL)
