"""Batches of first tokens of one replica: an engine prefills waiting prompts concurrently, so only the time of a whole
batch can be measured.

First tokens at other routers are received a moment later than our own. So the latest batches are kept while there are
other routers, and their times are shared out again with each first token that another router reports.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from router.core.estimators.prefill import LEARN_TOKENS_MIN
from router.core.fleet.lease import Lease, PrefillBatch
from router.core.fleet.peer_leases import PeerLoadView

# First tokens of one batch are less than half a step apart, those of two batches at least one step. First tokens at
# other routers have a tolerance for the estimated delay of messages.
BATCH_STEPS, BATCH_LEAST_MS, BATCH_MOST_MS = 0.5, 0.2, 20.0  # a fraction of a step, within limits
BATCH_OTHERS_LEAST_MS = 5.0
BATCHES_MAX = 16  # latest batches of a replica: other routers' first tokens are received a moment later


@dataclass(slots=True)
class PrefillBatches:
    """Latest batches. The argument `within_ms` is the longest time between two first tokens of one batch
    (`max_gap_ms`)."""

    first_token_s: float = 0.0  # time of the last first token
    long_s: float = -inf  # time of the last first token of a long prefill
    others_tokens: int = 0  # tokens computed for other routers, as received by the last first token
    _last: PrefillBatch | None = None  # batch of the last first token
    _shared: deque[PrefillBatch] = field(default_factory=lambda: deque(maxlen=BATCHES_MAX))

    def add(self, lease: Lease, others: PeerLoadView, within_ms: float, now_s: float) -> PrefillBatch:
        """Add the first token of a lease, and return its batch: that of the last first token if this one arrived with
        it, or a new one. The call of `end` must follow."""
        batch = self._join(lease, within_ms, now_s)
        if others.computed_tokens:
            if self._last is not batch:
                self._shared.append(batch)
            _share(batch, others, within_ms)
        self._last = batch
        return batch

    def end(self, lease: Lease, others: PeerLoadView, now_s: float) -> None:
        """Record the time of the last first token, after its prefill was measured."""
        self.others_tokens = others.computed_tokens
        self._set_time(lease, now_s)

    def interrupt(self, lease: Lease, now_s: float) -> None:
        """Record a first token that is not measured. It ends the batch before it."""
        self._last = None
        self._set_time(lease, now_s)

    def _set_time(self, lease: Lease, now_s: float) -> None:
        self.first_token_s = now_s
        if lease.uncached_tokens >= LEARN_TOKENS_MIN:
            self.long_s = now_s

    def on_peer_first_token(self, at_s: float, others: PeerLoadView, within_ms: float) -> None:
        """Share out the times of the batches that a first token of another router may belong to. `others` has it."""
        for batch in self._shared:
            if batch.until_s > at_s - max(within_ms, BATCH_OTHERS_LEAST_MS) / 1e3:
                _share(batch, others, within_ms)

    def _join(self, lease: Lease, within_ms: float, now_s: float) -> PrefillBatch:
        batch, before_s = self._last, self.first_token_s
        if batch is None or lease.placed_s >= before_s or (now_s - before_s) * 1e3 > within_ms:
            return PrefillBatch(before_s, max(lease.placed_s, before_s), now_s, lease.uncached_tokens)
        began_s = max(lease.placed_s, batch.before_s)
        if began_s < batch.since_s:
            batch.since_s = began_s
        batch.until_s = now_s
        batch.tokens += lease.uncached_tokens
        return batch


def max_gap_ms(step_ms: float) -> float:
    """Return the longest time between two first tokens of one batch, if a decode step takes `step_ms`."""
    return min(max(BATCH_STEPS * step_ms, BATCH_LEAST_MS), BATCH_MOST_MS)


def _share(batch: PrefillBatch, others: PeerLoadView, within_ms: float) -> None:
    """Assign other routers' prompts their part of a batch's time, from the first tokens received so far."""
    before_s, batch.others_tokens = others.batch(batch.until_s, max(within_ms, BATCH_OTHERS_LEAST_MS) / 1e3)
    batch.since_s = max(batch.since_s, before_s)
