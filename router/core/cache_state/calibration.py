"""Comparison of predicted and actual cached tokens, which verifies that a replica's events describe its engine.

There are two checks for each replica. The first uses answers: if an answer states its number of cached tokens, that
number is compared with the prediction from events alone. `agrees` (99 % of the last 200 equal) earns the exact grade
for a stream that was joined late. `drifts` (more than 10 % of the last 200 off by over a block) removes it. Late stores
cost an occasional block when requests with one prefix run in parallel; a wrong stream is off by whole prompts.

An engine with a drafting model that needs the hidden states of the last matched block computes that block again. This
applies to EAGLE and MTP: vLLM's v1/core/single_type_kv_cache_manager.py drops the block from every match, after the
match was cut before the prompt's last token. No page or event reports it, so it is learned. If most of the recent
answers with a hit found one block less than the events predicted, predictions are reduced by a block. They are compared
after that reduction.

The second check uses counters, for answers without cached tokens. The engine's own sums of cached and looked-up tokens
are compared with the sum of predictions, while all prompts of the engine come from this router.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.core.types.replicas import Load

CHECKS = 200  # maximum number of answers compared
EARNED_SHARE = 0.99  # share of CHECKS that must be predicted to the token to earn a grade
DRIFT_SHARE = 0.1  # share of CHECKS, or of tokens, that may be off
DRIFT_TOKENS_MIN = 50_000  # tokens looked up before counters are compared
HITS = 16  # recent answers with a hit that decide if the last matched block is dropped
HITS_MIN = 8  # hits before that decision
OURS_SHARE = 0.05  # share of other callers' prompts, or of requests in progress, at which counters are still comparable


def _windows() -> tuple[deque[bool], deque[bool]]:
    return deque(maxlen=CHECKS), deque(maxlen=CHECKS)


@dataclass(slots=True)
class AnswerCheck:
    """The last CHECKS comparisons with answers.

    Each is made for both possible numbers of dropped blocks. When the number is learned, it then also applies to the
    answers from which it was learned.
    """

    dropped_blocks: int = 0  # blocks at the end of each match that the engine computes again: 0 or 1
    _equal: tuple[deque[bool], deque[bool]] = field(default_factory=_windows)
    _off: tuple[deque[bool], deque[bool]] = field(default_factory=_windows)
    # blocks too many: 0 or 1; -1: any other difference
    _hits: deque[int] = field(default_factory=lambda: deque(maxlen=HITS))

    def observe(self, predicted_tokens: int, actual_tokens: int, block_tokens: int, *, drops: bool = True) -> None:
        """Process one answer.

        - `predicted_tokens`: the prediction from events, before any reduction for dropped blocks.
        - `drops`: False if the engine can drop no block for this answer.
        """
        for blocks in (0, 1):
            surplus = max(0, predicted_tokens - drops * blocks * block_tokens) - actual_tokens
            self._equal[blocks].append(surplus == 0)
            self._off[blocks].append(abs(surplus) > block_tokens)
        if drops and predicted_tokens and actual_tokens and block_tokens:
            self._learn(predicted_tokens - actual_tokens, block_tokens)

    def _learn(self, surplus_tokens: int, block_tokens: int) -> None:
        hits = self._hits
        hits.append(surplus_tokens // block_tokens if surplus_tokens in (0, block_tokens) else -1)
        if len(hits) >= HITS_MIN and 2 * hits.count(1 - self.dropped_blocks) > len(hits):
            self.dropped_blocks = 1 - self.dropped_blocks

    def clear(self) -> None:
        """Discard all comparisons."""
        for window in (*self._equal, *self._off):
            window.clear()

    def forget(self) -> None:
        """Start over for another process, which may drop a different number of blocks."""
        self.clear()
        self._hits.clear()
        self.dropped_blocks = 0

    @property
    def checks(self) -> int:
        """Number of answers compared."""
        return len(self._equal[0])

    @property
    def equal(self) -> int:
        """Number of answers predicted to the token."""
        return sum(self._equal[self.dropped_blocks])

    @property
    def agrees(self) -> bool:
        """True if the window is full and nearly all of it was predicted to the token."""
        return self.checks == CHECKS and self.equal >= EARNED_SHARE * CHECKS

    @property
    def drifts(self) -> bool:
        """True if too many predictions were off by more than a block. An unfilled window needs as many as a full
        one."""
        return sum(self._off[self.dropped_blocks]) > DRIFT_SHARE * CHECKS


@dataclass(slots=True)
class CounterCheck:
    """Sums of predictions since the counters were last compared."""

    _predicted_tokens: float = 0.0
    _prompt_tokens: float = 0.0
    _silent: bool = True  # no answer stated its cached tokens
    _since: Load | None = None

    def note_response(self, predicted_tokens: int | None, prompt_tokens: int, *, silent: bool) -> None:
        """Process one completed request. `predicted_tokens` is None if the placement did not use events."""
        self._silent = self._silent and silent and predicted_tokens is not None
        self._predicted_tokens += predicted_tokens or 0
        self._prompt_tokens += prompt_tokens

    def observe(self, load: Load) -> tuple[int, int] | None:
        """Process a probe's result. Returns (predicted, actual) cached tokens if a window is full and comparable."""
        since, queries, hits = self._since, load.cache_query_tokens_total, load.cache_hit_tokens_total
        if queries is None or hits is None:
            return None
        before = (since.cache_query_tokens_total, since.cache_hit_tokens_total) if since else (None, None)
        if before[0] is None or before[1] is None or queries < before[0]:
            self.clear(load)
            return None
        looked_up, found = queries - before[0], hits - before[1]
        if looked_up < DRIFT_TOKENS_MIN:
            return None
        ours = abs(looked_up - self._prompt_tokens) <= OURS_SHARE * looked_up
        pair = (round(self._predicted_tokens), round(found)) if ours and self._silent else None
        self.clear(load)
        return pair

    def clear(self, load: Load | None = None) -> None:
        """Start a new window at these counter values."""
        self._since, self._predicted_tokens, self._prompt_tokens, self._silent = load, 0.0, 0.0, True


def counters_drift(predicted_tokens: int, actual_tokens: int) -> bool:
    """True if a window's sums differ by over DRIFT_SHARE of the tokens that could be looked up."""
    return abs(predicted_tokens - actual_tokens) > DRIFT_SHARE * max(DRIFT_TOKENS_MIN, predicted_tokens, actual_tokens)
