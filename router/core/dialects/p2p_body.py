"""P2P KV transfer: a field in a request's body by which an engine fetches the prompt's blocks from another engine.

Source: vLLM (docs/features/kv_offloading_usage.md, "Orchestration-Layer Protocol", and
v1/kv_offload/tiering/p2p/manager.py at 0255eea, merged in July 2026 with #48021). The request of the receiving engine
names the source's control socket and an id of its own. The field is the router's: it is spliced in after any field of
the same name, and parsers take the last one (tenant_isolation.py). Values that tenants give for it are removed in any
case.
"""

from __future__ import annotations

import msgspec

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, MESSAGES, RESPONSES, with_fields

# vLLM paths with bodies that take the field.
PULLING = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
FIELD = "kv_transfer_params"
# Names the source to llm-d's sidecar, which puts the field into the body itself (llm-d-router, pkg/common/routing).
SOURCE_HEADER = b"x-kv-cache-source-host-port"


def with_pull(body: bytes, address: str, id_: str) -> bytes:
    """Return the same request, a JSON object, with the order to fetch blocks from the engine at `host:port` under this
    id."""
    host, _, port = address.rpartition(":")
    source = {"kv_request_id": id_, "remote_host": host.strip("[]"), "remote_port": int(port)}
    return with_fields(body, b'"%b":%b' % (FIELD.encode(), msgspec.json.encode({"remote_kv_source": source})))
