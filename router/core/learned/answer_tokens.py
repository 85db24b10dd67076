"""How long answers are, in tokens, when only some of them have ended.

Answers under way are censored observations: each is at least as long as it is by now. With a constant chance to end at
each token, the most likely mean is all tokens seen, of ended answers and of those under way, divided by the number of
answers that ended (Lawless, "Statistical Models and Methods for Lifetime Data", 2003, ch. 4). Without the tokens under
way a router would believe for its first minute that answers are as short as the first ones to end. What several routers
have counted adds up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORGET = 0.99  # part of the counts that is left after another answer: the mean is of the last hundred or so
GUESS_TOKENS = 300.0  # length of the one answer that is assumed before any was seen


@dataclass(slots=True)
class AnswerTokens:
    """Counts of tokens and answers; `under_way_tokens` is set from outside, every second or so."""

    under_way_tokens: float = 0.0
    _tokens: float = 0.0
    _ended: float = 0.0
    _told: dict[str, tuple[float, float]] = field(default_factory=dict)  # router -> its `counts`
    _told_tokens: float = 0.0
    _told_ended: float = 0.0

    def ended(self, tokens: int) -> None:
        """An answer ended well with so many tokens."""
        self._tokens = self._tokens * FORGET + tokens
        self._ended = self._ended * FORGET + 1.0

    @property
    def counts(self) -> tuple[float, float]:
        """(tokens of answers that ended and of those under way, answers that ended), as this router has seen them; what
        is longer ago counts for less."""
        return self._tokens + self.under_way_tokens, self._ended

    def tell(self, router: str, tokens: float, answers: float) -> None:
        """Take another router's `counts`, in place of those that it told before."""
        self._told[router] = tokens, answers
        self._add_up()

    def forget(self, router: str) -> None:
        """Another router is there no more."""
        if self._told.pop(router, None) is not None:
            self._add_up()

    def _add_up(self) -> None:
        self._told_tokens = sum([tokens for tokens, _ in self._told.values()])
        self._told_ended = sum([answers for _, answers in self._told.values()])

    @property
    def mean(self) -> float:
        """Tokens of the mean answer."""
        tokens = self._tokens + self.under_way_tokens + self._told_tokens
        return (tokens + GUESS_TOKENS) / (self._ended + self._told_ended + 1.0)
