"""Order of a large fleet's replicas on the policy's ring, so that the nearest to a request's key can be candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.core.fleet.member import ReplicaState


class RingOrder:
    """The policy's order, with the ids of the members of the last call."""

    def __init__(self, order_by_ring: Callable[[str, Collection[str]], list[str]]) -> None:
        """`order_by_ring` is the policy's method (RingOrdered)."""
        self._order_by_ring = order_by_ring
        self._last: tuple[list[ReplicaState], dict[str, None]] = ([], {})

    def order(self, ring_key: str, members: list[ReplicaState]) -> list[str]:
        """Return the ids of these members, the nearest to the key first."""
        return self._order_by_ring(ring_key, self._ids_of(members))

    def _ids_of(self, members: list[ReplicaState]) -> dict[str, None]:
        """Return the ids of these members. Every change creates a new list of members (fleet/ready_index.py), so the
        ids of the last list are valid for the same list object."""
        if self._last[0] is not members or len(self._last[1]) != len(members):
            self._last = members, dict.fromkeys([member.id for member in members])
        return self._last[1]
