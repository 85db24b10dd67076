"""Sequences of an engine that decode, advanced together.

Each iteration gives every sequence one token. Nothing more changes for a sequence until it needs a block, fills a block
or ends. All three times are known when it joins. On a clock that counts iterations, a sequence of `computed` tokens is
at a block boundary if `computed - joined + clock` is a multiple of the block size. Its end is at a fixed time. So an
iteration visits only the sequences that are due, a few of some hundred.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.fake_engine.host_tier import HostTier
    from loadtest.fake_engine.request import EngineRequest

_NUMBER = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Blocks of one sequence in transit from another engine's memory to this engine's."""

    source: str
    tier: HostTier
    """The source's memory at the time when the transfer started."""
    begin: int
    end: int
    fresh: tuple[int, ...]
    """Keys that were not in this engine's memory before."""


class EngineSequence:
    """A request inside the engine."""

    __slots__ = (
        "blocks", "cached", "computed", "ends", "generated", "joined", "live", "loading", "number", "pulling",
        "request", "stored",
    )  # fmt: skip

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.number = -1  # number of its admission, which is the order in the batch
        self.blocks: list[int] = []
        self.cached = -1  # prompt tokens found cached at first admission, -1 before
        # Tokens with existing KV, and tokens generated. For a sequence that decodes: the values when it joined.
        self.computed = self.generated = 0
        self.joined = self.ends = -1  # times on the clock of `DecodeBatch`; -1 if the sequence does not decode
        self.stored = 0  # full blocks that are in the prefix cache
        self.loading = 0  # blocks after these that are being loaded from the tier
        self.pulling: Pulled | None = None  # the last of those, if another engine sends them first
        self.live = True

    @property
    def behind(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.request.prompt_tokens + self.generated - self.computed


class DecodeBatch:
    """The sequences that decode. Between two steps each has exactly the blocks of its computed tokens."""

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.context_tokens = 0  # tokens of all sequences with existing KV
        self._size = block_tokens
        self._clock = 0  # iterations so far
        self._ends: list[
            tuple[int, int, EngineSequence]
        ] = []  # a heap of (end, number); may contain sequences that left
        self._phases: list[dict[EngineSequence, None]] = [
            {} for _ in range(block_tokens)
        ]  # key: (computed - clock) % size

    def join(self, sequence: EngineSequence) -> None:
        """Add a sequence that has its first token, or that has recomputed its tokens after a preemption."""
        sequence.joined = self._clock
        sequence.ends = self._clock + sequence.request.output_tokens - sequence.generated
        heappush(self._ends, (sequence.ends, sequence.number, sequence))
        self._phases[(sequence.computed - self._clock) % self._size][sequence] = None
        self.context_tokens += sequence.computed
        self.count += 1

    def leave(self, sequence: EngineSequence) -> None:
        """Remove a sequence that ended or was preempted."""
        passed = self._clock - sequence.joined
        sequence.computed += passed
        sequence.generated += passed
        sequence.joined = sequence.ends = -1
        del self._phases[(sequence.computed - self._clock) % self._size][sequence]
        self.context_tokens -= sequence.computed
        self.count -= 1

    def count_computed(self, sequence: EngineSequence) -> int:
        """Return the number of tokens with existing KV."""
        return sequence.computed + self._clock - sequence.joined

    def count_iterations_left(self) -> int:
        """Return the iterations until the first sequence ends. At least one sequence must be decoding."""
        ends = self._ends
        while ends[0][2].ends != ends[0][0]:
            heappop(ends)
        return ends[0][0] - self._clock

    def find_bordering(self, iterations: int) -> list[EngineSequence]:
        """Return the sequences that need or fill a block within `iterations`, in order of admission."""
        size, clock = self._size, self._clock
        first = max(0, size - iterations)  # sequences with this many tokens in their last block will fill it
        in_last = range(first, size) if first == 0 else (0, *range(first, size))
        found = [sequence for tokens in in_last for sequence in self._phases[(tokens - clock) % size]]
        found.sort(key=_NUMBER)
        return found

    def blocks_for(self, iterations: int) -> int:
        """Return the number of blocks that all sequences need for `iterations` more tokens each."""
        size, clock, phases = self._size, self._clock, self._phases
        whole, rest = divmod(iterations, size)
        in_last = (0, *range(size - rest + 1, size)) if rest else ()
        return whole * self.count + sum(len(phases[(tokens - clock) % size]) for tokens in in_last)

    def advance(self, iterations: int) -> list[EngineSequence]:
        """Generate `iterations` tokens for each sequence, at most until the first of them ends.

        Returns the sequences that ended, in order. They have been removed.
        """
        self._clock += iterations
        self.context_tokens += self.count * iterations
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._clock:
            when, _, sequence = heappop(ends)
            if sequence.ends == when:
                self.leave(sequence)
                ended.append(sequence)
        return ended
