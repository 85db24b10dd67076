"""PrefixIndex against a naive model of its documented semantics: the two must agree after every step."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.cache_state import prefix_index
from router.core.cache_state.lru import PrefixLru, Touch
from router.core.cache_state.prefix_index import HELD_BYTES, KEY_BYTES, RENEWS_MAX, PrefixIndex
from tests.compiled import COMPILED

SWEEP_KEYS = prefix_index.SWEEP_KEYS if COMPILED else 16  # small, so that departed holders are purged in several goes
EVICT_KEYS = 64  # evicted at a time where the byte budget is exceeded
NAMES = st.sampled_from("abcd")
SEGMENTS = (4, 30, 2, 45)  # blocks of a tree's levels; two children a node
PATHS = st.tuples(*[st.integers(0, 1)] * len(SEGMENTS))


def keys_of(path: tuple[int, ...], length: int) -> list[int]:
    """The first `length` keys on the way from the root to one leaf; paths share keys where they share a prefix."""
    keys = []
    for depth, blocks in enumerate(SEGMENTS):
        node = int("1" + "".join(map(str, path[: depth + 1])), 2)
        keys += [node * 1_000 + block for block in range(blocks)]
    return keys[:length]


PROMPTS = st.builds(keys_of, PATHS, st.integers(0, sum(SEGMENTS)))
PROBES = [keys_of(path, sum(SEGMENTS)) for path in [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 1)]]


def live_keys(recency: PrefixLru, id_: int) -> list[tuple[int, Touch]]:
    """The keys that a touch owns, in the order of their eviction."""
    touch = recency.touches[id_]
    return [(key, touch) for key in reversed(touch.keys) if recency.owner.get(key) == id_]


@dataclass
class _NaivePin:
    """An open lease."""

    use: int
    keys: list[int]


@dataclass
class _NaiveHolder:
    """`last` maps each block to (use, minus its place in the prompt, time): least recent first, leaf first.
    `vouched` counts the leases that vouch for blocks under way; `proven` is what was ever computed."""

    blocks_max: int
    last: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    pins: dict[int, _NaivePin] = field(default_factory=dict)
    vouched: Counter[int] = field(default_factory=Counter)
    proven: set[int] = field(default_factory=set)


class _NaiveIndex:
    """Everything by exhaustive search."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.holders: dict[str, _NaiveHolder] = {}
        self.dying: list[list[int]] = []
        self.uses = 0
        self.now_s = 0.0

    def bytes_used(self) -> int:
        held = self.held()
        return KEY_BYTES * len(set(held)) + HELD_BYTES * len(held)

    def held(self) -> list[int]:
        """Every block once per holder, the departed included."""
        return [key for keys in [*(h.last for h in self.holders.values()), *self.dying] for key in keys]

    def computed(self, holder: _NaiveHolder, keys: Sequence[int], now_s: float) -> None:
        self.use(holder, keys, now_s)
        holder.proven |= set(keys)
        for key in keys:
            del holder.vouched[key]

    def use(self, holder: _NaiveHolder, keys: Sequence[int], now_s: float) -> None:
        self.uses += 1
        self.now_s = now_s
        holder.last.update({key: (self.uses, -place, now_s) for place, key in enumerate(keys)})

    def fit(self, holder: _NaiveHolder) -> None:
        self.shrink(holder, holder.blocks_max)
        while self.bytes_used() > self.bytes_max:
            if self.dying:
                self.sweep(SWEEP_KEYS * 8)
                continue
            oldest = min((h for h in self.holders.values() if h.last), key=lambda h: min(h.last.values())[2])
            self.shrink(oldest, max(0, len(oldest.last) - EVICT_KEYS), pinned_too=True)

    def shrink(self, holder: _NaiveHolder, blocks_max: int, *, pinned_too: bool = False) -> None:
        renewed: set[int] = set()
        while len(holder.last) > blocks_max:
            victim = min(holder.last, key=lambda key: holder.last[key])
            lease = min(holder.pins, key=lambda lease: holder.pins[lease].use, default=None)
            if pinned_too or lease is None or holder.pins[lease].use > holder.last[victim][0]:
                del holder.last[victim]
                continue
            if lease in renewed or len(renewed) == RENEWS_MAX:
                return
            pin = holder.pins[lease]
            self.use(holder, list(takewhile(holder.last.__contains__, pin.keys)), self.now_s)
            pin.use = self.uses
            renewed.add(lease)

    def sweep(self, keys_max: int) -> None:
        while self.dying and keys_max > 0:
            purged = min(keys_max, len(self.dying[0]))
            del self.dying[0][len(self.dying[0]) - purged :]
            keys_max -= purged
            if not self.dying[0]:
                del self.dying[0]

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        depths = {}
        for name, holder in self.holders.items():
            depth = next((d for d, key in enumerate(keys) if key not in holder.last), len(keys))
            if depth:
                depths[name] = depth
        return depths


class _PrefixMachine(RuleBasedStateMachine):
    """Every public change, in any order, on both."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_index, "SWEEP_KEYS", SWEEP_KEYS)  # of compiled code this would change nothing
        self.leases: list[tuple[str, int]] = []  # open, whether their holders still know of them or not

    @initialize(pairs_max=st.sampled_from([70, 150, 400, 10_000]), drops=st.booleans())
    def start(self, pairs_max: int, drops: bool) -> None:
        self.drops = drops
        self.closed = not drops and pairs_max == 10_000  # nothing but LRU order takes blocks away
        bytes_max = pairs_max * (KEY_BYTES + HELD_BYTES)
        self.index, self.naive, self.now_s, self.next_lease = PrefixIndex(bytes_max), _NaiveIndex(bytes_max), 0.0, 0
        for name in "ab":
            self.add(name, 100)

    def teardown(self) -> None:
        self.patch.undo()

    def tick(self) -> float:
        self.now_s += 1.0
        return self.now_s

    @rule(name=NAMES, blocks_max=st.integers(1, 250))
    def add(self, name: str, blocks_max: int) -> None:
        self.index.add(name, blocks_max)
        holder = self.naive.holders.setdefault(name, _NaiveHolder(blocks_max))
        holder.blocks_max = blocks_max
        self.naive.fit(holder)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.index.remove(name)
        holder = self.naive.holders.pop(name, None)
        if holder:
            self.naive.dying.append(list(holder.last))

    def known(self, name: str) -> _NaiveHolder:
        if name not in self.naive.holders:
            self.add(name, 100)
        return self.naive.holders[name]

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        blocks_max = self.known(name).blocks_max
        self.index.clear(name)
        self.naive.dying.append(list(self.naive.holders.pop(name).last))
        self.naive.holders[name] = _NaiveHolder(blocks_max)

    @rule(name=NAMES, blocks_max=st.integers(1, 250))
    def resize(self, name: str, blocks_max: int) -> None:
        holder = self.known(name)
        self.index.resize(name, blocks_max)
        holder.blocks_max = blocks_max
        self.naive.fit(holder)

    @rule(name=NAMES, keys=PROMPTS)
    def touch(self, name: str, keys: list[int]) -> None:
        holder, now_s = self.known(name), self.tick()
        self.index.touch(name, keys, now_s)
        self.naive.sweep(SWEEP_KEYS)
        self.naive.computed(holder, keys, now_s)
        self.naive.fit(holder)

    @rule(name=NAMES, keys=PROMPTS)
    def pin(self, name: str, keys: list[int]) -> None:
        holder, now_s, lease = self.known(name), self.tick(), self.next_lease
        self.next_lease += 1
        self.leases.append((name, lease))
        self.index.pin(name, lease, list(keys), now_s)
        self.naive.sweep(SWEEP_KEYS)
        holder.vouched.update(key for key in keys if key not in holder.last or key in holder.vouched)
        self.naive.use(holder, keys, now_s)
        holder.pins[lease] = _NaivePin(self.naive.uses, keys)
        self.naive.fit(holder)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), path=PATHS, blocks=st.integers(1, 50))
    def extend(self, data: st.DataObject, path: tuple[int, ...], blocks: int) -> None:
        """The prompt of an open lease has more blocks than it was pinned with."""
        name, lease = data.draw(st.sampled_from(self.leases))
        holder = self.naive.holders.get(name)
        pin = holder.pins.get(lease) if holder else None
        known, whole = pin.keys if pin else [], keys_of(path, sum(SEGMENTS))
        if known != whole[: len(known)]:
            return
        more, now_s = whole[len(known) : len(known) + blocks], self.tick()
        self.index.extend(name, lease, more, now_s)
        if holder and pin:
            lost = [key for key in known if key not in holder.last and key not in holder.vouched]
            holder.vouched.update([*lost, *(key for key in more if key not in holder.last or key in holder.vouched)])
            pin.keys = [*known, *more]
            self.naive.use(holder, pin.keys, now_s)
            del holder.pins[lease]
            holder.pins[lease] = pin
            pin.use = self.naive.uses
            self.naive.fit(holder)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), answer_blocks=st.integers(0, 9))
    def unpin(self, data: st.DataObject, answer_blocks: int) -> None:
        """Ends one lease well; its holder may be gone, or have forgotten it."""
        name, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        now_s, holder = self.tick(), self.naive.holders.get(name)
        grown = [10**9 + lease * 100 + block for block in range(answer_blocks)]
        self.index.unpin(name, lease, now_s, grown=grown)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder and pin:
            self.naive.computed(holder, [*pin.keys, *grown], now_s)
            self.naive.fit(holder)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """A failed request takes back what only it vouched for."""
        name, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        holder = self.naive.holders.get(name)
        self.index.retract(name, lease)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder and pin:
            for key in holder.vouched.keys() & set(pin.keys):
                holder.vouched[key] -= 1
                if not holder.vouched[key]:
                    del holder.vouched[key]
                    holder.last.pop(key, None)
            self.naive.fit(holder)

    @precondition(lambda self: self.drops)
    @rule(name=NAMES, keys=PROMPTS, rng=st.randoms(use_true_random=False))
    def drop(self, name: str, keys: list[int], rng: random.Random) -> None:
        """Blocks out of the middle of prefixes, in any order, known or not."""
        holder = self.known(name)
        gone = [*rng.sample(keys, len(keys) // 3), 7]
        assert self.index.drop(name, gone) == len(holder.last.keys() & set(gone))
        holder.last = {key: last for key, last in holder.last.items() if key not in gone}
        holder.proven -= set(gone)

    @rule(keys_max=st.integers(0, 60))
    def sweep(self, keys_max: int) -> None:
        self.naive.sweep(keys_max)
        assert self.index.sweep(keys_max) == sum(map(len, self.naive.dying))

    @invariant()
    def answers_agree(self) -> None:
        for keys in PROBES:
            assert self.index.match(keys) == self.naive.match(keys)
        for name, holder in self.naive.holders.items():
            assert self.index.blocks(name) == len(holder.last)
            assert self.index.capacity(name) == holder.blocks_max
            assert all(self.index.holds(name, keys[9]) == (keys[9] in holder.last) for keys in PROBES)
            pinned = {pin.use for pin in holder.pins.values()}
            uses = Counter((last[0], last[2]) for last in holder.last.values() if last[0] not in pinned)
            oldest = [(uses[use], use[1]) for use in sorted(uses)]
            assert self.index.holders[name].next_out(3) == oldest[:3]

    @invariant()
    def limits_hold(self) -> None:
        assert self.index.bytes_used == self.naive.bytes_used() <= self.index.bytes_max
        assert self.index.keys == len(set(self.naive.held()))
        for name, holder in self.index.holders.items():
            pins = self.naive.holders[name].pins
            pinned = {key for pin in pins.values() for key in pin.keys}
            full = len(holder.recency) > holder.blocks_max
            assert not full or holder.recency.owner.keys() <= pinned or len(pins) > RENEWS_MAX

    @invariant()
    def books_balance(self) -> None:
        index = self.index
        assert index._masks.held == len(self.naive.held()) == sum(mask.bit_count() for mask in index._masks.of.values())
        for name, holder in index.holders.items():
            recency, naive = holder.recency, self.naive.holders[name]
            assert list(recency.owner) == list(naive.last)
            assert Counter(recency.owner.values()) == {id_: touch.live for id_, touch in recency.touches.items()}
            assert all(len(touch.keys) <= 2 * touch.live for touch in recency.touches.values())
            order = [(key, touch.at_s) for id_ in recency.order.values() for key, touch in live_keys(recency, id_)]
            assert order == [(key, last[2]) for key, last in sorted(naive.last.items(), key=itemgetter(1))]
            if self.closed:
                for path in PROBES:
                    held = [key in recency.owner for key in path]
                    assert held == sorted(held, reverse=True), "a block is held without its prefix"

    @invariant()
    def nothing_is_believed_that_no_lease_proved(self) -> None:
        for name, holder in self.naive.holders.items():
            pinned = {key for pin in holder.pins.values() for key in pin.keys}
            assert self.index.holders[name].recency.owner.keys() <= holder.proven | pinned
            assert self.index.holders[name].unproven.counts() == holder.vouched
            assert holder.vouched.keys() <= pinned

    @invariant()
    def the_departed_leave_nothing(self) -> None:
        if not self.naive.dying:
            assert all(mask & ~self.index._masks._seen == 0 for mask in self.index._masks.of.values())
            assert len(self.index._masks._names) == len(self.naive.holders)


TestPrefixModel = _PrefixMachine.TestCase
TestPrefixModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
