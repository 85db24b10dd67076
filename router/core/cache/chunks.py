"""Blocks that tiers keep together: vLLM stores and loads whole chunks, and names one chunk in each event.

No event says how wide a chunk is, so it is the width that most of the last events had. Other engines name whatever
came, prompts of all lengths, and no width is that frequent. Now and then an event is narrower than a chunk, such as the
end of a prompt: one odd event decides nothing.
"""

from __future__ import annotations

from collections import deque

EVENTS_MIN = 8  # events before the width is believed
EVENTS_MAX = 32  # last events that count
BLOCKS_MAX = 64  # blocks of a chunk; wider events are prompts of one length


class ChunkWidth:
    """The width of one engine's chunks, in blocks."""

    def __init__(self) -> None:
        self.blocks = 1  # blocks of a chunk; 1 where tiers keep single blocks, or that is not known
        self._last: deque[int] = deque()
        self._counts: dict[int, int] = {}  # width -> how many of the last events had it

    def begin(self, blocks: int) -> None:
        """Begin with a width that another process learned."""
        for _ in range(EVENTS_MIN):
            self.observe(blocks)

    def observe(self, blocks: int) -> None:
        """A tier's event gave the tokens of so many blocks."""
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
