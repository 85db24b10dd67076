"""A model engine: what vLLM does to its KV blocks, and what it says about it, without a model.

A pool of a few blocks of two tokens with vLLM's free queue (loadtest/fake_engine/kv_pool.py: least recently used first,
a sequence gives back its last block first, a block computed twice at once is two copies), a second tier behind it whose
events name hashes only, a sliding-window group that says the same hashes and means less by them, and a publisher with
sequence numbers from 0 and a bounded replay buffer. Everything is real bytes on the outside: msgpack as vLLM 0.32
(maps) or vLLM 0.23 and earlier (positional arrays) send it.

`held` is the truth: contents, not hashes, so that it shares nothing with the code under test.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvPool

BLOCK_TOKENS = 2
WINDOW_BLOCKS = 3  # blocks that the sliding-window group keeps

Identity = tuple[str, str]  # adapter, salt
Content = tuple[Identity, tuple[int, ...]]  # a whole prefix, up to the end of one block
Numbered = tuple[int, bytes]  # sequence number, payload


@dataclass(slots=True)
class Request:
    """One request that is running: its tokens, and the blocks it holds."""

    identity: Identity
    tokens: list[int]
    hashes: list[int]
    blocks: list[int]


@dataclass(slots=True)
class Flavour:
    """What differs between engines on the wire."""

    maps: bool = True  # events as maps (vLLM 0.24 and later), else as positional arrays
    hashes: str = "uint"  # uint | int | bytes
    cpu_blocks: int = 0  # size of the second tier; 0: none
    window: bool = False  # a second group, of sliding-window attention
    fixed_root: bool = True  # the hashes of a restarted engine are those of its predecessor (vLLM 0.29 and later)


@dataclass(slots=True)
class Engine:
    """One engine; `restart` replaces the process. `outbox` is what its PUB socket was given and nobody took yet."""

    blocks_n: int
    buffer_batches: int
    flavour: Flavour = field(default_factory=Flavour)
    process: int = 0
    garble: str = ""  # how the next batch will be spoilt: batch | event | more (see _spoilt)
    clock_s: float = 1_795_000_000.0
    pool: KvPool = field(init=False)
    running: list[Request] = field(init=False)
    outbox: list[Numbered] = field(init=False)
    next_seq: int = field(init=False)
    unreadable: bool = field(init=False)  # whether this process has said what cannot be read
    doubled: bool = False  # whether a block that was stored with a prompt's first was there already
    _cpu: OrderedDict[int, None] = field(init=False)
    _to_cpu: list[int] = field(init=False)  # stored in the last step: copied while the next one runs
    _window: deque[int] = field(init=False)
    _buffer: deque[Numbered] = field(init=False)
    _contents: dict[int, Content] = field(init=False)
    _queued: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.pool = KvPool(self.blocks_n, record_events=True)
        self.running, self.outbox, self.next_seq, self.unreadable = [], [], 0, False
        self._cpu, self._to_cpu, self._window, self._contents, self._queued = OrderedDict(), [], deque(), {}, []
        self._buffer = deque(maxlen=self.buffer_batches)

    # What happens to it

    def admit(self, identity: Identity, tokens: Sequence[int]) -> int | None:
        """Prefill a prompt; returns how many of its tokens were found cached, None when there is no room."""
        hashes = self._hashes(identity, tokens)
        matched = self.pool.match(hashes, (len(tokens) - 1) // BLOCK_TOKENS)  # never the last token: vLLM
        if not self.pool.fits(matched, len(hashes) - len(matched)):
            return None
        self.pool.share(matched)
        blocks = matched + self.pool.take(len(hashes) - len(matched))
        one = Request(identity, list(tokens), hashes, blocks)
        self.pool.store(one, hashes, blocks, len(matched), len(hashes))
        self.running.append(one)
        self._step()
        return len(matched) * BLOCK_TOKENS

    def report(self, identity: Identity, tokens: Sequence[int], origin: str) -> None:
        """Prefill a prompt for somebody who wants to be told what it hits (vLLM's `kv_cache_report_mode: full`): that
        is stored again, in words only. With `origin` the event says so."""
        hashes = self._hashes(identity, tokens)
        hit = hashes[: len(self.pool.match(hashes, (len(tokens) - 1) // BLOCK_TOKENS))]
        if hit:
            ids = list(tokens[: len(hit) * BLOCK_TOKENS])
            self._say_stored(identity, hit, None, ids, 0, "full_attention", origin)
        self.admit(identity, tokens)

    def admit_twice(self, identity: Identity, tokens: Sequence[int]) -> None:
        """Two equal prompts in one step: neither sees the other's blocks, so both are computed and stored."""
        hashes = self._hashes(identity, tokens)
        matched = self.pool.match(hashes, (len(tokens) - 1) // BLOCK_TOKENS)
        for _ in range(2):
            if not self.pool.fits(matched, len(hashes) - len(matched)):
                continue
            self.pool.share(matched)
            blocks = matched + self.pool.take(len(hashes) - len(matched))
            self.running.append(Request(identity, list(tokens), hashes, blocks))
        for one in self.running[-2:]:
            if one.hashes is hashes:
                self.pool.store(one, hashes, one.blocks, len(matched), len(hashes))
        self._step()

    def decode(self, index: int, tokens: Sequence[int]) -> None:
        """A running request fills one more block; without room nothing happens."""
        one = self.running[index]
        if not self.pool.fits([], 1):
            return
        start = len(one.hashes)
        del one.tokens[start * BLOCK_TOKENS :]
        one.tokens += tokens
        one.hashes = self._hashes(one.identity, one.tokens)
        one.blocks += self.pool.take(1)
        self.pool.store(one, one.hashes, one.blocks, start, start + 1)
        self._step()

    def finish(self, index: int) -> None:
        """A request ends: its blocks are free, and cached until they are taken."""
        self.pool.release(self.running.pop(index).blocks)

    def reset(self) -> bool:
        """Forget all; said only with the next step, as vLLM does. Refused while a request is running."""
        if not self.pool.clear():
            return False
        self._collect()
        return True

    def heartbeat(self) -> None:
        """Whatever else happens, one more batch: the last requests end, and a prompt nobody has asked is prefilled."""
        for index in range(len(self.running) - 1, -1, -1):
            self.finish(index)
        number = int(self.clock_s * 100) % 1_000_000
        self.admit(("", ""), [number, number])

    def restart(self) -> None:
        """A new process in place of this one: nothing is said, nothing is kept, numbers start at 0."""
        self.process += 1
        self.clock_s += 10.0
        self._start()

    # What it says

    def replay(self, first: int) -> list[Numbered]:
        """What a replay from `first` is answered with, before the end marker."""
        return [batch for batch in self._buffer if batch[0] >= first]

    @property
    def unsaid(self) -> bool:
        """Whether something happened that no batch has told yet."""
        return bool(self._queued)

    def held(self) -> set[Content]:
        """Contents of all cached blocks, in either tier."""
        hashes = set(self.pool._keys.values()) | set(self._cpu)
        return {self._contents[key] for key in hashes}

    def _hashes(self, identity: Identity, tokens: Sequence[int]) -> list[int]:
        seed = 0 if self.flavour.fixed_root else self.process
        hashes = []
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            content = (identity, tuple(tokens[:end]))
            key = xxh3_64_intdigest(repr(content).encode(), seed)
            self._contents[key] = content
            hashes.append(key)
        return hashes

    def _step(self) -> None:
        """The scheduler's step ends: what was queued leaves as one batch."""
        self._collect()
        if self._queued:
            self.clock_s += 0.01
            payload = msgspec.msgpack.encode([self.clock_s, self._spoilt(self._queued), 0])
            batch = (self.next_seq, payload)
            self.next_seq += 1
            self._queued, self.garble = [], ""
            self._buffer.append(batch)
            self.outbox.append(batch)

    def _spoilt(self, events: list[Any]) -> Any:
        """What a router of today cannot read of an engine of tomorrow: a whole batch, one event, one event more."""
        if self.garble:
            self.unreadable = True
        if self.garble == "batch":
            return {"events": events}
        if self.garble == "event":
            return [["BlockRemoved" if self.flavour.maps else {"type": "BlockRemoved"}], *events[1:]]
        return [*events, self._encode("OfTomorrow")] if self.garble == "more" else events

    def _collect(self) -> None:
        copied, self._to_cpu = self._to_cpu, []
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlocksRemoved):
                for key in event.keys:
                    self._removed([key], "GPU", 0)
            else:
                self._cpu.clear()
                copied.clear()
                self._window.clear()
                self._queued.append(self._encode("AllBlocksCleared"))
        for key in copied:
            self._offload(key)

    def _stored(self, event: BlockStored) -> None:
        one = event.tag
        assert isinstance(one, Request)
        first, keys = event.first_block, list(event.keys)
        held = list(self.pool._keys.values())
        self.doubled |= event.parent is None and any(held.count(key) > 1 for key in keys)
        ids = one.tokens[first * BLOCK_TOKENS : (first + len(keys)) * BLOCK_TOKENS]
        self._say_stored(one.identity, keys, event.parent, ids, 0, "full_attention")
        if self.flavour.window:
            self._say_stored(one.identity, keys, event.parent, ids, 1, "sliding_window")
            self._window.extend(keys)
            while len(self._window) > WINDOW_BLOCKS:
                self._removed([self._window.popleft()], "GPU", 1)
        if self.flavour.cpu_blocks:
            self._to_cpu += keys

    def _offload(self, key: int) -> None:
        """Copy a block to the second tier: its event names the hash only (vLLM's OffloadingEventsTracker)."""
        if key in self._cpu:
            self._cpu.move_to_end(key)
            return
        if len(self._cpu) == self.flavour.cpu_blocks:
            self._removed([self._cpu.popitem(last=False)[0]], "CPU", 0)
        self._cpu[key] = None
        fields: dict[str, Any] = {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "CPU",
        }
        self._queued.append(self._encode("BlockStored", block_hashes=[self._wire(key)], **fields, group_idx=0))

    def _say_stored(
        self,
        identity: Identity,
        keys: list[int],
        parent: int | None,
        ids: list[int],
        group: int,
        kind: str,
        origin: str = "",
    ) -> None:
        adapter, salt = identity
        extra: list[list[str] | None] = [[adapter] if adapter else None for _ in keys]
        if salt and parent is None:
            extra[0] = [*(extra[0] or []), salt]
        said = {
            "block_hashes": [self._wire(key) for key in keys],
            "parent_block_hash": None if parent is None else self._wire(parent),
            "token_ids": ids,
            "block_size": BLOCK_TOKENS,
            "lora_id": 1 if adapter else None,
            "medium": "GPU",
            "lora_name": adapter or None,
            "extra_keys": extra,
            "group_idx": group,
            "kv_cache_spec_kind": kind,
        } | ({"origin": origin} if origin else {})
        self._queued.append(self._encode("BlockStored", **said))

    def _removed(self, keys: list[int], medium: str, group: int) -> None:
        hashes = [self._wire(key) for key in keys]
        self._queued.append(self._encode("BlockRemoved", block_hashes=hashes, medium=medium, group_idx=group))

    def _wire(self, key: int) -> int | bytes:
        if self.flavour.hashes == "bytes":
            return key.to_bytes(32, "big")
        if self.flavour.hashes == "int" and key >> 63:
            return key - (1 << 64)
        return key

    def _encode(self, kind: str, **fields: Any) -> Any:
        if self.flavour.maps:
            return {"type": kind, **fields}
        if kind == "BlockStored" and "lora_name" not in fields:
            fields = {**fields, "lora_name": None, "extra_keys": None}
            fields["group_idx"] = fields.pop("group_idx")  # positional: it comes after those two
        return [kind, *fields.values()]
