"""KV pool blocks in use by the open leases of one replica. A prefix that several leases share counts once, as in the
engine.

Prompts are chains of block keys, and a key identifies its whole prefix. The set of live keys is therefore closed under
prefixes, and bisection finds the live part of a new prompt. Every STRIDE-th key is marked, which makes opening and
closing a lease cheap. The tokens after a prompt's last mark count as not shared.

If the pool has capacity for all prompts even without sharing, the shared part is not queried. So marks are set at the
first query, and never for a lease that was closed before it.
"""

from __future__ import annotations

from collections.abc import Sequence

STRIDE = 4  # 4 blocks of 512 bytes are about 500 tokens
UNMARKED_BLOCKS_MAX = 1 << 14  # 2 million tokens: their marks are set within a millisecond


class KvReservations:
    """Marks of open leases, and the tokens that no other lease shares."""

    __slots__ = ("_marks", "_unmarked", "_unmarked_blocks", "own_tokens", "unshared_blocks")

    def __init__(self) -> None:
        self._marks: dict[int, int] = {}  # key -> number of open leases with this key
        self._unmarked: dict[int, Sequence[int]] = {}  # open leases without marks yet, and their keys
        self._unmarked_blocks = 0
        self.unshared_blocks = 0  # live blocks of the router's size, counted once for each lease
        self.own_tokens = 0

    def open(self, lease: int, keys: Sequence[int], own_tokens: int) -> None:
        """Add a lease by its number. `own_tokens` are the prompt tokens after its last mark."""
        blocks = len(keys) // STRIDE * STRIDE
        self._unmarked[lease] = keys
        self.unshared_blocks += blocks
        self.own_tokens += own_tokens
        self._unmarked_blocks += blocks
        if self._unmarked_blocks > UNMARKED_BLOCKS_MAX:
            self._mark()

    def close(self, lease: int, keys: Sequence[int], own_tokens: int) -> None:
        """Remove a lease; the arguments are those of `open`."""
        blocks = len(keys) // STRIDE * STRIDE
        self.unshared_blocks -= blocks
        self.own_tokens -= own_tokens
        if self._unmarked.pop(lease, None) is not None:
            self._unmarked_blocks -= blocks
            return
        marks = self._marks
        for key in keys[STRIDE - 1 :: STRIDE]:
            left = marks[key] - 1
            if left:
                marks[key] = left
            else:
                del marks[key]

    @property
    def blocks(self) -> int:
        """Number of live blocks of the router's size that may be shared, each counted once."""
        self._mark()
        return len(self._marks) * STRIDE

    def count_live_blocks(self, keys: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are live."""
        self._mark()
        marks, low, high = self._marks, 0, len(keys) // STRIDE
        if not high or keys[STRIDE - 1] not in marks:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle * STRIDE - 1] in marks:
                low = middle
            else:
                high = middle - 1
        return low * STRIDE

    def sharers(self, keys: Sequence[int], blocks: int) -> int:
        """Return the number of leases that share these leading blocks of a prompt; `blocks` is a result of `shared`."""
        return self._marks[keys[blocks - 1]] if blocks else 0

    def _mark(self) -> None:
        marks = self._marks
        for keys in self._unmarked.values():
            for key in keys[STRIDE - 1 :: STRIDE]:
                marks[key] = marks.get(key, 0) + 1
        self._unmarked, self._unmarked_blocks = {}, 0


def shared_prefix_marks(blocks: int) -> int:
    """Return the number of blocks up to the last mark; the tokens after these are not shared."""
    return blocks // STRIDE * STRIDE
