"""Blocks that one engine reports as stored: a map from the engine's block hashes to our keys.

An engine names a block by a hash that is opaque to us. A prompt is looked up by our own keys, chained over its token
ids (blocks.token_chain). A Stored event carries both the hash and the tokens, so every hash gets its key here. The
key's bit in `HolderBitmap` is set while the engine holds the block:

    Stored(h7, child of h6, tokens)    key(h7) = xxh3(tokens, seed=key(h6))    held[h7] = key, bit set
    Removed(h7)                        one copy less. After the last one only the name h7 -> key is kept

The bit is for the GPU; each tier below it has its own bit (tier_blocks.py).

Rare cases are kept in separate tables, so that a common block costs one entry here and one in `HolderBitmap`:

* Copies. An engine can store a block twice, in GPU and CPU memory or for two groups of layers, and it removes each copy
  separately. Copies are counted per place (medium, group) in one integer with 16 bits for each place. A block with the
  usual copies, one on the GPU for each group, has no entry. A block is usable while every group has a copy. A block
  that only a tier has counts as held too, but only copies on the GPU use blocks of the KV pool.
* Orphans. A block with an unknown parent cannot get a key. It is set aside with its copies counted, and gets its key
  when the parent gets one. It is never taken for a root.
* Expectations, and several blocks of one key: see expected_blocks.py.

Entries dropped at a limit belong to blocks that the engine does hold, so errors always give too little credit.

This state machine is in one file on purpose. Nearly every event changes blocks, copies and orphans together, and an
engine sends thousands of events a second. Another object between them would cost each event a lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import cast

from xxhash import xxh3_64_intdigest

from router.core.cache_state.chunk_width import ChunkWidth
from router.core.cache_state.event_lag import PendingTails
from router.core.cache_state.expected_blocks import BlockAccounting
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import BlockStore, TierBlocks
from router.core.kv_events.batch_decoder import Event, Removed, Stored
from router.core.kv_events.event_state_codec import (
    COUNT_BYTES,
    PAGE_BLOCKS,
    BlockPage,
    CopyPage,
    EngineShape,
    Page,
    UnreadableState,
    pack_numbers,
)
from router.core.prompts.block_keys import token_chain, token_root
from router.core.types.tiers import GPU, SHARED, STORAGE, TIERS, UNREPORTED, tier_of

PLACES_MAX = 32  # (medium, group) pairs
GROUPS_MAX = 64  # groups remembered as not covering a whole prefix
ASIDE_BLOCK_BYTES = 512  # an orphan with blocks of more than 128 tokens counts as several
JOIN_BLOCKS = 512  # orphans that get their keys with one event, in about a millisecond
TRIM_KEYS = 1024  # names forgotten at a time: finding the oldest entry of a dict costs a scan
# Upper bounds, for tables that have just grown; tests/core measures them with tracemalloc (CPython 3.11).
BLOCK_BYTES = 320  # one held block: two table slots, hash, key, mask
NAME_BYTES = 192  # one name of a block that is no longer held
ORPHAN_BYTES = 640  # one block set aside, or ASIDE_BLOCK_BYTES of tokens
COPY_BYTES = 160  # one block with unusual copies: a table slot, and its hash again
TIER_PART = 0.75  # fill level up to which blocks held only by a tier are taken: the GPU's have priority

_COUNT_BITS = 16
_COUNT = (1 << _COUNT_BITS) - 1
_NOT_HELD = -1  # no key


class EngineBlocks:
    """The blocks of one engine under its name in `masks`.

    - `blocks_max`: maximum number of held blocks.
    - `aside_max`: maximum number of held blocks without a key.
    - `names_max`: approximate number of names kept for blocks that are no longer held.
    - `repeats`: the engine can be asked to publish its stored blocks again (see replay_trigger.py). A Stored event that
      can be such a repetition then adds no second copy in the same place. If it was a second copy after all, the block
      counts as removed with the first one. That is too little credit; the opposite error would leave credit forever.
    """

    def __init__(
        self, masks: HolderBitmap, name: str, *, blocks_max: int, aside_max: int, names_max: int, repeats: bool = False
    ) -> None:
        self._blocks_max, self._aside_max, self._names_max = blocks_max, aside_max, names_max
        self._repeats = repeats
        self.tails = PendingTails()
        self._slack = max(1, min(TRIM_KEYS, names_max // 8))
        self.stored = 0  # copies stored, without repetitions
        self.removed = 0  # copies removed
        self.unknown_removals = 0
        self.joined = 0  # blocks set aside that got their key later
        self.aside_dropped = 0  # blocks in events that were set aside and then dropped
        self.forgotten = 0  # blocks not taken because `blocks_max` are held, or given up for other replicas
        self.other_size = 0  # blocks not taken because their size is not `block_tokens`
        self.conflicts = 0  # hashes used for two different contents
        self._masks, self._name = masks, name
        self._credit = BlockAccounting(masks, name, expected_max=blocks_max)
        self._names: dict[int, int] = {}  # hash -> key of blocks that are no longer held
        self.shared: BlockStore | None = None  # store that this engine shares with others; set once an event named it
        self.apart = False  # True if its block hashes differ from the store's, so that it finds no block there
        self.store: BlockStore | None = None  # blocks in the engine's own files; set once an event named any
        self._reset()

    def _reset(self) -> None:
        self.block_tokens: int | None = None  # the engine's block size, from the first GPU event of a prefix group
        self._places: dict[tuple[str, int], int] = {}  # place -> shift of its count
        self._groups: dict[int, int] = {}  # group -> mask of the counts of its places on the GPU
        self._gpu = 0  # mask of the counts of all places on the GPU
        self._tier_groups: dict[str, dict[int, int]] = {}  # tier -> group -> mask of the counts of its places there
        self._chunk = ChunkWidth()
        self.tiers: dict[str, TierBlocks] = {}  # tiers with counted copies
        self._others: set[int] = set()  # groups that do not cover a whole prefix
        self._usual = 0  # copies of a block that has no entry in _copies
        self._empty()

    def _empty(self) -> None:
        self.complete = True
        self.aside = 0  # blocks in events that are set aside
        self._gpu_copies = 0  # GPU copies of all held blocks, with or without a key, in all groups
        self._kept = 0  # usable blocks on the GPU that a tier has too
        self._behind = 0  # usable blocks that are in a tier and not on the GPU
        self._held: dict[int, int | None] = {}  # hash -> key, None while the key is unknown
        self._copies: dict[int, int] = {}  # hash -> counts that differ from _usual
        self._few: dict[int, int] = {}  # counts -> the same number: blocks with equal counts share one object
        self._aside: OrderedDict[int, Stored] = OrderedDict()  # serial -> event
        self._aside_weight = 0
        self._waiting: dict[int, list[int]] = {}  # hash of the parent -> serials
        self._serial = 0
        self._ripe: list[int] = []  # parents of orphans; their own keys are known by now
        self.tails.clear()

    @property
    def blocks(self) -> int:
        """Held and usable blocks: with a key, and with a copy in every group, on the GPU or in a counted tier."""
        return self._credit.blocks + self._behind

    @property
    def chunk(self) -> int:
        """Blocks that tiers store together: vLLM reports one chunk in each event, other engines any number of
        blocks."""
        return self._chunk.blocks

    @property
    def kept_share(self) -> float:
        """Share of the GPU's blocks that a tier has too. After eviction they can be loaded again."""
        return self._kept / self._credit.blocks if self._kept else 0.0

    def tier_blocks(self) -> list[tuple[str, int]]:
        """Return the tiers below the GPU, each with its number of known blocks."""
        found = [(tier, blocks.blocks) for tier, blocks in self.tiers.items()]
        found += [(tier, len(store)) for tier, store in ((STORAGE, self.store), (SHARED, self.shared)) if store]
        return found

    def tier_bits(self) -> list[tuple[str, int]]:
        """Return the tiers below the GPU, fastest first, with their bits."""
        bits = [(tier, tier_blocks.bit) for tier, tier_blocks in self.tiers.items()]
        if self.store is not None:
            bits.append((STORAGE, self.store.bit))
        if self.shared is not None:
            bits.append((SHARED, self.shared.bit))
        return sorted(bits, key=lambda tier: TIERS.index(tier[0])) if len(bits) > 1 else bits

    @property
    def groups(self) -> int:
        """Number of layer groups with reported blocks on the GPU."""
        return len(self._groups) + len(self._others)

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the KV pool that the held blocks use. Second copies on the GPU and blocks without a key count too;
        blocks in tiers do not."""
        return -(-self._gpu_copies // (len(self._groups) or 1))  # a block of tokens is one block in each group

    @property
    def bytes_used(self) -> int:
        """Upper bound of the memory of blocks, names and orphans in bytes. Expectations are not included; open leases
        bound them."""
        blocks, copies = len(self._held) * BLOCK_BYTES, len(self._copies) * COPY_BYTES
        store = self.store.bytes_used if self.store is not None else 0
        return blocks + copies + store + len(self._names) * NAME_BYTES + self._aside_weight * ORPHAN_BYTES

    def shed_blocks(self, bytes_min: int) -> None:
        """Free at least `bytes_min` bytes, or everything. Orphans go first, then the newest blocks, which are more
        often ends of prompts than shared beginnings. The index is incomplete until the next clear."""
        self.complete = False
        left = self.bytes_used - bytes_min
        while self._aside and self.bytes_used > left:
            self._drop_oldest()
        while self._held and self.bytes_used > left:
            given, key = self._held.popitem()
            counts = self._copies.pop(given, self._usual)
            self._gpu_copies -= self._on_gpu(counts)
            if key is not None:
                self._credit_change(key, counts, 0)
            self.forgotten += 1
        if self.bytes_used > left:
            self._names.clear()
        if self.bytes_used > left and self.store is not None:
            self.store.close()
            self.store = None

    # --- state for another process

    def shape(self, *, hybrid: bool) -> EngineShape | None:
        """Return the known facts except the blocks; None if no block was stored yet. `hybrid` is the field of
        ReplicaEventState."""
        if self.block_tokens is None or not self._places:
            return None
        places, others = list(self._places), sorted(self._others)
        return EngineShape(self.block_tokens, self.complete, hybrid, places, others, self.chunk)

    def pages(self) -> Iterator[Page]:
        """Yield all blocks that have a key, the names, and unusual copies, a page at a time. Blocks in files are not
        included. Raises RuntimeError if blocks are stored or removed between two pages."""
        for held, blocks in ((True, self._held), (False, self._names)):
            items = iter(blocks.items())
            while page := list(islice(items, PAGE_BLOCKS)):
                named = [(given, key) for given, key in page if key is not None]
                yield BlockPage(
                    pack_numbers([given for given, _ in named]), pack_numbers([key for _, key in named]), held
                )
        copies = iter(self._copies.items())
        while some := list(islice(copies, PAGE_BLOCKS // 2)):
            kept = [(given, counts) for given, counts in some if self._held.get(given) is not None]
            counted = b"".join([counts.to_bytes(COUNT_BYTES, "little") for _, counts in kept])
            yield CopyPage(pack_numbers([given for given, _ in kept]), counted)

    def reset_to(self, shape: EngineShape) -> None:
        """Forget everything and adopt this shape. Raises UnreadableState."""
        known = set[tuple[str, int]]()
        for place in shape.places:
            # an older release counted copies in files; no event reports their removal
            untold = tier_of(place[0]) in UNREPORTED
            if place in known or untold or (place[0] != GPU and (GPU, place[1]) not in known):
                raise UnreadableState(f"invalid storage tier of blocks: {place}")
            known.add(place)
        self.clear()
        for medium, group in shape.places:
            if medium == "GPU":
                self._open_group(group)
            else:
                self._open_place(medium, group)
        self.block_tokens, self.complete, self._others = shape.block_tokens, shape.complete, set(shape.others)
        if shape.chunk > 1:
            self._chunk.begin(shape.chunk)

    def import_page(self, page: Page) -> None:
        """Add blocks that another process knew to be held. Raises UnreadableState."""
        if isinstance(page, CopyPage):
            for given, counts in page.unpack():
                if not 0 < counts < 1 << len(self._places) * _COUNT_BITS:
                    raise UnreadableState("unknown storage tier of blocks")
                if self._held.get(given) is not None and given not in self._copies:
                    self._gpu_copies += self._on_gpu(counts) - self._on_gpu(self._usual)
                    self._recount(given, self._usual, counts)
            return
        hashes, keys = page.unpack()
        if not page.held:
            self._names.update(zip(hashes, keys, strict=True))
            self._trim()
            return
        stored = self.stored
        if hashes and not self._take_new(hashes, keys):
            self.complete = False  # they exceed the limit, or the page lists some twice
        self._gpu_copies += (self.stored - stored) * self._on_gpu(self._usual)

    def holds(self, key: int) -> bool:
        """True if the block with this key is held in any place, or expected."""
        held = self._masks.of.get(key, 0)
        return self._credit.holds(key) or any(held & bit for _, bit in self.tier_bits())

    def clear(self) -> None:
        """Drop all blocks at once, and all names. A store that other engines reach is kept."""
        self._credit.reopen(self._held, [tier.name for tier in self.tiers.values()])
        self._begin_anew()

    def close(self) -> None:
        """Remove the engine. Its bits return to `masks`."""
        self._credit.close(self._held, [tier.name for tier in self.tiers.values()])
        self._begin_anew()
        self.shared = None

    def _begin_anew(self) -> None:
        if self.store is not None:
            self.store.close()
        self._names, self.store = {}, None
        self._reset()

    def apply(self, event: Event) -> None:
        """Apply the event, even if earlier ones were missed. Never raises."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self.clear()
        if self._ripe:
            self.attach_orphans(JOIN_BLOCKS)

    def expect(self, lease: int, keys: Sequence[int], depth: int = 0) -> None:
        """Expect the blocks with these keys: they will be computed for this lease. `depth` keys of the prompt precede
        them.

        They count as held until the lease is settled. If the engine reports one as stored before that, it counts while
        the engine holds it.
        """
        self._credit.expect(lease, keys, depth)

    def settle(self, lease: int) -> None:
        """End a lease: keys that only this lease expected and the engine did not confirm are no longer held."""
        self._credit.drop_unconfirmed(lease)

    # --- blocks stored

    def _store(self, event: Stored) -> None:
        if not event.prefix:
            if len(self._others) < GROUPS_MAX:
                self._others.add(event.group)
            return
        if not event.hashes or event.group in self._others:  # a tier does not always report the kind of its group
            return
        if event.tokens and not self._fits(event):
            return
        if event.medium != GPU and event.tokens:  # vLLM sends a block without tokens if it knows only its hash
            self._chunk.observe(len(event.hashes))
        if event.medium != GPU and (tier := tier_of(event.medium)) in UNREPORTED:
            self._store_untold(event, tier)
            return
        shift = self._place(event)
        if shift is None:
            return
        keys = self._keys_of(event)
        stored = self.stored
        again = self._repeats if event.again is None else event.again
        self._take(event.hashes, keys, shift, again)
        if event.medium == "GPU":
            self._gpu_copies += self.stored - stored
        if None in keys:
            self._set_aside(event)
        if self._waiting:
            self._ripe.extend(given for given in event.hashes if given in self._waiting)

    def _store_untold(self, event: Stored, tier: str) -> None:
        """Record blocks in files. No event reports their removal. Of several groups only the first counts."""
        if event.group != min(self._groups, default=event.group):
            return
        if tier == STORAGE and self.store is None:
            self.store = BlockStore(self._masks, f"{self._name} {STORAGE}", self._blocks_max)
        store = self.store if tier == STORAGE else self.shared
        if store is not None and not store.add(self._keys_of(event), event.hashes) and tier == SHARED:
            self.shared, self.apart = None, True

    def _fits(self, event: Stored) -> bool:
        if self.block_tokens is None:
            if event.medium != "GPU":  # a tier can publish in chunks of many blocks: LMCache's have 256 tokens
                return False
            self.block_tokens = event.block_tokens
        elif self.block_tokens != event.block_tokens:
            # vLLM caches a part of a block of a hybrid model under its own size (block_pool.cache_partial_block).
            self.other_size += len(event.hashes)
            return False
        return True

    def _place(self, event: Stored) -> int | None:
        """Return the shift of the count of these copies; None if copies in this place are not counted."""
        place = (event.medium, event.group)
        shift = self._places.get(place)
        if shift is not None:
            return shift
        if event.group not in self._groups:
            # A tier's events need not state the kind of their group; the GPU's events do.
            if event.medium != "GPU" or not event.tokens or len(self._places) >= PLACES_MAX:
                return None
            return self._open_group(event.group)
        if len(self._places) >= PLACES_MAX:
            return None
        return self._open_place(event.medium, event.group)

    def _open_place(self, medium: str, group: int) -> int:
        shift, tier = len(self._places) * _COUNT_BITS, tier_of(medium)
        self._places[medium, group] = shift
        if not tier:
            self._groups[group] |= _COUNT << shift
            self._gpu |= _COUNT << shift
            return shift
        if tier not in self.tiers:
            self.tiers[tier] = TierBlocks(self._masks, f"{self._name} {tier}")
        groups = self._tier_groups.setdefault(tier, {})
        groups[group] = groups.get(group, 0) | _COUNT << shift
        return shift

    def _open_group(self, group: int) -> int:
        """Count copies of a new group. A block is usable only if every group has it, and this group has none so far."""
        for given, key in self._held.items():
            counts = self._copies.setdefault(given, self._usual)
            if key is not None:
                self._credit_change(key, counts, 0)
        self._groups[group] = 0
        shift = self._open_place("GPU", group)
        self._usual |= 1 << shift
        return shift

    def _keys_of(self, event: Stored) -> Sequence[int | None]:
        """Return the keys of the blocks, None for each that must wait for its key."""
        tier = event.medium != "GPU"
        # vLLM's offloading omits the salt in a tier's events (offloading/events.py, extra_keys=None). The key of a root
        # there is therefore found by its hash only.
        if event.tokens and not (tier and event.parent is None):
            parent = self._find_key(event.parent) if event.parent is not None else _root(event)
            if parent is not None:
                keys = _chain(event, parent)
                if parent in self.tails.open and not tier:
                    self.tails.grow(parent, keys)
                return [self._find_key(h) or key for h, key in zip(event.hashes, keys, strict=True)] if tier else keys
        return [self._find_key(given) for given in event.hashes]

    def _find_key(self, given: int) -> int | None:
        return self._held.get(given) or self._names.get(given)

    def _take(self, hashes: Sequence[int], keys: Sequence[int | None], shift: int, again: bool) -> None:
        held, names = self._held, self._names
        one = 1 << shift
        on_gpu = bool(one & self._gpu)
        blocks_max = self._blocks_max if on_gpu else int(TIER_PART * self._blocks_max)
        if one == self._usual and self._take_new(hashes, keys):
            return
        for given, key in zip(hashes, keys, strict=True):
            if given in held:
                if key is not None:
                    self._call(given, key)
                self._copy(given, shift, again)
                continue
            if len(held) >= blocks_max:
                self.forgotten += 1
                self.complete = self.complete and not on_gpu
                if key is not None:
                    self._remember(given, key)
                continue
            held[given] = key
            if names:
                names.pop(given, None)
            if one != self._usual:
                self._copies[given] = one
            if key is not None:
                self._credit_change(key, 0, one)
            self.stored += 1

    def _take_new(self, hashes: Sequence[int], keys: Sequence[int | None]) -> bool:
        """Add blocks with keys, none of them held, with the usual one copy, in one step and a third of the time.
        Returns False, without any change, if the blocks are not of that kind."""
        held, names = self._held, self._names
        if len(held) + len(hashes) > self._blocks_max or not held.keys().isdisjoint(hashes):
            return False
        if None in keys or len(set(hashes)) < len(hashes):
            return False
        held.update(zip(hashes, self._credit.add_all(cast("Sequence[int]", keys)), strict=True))
        if not names.keys().isdisjoint(hashes):
            for given in hashes:
                names.pop(given, None)
        self.stored += len(hashes)
        return True

    def _copy(self, given: int, shift: int, again: bool) -> None:
        """Count one more copy of a held block; with `again` only if no copy in this place is known."""
        counts = self._copies.get(given, self._usual)
        here = counts >> shift & _COUNT
        if here and (again or here == _COUNT):
            return
        self.stored += 1
        self._recount(given, counts, counts + (1 << shift))

    def _recount(self, given: int, before: int, after: int) -> None:
        if after == self._usual:
            self._copies.pop(given, None)
        else:
            self._copies[given] = self._few.setdefault(after, after)
        key = self._held[given]
        if key is not None:
            self._credit_change(key, before, after)

    def _credit_change(self, key: int, before: int, after: int) -> None:
        """Move the credit of a block with this key from its old copies to its new ones, for the GPU and for each
        tier."""
        was, now = self._has_all_groups(before), self._has_all_groups(after)
        if was != now:
            if now:
                self._credit.add(key)
            else:
                self._credit.discard(key)
        if not self.tiers:
            return
        was_in = now_in = False
        for tier, blocks in self.tiers.items():
            had, has = self._has_tier_groups(tier, before), self._has_tier_groups(tier, after)
            was_in, now_in = was_in or had, now_in or has
            if had != has:
                if has:
                    blocks.add(key)
                else:
                    blocks.take(key)
        self._kept += (now and now_in) - (was and was_in)
        self._behind += (now_in and not now) - (was_in and not was)

    def _has_all_groups(self, counts: int) -> bool:
        if counts == self._usual:
            return bool(counts)
        return all(counts & mask for mask in self._groups.values())

    def _has_tier_groups(self, tier: str, counts: int) -> bool:
        masks = self._tier_groups[tier]
        return all(counts & masks.get(group, 0) for group in self._groups)

    def _call(self, given: int, key: int) -> None:
        """Set the key of a held block, from an event that carries its tokens."""
        known = self._held[given]
        if known == key:
            return
        if known is None:
            self.joined += 1
        else:
            # An SGLang older than 0.5.23 hashes tokens alone, so a block under two salts has one hash. Events do not
            # state which copy is removed first, so neither gets credit until the hash is free again.
            key = xxh3_64_intdigest(b"of two contents", given)
            if known == key:
                return
            self.conflicts += 1
        self._held[given] = key
        counts = self._copies.get(given, self._usual)
        if known is not None:
            self._credit_change(known, counts, 0)
        self._credit_change(key, 0, counts)

    # --- orphans

    def _set_aside(self, event: Stored) -> None:
        self._serial += 1
        self._aside[self._serial] = event
        self._weigh(event, 1)
        if event.tokens and event.parent is not None:
            self._waiting.setdefault(event.parent, []).append(self._serial)
        while self._aside_weight > self._aside_max:
            self._drop_oldest()

    def _weigh(self, event: Stored, sign: int) -> None:
        self.aside += sign * len(event.hashes)
        self._aside_weight += sign * max(len(event.hashes), len(event.tokens) // ASIDE_BLOCK_BYTES)

    def _drop_oldest(self) -> None:
        serial, event = self._aside.popitem(last=False)
        self._weigh(event, -1)
        if event.parent in self._waiting:
            serials = self._waiting[event.parent]
            if serial in serials:
                serials.remove(serial)
            if not serials:
                del self._waiting[event.parent]
        self.aside_dropped += len(event.hashes)
        self._forsake(event)

    def _forsake(self, event: Stored) -> None:
        for given in event.hashes:
            if self._held.get(given, 0) is None:
                del self._held[given]
                self._gpu_copies -= self._on_gpu(self._copies.pop(given, self._usual))

    def _on_gpu(self, counts: int) -> int:
        return sum(counts >> shift & _COUNT for (medium, _), shift in self._places.items() if medium == "GPU")

    def attach_orphans(self, blocks_max: int) -> bool:
        """Set the keys of orphans with parents that are known by now, about `blocks_max` blocks. Returns True if more
        remain.

        Every `apply` does a part of it, so this call is for a stream without new events.
        """
        ripe, waiting = self._ripe, self._waiting
        while ripe:
            serials = waiting.get(ripe[-1])
            parent = self._find_key(ripe[-1])
            if not serials or parent is None:
                given = ripe.pop()
                if not serials:
                    waiting.pop(given, None)
                continue
            if blocks_max <= 0:
                return True
            event = self._aside.pop(serials.pop())
            self._weigh(event, -1)
            blocks_max -= len(event.hashes)
            for child, key in zip(event.hashes, _chain(event, parent), strict=True):
                if child in self._held:
                    self._call(child, key)
                else:
                    self._remember(child, key)
                if child in waiting:
                    ripe.append(child)
        return False

    # --- blocks removed

    def _remove(self, event: Removed) -> None:
        if event.medium != GPU and (tier := tier_of(event.medium)) in UNREPORTED:
            store = self.store if tier == STORAGE else self.shared
            if store is not None:
                self.removed += store.drop([self._find_key(given) for given in event.hashes])
            return
        shift = self._places.get((event.medium, event.group))
        if shift is None:
            if event.group not in self._others:
                self.unknown_removals += len(event.hashes)
            return
        removed = self.removed
        if 1 << shift == self._usual and self._copies.keys().isdisjoint(event.hashes):
            self._remove_last(event.hashes)
        else:
            self._remove_copies(event.hashes, shift)
        if event.medium == "GPU":
            self._gpu_copies -= self.removed - removed

    def _remove_copies(self, hashes: Sequence[int], shift: int) -> None:
        held, copies = self._held, self._copies
        one = 1 << shift
        for given in hashes:
            counts = copies.get(given, self._usual) if given in held else 0
            if not counts >> shift & _COUNT:
                self.unknown_removals += 1
                continue
            self.removed += 1
            if counts != one:
                self._recount(given, counts, counts - one)
                continue
            copies.pop(given, None)
            key = held.pop(given)
            if key is not None:
                self._credit_change(key, one, 0)
                self._remember(given, key)

    def _remove_last(self, hashes: Sequence[int]) -> None:
        """Remove the usual copy of held blocks that have no other copy, in one step and a third of the time."""
        keys = list(map(self._held.pop, hashes, repeat(_NOT_HELD)))
        unknown = keys.count(_NOT_HELD)
        self.unknown_removals += unknown
        self.removed += len(keys) - unknown
        if unknown or None in keys:
            named = [(given, key) for given, key in zip(hashes, keys, strict=True) if key not in (None, _NOT_HELD)]
            hashes, keys = [given for given, _ in named], [key for _, key in named]
        self._credit.take_all(cast("Sequence[int]", keys))
        self._names.update(zip(hashes, cast("Sequence[int]", keys), strict=True))
        self._trim()

    def _remember(self, given: int, key: int) -> None:
        self._names[given] = key
        self._trim()

    def _trim(self) -> None:
        names = self._names
        while len(names) > self._names_max + self._slack:
            for oldest in list(islice(names, self._slack)):
                del names[oldest]


def _root(event: Stored) -> int:
    return token_root(event.adapter, event.salt, event.block_tokens)


def _chain(event: Stored, parent: int) -> list[int]:
    """Return the keys of the event's blocks after the block with key `parent`. Extra hash inputs go into a block's
    key."""
    if event.extras is None:
        return token_chain(event.tokens, event.block_tokens, parent)
    keys, width = [], 4 * event.block_tokens
    for index, extra in enumerate(event.extras):
        (parent,) = token_chain(event.tokens[index * width : (index + 1) * width], event.block_tokens, parent)
        if extra is not None:
            parent = xxh3_64_intdigest(b"extra" + extra, parent)
        keys.append(parent)
    return keys
