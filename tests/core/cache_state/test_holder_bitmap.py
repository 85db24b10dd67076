"""Who holds what, with and without remembered strides."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.cache_state.holder_bitmap import STRIDE_KEYS, HolderBitmap
from tests.support.examples import examples

STRIDES = 4
KEYS = [10_000 + n for n in range(STRIDES * STRIDE_KEYS + 5)]
FORK_AT = (0, STRIDE_KEYS, STRIDE_KEYS + 7, 2 * STRIDE_KEYS - 1)
FORKS = [[*KEYS[:at], *range(50_000 + 1_000 * at, 50_000 + 1_000 * at + 2 * STRIDE_KEYS)] for at in FORK_AT]
NAMES = ("a", "b", "c")


class MasksModel(RuleBasedStateMachine):
    """Masks that remember few strides, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = HolderBitmap(strides_max=3)
        self.bits: dict[str, int] = {}
        self.held: dict[str, set[int]] = {}
        self.hidden: set[str] = set()

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """A holder comes."""
        if name not in self.bits:
            self.bits[name], self.held[name] = self.masks.add(name), set()

    @precondition(lambda self: self.bits)
    @rule(data=st.data(), keys=st.sampled_from([KEYS, *FORKS]), upto=st.integers(0, len(KEYS)))
    def store(self, data: st.DataObject, keys: list[int], upto: int) -> None:
        """It gets the beginning of a prompt."""
        name = data.draw(st.sampled_from(sorted(self.bits)))
        for key in keys[:upto]:
            if key not in self.held[name]:
                self.masks.set(self.bits[name], key)
                self.held[name].add(key)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """It loses a key, wherever in a prefix."""
        name = data.draw(st.sampled_from(sorted(name for name in self.bits if self.held[name])))
        key = data.draw(st.sampled_from(sorted(self.held[name])))
        self.masks.unset(self.bits[name], key)
        self.held[name].discard(key)

    @precondition(lambda self: self.bits)
    @rule(data=st.data(), sweep=st.integers(0, 500))
    def leave(self, data: st.DataObject, sweep: int) -> None:
        """It is gone; its bit may be somebody else's when its keys are purged."""
        name = data.draw(st.sampled_from(sorted(self.bits)))
        self.masks.remove(name, self.held.pop(name))
        del self.bits[name]
        self.hidden.discard(name)
        self.masks.sweep(sweep)

    @precondition(lambda self: self.bits)
    @rule(data=st.data())
    def hide_or_show(self, data: st.DataObject) -> None:
        """It is not looked at for a while."""
        name = data.draw(st.sampled_from(sorted(self.bits)))
        if name in self.hidden:
            self.masks.show(name)
        else:
            self.masks.suspend_holder(name)
        self.hidden ^= {name}

    @rule(keys=st.sampled_from([KEYS, *FORKS]))
    def remember(self, keys: list[int]) -> None:
        """A prompt will be asked for again."""
        self.masks.remember(keys)

    @rule()
    def remember_some(self) -> None:
        """Something else is done, and a little of what was asked for with it."""
        self.masks.remember_some()

    @invariant()
    def the_walk_is_right(self) -> None:
        """Every prompt's longest prefix, for every visible holder."""
        for keys in (KEYS, *FORKS):
            want = {}
            for name in self.bits.keys() - self.hidden:
                depth = next((n for n, key in enumerate(keys) if key not in self.held[name]), len(keys))
                if depth:
                    want[name] = depth
            assert self.masks.match(keys) == want
        assert len(self.masks._strides) <= 3


TestMasks = MasksModel.TestCase
TestMasks.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
