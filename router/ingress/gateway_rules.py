"""Rules that a gateway in front of a picker must apply by itself: while no picker answers, it is the only check.

There is one list for all uses. The picker applies it, and tests run a real Envoy with it. The chart has it as
`files/gateway.yaml` (`python -m deploy.gateway`), and a test compares docs/guide/gateway.md with it.
"""

from __future__ import annotations

from router.config.schema import ApiSettings
from router.core.dialects import PATHS
from router.core.dialects.p2p_body import SOURCE_HEADER
from router.core.dialects.rank_field import RANK_HEADER
from router.core.disagg import bodies

CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
"""Headers that carry a client's key."""
DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key in which a picker names the endpoint (Endpoint Picker Protocol 1.0.0)."""
SERVED = "x-gateway-destination-endpoint-served"
"""Metadata key of an answer: the endpoint that served it."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata key of a request: the only endpoints that may take it."""

FORGEABLE = (
    DESTINATION,
    SUBSET,
    SERVED,
    *(name.decode() for name in (*bodies.HEADERS, SOURCE_HEADER)),
    RANK_HEADER.lower(),
    "x-routed-dp-rank",
    *(name.decode() for name in bodies.OVERRIDES),
)
"""Headers that a gateway removes from clients' requests before any other component reads them, and that the router
never forwards from a client. With them a client could choose the engine, the rank, or other hosts that an engine
connects to (llm-d's sidecar, vLLM, SGLang)."""
SECRETS = tuple(sorted(name.decode() for name in CREDENTIALS))
"""Headers that a gateway removes from a request that no picker has seen: keys are for the picker alone."""
PROMPT_PATHS, PASSED_PATHS = tuple(PATHS), ApiSettings().passthrough
"""Paths of prompts, and paths that are forwarded by default (`api.passthrough`). If no picker has seen a request, a
gateway accepts only a POST on one of these."""
