"""Lessons of an answer that ended well: speeds, sizes, the last replica, and the reliability of events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.core.cache_state.event_index import EventIndex
from router.core.estimators.response_memory import PastAnswer, ResponseMemory
from router.core.fleet import lease_learning, outlier_detection
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.models import Models
from router.core.fleet.registry import Fleet
from router.core.placement.scoring import round_to_blocks
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, Outcome, Usage

UNANNOUNCED_MAX = 16


@dataclass(frozen=True, slots=True)
class UnreportedHit:
    """Cached tokens of a prompt at a replica, found by its engine but not announced by its events."""

    replica: str
    model: str
    prompt: TokenPrompt
    cached_tokens: int


class OutcomeFeedback:
    """Updates the learned models that placement reads."""

    def __init__(
        self, fleet: Fleet, fitness: Eligibility, models: Models, answers: ResponseMemory, knowledge: EventIndex
    ) -> None:
        self._fleet = fleet
        self._fitness = fitness
        self._models = models
        self._answers = answers
        self._knowledge = knowledge
        self.unannounced: deque[UnreportedHit] = deque(maxlen=UNANNOUNCED_MAX)

    def learn(self, member: ReplicaState, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Learn from a lease that ended well."""
        usage, prompt = outcome.usage, lease.prompt
        uncached, cached = lease_learning.learn(member, lease, outcome, now_s)
        if (pull := lease.receipt.pull) is not None:
            self._fleet.pulls.learn(lease, pull, member.speeds.loads, cached)
        if lease.guessed:
            self._learn_guess(lease, usage)
        if lease.measurements.own_ms is not None:
            is_slow = outlier_detection.observe(self._fleet, member, lease, uncached, cached)
            if is_slow or member.breaker.backoff_s:
                self._fitness.on_latency_verdict(member, lease, slow=is_slow, now_s=now_s)
        self._compare(lease, usage)
        tokens = self._models.tokens(lease.model)
        if usage is not None:
            if usage.prompt_tokens:
                member.counters.correct_prompt_tokens(lease, usage.prompt_tokens)
            if prompt.text_bytes or prompt.opaque_bytes:
                tokens.observe(prompt.text_bytes, usage.prompt_tokens, prompt.opaque_bytes)
        if usage is not None and usage.cached_tokens is not None and prompt.credited_tokens:
            pulled = lease.receipt.pull.tokens if lease.receipt.pull is not None else 0
            tokens.observe_credit(prompt.credited_tokens, lease.cached_tokens - pulled - usage.cached_tokens)
        if prompt.end_key is not None:
            counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, outcome.events)
            self._answers.put(prompt.end_key, PastAnswer(lease.replica, *counts, member.cache_epoch))

    def _learn_guess(self, lease: Lease, usage: Usage | None) -> None:
        """Record if at least half of the tokens not known to be cached were cached. The engine's usage decides, or else
        the time to first token."""
        if usage is not None and usage.cached_tokens is not None:
            self._fleet.means.note_guess(right=usage.cached_tokens - lease.cached_tokens > lease.uncached_tokens / 2)
        elif (service_ms := lease.measurements.service_ms) is not None:
            self._fleet.means.note_guess(right=service_ms < lease.prefill_ms / 2)

    def _compare(self, lease: Lease, usage: Usage | None) -> None:
        """Compare the prediction by events with the engine's usage."""
        stored, token_ids = lease.prompt.stored, lease.prompt.token_ids
        actual = usage.cached_tokens if usage else None
        if token_ids and usage:
            self._models.compare_counts(lease.model, lease.prompt_tokens, usage.prompt_tokens)
        if stored is not None:
            matched = round_to_blocks(stored.tokens, lease.prompt_tokens, stored.block_tokens, whole=stored.whole)
            predicted = max(0, matched - stored.dropped)
            if actual is not None and lease.receipt.pull is not None:
                actual = min(actual, predicted)  # tokens beyond the prediction were pulled
            if actual is not None and token_ids is not None:
                self._knowledge.tiered.check_last_block(
                    lease.replica, stored.block_tokens, token_ids.tokens, predicted, actual
                )
            self._knowledge.check_prediction(lease.replica, stored, matched, actual, lease.prompt_tokens)
            # A prompt's last block may be cached without being counted.
            last = stored.block_tokens if stored.whole else 0
            if stored.tiers and actual is not None and actual + last < predicted and token_ids is not None:
                self._knowledge.tiered.drop_missing(lease.replica, stored, token_ids, actual)
            more = actual if actual and actual >= predicted + stored.block_tokens else 0
            if more and stored.grade is Confidence.CATCHING_UP and token_ids:
                self.unannounced.append(UnreportedHit(lease.replica, lease.model, token_ids, more))
        else:
            self._knowledge.check_prediction(lease.replica, None, 0, actual, lease.prompt_tokens)
