"""Which replica made a stored response, so that a request which continues the response goes to the same replica."""

from __future__ import annotations

from router.placer import UnknownResponse


class ResponseOwners:
    """Which replica made which stored response, and for whom; bounded, oldest forgotten first."""

    def __init__(self, ids_max: int, *, private: bool = False) -> None:
        """`private`: each is its tenant's own, and one that is not remembered is nobody's."""
        self._ids_max = ids_max
        self._private = private
        self._owners: dict[str, tuple[str, str]] = {}

    def learn(self, response_id: str, replica: str, tenant: str) -> None:
        """Remember it. Nobody takes over what is another's."""
        if self._private and self._owners.get(response_id, ("", tenant))[1] != tenant:
            return
        self._owners[response_id] = (replica, tenant)
        if len(self._owners) > self._ids_max:
            del self._owners[next(iter(self._owners))]

    def owner(self, response_id: str | None, tenant: str) -> str | None:
        """The replica, if it is remembered. Raises UnknownResponse."""
        if not response_id:
            return None
        replica, whose = self._owners.get(response_id, (None, None))
        if self._private and whose != tenant:
            raise UnknownResponse(response_id)
        return replica
