"""Which replica made a stored response, so that a request which continues the response goes to the same replica.

Memory is shared among tenants: where there is none left, whoever has the most ids loses its oldest one, so that nobody
who stores very many makes others' unknown.
"""

from __future__ import annotations

from router.placer import UnknownResponse


class ResponseOwners:
    """Which replica made which stored response, and for whom; bounded, oldest forgotten first."""

    def __init__(self, ids_max: int, *, private: bool = False) -> None:
        """`private`: each is its tenant's own, and one that is not remembered is nobody's."""
        self._ids_max = ids_max
        self._private = private
        self._owners: dict[str, tuple[str, str]] = {}
        self._of: dict[str, dict[str, None]] = {}  # tenant -> its ids, the oldest first; all are of "" unless private
        self._with: dict[int, dict[str, None]] = {}  # number of ids -> tenants that have so many
        self._most = 0  # largest such number

    def learn(self, response_id: str, replica: str, tenant: str) -> None:
        """Remember it. Nobody takes over what is another's."""
        known = response_id in self._owners
        if known and self._private and self._owners[response_id][1] != tenant:
            return
        self._owners[response_id] = (replica, tenant)
        if known:
            return
        whose = tenant if self._private else ""
        ids = self._of.setdefault(whose, {})
        ids[response_id] = None
        self._counted(whose, len(ids) - 1, len(ids))
        if len(self._owners) > self._ids_max:
            self._forget()

    def owner(self, response_id: str | None, tenant: str) -> str | None:
        """The replica, if it is remembered. Raises UnknownResponse."""
        if not response_id:
            return None
        replica, whose = self._owners.get(response_id, (None, None))
        if self._private and whose != tenant:
            raise UnknownResponse(response_id)
        return replica

    def knows(self, response_id: str) -> bool:
        """Whether the response is remembered, whoever it is for."""
        return response_id in self._owners

    def known(self) -> list[str]:
        """All ids that are remembered, oldest first."""
        return list(self._owners)

    def made(self, response_id: str) -> tuple[str, str] | None:
        """The replica and the tenant of a response; None if it is not remembered."""
        return self._owners.get(response_id)

    def _forget(self) -> None:
        whose = next(iter(self._with[self._most]))
        ids = self._of[whose]
        oldest = next(iter(ids))
        del ids[oldest], self._owners[oldest]
        self._counted(whose, len(ids) + 1, len(ids))
        if not ids:
            del self._of[whose]

    def _counted(self, whose: str, before: int, now: int) -> None:
        """Note that a tenant has so many ids, and had so many before."""
        if before:
            del self._with[before][whose]
            if not self._with[before]:
                del self._with[before]
        if now:
            self._with.setdefault(now, {})[whose] = None
        if now > self._most or (before == self._most and before not in self._with):
            self._most = now
