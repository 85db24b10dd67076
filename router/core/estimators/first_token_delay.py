"""Delay of a replica's first tokens that neither its queue nor its prefill explains, such as that of a proxy.

The delay is the least difference of the last SAMPLES first tokens to their expected times. A request that waits for
unannounced work is late, too, but not each of eight in a row. The factors of a replica's speed (speed_factor.py) cannot
show the delay: requests overlap in it, so their first tokens follow each other as if there were none.

Until its delay is over, a request counts as one that waits in the replica's queue. So an expected time contains the
longer one of the delay and the wait, not their sum.
"""

from __future__ import annotations

from collections import deque
from math import inf

SAMPLES = 8
DELAY_MIN_MS = 250.0  # a smaller difference is that of long decode steps, or noise of the models
FADE_S = 30.0  # seconds without a first token in which half of the delay is forgotten: it kept requests away


class FirstTokenDelay:
    """Learns the delay of one replica; 0 until SAMPLES first tokens came late."""

    __slots__ = ("_fades_s", "_late_ms", "ms")

    def __init__(self) -> None:
        self.ms = 0.0
        self._late_ms: deque[float] = deque(maxlen=SAMPLES)
        self._fades_s = inf

    def observe(self, expected_ms: float, took_ms: float, now_s: float) -> None:
        """Record a first token that came after `took_ms`. `expected_ms` is its expected time less the delay that was
        known at its placement."""
        self._late_ms.append(took_ms - expected_ms)
        self._fades_s = now_s + FADE_S
        if len(self._late_ms) == SAMPLES:
            least_ms = min(self._late_ms)
            self.ms = least_ms if least_ms >= DELAY_MIN_MS else 0.0

    def fade(self, now_s: float) -> None:
        """Forget half of a delay that no first token has shown for FADE_S."""
        if self.ms and now_s >= self._fades_s:
            self._fades_s = now_s + FADE_S
            self.ms = self.ms / 2 if self.ms >= 2 * DELAY_MIN_MS else 0.0

    def reset(self) -> None:
        """Forget everything."""
        self.ms, self._fades_s = 0.0, inf
        self._late_ms.clear()
