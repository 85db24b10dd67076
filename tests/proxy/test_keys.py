"""Keys over HTTP: who gets in, what they may ask for, and what engines get to see of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, FormData, web

from router.config.runtime import resolve
from router.core.placement.placement_request import PlacementRequest
from router.core.types.requests import Priority
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, events, idle, running, settings, status
from tests.support.keyring import ADMIN, Keyring, bearer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    """Two tenants; `few` may use one model, and is never urgent."""
    return Keyring(tmp_path, acme={}, few={"models": ["m"], "priority": "low"})


def spied(app: RouterServer, monkeypatch: pytest.MonkeyPatch) -> list[PlacementRequest]:
    """Everything that is placed."""
    seen: list[PlacementRequest] = []
    place = app.control.placer.place

    async def spy(wanted: PlacementRequest, exclude: frozenset[str]) -> Any:
        seen.append(wanted)
        return await place(wanted, exclude)

    monkeypatch.setattr(app.control.placer, "place", spy)
    return seen


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
async def test_who_gets_in(client: ClientSession, engine: FakeEngine, ring: Keyring) -> None:
    """A key opens by either header. None, a wrong one, another scheme, and two that differ are 401 in the words of
    the dialect, wherever they are shown, and no engine hears of it."""
    key, other = ring.keys["acme"], ring.keys["few"]
    good: list[Any] = [bearer(key), {"x-api-key": key}, {"Authorization": f"bearer  {key} "}]
    good.append({**bearer(key), "x-api-key": key})
    bad: list[Any] = [{}, bearer("wr-no"), bearer(""), {"Authorization": key}, {"Authorization": f"Basic {key}"}]
    bad += [{"x-api-key": key[:-1]}, {**bearer(key), "x-api-key": other}, {**bearer(key), "x-api-key": "wr-no"}]
    bad += [{**bearer("wr-no"), "x-api-key": key}, [("Authorization", f"Bearer {k}") for k in (key, other)]]
    async with running(engine, **ring.settings) as app:
        for headers in good:
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 200, headers
        for path, kind in ((CHAT, "error"), ("/v1/messages", "type"), ("/generate", "object"), ("/nowhere", "error")):
            for headers in bad:
                async with client.post(app.url + path, json=BODY, headers=headers) as response:
                    assert response.status == 401, headers
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    said = await response.json()
                    assert kind in said
                    assert (said.get("error") or said)["code"] == "invalid_api_key"
        assert len(engine.seen) == len(good)
        assert all(
            record.at_s > 1e9 for record in app.control.pages.decisions
        )  # who is turned away came at some time too


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
async def test_the_key_is_looked_at_before_the_body(client: ClientSession, engine: FakeEngine, ring: Keyring) -> None:
    """What has no key is not read: a body that is no JSON is 401, not 400."""
    async with running(engine, **ring.settings) as app:
        for headers, code in (({}, 401), (ring.of("acme"), 400)):
            async with client.post(app.url + CHAT, data=b"{", headers=headers) as response:
                assert response.status == code


@pytest.mark.promise("Clients' keys never reach engines, and the keys file holds digests only.", "tenants")
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("own", ["", "engine-key"])
async def test_what_engines_are_shown(
    client: ClientSession, engine: FakeEngine, ring: Keyring, keys: bool, own: str
) -> None:
    """Our keys never reach an engine; the router's own key for engines does, in their place. Without either, what the
    client shows is passed on. Hints are for the router alone, everything else is passed on."""
    given = {**ring.of("acme"), "X-Api-Key": ring.keys["acme"], "X-Other": "1"}
    given |= {"X-Warmroute-Tenant": "t", "X-Warmroute-Priority": "low"}
    async with running(engine, upstream__api_key=own, **(ring.settings if keys else {})) as app:
        async with client.post(app.url + CHAT, json=BODY, headers=given) as response:
            assert response.status == 200
    seen = engine.seen[0].headers
    assert seen["X-Other"] == "1"
    assert not any(name.lower().startswith("x-warmroute") for name in seen)
    assert seen.getall("Authorization", []) == ([f"Bearer {own}"] if own else [] if keys else [given["Authorization"]])
    assert seen.getall("X-Api-Key", []) == ([] if keys or own else [given["X-Api-Key"]])


@pytest.mark.promise("A key restricted to some models reaches no other model, by any name or adapter.", "tenants")
async def test_models(client: ClientSession, ring: Keyring) -> None:
    """A key for some models is 403 for others, whether they exist or not, and sees only its own: in the list, by
    name, in errors, as the default, as SGLang's adapters, and on paths that no dialect has."""
    headers = ring.of("few")
    async with FakeEngine(models=("m", "secret")) as both, running(both, **ring.settings) as app:
        for name, code in (("m", 200), ("secret", 403), ("nothing", 403)):
            async with client.post(app.url + CHAT, json=BODY | {"model": name}, headers=headers) as response:
                assert (response.status, "model_not_allowed" in await response.text()) == (code, code == 403)
        for path, body in (
            (CHAT, BODY | {"lora_path": "secret"}),
            (CHAT, BODY | {"lora_path": [None, "secret"]}),
            (CHAT, BODY | {"lora_path": {"odd": 1}}),
            ("/generate", {"text": "x", "model": "m", "lora_path": ["secret"]}),
            ("/generate", {"text": "x", "lora_path": "secret"}),
            ("/tokenize", {"model": "secret", "prompt": "x"}),
            ("/classify", {"model": "m", "text": "x", "lora_path": "secret"}),
        ):
            async with client.post(app.url + path, json=body, headers=headers) as response:
                assert response.status == 403, (path, body)
        async with client.post(app.url + "/tokenize", json={"prompt": "x"}, headers=headers) as response:
            assert response.status == 400, "which of two models is not said, and not all are allowed"
            assert "secret" not in await response.text()
        async with client.get(app.url + "/v1/models", headers=headers) as response:
            assert [row["id"] for row in (await response.json())["data"]] == ["m"]
        for name, code in (("m", 200), ("secret", 404), ("nothing", 404)):
            async with client.get(f"{app.url}/v1/models/{name}", headers=headers) as response:
                assert response.status == code
                assert (await response.text()).replace(name, "") == (
                    '{"error":{"message":"The model \'\' does not exist.","type":"not_found_error","param":"model",'
                    '"code":"model_not_found"}}'
                ) or code == 200
        assert len(both.seen) == 1
        async with client.get(app.url + "/v1/models", headers=ring.of("acme")) as response:
            assert len((await response.json())["data"]) == 2


@pytest.mark.promise("A key restricted to some models reaches no other model, by any name or adapter.", "tenants")
async def test_models_of_forms(client: ClientSession, ring: Keyring) -> None:
    """A form is for the one model that it names, whichever way an engine may read it: one that can be read in two is
    400 for a key that is for some models, and passed on for one that is for all."""
    headers = ring.of("few")

    async def transcribed(*names: str, **shown: str) -> int:
        form = FormData()
        form.add_field("file", b"RIFF", filename="a.wav")
        for name in names:
            form.add_field("model", name)
        async with client.post(f"{app.url}/v1/audio/transcriptions", data=form, headers=shown) as response:
            return response.status

    async with FakeEngine(models=("m", "secret")) as both, running(both, **ring.settings) as app:
        assert [await transcribed(name, **headers) for name in ("m", "secret")] == [200, 403]
        assert [await transcribed(*names, **headers) for names in (("m", "secret"), ("secret", "m"), ())] == [400] * 3
        assert len(both.seen) == 1
        assert await transcribed("m", "secret", **ring.of("acme")) == 200


@pytest.mark.promise("A key restricted to some models reaches no other model, by any name or adapter.", "tenants")
async def test_a_default_model_must_be_allowed(client: ClientSession, tmp_path: Path) -> None:
    """A request that names no model means the only one there is: which its key must be for."""
    ring = Keyring(tmp_path, few={"models": ["n"]}, acme={})
    async with FakeEngine() as engine, running(engine, **ring.settings) as app:
        for tenant, code in (("few", 403), ("acme", 200)):
            for path in (CHAT, "/tokenize"):
                body = {"messages": [], "prompt": "x"}
                async with client.post(app.url + path, json=body, headers=ring.of(tenant)) as response:
                    assert response.status == code


@pytest.mark.inside
async def test_whose_turn_it_is(
    client: ClientSession, engine: FakeEngine, ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key's priority can be lowered by the request and never raised; its tenant cannot be chosen."""
    low, high, normal = Priority.LOW, Priority.HIGH, Priority.NORMAL
    async with running(engine, **ring.settings) as app:
        seen = spied(app, monkeypatch)
        for tenant, wish, expected in (
            ("acme", None, normal), ("acme", "high", normal), ("acme", "low", low),
            ("few", "high", low), ("few", None, low),
        ):  # fmt: skip
            headers = ring.of(tenant) | ({"x-warmroute-priority": wish} if wish else {})
            headers["x-warmroute-tenant"] = "somebody-else"
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 200
            assert (seen[-1].tenant, seen[-1].priority, seen[-1].body_bytes > 50) == (tenant, expected, True)
        headers = ring.of("acme") | {"x-warmroute-priority": "urgent"}
        async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
            assert (response.status, "bad_priority" in await response.text()) == (400, True)
    async with running(engine) as app:
        seen = spied(app, monkeypatch)
        for wish, expected in (("high", high), ("Low", low), ("normal", normal), ("", normal)):
            headers = {"x-warmroute-tenant": "t.1", "x-warmroute-priority": wish}
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 200
            assert (seen[-1].tenant, seen[-1].priority) == ("t.1", expected)
        for name, value, code in (("tenant", "a b", "bad_tenant"), ("tenant", "x" * 65, "bad_tenant"),
                                  ("tenant", 'a"\\', "bad_tenant"), ("priority", "2", "bad_priority")):  # fmt: skip
            async with client.post(app.url + CHAT, json=BODY, headers={f"x-warmroute-{name}": value}) as response:
                assert (response.status, code in await response.text()) == (400, True)


async def test_tenants_are_seen_by_the_operator(
    client: ClientSession, engine: FakeEngine, ring: Keyring, tmp_path: Path
) -> None:
    """The tenant is in decisions, and in metrics where the keys file names it: up to a number of them, others are one
    more, and those without a key too."""
    more = Keyring(tmp_path, **{f"t{n}": {} for n in range(5)})
    async with running(engine, auth__tenants_max=3, admin__token=ADMIN, **more.settings) as app:
        for n in range(5):
            async with client.post(app.url + CHAT, json=BODY, headers=more.of(f"t{n}")) as response:
                assert response.status == 200
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 401
        async with client.get(app.admin_url + "/admin/decisions", headers=bearer(ADMIN)) as response:
            rows = (await response.json())["decisions"]
        assert [row["tenant"] for row in rows] == ["", "t4", "t3", "t2", "t1", "t0"]
        async with client.get(app.admin_url + "/metrics", headers=bearer(ADMIN)) as response:
            page = await response.text()
    found = [line for line in page.splitlines() if line.startswith("warmroute_tenant_requests_total{")]
    assert sorted(found) == [
        'warmroute_tenant_requests_total{status="2xx",tenant="other"} 2.0',
        *(f'warmroute_tenant_requests_total{{status="2xx",tenant="t{n}"}} 1.0' for n in range(3)),
        'warmroute_tenant_requests_total{status="4xx",tenant="none"} 1.0',
    ]
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY, headers={"x-warmroute-tenant": "t0"}) as response:
            assert response.status == 200
        async with client.get(app.admin_url + "/metrics") as response:
            assert set(re.findall('tenant="([^"]*)"', await response.text())) == {"none"}


@pytest.mark.promise(
    "Tenants see neither replicas nor their caches, and receipts come from this router alone.", "tenants"
)
async def test_receipts_are_for_operators(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Tenants are not told where their prompts were found, unless the settings or their key say so. The request's id
    is always told."""
    ring = Keyring(tmp_path, acme={}, ours={"receipts": True})
    for setting in (False, True):
        async with running(engine, auth__receipts=setting, **ring.settings) as app:
            for tenant in ("acme", "ours"):
                async with client.post(app.url + CHAT, json=BODY, headers=ring.of(tenant)) as response:
                    told = {name.lower() for name in response.headers if name.lower().startswith("x-warmroute-")}
                    assert "x-warmroute-request-id" in told
                    assert (len(told) > 1) == (setting or tenant == "ours")
                    assert str(engine.port) not in str(response.headers) or len(told) > 1


@pytest.mark.promise("No tenant gets more than its rate.", "tenants")
async def test_who_leaves_before_the_end_has_used_what_it_got(client: ClientSession, tmp_path: Path) -> None:
    """A stream that its client leaves just before its end counts against the rate with every event that came."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": 1_000})

    async def long(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(30):
            await response.write(events()[0] * 100)
        await engine.go_on.wait()
        return response

    async with FakeEngine() as engine, running(engine, **ring.settings) as app:
        engine.script.append(long)
        async with client.post(app.url + CHAT, json=BODY | {"stream": True}, headers=ring.of("acme")) as response:
            came = 0
            while came < 2_900:
                came += (await response.content.readany()).count(b"\n\n")
            response.close()
        while not idle(app):
            await asyncio.sleep(0.01)
        async with client.post(app.url + CHAT, json=BODY, headers=ring.of("acme")) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 60


@pytest.mark.promise("No tenant gets more than its rate.", "tenants")
async def test_long_answers_count(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """An answer too long to be held counts by the usage at its end, not by one that is part of what was said."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": 1_000})
    said = json.dumps('"usage":{"prompt_tokens":1,"completion_tokens":1}' * 5_000)
    usage = '{"prompt_tokens": 10, "completion_tokens": 3000}'
    async with running(engine, limits__buffered_response_bytes_max=4_096, **ring.settings) as app:
        engine.script.append(status(200, f'{{"choices": [{{"message": {{"content": {said}}}}}], "usage": {usage}}}'))
        async with client.post(app.url + CHAT, json=BODY, headers=ring.of("acme")) as response:
            assert len(await response.read()) > len(said)
        async with client.post(app.url + CHAT, json=BODY, headers=ring.of("acme")) as response:
            assert response.status == 429


@pytest.mark.promise(
    "Tenants see neither replicas nor their caches, and receipts come from this router alone.", "tenants"
)
async def test_engines_tell_tenants_no_addresses(client: ClientSession, engine: FakeEngine, ring: Keyring) -> None:
    """An engine that redirects names itself: that is for who may see receipts. A slash too many, for which it would
    redirect, does not reach it."""
    away = status(307, headers={"Location": engine.url, "X-Other": "1"})
    for keys, told in ((ring.settings, False), ({}, True)):
        async with running(engine, **keys) as app:
            async with client.get(f"{app.url}{RESPONSES}/resp_a/", headers=ring.of("acme")) as response:
                assert response.status == (200 if told else 404)
                assert not any(seen.path.endswith("/") for seen in engine.seen)
            engine.script.append(away)
            async with client.post(
                app.url + CHAT, json=BODY, headers=ring.of("acme"), allow_redirects=False
            ) as response:
                assert (response.status, response.headers["X-Other"]) == (307, "1")
                assert ("Location" in response.headers) == told


@pytest.mark.promise("Keys and certificates are replaced without a restart.", "admin")
async def test_keys_are_replaced_at_once(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """A new table counts from the next request on."""
    old = Keyring(tmp_path, acme={})
    options = settings(engine, **old.settings)
    async with RouterServer(resolve(options)) as app:
        await app.control.probe_now()
        new = Keyring(tmp_path, acme={}, more={})
        app.apply(resolve(options))
        for headers, code in ((old.of("acme"), 401), (new.of("acme"), 200), (new.of("more"), 200)):
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == code


@pytest.mark.promise("A stored response is its tenant's alone.", "tenants")
async def test_stored_responses_are_their_tenants(client: ClientSession, engine: FakeEngine, ring: Keyring) -> None:
    """Another's stored response looks like one that does not exist, in every way of asking for one; whatever id a
    request asks to be stored under, and whatever ids an answer shows, nobody takes over another's."""
    acme, few = ring.of("acme"), ring.of("few")
    async with running(engine, **ring.settings) as app:

        async def ask(headers: dict[str, str], method: str, path: str, **body: Any) -> tuple[int, str]:
            async with client.request(method, app.url + path, json=body or None, headers=headers) as response:
                return response.status, await response.text()

        async def make(headers: dict[str, str], id_: str, **body: Any) -> None:
            engine.script.append(status(200, f'{{"id": "{id_}", "object": "response"}}'))
            assert (await ask(headers, "POST", RESPONSES, model="m", input="x", **body))[0] == 200

        await make(acme, "resp_a", request_id="resp_a")
        assert json.loads(engine.seen[-1].body)["request_id"] != "resp_a"
        ways: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", f"{RESPONSES}/%s", {}), ("DELETE", f"{RESPONSES}/%s", {}), ("POST", f"{RESPONSES}/%s/cancel", {}),
            ("GET", f"{RESPONSES}/%s/input_items", {}),
            ("POST", RESPONSES, {"input": "y", "previous_response_id": "%s"}),
        ]  # fmt: skip
        await make(few, "resp_f")
        engine.script.append(status(200, '{"data": [{"id": "resp_a"}]}'))  # words of the tenant's own in an answer
        assert (await ask(few, "GET", f"{RESPONSES}/resp_f/input_items"))[0] == 200
        await make(few, "resp_a")  # an engine that takes ids from requests
        for method, path, given in ways:
            answers = []
            for id_ in ("resp_a", "resp_0"):
                body = {k: v % id_ if "%s" in v else v for k, v in given.items()}
                code, text = await ask(few, method, path % id_ if "%s" in path else path, **body)
                answers.append((code, text.replace(id_, "")))
            assert answers[0] == answers[1], path
            assert answers[0][0] == 404
            own = {k: v % "resp_a" if "%s" in v else v for k, v in given.items()}
            assert (await ask(acme, method, path % "resp_a" if "%s" in path else path, **own))[0] == 200, path
        count = len(engine.seen)
        code, _ = await ask(few, "POST", f"{RESPONSES}/resp_a/cancel", previous_response_id="resp_f")
        assert (code, len(engine.seen)) == (404, count)


async def test_with_keys_what_is_not_remembered_is_nobodys(
    client: ClientSession, engine: FakeEngine, ring: Keyring
) -> None:
    """After a restart nobody knows whose a response was, so nobody gets it. Without keys it is asked for, as ever."""
    for keys, code in ((ring.settings, 404), ({}, 200)):
        async with running(engine, **keys) as app:
            async with client.get(f"{app.url}{RESPONSES}/resp_old", headers=ring.of("acme")) as response:
                assert response.status == code


async def test_many_at_once(client: ClientSession, engine: FakeEngine, ring: Keyring) -> None:
    """Requests of two tenants side by side are each their own."""
    async with running(engine, **ring.settings) as app:

        async def one(n: int) -> None:
            tenant = ("acme", "few")[n % 2]
            headers = ring.of(tenant) | {"x-request-id": f"{tenant}-{n}"}
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as response:
                assert response.status == 200

        await asyncio.gather(*map(one, range(40)))
        records = app.control.pages.decisions
        assert all(record.id.startswith(record.client.tenant) for record in records)
        assert len(records) == 40
