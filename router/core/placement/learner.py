"""What an answer that ended well teaches: speed, sizes, who gave it, and how far events can be trusted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.core.cache.knowledge import Knowledge
from router.core.facts.placements import Grade, Outcome, Usage
from router.core.fleet import slow as pace
from router.core.fleet.fitness import Standing
from router.core.fleet.fleet import Fleet
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member
from router.core.fleet.models import Models
from router.core.learned.answers import Answer, AnswerMemory
from router.core.placement.candidates import capped
from router.core.prompts.token_keys import TokenPrompt

UNANNOUNCED_MAX = 16


@dataclass(frozen=True, slots=True)
class Unannounced:
    """A replica held `cached_tokens` of a prompt, and its events did not know."""

    replica: str
    model: str
    prompt: TokenPrompt
    cached_tokens: int


class Learner:
    """Writes what it learns to where placing looks it up."""

    def __init__(
        self, fleet: Fleet, standing: Standing, models: Models, answers: AnswerMemory, knowledge: Knowledge
    ) -> None:
        self._fleet = fleet
        self._standing = standing
        self._models = models
        self._answers = answers
        self._knowledge = knowledge
        self.unannounced: deque[Unannounced] = deque(maxlen=UNANNOUNCED_MAX)

    def learn(self, member: Member, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Of a lease that ended well."""
        usage = outcome.usage
        uncached, cached = self._fleet.learn(member, lease, outcome, now_s)
        if lease.own_ms is not None:
            slow = pace.observe(self._fleet, member, lease, uncached, cached)
            if slow or member.breaker.backoff_s:
                self._standing.timed(member, lease, slow=slow, now_s=now_s)
        self._compare(lease, usage)
        tokens = self._models.tokens(lease.model)
        if usage is not None:
            if usage.prompt_tokens:
                member.sent(lease, usage.prompt_tokens)
            if lease.text_bytes or lease.opaque_bytes:
                tokens.observe(lease.text_bytes, usage.prompt_tokens, lease.opaque_bytes)
        if usage is not None and usage.cached_tokens is not None and lease.credited_tokens:
            tokens.observe_credit(lease.credited_tokens, lease.cached_tokens - usage.cached_tokens)
        if lease.end_key is not None:
            counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, outcome.events)
            self._answers.put(lease.end_key, Answer(lease.replica, *counts, member.life))

    def _compare(self, lease: Lease, usage: Usage | None) -> None:
        """What events said against what the engine found."""
        held, actual = lease.held, usage.cached_tokens if usage else None
        if lease.tokens and usage:
            self._models.compare_counts(lease.model, lease.prompt_tokens, usage.prompt_tokens)
        if held is not None:
            predicted = capped(held.tokens, lease.prompt_tokens, held.block_tokens)
            self._knowledge.answered(lease.replica, held, predicted, actual, lease.prompt_tokens)
            if held.grade is Grade.CATCHING_UP and lease.tokens and actual and actual >= predicted + held.block_tokens:
                self.unannounced.append(Unannounced(lease.replica, lease.model, lease.tokens, actual))
        else:
            self._knowledge.answered(lease.replica, None, 0, actual, lease.prompt_tokens)
