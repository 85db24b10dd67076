"""Learned values of the whole fleet: speeds by kind of replica, and the success rate of guesses on the ring.

A kind is the set of base models that a replica serves. Replicas of one kind share one ModelSpeeds (model_speeds.py):
observations of one of them are the prior of all.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.core.estimators.model_speeds import WORK_FADE, ModelSpeeds
from router.core.estimators.tier_load import GUESSES, LoadFits, LoadModel

RING_GUESS_PRIOR = 0.9  # initial success rate of guesses (FleetMeans.elsewhere)
GUESS_LEAST = 0.05  # minimum of the success rate: some guesses are always made, to detect when they become right again
SPEEDS_MAX = 256  # kinds of replicas with stored speeds

Kind = tuple[str, ...]
"""Names of the base models that a replica serves, in order."""


class FleetMeans:
    """Values learned from all replicas' answers."""

    def __init__(self) -> None:
        self.speeds: dict[Kind, ModelSpeeds] = {}
        self.load_guesses: dict[str, LoadModel] = dict(GUESSES)  # before any load is learned; changed in place
        # Share of the guesses that were right: the replica held a prompt that no replica was known to hold.
        self.guess_right = RING_GUESS_PRIOR

    def get_or_create(self, kind: Kind, in_use: Iterable[ModelSpeeds]) -> ModelSpeeds:
        """Return the speeds of a kind of replicas. If too many kinds are known, those not `in_use` are dropped."""
        speeds = self.speeds.get(kind)
        if speeds is None:
            if len(self.speeds) >= SPEEDS_MAX:
                used = {id(each) for each in in_use}
                self.speeds = {key: each for key, each in self.speeds.items() if id(each) in used}
            speeds = self.speeds[kind] = ModelSpeeds(loads=LoadFits(self.load_guesses))
        return speeds

    @property
    def common(self) -> ModelSpeeds:
        """The speeds of the kind with the most answers, for values that refer to no replica."""
        most: ModelSpeeds | None = None
        for speeds in self.speeds.values():
            if most is None or speeds.answers > most.answers:
                most = speeds
        return most if most is not None else ModelSpeeds()

    def note_guess(self, *, right: bool) -> None:
        """Record the result of a guess: a prompt that no replica was known to hold was placed on the ring."""
        self.guess_right += (1 - WORK_FADE) * (right - self.guess_right)

    @property
    def elsewhere(self) -> float:
        """Probability that another router placed a prompt that no replica is known to hold at its place on the ring."""
        return max(self.guess_right, GUESS_LEAST)
