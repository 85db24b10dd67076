"""Index of stored responses: a request that continues a response goes to the replica that made it.

All tenants share its memory. When it is full, the tenant with the most ids loses its oldest one. So a tenant that
stores very many responses cannot make another tenant's unknown. Responses that other routers have reported have a
memory of their own. No report from another router replaces or evicts an entry that was learned from answers that passed
here.
"""

from __future__ import annotations

from router.placement_api import UnknownResponse


class _Memory:
    """Owners by id, at most `ids_max`."""

    def __init__(self, ids_max: int, *, private: bool) -> None:
        self._ids_max, self._private = ids_max, private
        self.owners: dict[str, tuple[str, str]] = {}
        self._of: dict[str, dict[str, None]] = {}  # tenant -> its ids, the oldest first; all are of "" unless private
        self._with: dict[int, dict[str, None]] = {}  # number of ids -> tenants that have that number
        self._most = 0  # largest such number

    def learn(self, response_id: str, replica: str, tenant: str) -> None:
        """Store an owner, unless the response belongs to another tenant."""
        before = self.owners.get(response_id)
        if before is not None and self._private and before[1] != tenant:
            return
        self.owners[response_id] = (replica, tenant)
        if before is not None:
            return
        of = tenant if self._private else ""
        ids = self._of.setdefault(of, {})
        ids[response_id] = None
        self._update_count(of, len(ids) - 1, len(ids))
        if len(self.owners) > self._ids_max:
            fullest = next(iter(self._with[self._most]))
            self.forget(next(iter(self._of[fullest])))

    def forget(self, response_id: str) -> None:
        """Remove a response, if it is known."""
        made = self.owners.pop(response_id, None)
        if made is None:
            return
        of = made[1] if self._private else ""
        ids = self._of[of]
        del ids[response_id]
        self._update_count(of, len(ids) + 1, len(ids))
        if not ids:
            del self._of[of]

    def _update_count(self, of: str, before: int, now: int) -> None:
        """Update the count of a tenant's ids."""
        if before:
            del self._with[before][of]
            if not self._with[before]:
                del self._with[before]
        if now:
            self._with.setdefault(now, {})[of] = None
        if now > self._most or (before == self._most and before not in self._with):
            self._most = now


class ResponseOwners:
    """Replica and tenant of each stored response. The memory is bounded, and the oldest entries are removed first."""

    def __init__(self, ids_max: int, *, private: bool = False) -> None:
        """Create an empty index.

        - `ids_max`: most responses of this router that are kept; up to the same number of other routers' responses is
          kept.
        - `private`: each response belongs to its tenant, and a response that is not known here is unknown to all.
        """
        self._private = private
        self._own = _Memory(ids_max, private=private)
        self._reported = _Memory(ids_max, private=private)

    def learn(self, response_id: str, replica: str, tenant: str) -> None:
        """Store a response after its answer passed here. It stays the first tenant's, despite any report."""
        self._own.learn(response_id, replica, tenant)
        self._reported.forget(response_id)

    def report(self, response_id: str, replica: str, tenant: str) -> None:
        """Store another router's report of a response that this router has not seen."""
        if response_id not in self._own.owners:
            self._reported.learn(response_id, replica, tenant)

    def owner(self, response_id: str | None, tenant: str) -> str | None:
        """Return the replica, if the response is known. Raises UnknownResponse."""
        if not response_id:
            return None
        replica, of = self.owner_entry(response_id) or (None, None)
        if self._private and of != tenant:
            raise UnknownResponse(response_id)
        return replica

    def knows(self, response_id: str) -> bool:
        """True if a response with this id is known for any tenant."""
        return response_id in self._own.owners or response_id in self._reported.owners

    def ids(self) -> list[str]:
        """Return all known ids: those of other routers, then those of this router, each oldest first."""
        return [*self._reported.owners, *self._own.owners]

    def owner_entry(self, response_id: str) -> tuple[str, str] | None:
        """Return the replica and the tenant of a response; None if it is not known."""
        return self._own.owners.get(response_id) or self._reported.owners.get(response_id)
