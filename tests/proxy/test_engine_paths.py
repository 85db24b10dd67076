"""Paths that engines have, so that what was made for one engine works with the router in front."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, WSServerHandshakeError

from router import __version__
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring, bearer

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def app(engine: FakeEngine) -> AsyncIterator[RouterServer]:
    """A router before one engine."""
    async with running(engine) as running_app:
        yield running_app


async def test_health_under_engines_names(client: ClientSession, tmp_path: Path) -> None:
    """They say what `/readyz` says, without a key, and the version is the router's own."""
    ring = Keyring(tmp_path, acme={})
    async with FakeEngine() as engine, running(engine, **ring.settings) as app:
        for path in ("/readyz", "/health", "/ping"):
            for method in ("GET", "HEAD", *(("POST",) if path == "/ping" else ())):
                async with client.request(method, app.url + path) as response:
                    assert response.status == 200, (method, path)
        async with client.post(app.url + "/health") as response:
            assert response.status == 404
        async with client.get(app.url + "/version") as response:
            assert response.status == 401
        async with client.get(app.url + "/version", headers=ring.of("acme")) as response:
            assert await response.json() == {"version": __version__}
        engine.healthy = False
        for _ in range(2):
            await app.control.probe_now()
        for path in ("/readyz", "/health", "/ping"):
            async with client.get(app.url + path) as response:
                assert response.status == 503, path
    async with FakeEngine() as engine, running(engine) as app:
        app.http.lame_duck()
        async with client.get(app.url + "/health") as response:
            assert response.status == 503


@pytest.mark.parametrize("query", ["", "?api-version=1"])
async def test_a_slash_too_many(client: ClientSession, engine: FakeEngine, app: RouterServer, query: str) -> None:
    """It is taken off, also of what the engine gets; a second one is not."""
    async with client.post(f"{app.url}{CHAT}/{query}", json=BODY) as response:
        assert response.status == 200
    assert engine.seen[-1].path == CHAT + query
    for path, code in (("/v1/models/", 200), ("/health/", 200), ("/", 200), (CHAT + "//", 404), ("/v1//models", 404)):
        async with client.get(app.url + path, allow_redirects=False) as response:
            assert response.status == code, path


@pytest.mark.parametrize("path", ["/v1/realtime?model=m", CHAT, "/healthz"])
async def test_websockets_are_refused_by_name(
    client: ClientSession, engine: FakeEngine, app: RouterServer, path: str
) -> None:
    """At once, so that a client can tell why; no engine hears of it."""
    with pytest.raises(WSServerHandshakeError) as refused:
        await client.ws_connect(app.url + path)
    assert refused.value.status == 501
    headers = {"Connection": "Upgrade", "Upgrade": "WebSocket"}
    async with client.get(app.url + path, headers=headers) as response:
        assert (await response.json())["error"]["code"] == "websocket_unsupported"
    async with client.post(app.url + CHAT, json=BODY, headers={"Connection": "Upgrade", "Upgrade": "h2c"}) as response:
        assert response.status == 200
    assert len(engine.seen) == 1


PASSED = (
    "/v2/embed", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/inference/v1/generate", "/invocations",
    "/generative_scoring", "/v1/systemone", "/cohere/v2/chat", "/encode", "/parse_function_call", "/separate_reasoning",
    "/v1/decisions", "/api/chat",
)  # fmt: skip
REFUSED = (
    "/flush_cache", "/v1/load_lora_adapter", "/sleep", "/pause", "/abort_requests", "/update_weights", "/start_profile",
    "/collective_rpc", "/set_internal_state", "/vertex_generate",
)  # fmt: skip


async def test_client_paths_of_engines(client: ClientSession, engine: FakeEngine, app: RouterServer) -> None:
    """Those for clients pass; those that change an engine do not."""
    for paths, code in ((PASSED, 200), (REFUSED, 404)):
        for path in paths:
            async with client.post(app.url + path, json={"model": "m"}) as response:
                assert response.status == code, path
    assert [seen.path for seen in engine.seen] == list(PASSED)


async def test_transfers_within_sampling_parameters(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """vLLM takes parameters of transfers there, too: no tenant has them sent; what else is there stays."""
    ring = Keyring(tmp_path, acme={})
    extra = {"kv_transfer_params": {"remote_host": "10.0.0.9"}, "kept": 1}
    sent = [{"temperature": 0.5, "extra_args": extra}, {"temperature": 0.5}, [{"max_new_tokens": 1}], None]
    async with running(engine, **ring.settings) as app:
        for sampling in sent:
            body = {"model": "m", "token_ids": [1], "sampling_params": sampling}
            async with client.post(app.url + "/inference/v1/generate", json=body, headers=ring.of("acme")) as response:
                assert response.status == 200
    got = [json.loads(seen.body)["sampling_params"] for seen in engine.seen]
    assert got == [{"temperature": 0.5, "extra_args": {"kept": 1}}, *sent[1:]]


async def test_two_credentials(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """A key of another service beside one of ours is passed over, and not passed on; two of ours that differ are 401,
    and the message says why."""
    ring = Keyring(tmp_path, acme={}, few={})
    key, other = ring.keys["acme"], ring.keys["few"]
    async with running(engine, **ring.settings) as app:
        for headers in ({**bearer(key), "x-api-key": "sk-own"}, {**bearer("sk-own"), "x-api-key": key}):
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 200
        for headers, why in (
            ({**bearer(key), "x-api-key": other}, "differ"),
            ({**bearer(key), "x-api-key": "wr-unknown"}, "differ"),
            ({**bearer("sk-a"), "x-api-key": "sk-b"}, "missing"),
        ):
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 401
                assert why in (await response.json())["error"]["message"]
    assert len(engine.seen) == 2
    assert not any("sk-own" in value for seen in engine.seen for value in seen.headers.values())
