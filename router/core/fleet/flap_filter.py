"""Detection of a state that changes back and forth, so that its log has one line when that begins and one when it ends.

A flap is a change for the worse. FLAPS_MIN flaps within WINDOW_S are flapping. It ends after STEADY_S without any
change. STEADY_S is shorter than the window, so that a state which flaps every few minutes has one beginning.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

WINDOW_S, KEPT_MAX = 600.0, 20  # time for which flaps are kept, and how many
FLAPS_MIN = 3
STEADY_S = 300.0


class FlapPhase(Enum):
    """Part of a change in flapping."""

    NONE = auto()  # the change is not part of flapping
    BEGINS = auto()
    LASTS = auto()


class FlapFilter:
    """Flaps of one state. Times ascend."""

    __slots__ = ("_at_s", "_flapping", "_flaps_min", "_last_s")

    def __init__(self, flaps_min: int = FLAPS_MIN) -> None:
        self._flaps_min = flaps_min
        self._at_s: deque[float] = deque(maxlen=KEPT_MAX)
        self._last_s = 0.0
        self._flapping = False

    def note_change(self, now_s: float, *, flap: bool = True) -> FlapPhase:
        """Record a change, which is a flap or not. Returns its phase."""
        self._last_s = now_s
        if flap:
            self._at_s.append(now_s)
        if self._flapping:
            return FlapPhase.LASTS
        self._flapping = flap and self.count(now_s) >= self._flaps_min
        return FlapPhase.BEGINS if self._flapping else FlapPhase.NONE

    def count(self, now_s: float) -> int:
        """Return the number of flaps within the window, at most KEPT_MAX."""
        return sum(at_s >= now_s - WINDOW_S for at_s in self._at_s)

    def end_if_steady(self, now_s: float) -> bool:
        """True if flapping has ended; the flaps before no longer begin another one. Call it every few seconds."""
        if not self._flapping or now_s - self._last_s < STEADY_S:
            return False
        self._flapping = False
        return True
