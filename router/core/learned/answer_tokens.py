"""How long answers are, in tokens, when only some of them have ended.

Answers under way are censored observations: each is at least as long as it is by now. With a constant chance to end at
each token, the most likely mean is all tokens seen, of ended answers and of those under way, divided by the number of
answers that ended (Lawless, "Statistical Models and Methods for Lifetime Data", 2003, ch. 4). Without the tokens under
way a router would believe for its first minute that answers are as short as the first ones to end.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.99  # part of the counts that is left after another answer: the mean is of the last hundred or so
GUESS_TOKENS = 300.0  # length of the one answer that is assumed before any was seen


@dataclass(slots=True)
class AnswerTokens:
    """Counts of tokens and answers; `under_way_tokens` is set from outside, every second or so."""

    under_way_tokens: float = 0.0
    _tokens: float = 0.0
    _ended: float = 0.0

    def ended(self, tokens: int) -> None:
        """An answer ended well with so many tokens."""
        self._tokens = self._tokens * FORGET + tokens
        self._ended = self._ended * FORGET + 1.0

    @property
    def counts(self) -> tuple[float, float]:
        """(tokens, answers) of answers that ended; what is longer ago counts for less."""
        return self._tokens, self._ended

    def adopt(self, tokens: float, answers: float) -> None:
        """Begin with another router's `counts`, in place of none."""
        self._tokens, self._ended = tokens, answers

    @property
    def mean(self) -> float:
        """Tokens of the mean answer."""
        return (self._tokens + self.under_way_tokens + GUESS_TOKENS) / (self._ended + 1.0)
