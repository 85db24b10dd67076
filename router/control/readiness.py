"""Readiness of a router: the answer to `/readyz`."""

from __future__ import annotations

import asyncio

from router.control.snapshot import SnapshotManager
from router.core.fleet.registry import Fleet


class Readiness:
    """Whether requests should be sent to this router."""

    def __init__(
        self, fleet: Fleet, discovered: asyncio.Event, state: SnapshotManager | None, *, scale_from_zero: bool
    ) -> None:
        """`discovered` is set when the first list of replicas has arrived. `state`: the earlier state that is restored,
        if there is any."""
        self._fleet = fleet
        self._discovered = discovered
        self._state = state
        self._scale_from_zero = scale_from_zero
        self._draining = False
        self._looked = False  # the replicas of the first list were probed

    def is_ready(self) -> bool:
        """True if a replica accepts requests, the earlier state is restored or has taken too long, and the router is
        not draining. Under `discovery.scale_from_zero` no replica is needed."""
        if self._draining or (self._state is not None and self._state.blocks_readiness):
            return False
        return bool(self._fleet.usable()) or (self._scale_from_zero and self._has_looked())

    def _has_looked(self) -> bool:
        """True if the first list of replicas has arrived and each of them was probed. Only then is it certain that none
        is ready."""
        if not self._looked and self._discovered.is_set():
            self._looked = all(member.health.asked for member in self._fleet.members.values())
        return self._looked

    def drain(self) -> None:
        """Report from now on that the router accepts no further requests."""
        self._draining = True
