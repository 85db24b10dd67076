"""The channel through which simulated routers tell each other what they do: delay, loss, a partition.

What carries messages between real routers is left to its own tests; here it is a time that each takes, a chance to be
lost on the way to each router, and a time in which the first router hears nobody and nobody hears it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from loadtest.simulate.world.placer import Placer
from loadtest.simulate.world.setting import Setting
from router.core.sharing.limits import SharingLimits
from router.core.sharing.sharing import Sharing

LOOK_S = 0.25  # between two looks for routers that are silent

Schedule = Callable[[float, Callable[[Any], None], Any], None]
"""(when, what, with what)"""


class Channel:
    """All messages of all routers. `at` calls in virtual time, and `now` says what it is."""

    def __init__(self, setting: Setting, placers: Sequence[Placer], at: Schedule, now: Callable[[], float]) -> None:
        self._setting, self._at, self._now = setting, at, now
        self._limits = SharingLimits()
        self._rng = random.Random(f"{setting.seed}/channel")
        self._asked = [False] * len(placers)
        self.said_bytes = self.messages = 0
        self.sharing = [
            Sharing(placer.router, f"router-{n}", 1, self._limits, partial(self._urgent, n))
            for n, placer in enumerate(placers)
        ]

    def begin(self) -> None:
        """The time is 0."""
        for n in range(len(self.sharing)):
            # Processes begin at different moments.
            self._at(self._rng.uniform(0, self._limits.every_s), self._regular, n)
        self._at(LOOK_S, self._look, None)

    def _urgent(self, n: int) -> None:
        """Say it as soon as may be: behind what is going on right now."""
        if not self._asked[n]:
            self._asked[n] = True
            self._at(self._now(), self._pressing, n)

    def _pressing(self, n: int) -> None:
        if self._say(n):
            self._asked[n] = False
        else:
            self._at(self._now() + self._limits.urgent_s / 2, self._pressing, n)

    def _regular(self, n: int) -> None:
        self._say(n)
        self._at(self._now() + self._limits.every_s, self._regular, n)

    def _say(self, n: int) -> bool:
        now_s, setting = self._now(), self._setting
        message = self.sharing[n].say(now_s)
        if message is None:
            return False
        self.messages += 1
        self.said_bytes += len(message)
        for other in range(len(self.sharing)):
            lost = setting.share_loss and self._rng.random() < setting.share_loss
            if other != n and not lost and not (self._cut(now_s) and 0 in {n, other}):
                self._at(now_s + (setting.share_delay_s or 0.0), self._hear, (other, message))
        return True

    def _hear(self, what: tuple[int, bytes]) -> None:
        self.sharing[what[0]].hear(what[1], self._now())

    def _look(self, _: None) -> None:
        for sharing in self.sharing:
            sharing.tick(self._now())
        self._at(self._now() + LOOK_S, self._look, None)

    def _cut(self, now_s: float) -> bool:
        partition = self._setting.share_partition
        return partition is not None and partition[0] <= now_s < partition[0] + partition[1]
