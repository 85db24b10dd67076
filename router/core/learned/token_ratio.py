"""Bytes per token, tokens of what is no text, and whether answers come back as prompts: learned per model from what
engines report.

A prompt with images has the tokens of its text, at the model's bytes per token, and the rest is its images': what they
have on the mean. The text is known to a tenth only, so a prompt says the less of its images the more text it has: its
weight is that of an observation with an error of that size beside one as large as the first guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.facts.requests import OPAQUE_BYTES, Prompt

BYTES_PER_TOKEN = 4.0  # English text under any large vocabulary; gone after a few answers
PRIOR_TOKENS = 200.0
RATIO_MIN, RATIO_MAX = 0.5, 64.0
FADE = 0.99
CREDIT_TRIALS_MIN = 5.0
CREDIT_TRUE_MIN = 0.5
CREDIT_RETRY = 20
MISCOUNTS_MAX = 5.0
OPAQUE_TOKENS = 256.0  # guessed tokens of an image, before one was counted
OPAQUE_PRIOR = 0.5  # images that this guess is worth
OPAQUE_TOKENS_MAX = 1 << 18  # most tokens believed of one part: an hour of video
TEXT_ERROR = 0.1  # relative error of the tokens that a text is believed to have


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
    _opaque_tokens: float = OPAQUE_TOKENS * OPAQUE_PRIOR
    _opaque_parts: float = OPAQUE_PRIOR
    # Of all prompts, with those that are not only text. The same as of texts as long as there are no others.
    _all_bytes: float = BYTES_PER_TOKEN * PRIOR_TOKENS
    _all_tokens: float = PRIOR_TOKENS

    @property
    def counts(self) -> tuple[float, ...]:
        """What was counted, with the first guesses; what is longer ago counts for less."""
        return (
            *(self._bytes, self._tokens, self._credits, self._credits_true),
            *(self._opaque_tokens, self._opaque_parts, self._all_bytes, self._all_tokens),
        )

    def adopt(self, counts: Sequence[float]) -> bool:
        """Begin with `counts` of before, where nothing was counted yet; returns whether they were taken."""
        if self.counts != ModelTokens().counts or len(counts) != len(self.counts):
            return False
        bytes_, tokens, credits_, credits_true, opaque_tokens, opaque_parts, all_bytes, all_tokens = counts
        if (
            min(counts) < 0
            or min(tokens, opaque_parts, all_tokens) <= 0
            or opaque_tokens / opaque_parts > OPAQUE_TOKENS_MAX
        ):
            return False
        if not plausible(bytes_ / tokens) or not plausible(all_bytes / all_tokens):
            return False
        self._bytes, self._tokens, self._credits, self._credits_true = bytes_, tokens, credits_, credits_true
        self._opaque_tokens, self._opaque_parts = opaque_tokens, opaque_parts
        self._all_bytes, self._all_tokens = all_bytes, all_tokens
        return True

    @property
    def bytes_per_token(self) -> float:
        """Mean over recent prompts, canonical bytes against the engine's count (template included)."""
        return self._bytes / self._tokens

    @property
    def opaque_tokens(self) -> float:
        """Mean tokens of a part that is no text."""
        return self._opaque_tokens / self._opaque_parts

    @property
    def pool_ratio(self) -> float:
        """Bytes per token of what fills a cache, as part of those of text: below 1 where images have more tokens than
        their bytes would be as text."""
        return self._all_bytes / self._all_tokens / self.bytes_per_token

    def tokens_of(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, as far as is learned; at least 1."""
        text_bytes, parts = prompt.size - prompt.opaque_bytes, prompt.opaque_bytes / OPAQUE_BYTES
        tokens = text_bytes / (prompt.bytes_per_token or self.bytes_per_token)
        return round(tokens + parts * self.opaque_tokens if parts else tokens) or 1

    def observe(self, text_bytes: int, prompt_tokens: int, opaque_bytes: int = 0) -> None:
        """Take one prompt whose tokens an engine counted; `opaque_bytes` are those that it has besides its text."""
        if opaque_bytes:
            self._observe_opaque(text_bytes, prompt_tokens, opaque_bytes)
            return
        if prompt_tokens <= 0 or not plausible(text_bytes / prompt_tokens):
            return
        self._bytes = self._bytes * FADE + text_bytes
        self._tokens = self._tokens * FADE + prompt_tokens
        self._all_bytes = self._all_bytes * FADE + text_bytes
        self._all_tokens = self._all_tokens * FADE + prompt_tokens

    def _observe_opaque(self, text_bytes: int, prompt_tokens: int, opaque_bytes: int) -> None:
        parts, text_tokens = opaque_bytes / OPAQUE_BYTES, text_bytes / self.bytes_per_token
        if not 0 < prompt_tokens <= parts * OPAQUE_TOKENS_MAX + text_bytes / RATIO_MIN:
            return  # the engine counts something else
        guessed, error = parts * OPAQUE_TOKENS, TEXT_ERROR * text_tokens
        weight = guessed * guessed / (guessed * guessed + error * error)
        self._opaque_tokens = self._opaque_tokens * FADE + weight * max(0.0, prompt_tokens - text_tokens)
        self._opaque_parts = self._opaque_parts * FADE + weight * parts
        self._all_bytes = self._all_bytes * FADE + text_bytes + opaque_bytes
        self._all_tokens = self._all_tokens * FADE + prompt_tokens

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

    @property
    def may_credit(self) -> bool:
        """Whether to credit now: where it proved wrong, once in CREDIT_RETRY requests, to learn when that changes."""
        return self.credits_answers or self._denied == CREDIT_RETRY - 1

    def count_credit(self) -> None:
        """A request was placed that quotes an answer, credited or not."""
        if not self.credits_answers:
            self._denied = (self._denied + 1) % CREDIT_RETRY

    def observe_credit(self, credited_tokens: int, missing_tokens: int) -> None:
        """A request with `credited_tokens` of an answer was `missing_tokens` short of the prediction."""
        self._credits = self._credits * FADE + 1
        self._credits_true = self._credits_true * FADE + (missing_tokens < credited_tokens / 2)
