"""What the open leases of one replica keep in its KV pool: what several have in common counts once, as in the engine.

Prompts are chains of block keys, and a key names its whole prefix, so what is live is closed under prefixes: how much
of a new prompt is live already is found by bisection. Every STRIDE-th key is marked, which makes opening and closing a
lease cheap; what stands behind a prompt's last mark is taken for its own.

Where there is room for all prompts even if they shared nothing, nobody asks what they share. So marks are set when
that is asked, and those of a lease that was closed before never are.
"""

from __future__ import annotations

from collections.abc import Sequence

STRIDE = 4  # blocks of 512 bytes: some 500 tokens
UNMARKED_BLOCKS_MAX = 1 << 14  # 2 million tokens: their marks are set within a millisecond


class Live:
    """Marks of open leases, and tokens that no other shares."""

    __slots__ = ("_marks", "_unmarked", "_unmarked_blocks", "own_tokens", "unshared_blocks")

    def __init__(self) -> None:
        self._marks: dict[int, int] = {}  # key -> open leases that run through it
        self._unmarked: dict[int, Sequence[int]] = {}  # open leases whose marks are not set, and their keys
        self._unmarked_blocks = 0
        self.unshared_blocks = 0  # live ones of the router's size, each as often as a lease has it
        self.own_tokens = 0

    def open(self, lease: int, keys: Sequence[int], own_tokens: int) -> None:
        """A lease, by its number, on a prompt of which so many tokens stand behind its last mark."""
        blocks = len(keys) // STRIDE * STRIDE
        self._unmarked[lease] = keys
        self.unshared_blocks += blocks
        self.own_tokens += own_tokens
        self._unmarked_blocks += blocks
        if self._unmarked_blocks > UNMARKED_BLOCKS_MAX:
            self._mark()

    def close(self, lease: int, keys: Sequence[int], own_tokens: int) -> None:
        """The end of a lease that was opened with the same."""
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
        """Live ones of the router's size that may be shared, each once."""
        self._mark()
        return len(self._marks) * STRIDE

    def shared(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a prompt are live."""
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
        """How many leases have so many leading blocks of a prompt live, as `shared` tells that number."""
        return self._marks[keys[blocks - 1]] if blocks else 0

    def _mark(self) -> None:
        marks = self._marks
        for keys in self._unmarked.values():
            for key in keys[STRIDE - 1 :: STRIDE]:
                marks[key] = marks.get(key, 0) + 1
        self._unmarked, self._unmarked_blocks = {}, 0


def behind_marks(blocks: int) -> int:
    """How many of so many blocks are marked; the rest of the prompt is behind these."""
    return blocks // STRIDE * STRIDE
