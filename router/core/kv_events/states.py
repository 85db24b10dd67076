"""What one engine holds by its own account, as bytes that another process can go on from.

A block is 16 bytes: the engine's hash and our key. What is rare goes with it: copies that are not the usual ones, names
of blocks that are gone. Blocks that wait for the key of their parent are left out: they are of no use until it comes,
and too little credit is the safe side.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Annotated

import msgspec
from msgspec import Meta

PAGE_BLOCKS = 256  # blocks of a page, which are made, and taken in, without a break
WHY_CHARS_MAX = 4_096
COUNT_BYTES = 64  # counts of one block's copies, in all places


class UnreadableState(ValueError):
    """What somebody has left cannot be read; the text says why in one line."""


class EngineShape(msgspec.Struct, array_like=True):
    """What is known of an engine besides its blocks."""

    block_tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    complete: bool
    hybrid: bool  # whether blocks of a group were seen that do not answer for a whole prefix (Reported.hybrid)
    places: Annotated[list[tuple[str, int]], Meta(min_length=1, max_length=32)]  # (medium, group), in their order
    others: Annotated[list[int], Meta(max_length=64)]  # groups that do not answer for a whole prefix
    chunk: Annotated[int, Meta(ge=1, le=1 << 16)] = 1  # blocks that tiers keep together (EngineBlocks.chunk)


class BlockPage(msgspec.Struct, array_like=True, tag="blocks"):
    """Some blocks, in the order in which they were stored: hashes and keys, eight bytes each, little-endian."""

    hashes: bytes
    keys: bytes
    held: bool = True  # False: only the names of blocks that are held no more

    def unpacked(self) -> tuple[list[int], list[int]]:
        """Hashes and keys. Raises UnreadableState."""
        if len(self.hashes) != len(self.keys) or len(self.hashes) > PAGE_BLOCKS * 8:
            raise UnreadableState(f"{len(self.hashes)} bytes of hashes and {len(self.keys)} of keys are no page")
        return unpacked(self.hashes), unpacked(self.keys)


class CopyPage(msgspec.Struct, array_like=True, tag="copies"):
    """Copies of blocks that have not the usual ones: of each hash the counts of all places, COUNT_BYTES each."""

    hashes: bytes
    counts: bytes

    def unpacked(self) -> list[tuple[int, int]]:
        """(hash, counts) of each. Raises UnreadableState."""
        hashes, size = unpacked(self.hashes), COUNT_BYTES
        if len(self.counts) != len(hashes) * size or len(hashes) > PAGE_BLOCKS:
            raise UnreadableState(f"{len(self.counts)} bytes of counts are not of {len(hashes)} blocks")
        counts = [int.from_bytes(self.counts[n * size : (n + 1) * size], "little") for n in range(len(hashes))]
        return list(zip(hashes, counts, strict=True))


Page = BlockPage | CopyPage


class StreamState(msgspec.Struct, array_like=True, tag="stream"):
    """How far an engine's events were applied, and what that is worth."""

    seq: Annotated[int, Meta(ge=0)]  # number of the last batch
    digest: Annotated[
        bytes, Meta(min_length=16, max_length=16)
    ]  # digest of that batch (kv_events/batches.py), big-endian
    exact: bool  # whether the stream was whole since the cache began
    why: Annotated[str, Meta(max_length=WHY_CHARS_MAX)]  # reason of the grade
    shape: EngineShape


@dataclass(slots=True)
class EngineState:
    """What one engine's events said up to a batch."""

    stream: StreamState
    pages: list[Page]

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return sum(len(page.keys) // 8 for page in self.pages if isinstance(page, BlockPage) and page.held)


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers of 64 bits as bytes, eight each, little-endian."""
    made = array("Q", numbers)
    if byteorder == "big":
        made.byteswap()
    return made.tobytes()


def unpacked(numbers: bytes) -> list[int]:
    """The reverse of `packed`. Raises UnreadableState."""
    if len(numbers) % 8:
        raise UnreadableState(f"{len(numbers)} bytes are not eight for each number")
    made = array("Q", numbers)
    if byteorder == "big":
        made.byteswap()
    return made.tolist()
