"""Bytes per token, and whether answers come back as prompts: learned per model from what engines report."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_TOKEN = 4.0  # English text under any large vocabulary; gone after a few answers
PRIOR_TOKENS = 200.0
RATIO_MIN, RATIO_MAX = 0.5, 64.0
FADE = 0.99
CREDIT_TRIALS_MIN = 5.0
CREDIT_TRUE_MIN = 0.5
CREDIT_RETRY = 20
MISCOUNTS_MAX = 5.0


def plausible(bytes_per_token: float) -> bool:
    """Whether a tokenizer can do that; otherwise the engine counts something else."""
    return RATIO_MIN <= bytes_per_token <= RATIO_MAX


@dataclass(slots=True)
class ModelTokens:
    """What is learned of one model's tokenizer and template."""

    _bytes: float = BYTES_PER_TOKEN * PRIOR_TOKENS
    _tokens: float = PRIOR_TOKENS
    _credits: float = 0.0
    _credits_true: float = 0.0
    _denied: int = 0
    _miscounts: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        """Mean over recent prompts, canonical bytes against the engine's count (template included)."""
        return self._bytes / self._tokens

    def observe(self, text_bytes: int, prompt_tokens: int) -> None:
        """Take one prompt whose tokens an engine counted."""
        if prompt_tokens <= 0 or not plausible(text_bytes / prompt_tokens):
            return
        self._bytes = self._bytes * FADE + text_bytes
        self._tokens = self._tokens * FADE + prompt_tokens

    def miscounts(self, ours: int, theirs: int) -> bool:
        """Take one prompt that was turned into token ids here and counted there. True when so many of the last hundred
        differ that our ids cannot be the engine's; counting begins anew then."""
        self._miscounts = self._miscounts * FADE + (ours != theirs)
        wrong = self._miscounts >= MISCOUNTS_MAX
        if wrong:
            self._miscounts = 0.0
        return wrong

    @property
    def credits_answers(self) -> bool:
        """Whether an answer's own blocks count as held.

        Templates that drop what the model generated (its reasoning, say) break that; the engine's counts tell.
        """
        return self._credits < CREDIT_TRIALS_MIN or self._credits_true / self._credits >= CREDIT_TRUE_MIN

    def try_credit(self) -> bool:
        """Whether to credit now: where it proved wrong, once in CREDIT_RETRY requests, to learn when that changes."""
        if self.credits_answers:
            return True
        self._denied = (self._denied + 1) % CREDIT_RETRY
        return not self._denied

    def observe_credit(self, credited_tokens: int, missing_tokens: int) -> None:
        """A request with `credited_tokens` of an answer was `missing_tokens` short of the prediction."""
        self._credits = self._credits * FADE + 1
        self._credits_true = self._credits_true * FADE + (missing_tokens < credited_tokens / 2)
