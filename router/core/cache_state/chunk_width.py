"""Width of the chunks in which tiers store and load blocks; vLLM reports one chunk in each event.

No event states the width of a chunk, so the width of most of the recent events is taken. Other engines report blocks as
they are stored, for prompts of all lengths, so no width is frequent enough there. An event can be narrower than a
chunk, for example at the end of a prompt. A single odd event therefore changes nothing.
"""

from __future__ import annotations

from collections import deque

EVENTS_MIN = 8  # events before the width counts as known
EVENTS_MAX = 32  # recent events that count
BLOCKS_MAX = 64  # blocks of a chunk; wider events are prompts of equal length


class ChunkWidth:
    """Width of one engine's chunks, in blocks."""

    def __init__(self) -> None:
        self.blocks = 1  # blocks of a chunk; 1 if tiers keep single blocks or the width is unknown
        self._last: deque[int] = deque()
        self._counts: dict[int, int] = {}  # width -> number of recent events that had it

    def begin(self, blocks: int) -> None:
        """Start with a width that another process learned."""
        for _ in range(EVENTS_MIN):
            self.observe(blocks)

    def observe(self, blocks: int) -> None:
        """Record a tier event that carries the tokens of this number of blocks."""
        last, counts = self._last, self._counts
        if len(last) == EVENTS_MAX:
            oldest = last.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
        last.append(blocks)
        counts[blocks] = counts.get(blocks, 0) + 1
        frequent = max(counts, key=counts.__getitem__) if len(counts) > 1 else blocks
        known = len(last) >= EVENTS_MIN and 2 * counts[frequent] > len(last)
        self.blocks = frequent if known and frequent <= BLOCKS_MAX else 1
