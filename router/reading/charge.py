"""A request is taken from its tenant's rate before its body is read: as soon as its head has come, where the body comes
behind it, or before it is parsed. Whoever is over the rate sends no more of the body, and nothing of it is parsed."""

from __future__ import annotations

from msgspec import Struct

from router.core.facts.placements import Shed
from router.http.request import Refusal, Request
from router.placer import Placer
from router.settings.keys import Caller, Keys


class Met(Struct, eq=False):
    """Whom a request's key belonged to in this table of keys, and whether it was taken from the tenant's rate."""

    keys: Keys
    caller: Caller
    looked: bool = False  # the tenant's rate had room for the request
    taken: bool = False  # and the request was taken from it for good


def charge(placer: Placer, request: Request, caller: Caller) -> bool:
    """Whether a request was taken from its tenant's rate for good; if not, it is taken when it is placed. The rate is
    asked once for each request. Raises Refusal where it is used up."""
    tenant = caller.tenant
    if tenant is None or not (tenant.requests_per_min or tenant.tokens_per_min):
        return False
    met = request.met if isinstance(request.met, Met) and request.met.caller is caller else None
    if met is not None and met.looked:
        return met.taken
    try:
        taken = placer.charge(caller.name, caller.priority)
    except Shed as shed:
        raise Refusal(429, shed.code, str(shed), retry_after_s=shed.retry_after_s) from shed
    if met is not None:
        met.looked, met.taken = True, taken
    return taken
