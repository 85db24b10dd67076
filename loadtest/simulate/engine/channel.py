"""Channel for the messages between simulated routers: delay, loss, a partition.

The transport between real routers has its own tests. Here each message takes a fixed time and may be lost on the way to
each router. During a partition the first router neither sends nor receives messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.placer import Placer
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.sync import PeerSyncCore

LOOK_S = 0.25  # interval between two checks for silent routers

Schedule = Callable[[float, Callable[[Any], None], Any], None]
"""(time, callback, its argument)"""


class Channel:
    """All messages of all routers. `at` schedules a call in virtual time, and `now` returns that time."""

    def __init__(self, setting: ClusterSpec, placers: Sequence[Placer], at: Schedule, now: Callable[[], float]) -> None:
        self._setting, self._at, self._now = setting, at, now
        self._limits = SharingLimits()
        self._rng = random.Random(f"{setting.seed}/channel")
        self._asked = [False] * len(placers)
        self.said_bytes = self.messages = 0
        self.sharing = [
            PeerSyncCore(placer.router, f"router-{n}", 1, self._limits, partial(self._urgent, n))
            for n, placer in enumerate(placers)
        ]

    def begin(self) -> None:
        """Start the schedules at time 0."""
        for n in range(len(self.sharing)):
            # Processes begin at different moments.
            self._at(self._rng.uniform(0, self._limits.every_s), self._regular, n)
        self._at(LOOK_S, self._look, None)

    def _urgent(self, n: int) -> None:
        """Schedule an urgent message for this moment, after the current event."""
        if not self._asked[n]:
            self._asked[n] = True
            self._at(self._now(), self._send_urgent, n)

    def _send_urgent(self, n: int) -> None:
        if self._say(n):
            self._asked[n] = False
        else:
            self._at(self._now() + self._limits.urgent_s / 2, self._send_urgent, n)

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
