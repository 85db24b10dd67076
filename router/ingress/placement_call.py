"""Lease for a request that was read, or the refusal for its client."""

from __future__ import annotations

from collections.abc import Callable

from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import Shed
from router.http.request import Refusal
from router.ingress.local_responses import no_replica_ready
from router.placement_api import LEFT, LeaseHandle, PlacementService, UnknownResponse

CONNECT_ATTEMPTS_MAX = 3  # attempts of one request that reached no replica
RESPONSE_ID_CHARS_MAX = 128


async def place_or_refuse(
    placer: PlacementService, wanted: PlacementRequest, excluded: frozenset[str], clock: Callable[[], float]
) -> LeaseHandle:
    """Return a lease on a replica that is not excluded. Raises Refusal if no replica is left to try."""
    try:
        for _ in range(CONNECT_ATTEMPTS_MAX):
            lease = await placer.place(wanted, excluded)
            if placer.is_valid(lease):
                return lease
            placer.finish(lease, LEFT, clock())
        raise no_replica_ready(*placer.readiness_summary(wanted.model))
    except NoReplicaReady as error:
        raise no_replica_ready(*placer.readiness_summary(wanted.model)) from error
    # the same text as from an engine, so that another tenant's response is not revealed
    except UnknownResponse as unknown:
        said = f"Response with id '{str(unknown)[:RESPONSE_ID_CHARS_MAX]}' not found."
        raise Refusal(404, "response_not_found", said, "response_id") from unknown
    except Shed as shed:
        raise Refusal(429, shed.code, str(shed), retry_after_s=shed.retry_after_s) from shed
