"""Estimate of the mean answer length in tokens, when only some answers have ended.

Answers under way are censored observations: each has at least its current length. If answers end with a constant
probability at each token, the maximum-likelihood mean is the number of all tokens seen, divided by the number of
answers that ended. The source is Lawless, "Statistical Models and Methods for Lifetime Data", 2003, ch. 4. The tokens
include those of answers under way. Without these a router would estimate in its first minute that answers are as short
as the first ones to end. The counts of several routers are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORGET = 0.99  # part of the counts that remains after another answer: the mean covers the last hundred or so
GUESS_TOKENS = 300.0  # length of the one answer that is assumed before any was seen


@dataclass(slots=True)
class OutputLength:
    """Counts of tokens and answers; `under_way_tokens` is set from outside, about once a second."""

    under_way_tokens: float = 0.0
    _tokens: float = 0.0
    _ended: float = 0.0
    _told: dict[str, tuple[float, float]] = field(default_factory=dict)  # router -> its `counts`
    _told_tokens: float = 0.0
    _told_ended: float = 0.0

    def note_length(self, tokens: int) -> None:
        """Record an answer of this many tokens that ended well."""
        self._tokens = self._tokens * FORGET + tokens
        self._ended = self._ended * FORGET + 1.0

    @property
    def counts(self) -> tuple[float, float]:
        """(tokens of answers that ended or are under way, answers that ended), as seen by this router. Older answers
        count less."""
        return self._tokens + self.under_way_tokens, self._ended

    def tell(self, router: str, tokens: float, answers: float) -> None:
        """Store another router's `counts` and replace its previous ones."""
        self._told[router] = tokens, answers
        self._add_up()

    def forget(self, router: str) -> None:
        """Drop the counts of another router that is gone."""
        if self._told.pop(router, None) is not None:
            self._add_up()

    def _add_up(self) -> None:
        self._told_tokens = sum([tokens for tokens, _ in self._told.values()])
        self._told_ended = sum([answers for _, answers in self._told.values()])

    @property
    def mean(self) -> float:
        """Mean number of tokens of an answer."""
        tokens = self._tokens + self.under_way_tokens + self._told_tokens
        return (tokens + GUESS_TOKENS) / (self._ended + self._told_ended + 1.0)
