"""Serialized state of one engine's reported blocks, from which another process can continue.

A block is 16 bytes: the engine's hash and our key. Rare facts are added: unusual copies, and names of removed blocks.
Blocks that wait for the key of their parent are omitted. They are not usable before it is known, and too little credit
is the safe error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Annotated

import msgspec
from msgspec import Meta

PAGE_BLOCKS = 256  # blocks of a page, which is written and read in one step
WHY_CHARS_MAX = 4_096
COUNT_BYTES = 64  # size of the counts of one block's copies, in all places


class UnreadableState(ValueError):
    """The state left by another process is unreadable; the text gives the reason in one line."""


class EngineShape(msgspec.Struct, array_like=True):
    """Known facts of an engine except its blocks."""

    block_tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    complete: bool
    hybrid: bool  # True if events named a layer group that does not cover a whole prefix (Reported.hybrid)
    # (medium, group), in order of first use
    places: Annotated[list[tuple[str, int]], Meta(min_length=1, max_length=32)]
    others: Annotated[list[int], Meta(max_length=64)]  # groups that do not cover a whole prefix
    chunk: Annotated[int, Meta(ge=1, le=1 << 16)] = 1  # blocks that tiers store together (EngineBlocks.chunk)


class BlockPage(msgspec.Struct, array_like=True, tag="blocks"):
    """A page of blocks, in the order in which they were stored: hashes and keys, eight bytes each, little-endian."""

    hashes: bytes
    keys: bytes
    held: bool = True  # False: only the names of blocks that are no longer held

    def unpack(self) -> tuple[list[int], list[int]]:
        """Return hashes and keys. Raises UnreadableState."""
        if len(self.hashes) != len(self.keys) or len(self.hashes) > PAGE_BLOCKS * 8:
            raise UnreadableState(f"{len(self.hashes)} bytes of hashes and {len(self.keys)} of keys do not match")
        return unpack_numbers(self.hashes), unpack_numbers(self.keys)


class CopyPage(msgspec.Struct, array_like=True, tag="copies"):
    """A page of blocks with unusual copies: for each hash the counts of all places, COUNT_BYTES each."""

    hashes: bytes
    counts: bytes

    def unpack(self) -> list[tuple[int, int]]:
        """Return (hash, counts) of each block. Raises UnreadableState."""
        hashes, size = unpack_numbers(self.hashes), COUNT_BYTES
        if len(self.counts) != len(hashes) * size or len(hashes) > PAGE_BLOCKS:
            raise UnreadableState(f"{len(self.counts)} bytes of counts do not match {len(hashes)} blocks")
        counts = [int.from_bytes(self.counts[n * size : (n + 1) * size], "little") for n in range(len(hashes))]
        return list(zip(hashes, counts, strict=True))


Page = BlockPage | CopyPage


class StreamState(msgspec.Struct, array_like=True, tag="stream"):
    """Position up to which an engine's events were applied, and the grade of that state."""

    seq: Annotated[int, Meta(ge=0)]  # number of the last batch
    digest: Annotated[
        bytes, Meta(min_length=16, max_length=16)
    ]  # digest of that batch (kv_events/reorder_buffer.py), big-endian
    exact: bool  # True if the stream was complete since the cache began
    why: Annotated[str, Meta(max_length=WHY_CHARS_MAX)]  # reason of the grade
    shape: EngineShape


@dataclass(slots=True)
class EngineState:
    """One engine's state according to its events up to a batch."""

    stream: StreamState
    pages: list[Page]

    @property
    def blocks(self) -> int:
        """Number of held blocks."""
        return sum(len(page.keys) // 8 for page in self.pages if isinstance(page, BlockPage) and page.held)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return 64-bit numbers as bytes, eight each, little-endian."""
    made = array("Q", numbers)
    if byteorder == "big":
        made.byteswap()
    return made.tobytes()


def unpack_numbers(numbers: bytes) -> list[int]:
    """Reverse `pack_numbers`. Raises UnreadableState."""
    if len(numbers) % 8:
        raise UnreadableState(f"{len(numbers)} bytes are not 8 bytes per number")
    made = array("Q", numbers)
    if byteorder == "big":
        made.byteswap()
    return made.tolist()
