"""Lease in a worker."""

from __future__ import annotations

from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import Receipt


class RemoteLease:
    """A lease from the hub, or one that this worker opened without it."""

    __slots__ = ("charged_tokens", "first_token_s", "id", "model", "receipt", "stands", "streams", "tenant")

    def __init__(self, id_: int, receipt: Receipt, wanted: PlacementRequest) -> None:
        self.id = id_
        self.receipt = receipt
        self.model = wanted.model
        self.streams = wanted.ask.stream
        self.tenant = wanted.tenant
        self.charged_tokens = 0  # tokens taken from the tenant's rate without the hub
        self.first_token_s: float | None = None
        self.stands = True  # the replica has not left since

    @property
    def replica(self) -> str:
        """Id of the replica."""
        return self.receipt.replica
