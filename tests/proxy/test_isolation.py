"""Tenants' caches are their own: nobody hits what another has asked, and nobody finds out by time.

The replicas are those of `python -m loadtest engine`: what they cache, and for whom, is theirs to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from loadtest.insights import sidechannel
from router.core.dialects import PATHS
from router.core.types.placements import Confidence
from router.ingress.parser import NO_PREFILL_PATHS
from tests.engines.test_exact import caught_up, graded, replicas, routing
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

CHAT, COMPLETIONS, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
TEXT = "What only one tenant has ever asked, in many words and more. " * 32
ASKS: dict[str, Callable[[], dict[str, Any]]] = {
    CHAT: lambda: {"messages": [{"role": "user", "content": TEXT}]},
    COMPLETIONS: lambda: {"prompt": TEXT},
}
PROBES = int(os.environ.get("WARMROUTE_PROBES", "300"))


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    """Two isolated tenants, and one that need not be."""
    return Keyring(tmp_path, acme={"receipts": True}, evil={"receipts": True}, open={"receipts": True})


@pytest.mark.promise(
    "Isolated tenants share no cached prefix, and engines that ignore salts are refused to them.", "tenants"
)
@pytest.mark.inside
@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("path", ASKS)
async def test_nobody_hits_what_another_has_asked(
    client: ClientSession, ring: Keyring, path: str, events: bool
) -> None:
    """Of equal prompts of two tenants nothing is shared, whatever the second gives as salt, the first's own among
    them; the same tenant's second prompt hits, and its own salt keeps its caches apart. What the router predicts is
    what the engine then finds, by estimate and by events."""
    async with replicas(1, events=events) as engines:
        async with routing(*engines.urls, auth__isolate=True, **ring.settings) as app:
            if events:
                await graded(app, Confidence.EXACT)

            async def ask(tenant: str, **more: Any) -> tuple[int, int]:
                body = {"model": "sim", "max_tokens": 4, **ASKS[path](), **more}
                async with client.post(app.url + path, json=body, headers=ring.of(tenant)) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    predicted = int(response.headers["x-warmroute-predicted-cached-tokens"])
                if events:
                    await caught_up(app, engines)
                return predicted, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

            sent: list[str] = []
            understand = app.http.reader.parse

            async def spy(*args: Any) -> Any:
                question = await understand(*args)
                sent.append(json.loads(question.body)["cache_salt"])
                return question

            app.http.reader.parse = spy  # type: ignore[method-assign]
            assert await ask("acme") == (0, 0)
            predicted, actual = await ask("acme")
            assert actual > 400
            assert predicted == actual if events else predicted > 300
            theirs = sent[0]
            for salt in (theirs, "acme", "", theirs.upper(), theirs + "\0"):
                assert await ask("evil", cache_salt=salt) == (0, 0), salt
            assert await ask("acme", cache_salt="own") == (0, 0)
            assert (await ask("acme", cache_salt="own"))[1] == actual
            assert (await ask("acme"))[1] == actual
            by_tenant = {"acme": set(sent[:2] + sent[-3:]), "evil": set(sent[2:-3])}
            assert not by_tenant["acme"] & by_tenant["evil"]


async def test_without_isolation_tenants_share(client: ClientSession, ring: Keyring) -> None:
    """The same two prompts hit where nothing keeps them apart: the tests above are not blind."""
    async with replicas(1, events=False) as engines, routing(*engines.urls, **ring.settings) as app:
        cached = []
        for tenant in ("acme", "evil"):
            body = {"model": "sim", "max_tokens": 4, "prompt": TEXT}
            async with client.post(app.url + COMPLETIONS, json=body, headers=ring.of(tenant)) as response:
                cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0
        assert cached[1] > 400


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": []}, COMPLETIONS: {"prompt": "x"}, "/v1/embeddings": {"input": "x"}, RESPONSES: {"input": "x"},
    "/v1/messages": {"messages": [], "max_tokens": 1}, GENERATE: {"text": "x"},
}  # fmt: skip


@pytest.mark.parametrize("offload", [1, 1 << 20])
async def test_what_engines_are_sent(client: ClientSession, tmp_path: Path, offload: int) -> None:
    """Each path of each dialect: the body with the salt where every engine of the model heeds it, a refusal where one
    may not. Paths that fill no cache pass as they are; those of which nothing is known do not."""
    ring = Keyring(tmp_path, acme={"isolate": True}, open={})
    heeded = {"vllm": set(PATHS) - {GENERATE}, "sglang": {CHAT, COMPLETIONS, RESPONSES, GENERATE}, "other": set()}
    for kind, paths in heeded.items():
        async with FakeEngine(owned_by=kind) as engine:
            async with running(engine, limits__offload_bytes_min=offload, **ring.settings) as app:
                for path in (*PATHS, *app._config.settings.api.passthrough):
                    body = {"model": "m", **BODIES.get(path, {}), "cache_salt": "mine", "extra_key": "k"}
                    for tenant in ("acme", "open"):
                        before = len(engine.seen)
                        async with client.post(app.url + path, json=body, headers=ring.of(tenant)) as response:
                            passes = tenant == "open" or path in paths or path in NO_PREFILL_PATHS
                            said = await response.text()
                            assert (response.status, "isolation_unsupported" in said) == (
                                (200, False) if passes else (400, True)
                            ), (kind, path, said)
                        assert len(engine.seen) == before + passes
                        if passes and (tenant == "open" or path in NO_PREFILL_PATHS):
                            assert engine.seen[-1].json == body
                        elif passes:
                            sent = engine.seen[-1].json
                            assert len(sent["cache_salt"]) == 64
                            assert sent["model"] == "m"
                            assert sent["extra_key"] in (
                                None,
                                "k" if path in ("/v1/embeddings", "/v1/messages") else None,
                            )


@pytest.mark.promise(
    "Isolated tenants share no cached prefix, and engines that ignore salts are refused to them.", "tenants"
)
async def test_one_engine_that_may_not_is_enough(client: ClientSession, tmp_path: Path) -> None:
    """A model that two kinds of engine serve is isolated where both heed the salt."""
    ring = Keyring(tmp_path, acme={"isolate": True})
    async with FakeEngine(owned_by="vllm") as one, FakeEngine(owned_by="sglang") as two:
        async with running(one, two, **ring.settings) as app:
            for path, code in ((CHAT, 200), ("/v1/messages", 400), (GENERATE, 400)):
                async with client.post(
                    app.url + path, json={"model": "m", **BODIES[path]}, headers=ring.of("acme")
                ) as r:
                    assert r.status == code


@pytest.mark.promise("Time to first token shows an isolated tenant no other's prompts (AUC at most 0.55).", "tenants")
async def test_time_tells_nothing() -> None:
    """Probes of whether another tenant has asked a prompt: with isolation, time to first token is as good as a coin
    (AUC at most 0.55 of 2,000; WARMROUTE_PROBES=2000), and none hits; without it, time tells all."""
    shared = await sidechannel.probes(PROBES // 3, isolated=False)
    assert sidechannel.auc(shared) > sidechannel.AUC_BLIND
    apart = await sidechannel.probes(PROBES, isolated=True)
    print(f"AUC {sidechannel.auc(apart):.3f} of {PROBES} probes")
    assert not any(look.cached_tokens for look in apart)
    assert sidechannel.auc(apart) <= sidechannel.AUC_MAX + 0.5 * (1 / PROBES - 1 / 2_000) ** 0.5
