"""Against real vLLM: a tenant's salt, spliced into a body of any dialect, keeps its cached prefix to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from router.core.dialects import PATHS, tenant_isolation
from tests.real.token_requests import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.real.vllm_server import MODEL, Replica

pytestmark = pytest.mark.promise(
    "Isolated tenants share no cached prefix, and engines that ignore salts are refused to them.", "tenants"
)

SECRET = b"of-the-tests-and-long-enough-for-it"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    COMPLETIONS: lambda text: {"prompt": text, "max_tokens": 1},
    MESSAGES: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 1, "store": False},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_salted_prefix_is_its_tenants(
    path: str, replicas: list[Replica], figures: Callable[[str], None]
) -> None:
    """Equal prompts of two tenants share nothing, though the second gives the first's salt as its own; the same
    tenant's second prompt hits. Each way to reach the engine's cache past the salt is in the bodies, and undone."""
    text = f"Only one tenant has ever asked this through {path}, and that in many words. " * 12
    acme = tenant_isolation.tenant_salt(SECRET, "acme", b"")
    odd: dict[str, Any] = {"extra_key": "k", "session_params": {}, "cache_salt": acme.decode()}

    async def cached(client: httpx.AsyncClient, salt: bytes) -> int:
        body = msgspec.json.encode({"model": MODEL, **BODIES[path](text), **odd})
        headers = {"content-type": "application/json"}
        answer = await client.post(path, content=tenant_isolation.with_salt(path, body, salt), headers=headers)
        assert answer.status_code == 200, answer.text
        usage = PATHS[path].usage(answer.content)
        assert usage is not None
        return usage.cached_tokens or 0

    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60, trust_env=False) as client:
        found = [await cached(client, acme), await cached(client, acme)]
        found.append(await cached(client, tenant_isolation.tenant_salt(SECRET, "evil", acme)))
        found.append(await cached(client, acme))
    figures(f"isolation on {path}: {found} cached tokens (first, again, another tenant, again)")
    assert found[0] == found[2] == 0
    assert found[1] == found[3] > 0
