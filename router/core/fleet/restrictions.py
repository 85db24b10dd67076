"""Reasons other than health checks and its breaker for which a replica is sent no requests, or fewer than others.

Eligibility (eligibility.py) and the registry (registry.py) set them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Restrictions:
    """Cooldown, warm-up and slow start of one replica."""

    rest_until_s: float = 0.0  # end of its cooldown
    full: bool = False  # in cooldown because its queue was full, without a given time
    full_trial: int = -1  # number of the last lease placed there during such a cooldown
    warming_up: bool = False  # no requests are sent until the cache is warm (Fleet.warm_up)
    slow_start_at_s: float = -inf  # time at which the slow start began

    def set_cooldown(self, until_s: float, *, full: bool) -> None:
        """Extend the cooldown to this time. An earlier time has no effect."""
        if until_s >= self.rest_until_s:
            self.rest_until_s, self.full = until_s, full

    def note_trial(self, lease: int, placed_s: float) -> None:
        """Record the number of a placed lease. During a cooldown because of a full queue it is the trial."""
        if self.full and self.rest_until_s > placed_s:
            self.full_trial = lease
