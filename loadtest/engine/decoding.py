"""The sequences of an engine that decode, moved on together.

Each iteration gives every one of them a token, and nothing else about them changes until one needs a block, fills one
or ends. All three are known from when it joins: with a clock that counts iterations, a sequence of `computed` tokens is
at a block's border whenever `computed - joined + clock` is a multiple of the block's size, and at its end at a fixed
time. So an iteration looks only at those whose turn it is, a few of some hundred.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.engine.host_tier import HostTier
    from loadtest.engine.request import EngineRequest

_NUMBER = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Blocks of one sequence on their way from another engine's memory into this one's."""

    source: str
    tier: HostTier
    """The source's memory, as it was when they left."""
    begin: int
    end: int
    fresh: tuple[int, ...]
    """Keys that this engine's memory did not have before."""


class Running:
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
        # Tokens whose KV exists, and tokens generated; of a sequence that decodes, those when it joined.
        self.computed = self.generated = 0
        self.joined = self.ends = -1  # times on the clock of Decoding; -1 while the sequence does not decode
        self.stored = 0  # full blocks that are known to the cache
        self.loading = 0  # blocks behind these that are being loaded from the tier
        self.pulling: Pulled | None = None  # the last of those, where they come from another engine first
        self.live = True

    @property
    def behind(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.request.prompt_tokens + self.generated - self.computed


class Decoding:
    """The sequences that decode. Between two steps each has the blocks of what it has computed, and no more."""

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.context_tokens = 0  # tokens of all sequences whose KV exists
        self._size = block_tokens
        self._clock = 0  # iterations so far
        self._ends: list[tuple[int, int, Running]] = []  # a heap of (when, number); some have left
        self._phases: list[dict[Running, None]] = [{} for _ in range(block_tokens)]  # key: (computed - clock) % size

    def join(self, sequence: Running) -> None:
        """Add a sequence: it has its first token, or has computed again what a preemption took."""
        sequence.joined = self._clock
        sequence.ends = self._clock + sequence.request.output_tokens - sequence.generated
        heappush(self._ends, (sequence.ends, sequence.number, sequence))
        self._phases[(sequence.computed - self._clock) % self._size][sequence] = None
        self.context_tokens += sequence.computed
        self.count += 1

    def leave(self, sequence: Running) -> None:
        """Remove a sequence: it ended, or was preempted."""
        passed = self._clock - sequence.joined
        sequence.computed += passed
        sequence.generated += passed
        sequence.joined = sequence.ends = -1
        del self._phases[(sequence.computed - self._clock) % self._size][sequence]
        self.context_tokens -= sequence.computed
        self.count -= 1

    def computed(self, sequence: Running) -> int:
        """Tokens whose KV exists."""
        return sequence.computed + self._clock - sequence.joined

    def until_end(self) -> int:
        """Iterations until the first sequence ends; there must be one."""
        ends = self._ends
        while ends[0][2].ends != ends[0][0]:
            heappop(ends)
        return ends[0][0] - self._clock

    def bordering(self, iterations: int) -> list[Running]:
        """The sequences that need or fill a block within so many iterations, in order of admission."""
        size, clock = self._size, self._clock
        first = max(0, size - iterations)  # sequences with this many tokens in their last block will fill it
        in_last = range(first, size) if first == 0 else (0, *range(first, size))
        found = [sequence for tokens in in_last for sequence in self._phases[(tokens - clock) % size]]
        found.sort(key=_NUMBER)
        return found

    def blocks_for(self, iterations: int) -> int:
        """The number of blocks that all sequences will take in so many iterations."""
        size, clock, phases = self._size, self._clock, self._phases
        whole, rest = divmod(iterations, size)
        in_last = (0, *range(size - rest + 1, size)) if rest else ()
        return whole * self.count + sum(len(phases[(tokens - clock) % size]) for tokens in in_last)

    def advance(self, iterations: int) -> list[Running]:
        """A token each, so many times, at most until the first of them ends. Returns those that did, in order; they
        have left."""
        self._clock += iterations
        self.context_tokens += self.count * iterations
        ended, ends = [], self._ends
        while ends and ends[0][0] <= self._clock:
            when, _, sequence = heappop(ends)
            if sequence.ends == when:
                self.leave(sequence)
                ended.append(sequence)
        return ended
