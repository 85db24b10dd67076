"""Evidence from several routers about one replica: if three of them have found it dead, it is dead for all.

A router's breaker opens only after three failures of requests that this router sent. So each of eight routers would
send a dead replica three more requests. Each router publishes the replicas that it has found dead with its requests,
never those reported by others. When DEAD_ROUTERS have reported a replica within EVIDENCE_S, all others put it in
cooldown at once. The cooldown is as short as after their first finding, and after it they try the replica as usual. The
same evidence counts once: it does not override a trial that succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable

DEAD_ROUTERS = 3  # routers that must have found a replica dead; this one may be one of them
EVIDENCE_S = 2.0  # time for which the reports of a router count


class DeadReplicaConsensus:
    """Replicas that other routers have found dead. Numbers that identify routers are those of frames."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[frozenset[str], float]] = {}  # router -> replicas, time of the message
        self._taken: set[str] = set()  # replicas that were put in cooldown and are still reported by enough routers

    def hear(self, origin: int, dead: Iterable[str], now_s: float) -> None:
        """Replace the set of replicas that another router reports as dead."""
        found = frozenset(dead)
        if found:
            self._said[origin] = (found, now_s)
        else:
            self._said.pop(origin, None)

    def forget(self, origin: int) -> None:
        """Forget a router that is silent."""
        self._said.pop(origin, None)

    def confirmed(self, own: frozenset[str], now_s: float) -> list[tuple[str, int]]:
        """Return the replicas newly found dead by DEAD_ROUTERS routers, each with the number of other routers that
        found it. `own` are replicas found dead by this router."""
        counts: dict[str, int] = {}
        for found, at_s in self._said.values():
            if now_s - at_s <= EVIDENCE_S:
                for replica in found:
                    counts[replica] = counts.get(replica, 0) + 1
        agreed = {replica for replica, count in counts.items() if count + (replica in own) >= DEAD_ROUTERS}
        new = sorted(agreed - self._taken)
        self._taken = agreed
        return [(replica, counts[replica]) for replica in new]
