"""Whether the stream of a request may be continued on another replica, and how: what the request wants, what its key,
its model and the settings allow, and what its body lets."""

from __future__ import annotations

from collections.abc import Mapping

from router.core.dialects.continuing import MODES, OFF, ContinuationPlan, NotContinued, plan_of
from router.core.facts.requests import Ask
from router.http.request import Refusal, Request
from router.settings.keys import Tenant

CONTINUE = b"x-warmroute-continue"  # header for the router, not sent on
ASKED = "asked"

Planned = tuple[ContinuationPlan | None, str]  # the plan, or why there is none where one is wanted


def wished(request: Request, tenant: Tenant | None, model: str, models: Mapping[str, str], all_streams: str) -> str:
    """EXACT or APPROXIMATE for a stream that is to be continued should it break; OFF for any other. `models` says so
    for single models, `all_streams` for the others, where no key does. Raises Refusal for a wish that is none."""
    said = request.fields.get(CONTINUE)
    wish = said.decode("latin-1").lower() if said is not None else ""
    if wish and wish not in MODES:
        raise Refusal(400, "bad_continue", "x-warmroute-continue is exact, approximate or off.")
    allowed = (tenant.continue_streams if tenant is not None else "") or models.get(model, all_streams)
    if allowed == OFF:
        return OFF
    return wish or (OFF if allowed == ASKED else allowed)


def planned(path: str, body: bytes, ask: Ask, engines: frozenset[str], context_tokens: int, mode: str) -> Planned:
    """The plan for a streaming request's body, on a model that has room for so many tokens."""
    media = ask.prompt is None or ask.prompt.opaque_bytes > 0
    try:
        return plan_of(path, body, engines, mode, media=media, context_tokens=context_tokens), ""
    except NotContinued as why:
        return None, why.reason
