"""What a gateway in front of a picker must do by itself, whatever the picker says: while none answers it is alone.

One list for all: the picker goes by it, tests run a real Envoy by it, the chart has it as `files/gateway.yaml`
(`python -m deploy.gateway`), and a test holds docs/guide/gateway.md to it.
"""

from __future__ import annotations

from router.core.dialects import PATHS, legs
from router.core.dialects.pulls import SOURCE_HEADER
from router.core.dialects.ranks import RANK_HEADER
from router.settings.schema import ApiSettings

CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
"""Headers by which a client says its key."""
DESTINATION = "x-gateway-destination-endpoint"
"""Header and key of metadata by which a picker names the endpoint (Endpoint Picker Protocol 1.0.0)."""
SERVED = "x-gateway-destination-endpoint-served"
"""Key of an answer's metadata: the endpoint that gave it."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key of a request's metadata: the only endpoints that may take it."""

FORGEABLE = (
    DESTINATION,
    SUBSET,
    SERVED,
    *(name.decode() for name in (*legs.HEADERS, SOURCE_HEADER)),
    RANK_HEADER.lower(),
    "x-routed-dp-rank",
    *(name.decode() for name in legs.OVERRIDES),
)
"""Headers that a gateway takes from clients before anything reads them, and that the router passes on from no client:
by these they could choose the engine, the rank, or other hosts that an engine connects to (llm-d's sidecar, vLLM,
SGLang)."""
SECRETS = tuple(sorted(name.decode() for name in CREDENTIALS))
"""Headers that a gateway takes away from a request that no picker has seen: keys are for the picker alone."""
PROMPT_PATHS, PASSED_PATHS = tuple(PATHS), ApiSettings().passthrough
"""Paths of prompts, and those that are passed on by default (`api.passthrough`). Of a request that no picker has seen a
gateway lets only a POST on one of these through."""
