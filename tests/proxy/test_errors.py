"""Bad input and missing replicas: a clear error in the dialect's own body, and nothing lost."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.support.fakes import FakeEngine, idle, reset, running
from tests.support.keyring import Keyring

CHAT = "/v1/chat/completions"


async def error_of(client: ClientSession, url: str, **kwargs: object) -> tuple[int, dict[str, object]]:
    """Status and error object of a POST."""
    async with client.post(url, **kwargs) as response:  # type: ignore[arg-type]
        return response.status, (await response.json())["error"]


async def test_invalid_json(client: ClientSession, engine: FakeEngine) -> None:
    """A body that is no JSON object, or more parts than are taken, is 400 and never reaches an engine."""
    async with running(engine) as app:
        for body in (b'{"model": ', b"[]", b"", b"\xff\xfe", b'{"model": 1}', b"[" * 100_000):
            code, error = await error_of(client, app.url + CHAT, data=body)
            assert (code, error["type"]) == (400, "invalid_request_error")
            assert error["code"] in ("invalid_json", "invalid_model", "too_many_parts")
        assert engine.seen == []


async def test_hostile_but_valid_json(client: ClientSession, engine: FakeEngine) -> None:
    """What the router cannot read it passes on: the engine judges its own input."""
    deep = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 200 + b"]" * 200 + b"}"
    async with running(engine) as app:
        for body in (deep, b'{"model":"m","messages":5}', b'{"model":"m","messages":[{"role":1}]}', b'{"model":"m"}'):
            async with client.post(app.url + CHAT, data=body) as response:
                assert response.status == 200
            assert engine.seen[-1].body == body
        assert idle(app)


async def test_unknown_model(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """An unknown model is 404 and names those that are served."""
    other.models = ("n", "adapter")
    async with running(engine, other) as app:
        code, error = await error_of(client, app.url + CHAT, json={"model": "gpt", "messages": []})
        assert (code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "adapter, m, n" in str(error["message"])


async def test_missing_model(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Naming no model is fine while only one is served, as engines have it; else 400."""
    async with running(engine) as app, client.post(app.url + CHAT, json={"messages": []}) as response:
        assert response.status == 200
    other.models = ("n",)
    async with running(engine, other) as app:
        code, error = await error_of(client, app.url + CHAT, json={"messages": []})
        assert (code, error["code"]) == (400, "model_not_found")


async def test_body_too_large(client: ClientSession, engine: FakeEngine) -> None:
    """A body over the limit is 413."""
    async with running(engine, limits__body_bytes_max=1000) as app:
        code, error = await error_of(client, app.url + CHAT, data=b"x" * 2000)
        assert (code, error["code"]) == (413, "body_too_large")
        assert idle(app)


async def test_compressed_body(client: ClientSession, engine: FakeEngine) -> None:
    """A compressed body is 415: a small one may be huge inside."""
    async with running(engine) as app:
        code, error = await error_of(client, app.url + CHAT, data=b"x", headers={"Content-Encoding": "gzip"})
        assert (code, error["code"]) == (415, "unsupported_encoding")


async def test_no_replica_ready(client: ClientSession, unused_tcp_port: int) -> None:
    """With no replica up the router serves: 503 with Retry-After, `/readyz` 503, `/healthz` 200, no models."""
    async with running(f"http://127.0.0.1:{unused_tcp_port}") as app:
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            error = (await response.json())["error"]
            assert error["code"] == "no_replica_ready"
            assert "Cause: 0 of 1 replicas are ready: connection refused." in error["message"]
        for url, expected in (("/readyz", 503), ("/healthz", 200)):
            for base in (app.url, app.admin_url):
                async with client.get(base + url) as response:
                    assert response.status == expected
        async with client.get(app.url + "/v1/models") as response:
            assert (await response.json())["data"] == []


async def test_why_it_failed_is_for_those_who_may_see_receipts(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """What failed behind the router stands in the error of a tenant with receipts, in no other tenant's, and always in
    the record; what to do stands in both."""
    ring = Keyring(tmp_path, acme={}, ours={"receipts": True})
    async with running(engine, **ring.settings) as app:
        for name, told in (("acme", False), ("ours", True)):
            engine.script.append(reset)
            call = {"json": {"model": "m", "messages": []}, "headers": ring.of(name)}
            code, error = await error_of(client, app.url + CHAT, **call)
            assert (code, error["code"]) == (502, "engine_failed")
            assert "try again" in str(error["message"])
            assert (f"broke_early at {engine.url}" in str(error["message"])) is told
            assert f"broke_early at {engine.url}" in str(app.control.pages.decisions[-1].detail)


async def test_replica_comes_up(client: ClientSession, unused_tcp_port: int) -> None:
    """A replica that was unreachable at start is used as soon as it answers, by the next probe round."""
    async with running(f"http://127.0.0.1:{unused_tcp_port}", probe__interval_s=0.02) as app:
        async with FakeEngine(port=unused_tcp_port):
            async with asyncio.timeout(60):
                while not app.router.fleet.ready():
                    await asyncio.sleep(0.01)  # real rounds on a real clock
            async with client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
                assert response.status == 200
            async with client.get(app.url + "/readyz") as response:
                assert response.status == 200


async def test_models_union(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """`/v1/models` is the union; a request goes only to replicas that serve its model."""
    other.models = ("m", "lora")
    async with running(engine, other) as app:
        async with client.get(app.url + "/v1/models") as response:
            assert [row["id"] for row in (await response.json())["data"]] == ["m", "lora"]
        async with client.get(app.url + "/v1/models/lora") as response:
            assert (await response.json())["id"] == "lora"
        async with client.get(app.url + "/v1/models/none") as response:
            assert response.status == 404
        for _ in range(4):
            async with client.post(app.url + CHAT, json={"model": "lora", "messages": []}) as response:
                assert response.headers["x-warmroute-replica"] == other.url


async def test_engines_with_a_key(client: ClientSession, engine: FakeEngine) -> None:
    """Engines started with an API key are probed with it; without it the reason is shown, not guessed."""
    engine.api_key = "sesame"
    async with running(engine) as app:
        assert not app.router.fleet.ready()
        async with client.get(app.admin_url + "/admin/replicas") as response:
            assert (await response.json())["replicas"][0]["why"] == "/v1/models: status 401"
    async with running(engine, probe__api_key="sesame") as app:
        assert app.router.fleet.ready()
        async with client.post(app.url + CHAT, json={"model": "m"}, headers={"Authorization": "Bearer mine"}):
            pass
        assert engine.seen[-1].headers["Authorization"] == "Bearer mine"


async def test_engine_error_passes(client: ClientSession, engine: FakeEngine) -> None:
    """An engine's own 400 reaches the client unchanged and blames nobody."""
    from tests.support.fakes import status

    said = json.dumps({"error": {"message": "does not support Embeddings API", "code": 400}})
    engine.script.append(status(400, said))
    async with running(engine) as app:
        async with client.post(app.url + "/v1/embeddings", json={"model": "m", "input": "x"}) as response:
            assert (response.status, await response.text()) == (400, said)
        assert len(engine.seen) == 1
        assert app.router.fleet.ready()


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/admin/replicas", "/admin/decisions", "/admin/index"]
)
async def test_admin_pages(client: ClientSession, engine: FakeEngine, path: str) -> None:
    """The admin listener shows health, metrics, replicas, decisions and the index."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}):
            pass
        async with client.get(app.admin_url + path) as response:
            assert response.status == 200
            if path.startswith("/admin"):
                assert engine.url in await response.text() or path == "/admin/index"


async def test_metrics_on_main_can_be_switched_off(client: ClientSession, engine: FakeEngine) -> None:
    """`/metrics` leaves the main listener when told to, and stays on the admin one."""
    async with running(engine, listen__metrics_on_main=False) as app:
        async with client.get(app.url + "/metrics") as response:
            assert response.status == 404
        async with client.get(app.admin_url + "/metrics") as response:
            assert response.status == 200
