"""What the answers of the whole fleet teach: speeds by kind of replica, and how often a guess on the ring was right.

A kind are the base models that a replica serves: replicas of one kind share one Speeds (speeds.py), and what one of
them learns is the prior of all.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.core.learned.loads import GUESSES, LoadFits, LoadModel
from router.core.learned.speeds import WORK_FADE, Speeds

GUESS_RIGHT = 0.9  # first belief in guesses (FleetMeans.elsewhere)
GUESS_LEAST = 0.05  # least belief in guesses: some are still made, to see when they become right again
SPEEDS_MAX = 256  # kinds of replicas whose speeds are kept

Kind = tuple[str, ...]
"""Names of the base models that a replica serves, in order."""


class FleetMeans:
    """Learned from all replicas' answers."""

    def __init__(self) -> None:
        self.speeds: dict[Kind, Speeds] = {}
        self.load_guesses: dict[str, LoadModel] = dict(GUESSES)  # before anything is learned; changed in place
        # Part of the guesses that were right: the replica held what nobody was known to hold.
        self.guess_right = GUESS_RIGHT

    def of(self, kind: Kind, in_use: Iterable[Speeds]) -> Speeds:
        """The speeds of a kind of replicas. Where too many kinds are known, those not `in_use` are forgotten."""
        speeds = self.speeds.get(kind)
        if speeds is None:
            if len(self.speeds) >= SPEEDS_MAX:
                used = {id(each) for each in in_use}
                self.speeds = {key: each for key, each in self.speeds.items() if id(each) in used}
            speeds = self.speeds[kind] = Speeds(loads=LoadFits(self.load_guesses))
        return speeds

    @property
    def common(self) -> Speeds:
        """The speeds of the kind with the most answers: for figures that name no replica."""
        most: Speeds | None = None
        for speeds in self.speeds.values():
            if most is None or speeds.answers > most.answers:
                most = speeds
        return most if most is not None else Speeds()

    def guessed(self, *, right: bool) -> None:
        """A prompt that nobody was known to hold was placed on a guess, which was right or wrong."""
        self.guess_right += (1 - WORK_FADE) * (right - self.guess_right)

    @property
    def elsewhere(self) -> float:
        """Chance that another router placed a prompt that nobody is known to hold at its place on the ring."""
        return max(self.guess_right, GUESS_LEAST)
