"""Predicted against actual: whether what the events say is what the engine does.

Two instruments, per replica. Answers: where an answer says how many tokens were cached, the prediction made from
events alone is held against it. `agrees` (99 % of the last 200 equal) earns the grade of a stream that was joined
late; `drifts` (more than 10 % of the last 200 off by over a block) takes it away. Late stores cost a block here and
there when requests of one prefix run side by side; a lying stream is off by whole prompts.

An engine whose drafting model needs the last matched block's hidden states computes that block again (EAGLE and MTP:
vLLM v1/core/single_type_kv_cache_manager.py drops it from every match, after the match was cut before the prompt's last
token). No page or event says so, so it is learned: where most of the last answers with a hit found one block less than
the events said, predictions are a block less, and are compared after that.

Counters: where answers are silent, the engine's own sums of cached and looked-up tokens are held against the sum of
predictions, as long as all its prompts are ours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.core.facts.replicas import Load

CHECKS = 200  # answers compared, at most
EARNED_SHARE = 0.99  # part of CHECKS that must be predicted to the token to earn a grade
DRIFT_SHARE = 0.1  # part of CHECKS, or of tokens, that may be off
DRIFT_TOKENS_MIN = 50_000  # tokens looked up before counters say anything
HITS = 16  # last answers with a hit, by which it is decided whether the last matched block is dropped
HITS_MIN = 8  # hits before that is decided
OURS_SHARE = 0.05  # prompts of others, or requests still under way, that leave the counters comparable


def _windows() -> tuple[deque[bool], deque[bool]]:
    return deque(maxlen=CHECKS), deque(maxlen=CHECKS)


@dataclass(slots=True)
class AnswerCheck:
    """The last CHECKS comparisons with answers, each made for both numbers of blocks that an engine may drop, so that
    what is learned of that counts for the answers that taught it too."""

    dropped_blocks: int = 0  # blocks at the end of each match that the engine computes again: 0 or 1
    _equal: tuple[deque[bool], deque[bool]] = field(default_factory=_windows)
    _off: tuple[deque[bool], deque[bool]] = field(default_factory=_windows)
    _hits: deque[int] = field(default_factory=lambda: deque(maxlen=HITS))  # blocks too many: 0, 1; -1: anything else

    def observe(self, predicted_tokens: int, actual_tokens: int, block_tokens: int, *, drops: bool = True) -> None:
        """Take one answer. `predicted_tokens` is what events say, whatever is known to be dropped; without `drops`
        nothing of that can be."""
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
        """What was compared no longer counts."""
        for window in (*self._equal, *self._off):
            window.clear()

    def forget(self) -> None:
        """Another process answers from now on, and may drop blocks where this one did not."""
        self.clear()
        self._hits.clear()
        self.dropped_blocks = 0

    @property
    def checks(self) -> int:
        """Answers compared."""
        return len(self._equal[0])

    @property
    def equal(self) -> int:
        """Answers that were predicted to the token."""
        return sum(self._equal[self.dropped_blocks])

    @property
    def agrees(self) -> bool:
        """The window is full and nearly all of it was predicted to the token."""
        return self.checks == CHECKS and self.equal >= EARNED_SHARE * CHECKS

    @property
    def drifts(self) -> bool:
        """Too many were off by more than a block; of an unfilled window as many as of a full one."""
        return sum(self._off[self.dropped_blocks]) > DRIFT_SHARE * CHECKS


@dataclass(slots=True)
class CounterCheck:
    """Sums of predictions since the counters were last compared."""

    _predicted_tokens: float = 0.0
    _prompt_tokens: float = 0.0
    _silent: bool = True  # no answer said how many tokens were cached
    _since: Load | None = None

    def finished(self, predicted_tokens: int | None, prompt_tokens: int, *, silent: bool) -> None:
        """Take one request that ended; `predicted_tokens` is None where events were not asked."""
        self._silent = self._silent and silent and predicted_tokens is not None
        self._predicted_tokens += predicted_tokens or 0
        self._prompt_tokens += prompt_tokens

    def observe(self, load: Load) -> tuple[int, int] | None:
        """Take a probe's view; (predicted, actual) cached tokens when a window is full and comparable."""
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
        """Begin a new window at this view of the counters."""
        self._since, self._predicted_tokens, self._prompt_tokens, self._silent = load, 0.0, 0.0, True


def counters_drift(predicted_tokens: int, actual_tokens: int) -> bool:
    """Whether a window's sums are too far apart: over DRIFT_SHARE of what could be looked up."""
    return abs(predicted_tokens - actual_tokens) > DRIFT_SHARE * max(DRIFT_TOKENS_MIN, predicted_tokens, actual_tokens)
