"""Decision on stream failover: if a request's stream may continue on another replica. It depends on the request's
header, on its key, its model and the settings, and on its body."""

from __future__ import annotations

from collections.abc import Mapping

from router.config.api_keys import Tenant
from router.core.dialects.failover import EXACT, OFF, FailoverPlan, FailoverRefused, plan_of
from router.core.types.requests import RequestSpec
from router.former_names import former_header
from router.http.request import Refusal, Request

STREAM_FAILOVER = b"x-warmroute-stream-failover"  # header for the router, not forwarded
FORMER_STREAM_FAILOVER = former_header(STREAM_FAILOVER.decode()).encode()

FailoverPlanResult = tuple[FailoverPlan | None, str]  # the plan, or the reason why a wanted plan does not exist


def wants_failover(
    request: Request, tenant: Tenant | None, model: str, models: Mapping[str, str], all_streams: str
) -> bool:
    """True if a request's stream may fail over. The allowed mode comes from the tenant's key, else from `models` for
    this model, else from `all_streams`. If it is not OFF, the request's header may override it. Raises Refusal for an
    invalid header."""
    said = request.fields.get(STREAM_FAILOVER, request.fields.get(FORMER_STREAM_FAILOVER))
    wish = said.decode("latin-1").lower() if said is not None else ""
    if wish not in ("", EXACT, OFF):
        raise Refusal(400, "bad_stream_failover", "x-warmroute-stream-failover must be exact or off.")
    allowed = (tenant.stream_failover if tenant is not None else "") or models.get(model, all_streams)
    return allowed != OFF and (wish or allowed) == EXACT


def build_failover_plan(
    path: str, body: bytes, ask: RequestSpec, engines: frozenset[str], context_tokens: int
) -> FailoverPlanResult:
    """Make the plan for a streaming request's body, on a model with a context of `context_tokens`."""
    media = ask.prompt is None or ask.prompt.opaque_bytes > 0
    try:
        return plan_of(path, body, engines, media=media, context_tokens=context_tokens), ""
    except FailoverRefused as why:
        return None, why.reason
