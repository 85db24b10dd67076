"""Channel for the messages between simulated routers: delay, a partition.

The transport between real routers has its own tests. Here each message takes a fixed time. During a partition the first
router neither sends nor receives messages. After it, all routers read each other's complete state.
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

LOOK_S = 0.25  # interval between two calls of `tick`

Schedule = Callable[[float, Callable[[Any], None], Any], None]
"""(time, callback, its argument)"""


class Channel:
    """All messages of all routers. `at` schedules a call in virtual time, and `now` returns that time."""

    def __init__(self, setting: ClusterSpec, placers: Sequence[Placer], at: Schedule, now: Callable[[], float]) -> None:
        self._setting, self._at, self._now = setting, at, now
        self._limits = SharingLimits()
        self._rng = random.Random(f"{setting.seed}/channel")
        self._asked = [False] * len(placers)
        self._apart = False  # True during the partition
        self.said_bytes = self.messages = 0
        self.sharing = [
            PeerSyncCore(placer.router, name_of(n), self._limits, partial(self._urgent, n))
            for n, placer in enumerate(placers)
        ]
        for n, sharing in enumerate(self.sharing):
            for other in range(len(placers)):
                if other != n:
                    sharing.begin(name_of(other))

    def begin(self) -> None:
        """Start the schedules at time 0."""
        for n in range(len(self.sharing)):
            # Processes begin at different moments.
            self._at(self._rng.uniform(0, self._limits.every_s), self._regular, n)
        self._at(LOOK_S, self._look, None)
        if self._setting.share_partition is not None:
            at_s, lasts_s = self._setting.share_partition
            self._at(at_s, self._part, None)
            self._at(at_s + lasts_s, self._join, None)

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
        now_s = self._now()
        message = None if self._apart and n == 0 else self.sharing[n].say(now_s)
        if message is None:
            return False
        self.messages += 1
        self.said_bytes += len(message)
        for other in range(len(self.sharing)):
            if other != n and not (self._apart and other == 0):
                self._at(now_s + (self._setting.share_delay_s or 0.0), self._hear, (other, n, message))
        return True

    def _hear(self, what: tuple[int, int, bytes]) -> None:
        to, sender, message = what
        if not (self._apart and 0 in {to, sender}):
            self.sharing[to].hear(name_of(sender), message, 0.0, self._now())  # all have the same clock

    def _look(self, _: None) -> None:
        for sharing in self.sharing:
            sharing.tick(self._now())
        self._at(self._now() + LOOK_S, self._look, None)

    def _part(self, _: None) -> None:
        self._apart = True
        first, *others = self.sharing
        first.on_disconnected(self._now())
        for sharing in others:
            sharing.forget(name_of(0), self._now())

    def _join(self, _: None) -> None:
        self._apart = False
        first, *others = self.sharing
        for n, sharing in enumerate(others, 1):
            for here, there, sender in ((first, sharing, n), (sharing, first, 0)):
                for _step in here.restore(name_of(sender), there.state(self._now()), 0.0, self._now()):
                    pass


def name_of(router: int) -> str:
    """Return a router's name."""
    return f"router-{router}"
