"""Charge of a request to its tenant's rate, before its body is parsed. If the body arrives after the head, the charge
is made at the head. A client over its rate then sends no further part of the body."""

from __future__ import annotations

from msgspec import Struct

from router.config.api_keys import Caller, Keys
from router.core.types.placements import Shed
from router.http.request import Refusal, Request
from router.placement_api import PlacementService


class AuthResult(Struct, eq=False):
    """Caller of a request in this table of keys, and the state of its charge."""

    keys: Keys
    caller: Caller
    looked: bool = False  # the tenant's rate allowed the request
    taken: bool = False  # the charge of the request is final


def reserve_rate(placer: PlacementService, request: Request, caller: Caller) -> bool:
    """Charge a request to its tenant's rate. Returns True if the charge is final; if not, the request is charged when
    it is placed. The rate is checked once for each request. Raises Refusal if the rate is used up."""
    tenant = caller.tenant
    if tenant is None or not (tenant.requests_per_min or tenant.tokens_per_min):
        return False
    met = request.met if isinstance(request.met, AuthResult) and request.met.caller is caller else None
    if met is not None and met.looked:
        return met.taken
    try:
        taken = placer.reserve_rate(caller.name, caller.priority)
    except Shed as shed:
        raise Refusal(429, shed.code, str(shed), retry_after_s=shed.retry_after_s) from shed
    if met is not None:
        met.looked, met.taken = True, taken
    return taken
