"""Learned token counts per model, from the engines' reports: bytes per token, tokens of images, and reuse of answers.

The tokens of a prompt with images are the tokens of its text, at the model's bytes per token, plus the tokens of its
images, at their mean. The text's tokens are known only to a tenth. So a prompt with more text contains less information
about its images. Its weight is that of an observation with an error of that size, relative to the first guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.types.requests import OPAQUE_BYTES, Prompt

BYTES_PER_TOKEN = 4.0  # English text with any large vocabulary; outweighed after a few answers
PRIOR_TOKENS = 200.0
RATIO_MIN, RATIO_MAX = 0.5, 64.0
FADE = 0.99
CREDIT_TRIALS_MIN = 5.0
CREDIT_TRUE_MIN = 0.5
CREDIT_RETRY = 20
MISCOUNTS_MAX = 5.0
OPAQUE_TOKENS = 256.0  # assumed tokens of an image before one was counted
OPAQUE_PRIOR = 0.5  # weight of this assumption, in images
OPAQUE_TOKENS_MAX = 1 << 18  # limit of the tokens of one part: an hour of video
TEXT_ERROR = 0.1  # relative error of the estimated tokens of a text


def plausible(bytes_per_token: float) -> bool:
    """True if a tokenizer can produce this ratio; otherwise the engine counts in another way."""
    return RATIO_MIN <= bytes_per_token <= RATIO_MAX


@dataclass(slots=True)
class ModelTokens:
    """Learned properties of one model's tokenizer and template."""

    _bytes: float = BYTES_PER_TOKEN * PRIOR_TOKENS
    _tokens: float = PRIOR_TOKENS
    _credits: float = 0.0
    _credits_true: float = 0.0
    _denied: int = 0
    _miscounts: float = 0.0
    _opaque_tokens: float = OPAQUE_TOKENS * OPAQUE_PRIOR
    _opaque_parts: float = OPAQUE_PRIOR
    # Counts of all prompts, including those with more than text. The same as for texts until such a prompt comes.
    _all_bytes: float = BYTES_PER_TOKEN * PRIOR_TOKENS
    _all_tokens: float = PRIOR_TOKENS

    @property
    def counts(self) -> tuple[float, ...]:
        """The counts, including the first guesses; older prompts count less."""
        return (
            *(self._bytes, self._tokens, self._credits, self._credits_true),
            *(self._opaque_tokens, self._opaque_parts, self._all_bytes, self._all_tokens),
        )

    def adopt(self, counts: Sequence[float]) -> bool:
        """Start with earlier `counts` if none were made yet; returns True if they were accepted."""
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
        """Mean over recent prompts: canonical bytes per token as counted by the engine (template included)."""
        return self._bytes / self._tokens

    @property
    def opaque_tokens(self) -> float:
        """Mean tokens of a part that is not text."""
        return self._opaque_tokens / self._opaque_parts

    @property
    def pool_ratio(self) -> float:
        """Bytes per token of the content of a KV cache, relative to those of text: below 1 if images have more tokens
        than text of the same size."""
        return self._all_bytes / self._all_tokens / self.bytes_per_token

    def tokens_of(self, prompt: Prompt) -> int:
        """Return the estimated number of tokens of a prompt, at least 1."""
        text_bytes, parts = prompt.size - prompt.opaque_bytes, prompt.opaque_bytes / OPAQUE_BYTES
        tokens = text_bytes / (prompt.bytes_per_token or self.bytes_per_token)
        return round(tokens + parts * self.opaque_tokens if parts else tokens) or 1

    def observe(self, text_bytes: int, prompt_tokens: int, opaque_bytes: int = 0) -> None:
        """Record one prompt with the engine's token count; `opaque_bytes` are its bytes other than text."""
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
            return  # the engine counts in another way
        guessed, error = parts * OPAQUE_TOKENS, TEXT_ERROR * text_tokens
        weight = guessed * guessed / (guessed * guessed + error * error)
        self._opaque_tokens = self._opaque_tokens * FADE + weight * max(0.0, prompt_tokens - text_tokens)
        self._opaque_parts = self._opaque_parts * FADE + weight * parts
        self._all_bytes = self._all_bytes * FADE + text_bytes + opaque_bytes
        self._all_tokens = self._all_tokens * FADE + prompt_tokens

    def miscounts(self, ours: int, theirs: int) -> bool:
        """Compare this router's token count of one prompt with the engine's. Returns True if so many of the last
        hundred differ that our ids cannot be the engine's; the count then restarts."""
        self._miscounts = self._miscounts * FADE + (ours != theirs)
        wrong = self._miscounts >= MISCOUNTS_MAX
        if wrong:
            self._miscounts = 0.0
        return wrong

    @property
    def credits_answers(self) -> bool:
        """True if an answer's own blocks count as cached.

        Templates that remove generated text (for example reasoning) break that; the engine's counts show it.
        """
        return self._credits < CREDIT_TRIALS_MIN or self._credits_true / self._credits >= CREDIT_TRUE_MIN

    @property
    def may_credit(self) -> bool:
        """True if an answer may be credited now. If credits proved wrong, one in CREDIT_RETRY requests is credited, to
        detect a change."""
        return self.credits_answers or self._denied == CREDIT_RETRY - 1

    def count_credit(self) -> None:
        """Record the placement of a request that quotes an answer, credited or not."""
        if not self.credits_answers:
            self._denied = (self._denied + 1) % CREDIT_RETRY

    def observe_credit(self, credited_tokens: int, missing_tokens: int) -> None:
        """Record that a request with `credited_tokens` of an answer was `missing_tokens` short of the prediction."""
        self._credits = self._credits * FADE + 1
        self._credits_true = self._credits_true * FADE + (missing_tokens < credited_tokens / 2)
