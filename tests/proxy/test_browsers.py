"""Pages in browsers may use the router where the settings say so (CORS), on every path, with keys and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.config.runtime import resolve
from router.core.dialects import PATHS
from router.proxy.preflights import AT_ONCE_MAX
from tests.support.fakes import FakeEngine, idle, reset, running, settings, status
from tests.support.keyring import Keyring
from tests.support.waiting import until

CHAT, PAGE = "/v1/chat/completions", "https://chat.example.com"
BODY = {"model": "m", "messages": [], "input": "hi", "text": "hi", "max_tokens": 1}
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
ALLOW, CREDENTIALS = "access-control-allow-origin", "access-control-allow-credentials"
EVERYWHERE = (*PATHS, "/tokenize", "/v1/models", "/v1/responses/resp_1", "/nowhere")


def said(headers: Mapping[str, str]) -> dict[str, str]:
    """What an answer says to browsers."""
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("access-control-")}


@pytest.mark.parametrize("keys", [False, True])
async def test_permission_is_given_before_keys(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, keys: bool
) -> None:
    """A browser shows none when it asks. What it asks for is echoed; an engine hears nothing of it."""
    more = Keyring(tmp_path, acme={}).settings if keys else {}
    headers = "authorization, content-type, x-stainless-lang"
    async with running(engine, listen__cors_origins=(PAGE, "http://localhost:3000"), **more) as app:
        for path in EVERYWHERE:
            asked = ASKS | {"Access-Control-Request-Headers": headers}
            async with client.options(app.url + path, headers=asked) as answer:
                assert (answer.status, await answer.read()) == (204, b"")
                assert said(answer.headers) == {
                    ALLOW: PAGE,
                    CREDENTIALS: "true",
                    "access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS",
                    "access-control-allow-headers": headers,
                    "access-control-max-age": "600",
                }
                assert "Origin" in answer.headers["Vary"]
        async with client.options(app.url + CHAT, headers=ASKS, data=b"x" * 100_000) as answer:
            assert answer.status == 204, "a body that is not wanted is not read"
    assert engine.seen == engine.preflights == []


async def test_a_public_page_may_use_a_private_network(client: ClientSession, engine: FakeEngine) -> None:
    """Where it asks for it; and odd names of headers are not echoed."""
    async with running(engine, listen__cors_origins=("*",)) as app:
        private = {"Access-Control-Request-Private-Network": "true"}
        async with client.options(app.url + CHAT, headers=ASKS | private) as answer:
            assert answer.headers["access-control-allow-private-network"] == "true"
        odd = {"Access-Control-Request-Headers": 'a"b'}
        async with client.options(app.url + CHAT, headers=ASKS | odd) as answer:
            assert answer.status == 204
            assert set(said(answer.headers)) == {ALLOW, "access-control-allow-methods", "access-control-max-age"}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed", "credentials"),
    [
        ((PAGE,), PAGE, PAGE, True),
        (("HTTPS://Chat.Example.com:443",), PAGE, PAGE, True),
        ((PAGE,), "https://evil.example.com", None, False),
        ((PAGE,), "http://chat.example.com", None, False),
        ((PAGE,), PAGE + ":8443", None, False),
        ((PAGE,), PAGE + ".evil.com", None, False),
        ((PAGE,), "null", None, False),
        ((PAGE,), None, None, False),
        (("null",), "null", "null", False),
        (("*",), PAGE, "*", False),
        (("*",), "null", "*", False),
        (("chrome-extension://abcdefgh",), "chrome-extension://abcdefgh", "chrome-extension://abcdefgh", True),
    ],
)
async def test_who_may_read_answers(
    client: ClientSession,
    engine: FakeEngine,
    origins: tuple[str, ...],
    origin: str | None,
    allowed: str | None,
    credentials: bool,
) -> None:
    """Listed origins, as browsers write them; a request that no page sent is served all the same."""
    headers = {} if origin is None else {"Origin": origin}
    async with running(engine, listen__cors_origins=origins) as app:
        async with client.post(app.url + CHAT, json=BODY, headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers.get(ALLOW) == allowed
            assert (CREDENTIALS in answer.headers) is credentials
            assert ("Vary" in answer.headers) is (origins != ("*",))
        if origin is None:
            return
        async with client.options(app.url + CHAT, headers=ASKS | headers) as answer:
            assert answer.status == (204 if allowed else 403)
            assert answer.headers.get(ALLOW) == allowed
            if not allowed:
                assert (await answer.json())["error"]["code"] == "origin_not_allowed"


async def test_every_answer_and_error_may_be_read(client: ClientSession, tmp_path: Path) -> None:
    """Pages of ours, whole answers, streams, and errors of every kind, in every dialect."""
    ring = Keyring(tmp_path, acme={"requests_per_min": 1}, free={})
    origin = {"Origin": PAGE}
    async with FakeEngine() as engine, running(engine, listen__cors_origins=(PAGE,), **ring.settings) as app:
        statuses = set[int]()

        async def ask(path: str, key: str = "free", method: str = "POST", **more: object) -> None:
            headers = origin | (ring.of(key) if key else {})
            async with client.request(method, app.url + path, headers=headers, **more) as answer:  # type: ignore[arg-type]
                statuses.add(answer.status)
                assert answer.headers.getall(ALLOW) == [PAGE], (path, answer.status)
                await answer.read()

        for path in PATHS:
            for streams in (False, True):
                await ask(path, json=BODY | {"stream": streams})
            await ask(path, "", json=BODY)
            await ask(path, json=BODY | {"model": "nope"})
            await ask(path, data=b"{")
            engine.script += [status(code) for code in (400, 422)]
            await ask(path, json=BODY)
            await ask(path, json=BODY)
        for path in ("/v1/models", "/", "/healthz", "/readyz", "/nowhere"):
            await ask(path, method="GET")
        for _ in range(2):
            await ask(CHAT, "acme", json=BODY)
        await ask(CHAT, data=BytesIO(b"x" * (33 << 20)))
        engine.script += [reset, reset]
        await ask(CHAT, json=BODY)
    assert {200, 400, 401, 404, 413, 422, 429, 502} <= statuses


async def test_what_an_engine_says_is_replaced(client: ClientSession, engine: FakeEngine) -> None:
    """Twice the same header, or two that differ, would make a browser refuse the answer."""
    own = {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Credentials": "true",
        "Access-Control-Expose-Headers": "x-engine",
        "Vary": "Accept-Encoding, Origin",
    }

    async def streamed(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **own})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        return response

    replies = (status(200, "{}", own), status(400, "{}", own), streamed)
    for origins, origin, expected in (((PAGE,), PAGE, PAGE), ((PAGE,), "https://evil.com", None), (("*",), PAGE, "*")):
        async with running(engine, listen__cors_origins=origins) as app:
            for reply in replies:
                engine.script.append(reply)
                fields = BODY | {"stream": reply is streamed}
                async with client.post(app.url + CHAT, json=fields, headers={"Origin": origin}) as answer:
                    assert answer.headers.getall(ALLOW, []) == ([expected] if expected else [])
                    assert (CREDENTIALS in answer.headers) is (expected == PAGE)
                    assert answer.headers.getall("Vary") == ["Accept-Encoding, Origin"]
                    shown = answer.headers.get("Access-Control-Expose-Headers", "")
                    ours = {name.lower() for name in answer.headers if name.lower().startswith("x-warmroute-")}
                    assert ours
                    assert (ours | {"retry-after"} <= set(shown.split(", "))) is bool(expected)
                    assert "x-engine" not in shown


async def test_without_the_setting_nothing_is_said(client: ClientSession, engine: FakeEngine) -> None:
    """An engine's own headers pass, and what is no path is 404 as before."""
    async with running(engine) as app:
        engine.script.append(status(200, "{}", {"Access-Control-Allow-Origin": "*"}))
        async with client.post(app.url + CHAT, json=BODY, headers={"Origin": PAGE}) as answer:
            assert said(answer.headers) == {ALLOW: "*"}
            assert "Vary" not in answer.headers
        async with client.get(app.url + "/v1/models", headers={"Origin": PAGE}) as answer:
            assert not said(answer.headers)
        async with client.options(app.url + CHAT, headers=ASKS) as answer:
            assert (answer.status, said(answer.headers)) == (404, {})


@pytest.mark.promise("Without `origins`, web pages get what engines allow, and nothing if keys are in use.", "admin")
@pytest.mark.parametrize("said_by_engine", ["*", ""])
async def test_engines_that_let_pages_in(client: ClientSession, engine: FakeEngine, said_by_engine: str) -> None:
    """Without the setting a page may do what engines let it do. Preflights pass as they are, without what is no part of
    them; answers of ours, where engines let every page in, say that of every page, and nothing of cookies."""
    engine.allow_origin = said_by_engine
    own = {ALLOW: "*", CREDENTIALS: "true"}
    asked = ASKS | {"Access-Control-Request-Headers": "authorization", "Cookie": "a=b", "X-Other": "c"}
    async with running(engine) as app:
        for path, target in ((CHAT, CHAT), ("/v1/models", "/v1/models"), ("/odd/..", "/v1/models")):
            async with client.options(app.url + path, headers=asked) as answer:
                assert (answer.status, await answer.text()) == (200, "OK")
                assert answer.headers.getall(ALLOW) == [said_by_engine or PAGE]
                assert (CREDENTIALS in answer.headers) is (not said_by_engine)
            seen = [each for each in engine.preflights if each.headers["Origin"] == PAGE][-1]
            assert seen.path == target
            assert not {"Cookie", "X-Other"} & seen.headers.keys()
            assert seen.headers["Access-Control-Request-Headers"] == "authorization"
        page = {"Origin": PAGE}
        async with client.get(app.url + "/v1/models", headers=page) as answer:
            assert (answer.status, said(answer.headers)) == (200, {ALLOW: "*"})
        async with client.post(app.url + CHAT, json=BODY | {"model": "nope"}, headers=page) as answer:
            assert (answer.status, said(answer.headers)) == (404, {ALLOW: "*"})
        for headers in (own, {}):
            engine.script.append(status(200, "{}", headers))
            async with client.post(app.url + CHAT, json=BODY, headers=page) as answer:
                assert said(answer.headers) == headers, "an engine's answer is left alone"
                assert len(answer.headers.getall(ALLOW, [])) == len(headers) / 2
                request_id = answer.headers["x-warmroute-request-id"]
        async with client.get(app.url + "/v1/models") as answer:
            assert not said(answer.headers), "no page asks"
        for path in ("/metrics", f"/v1/warmroute/requests/{request_id}"):
            async with client.get(app.url + path, headers=page) as answer:
                assert (answer.status, said(answer.headers)) == (200, {}), "these show more than engines do"
        engine.allow_origin = None
        async with client.options(app.url + CHAT, headers=ASKS) as answer:
            assert (answer.status, said(answer.headers)) == (404, {})
        async with client.get(app.url + "/v1/models", headers=page) as answer:
            assert not said(answer.headers), "what engines no longer say is forgotten"
        assert idle(app)


@pytest.mark.promise("Without `origins`, web pages get what engines allow, and nothing if keys are in use.", "admin")
async def test_engines_that_let_some_pages_in(client: ClientSession, engine: FakeEngine) -> None:
    """A list of the engine's is passed on, and says nothing of our own answers."""
    engine.allow_origin = PAGE
    async with running(engine) as app:
        async with client.options(app.url + CHAT, headers=ASKS) as answer:
            assert answer.headers.getall(ALLOW) == [PAGE]
        async with client.get(app.url + "/v1/models", headers={"Origin": PAGE}) as answer:
            assert not said(answer.headers)


async def test_a_page_that_comes_without_a_preflight(client: ClientSession, engine: FakeEngine) -> None:
    """As a simple request does, or one whose preflight another router had: the engine is asked once, for no page."""
    engine.allow_origin = ""
    async with running(engine) as app:
        for _ in range(3):
            async with client.get(app.url + "/v1/models", headers={"Origin": PAGE}) as answer:
                assert said(answer.headers) == {ALLOW: "*"}
    assert [each.headers["Origin"] for each in engine.preflights] == ["https://every-page.invalid"]


async def test_preflights_that_nobody_answers(client: ClientSession, engine: FakeEngine) -> None:
    """They are given up soon, few are with an engine at once, none is held against it, and the page is told as before.
    So where no replica is ready."""
    engine.allow_origin, engine.mute = "*", True
    async with running(engine) as app:

        async def asked() -> int:
            async with client.options(app.url + CHAT, headers=ASKS) as answer:
                return answer.status

        many = asyncio.gather(*(asked() for _ in range(30)))
        await until(lambda: len(engine.preflights) >= AT_ONCE_MAX)
        async with client.get(app.url + "/healthz") as answer:  # what else was sent has come by then
            assert len(engine.preflights) == AT_ONCE_MAX
        assert await many == [404] * 30
        async with client.post(app.url + CHAT, json=BODY) as answer:
            assert answer.status == 200
        assert idle(app)
    async with running("http://127.0.0.1:1") as app:
        assert await asked() == 404


@pytest.mark.promise("Without `origins`, web pages get what engines allow, and nothing if keys are in use.", "admin")
@pytest.mark.parametrize("more", ["keys", "upstream.api_key", "listen.cors_origins"])
async def test_engines_decide_where_nothing_is_added(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, more: str
) -> None:
    """A page could do more through a router that asks for keys, or shows its own, than at an engine."""
    engine.allow_origin = "*"
    given: dict[str, Any] = {"upstream__api_key": "k"}
    if more != "upstream.api_key":
        given = (
            Keyring(tmp_path, acme={}).settings if more == "keys" else {"listen__cors_origins": ("https://b.example",)}
        )
    async with running(engine, **given) as app:
        async with client.options(app.url + CHAT, headers=ASKS) as answer:
            assert answer.status in (401, 403, 404)
            assert ALLOW not in answer.headers
        async with client.get(app.url + "/v1/models", headers={"Origin": PAGE}) as answer:
            assert ALLOW not in answer.headers
        async with client.options(app.admin_url + "/admin/replicas", headers=ASKS) as answer:
            assert ALLOW not in answer.headers
    assert engine.preflights == []


async def test_options_that_is_no_question_is_no_path(client: ClientSession, engine: FakeEngine) -> None:
    """Only a browser's question is answered."""
    async with running(engine, listen__cors_origins=(PAGE,)) as app:
        for headers in ({}, {"Origin": PAGE}):
            async with client.options(app.url + CHAT, headers=headers) as answer:
                assert answer.status == 404


async def test_origins_change_at_run_time(client: ClientSession, engine: FakeEngine) -> None:
    """From the next answer on, on connections that are open."""
    async with running(engine) as app:
        for origins, allowed in (((PAGE,), PAGE), (("*",), "*"), ((), None)):
            app.apply(resolve(settings(engine, listen__cors_origins=origins)))
            async with client.get(app.url + "/v1/models", headers={"Origin": PAGE}) as answer:
                assert answer.headers.get(ALLOW) == allowed


async def test_an_error_of_the_connection_is_read_too(engine: FakeEngine) -> None:
    """A body that is too long is refused before it comes."""
    async with running(engine, listen__cors_origins=(PAGE,)) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(app.url.rpartition(":")[2]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nOrigin: {PAGE}\r\nContent-Length: 99999999999\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert f"{ALLOW}: {PAGE}\r\n".encode() in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
