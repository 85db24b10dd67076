"""Lease for a request that was read, or the refusal for its client."""

from __future__ import annotations

from collections.abc import Callable

from router.core.facts.placements import Shed
from router.core.fleet.models import NoReplica
from router.core.placement.wanted import Wanted
from router.http.request import Refusal
from router.placer import LEFT, Placed, Placer, UnknownResponse
from router.reading.answering import none_ready

UNSENT_MAX = 3  # attempts of one request that reached no replica
RESPONSE_ID_CHARS_MAX = 128


async def placed(placer: Placer, wanted: Wanted, excluded: frozenset[str], clock: Callable[[], float]) -> Placed:
    """Return a lease on a replica that is not excluded. Raises Refusal if no replica is left to try."""
    try:
        for _ in range(UNSENT_MAX):
            lease = await placer.place(wanted, excluded)
            if placer.stands(lease):
                return lease
            placer.finish(lease, LEFT, clock())
        raise none_ready(placer.standing())
    except NoReplica as error:
        raise none_ready(placer.standing()) from error
    # the same text as from an engine, so that another tenant's response is not revealed
    except UnknownResponse as unknown:
        said = f"Response with id '{str(unknown)[:RESPONSE_ID_CHARS_MAX]}' not found."
        raise Refusal(404, "response_not_found", said, "response_id") from unknown
    except Shed as shed:
        raise Refusal(429, shed.code, str(shed), retry_after_s=shed.retry_after_s) from shed
