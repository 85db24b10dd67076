"""The admin listener: who gets in, and where replicas may be that are added at run time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st

from router.admin import dashboard, openapi, runbook
from router.admin.added_replicas import RuntimeReplicas
from router.admin.drain import DrainPage
from router.config.allowed_networks import NotAllowed, check_replica_url, parse_networks
from router.config.api_keys import UNAUTHENTICATED_PATHS
from router.core.dialects import PATHS
from router.engines.discovery.static import StaticDiscovery
from router.ingress.auth import METRICS
from router.ingress.paths import METHODS, RESPONSE_ACTIONS
from router.ingress.proxied_request import RESPONSES
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN, Keyring, bearer

REPLICAS = "/admin/replicas"


def admin_routes(app: RouterServer) -> list[tuple[str, str]]:
    """Every route of the admin listener, from the code."""
    assert app.control.observatory is not None
    own = [*app.control.pages.routes(), *app.control.observatory.routes(), *app.control.prewarm_page.routes()]
    drains = DrainPage(app.control.discoveries).routes()
    routes = [*own, *drains, *RuntimeReplicas(StaticDiscovery(()), ()).routes()]
    found = [(route.method, route.path) for route in routes]
    served = {(route.method, route.path) for route in app.control.admin.table.routes}
    static = [(route.method, route.path) for route in (*dashboard.routes(), *runbook.routes())]
    found += [("GET", "/"), ("GET", openapi.PATH)]
    assert served == {*found, *static}, "a route that this test does not know of"
    return [*found, *static]


def main_routes(app: RouterServer) -> list[tuple[str, str]]:
    """Every route of the main listener, and some that lead nowhere."""
    inference = [("POST", path) for path in (*PATHS, *app._config.settings.api.passthrough)]
    stored = [(method, f"{RESPONSES}/resp_1{action}") for method, action in
              product(METHODS, ("", *(f"/{each}" for each in RESPONSE_ACTIONS)))]  # fmt: skip
    pages = [("GET", path) for path in ("/", *UNAUTHENTICATED_PATHS, METRICS, "/v1/models", "/v1/models/m")]
    others = [("GET", "/nowhere"), ("PUT", "/v1/models"), ("POST", "/add_worker"), ("GET", REPLICAS)]
    return [*inference, *stored, *pages, *others]


@pytest.mark.promise("Each page of both listeners is closed to callers without the right key.", "admin")
async def test_every_route_and_every_kind_of_key(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Every route of both listeners with no key, a wrong one, a tenant's and the admin's: each opens what it is for
    and nothing else. Only `/healthz`, `/readyz`, the runbook and the files of the dashboard are anybody's. What is
    turned away reaches no engine."""
    ring = Keyring(tmp_path, acme={})
    kinds = {"none": {}, "bad": bearer("wr-bad-bad-bad-bad-bad"), "tenant": ring.of("acme"), "admin": bearer(ADMIN)}
    options = {"admin__token": ADMIN, "admin__replicas_allowed": "http://127.0.0.0/8:1", **ring.settings}
    async with running(engine, **options) as app:
        listeners = [(app.url, main_routes(app), "tenant"), (app.admin_url, admin_routes(app), "admin")]
        for (url, routes, right), (kind, headers) in product(listeners, kinds.items()):
            for method, path in routes:
                opens = path in (*UNAUTHENTICATED_PATHS, *dashboard.PATHS, *runbook.PATHS) or kind == (
                    "admin" if path == METRICS else right
                )
                reached = len(engine.seen)
                body = {"json": {"model": "m"}} if method == "POST" else {}
                async with client.request(method, url + path, headers=headers, **body) as response:
                    assert (response.status != 401) == opens, (url, method, path, kind, response.status)
                    assert response.status < 500
                    if not opens:
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                assert opens or len(engine.seen) == reached
        async with client.get(f"{app.admin_url}/nowhere") as response:
            assert response.status == 401, "what is not there is not told either"


@pytest.mark.promise("Each page of both listeners is closed to callers without the right key.", "admin")
async def test_metrics_on_the_main_listener(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Open as long as nothing is closed; the admin's as soon as there are keys, or a token; nobody's with keys and no
    token."""
    ring = Keyring(tmp_path, acme={})
    for options, headers, code in (
        ({}, {}, 200), ({"admin__token": ADMIN}, {}, 401), ({"admin__token": ADMIN}, bearer(ADMIN), 200),
        (ring.settings, ring.of("acme"), 401), (ring.settings, bearer(""), 401),
    ):  # fmt: skip
        async with running(engine, **options) as app, client.get(app.url + "/metrics", headers=headers) as response:
            assert response.status == code


# -- browsers ------------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


@pytest.mark.promise("No web page can use the admin listener or read from it.", "admin")
@pytest.mark.parametrize("token", ["", ADMIN])
async def test_web_pages_cannot_use_it(client: ClientSession, engine: FakeEngine, token: str) -> None:
    """What a browser on the same machine sends for a web page changes nothing: a form, a script of another origin, a
    name that was made to resolve to us. Nor does it read anything, where there is no token."""
    headers = bearer(token) if token else {}
    options = {"admin__token": token, "admin__replicas_allowed": "http://127.0.0.0/8:1"}
    async with running(engine, **options) as app:
        url = app.admin_url + REPLICAS
        for more, code in (
            ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
            ({**JSON, "Origin": "http://evil"}, 403), ({**JSON, "Origin": "null"}, 403),
            ({**JSON, "Host": "evil:80"}, 421), ({**JSON, "Host": "127.0.0.1.evil"}, 421),
            ({**JSON, "Host": "[::1].evil:1"}, 421), ({**JSON, "Host": "evil"}, 421), (JSON, 201),
        ):  # fmt: skip
            async with client.post(url, data=b'{"url": "http://127.0.0.1:1"}', headers=headers | more) as response:
                assert response.status == code, more
            added = {"http://127.0.0.1:1"} if code == 201 else set()
            assert app.control.replicas.added == added, more
        async with client.delete(
            url, params={"url": "http://127.0.0.1:1"}, headers={"Origin": "x"} | headers
        ) as response:
            assert response.status == 403
        async with client.get(url, headers=headers | {"Host": "evil:80"}) as response:
            assert response.status == (200 if token else 421)
        for host in ("localhost:8001", "LOCALHOST", "[::1]:80", "10.0.0.1"):
            async with client.get(url, headers=headers | {"Host": host}) as response:
                assert response.status == 200


# -- replicas added at run time ------------------------------------------------------------------------------------


@asynccontextmanager
async def canary() -> AsyncIterator[tuple[int, list[str]]]:
    """A port that nobody may connect to, and who did."""
    heard: list[str] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard


def vectors(port: int, good: int) -> Iterator[str]:
    """Ways to say an address that is not allowed, all of which lead to `port` if they lead anywhere; or to say an
    allowed one in another way."""
    hosts = (
        "localhost", "LOCALHOST", "localhost.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1",
        "017700000001", "0177.0.0.1", "127.0.0.01", "127.000.000.001", "0", "0.0.0.0", "[::]", "[::1]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]", "[2002:7f00:1::]",
        "[64:ff9b::7f00:1]", "[::1%25lo]", "[::1%lo]", "127.0.0.1.", "127.0.0.1.nip.io", "metadata.google.internal",
        "169.254.169.254", "[fe80::1]", "[fd00:ec2::254]", "100.100.100.200", "127.0.0.256", "127.0.0.1e0",
        "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u2460.0.0.1", "\u0661.0.0.1",
        "224.0.0.1", "255.255.255.255", "[127.0.0.1]", "",
    )  # fmt: skip
    yield from (f"http://{host}:{each}" for host in hosts for each in (port, good))
    yield f"http://127.0.0.1:{port}"
    for url in (
        "http://127.0.0.1:{}@127.0.0.1:{}", "http://u:p@127.0.0.1:{1}", "http://127.0.0.1:{}#@127.0.0.1:{}",
        "http://127.0.0.1:{}\\@127.0.0.1:{}", "http://127.0.0.1:{}#dp1", "http://127.0.0.1:{}/v1", "http://127.0.0.1:{}?x",
        "http://127.0.0.1:{}/../", "http://127.0.0.1:{}/%2e%2e", "http://127.0.0.1:{}//", "HTTP://127.0.0.1:{}",
        "https://127.0.0.1:{}", "file:///etc/passwd", "gopher://127.0.0.1:{1}/_GET", "ftp://127.0.0.1:{}",
        "//127.0.0.1:{1}", "127.0.0.1:{1}", " http://127.0.0.1:{}", "http://127.0.0.1:{} ", "http://127.0.0.1:{}\n",
        "http://127.0.0.1:{}\r\nX: y", "http://127.0.0.1:{}\t", "http:/127.0.0.1:{1}", "http:127.0.0.1:{1}",
        "http://127.0.0.1:0{}", "http://127.0.0.1", "http://127.0.0.1:", "http://127.0.0.1:0", "http://127.0.0.1:99999",
        "http://127.0.0.1:+{}", "http://127.0.0.1:\uff18\uff10", "http://127.0.0.1:{}\x00.evil", "http://127.0.0.1%3a{}",
        "http://127.0.0.1,127.0.0.2:{}", "http://[127.0.0.1]:{}", "http://127.0.0.1:{}/health",
    ):  # fmt: skip
        yield url.format(good, port) if "{1}" in url or url.count("{}") == 2 else url.format(good)


@pytest.mark.promise(
    "The router connects only to configured hosts and `admin.replicas_allowed`, without redirects.", "admin"
)
async def test_nobody_is_sent_elsewhere(client: ClientSession, engine: FakeEngine) -> None:
    """Of all ways to say an address only the plain one is taken, and only if it is allowed: nothing ever connects to
    a port beside it."""
    async with canary() as (port, heard), FakeEngine() as added:
        options = {"admin__replicas_allowed": f"http://127.0.0.1:{added.port}, http://0.0.0.0/0:{added.port}"}
        async with running(engine, **options) as app:
            for url in vectors(port, added.port):
                for way in (url, f"{url}/"):
                    async with client.post(app.admin_url + REPLICAS, json={"url": way}) as response:
                        plain = way == f"http://127.0.0.1:{added.port}/"
                        assert (response.status == 403) == (not plain), (way, await response.text())
            assert app.control.replicas.added <= {f"http://127.0.0.1:{added.port}"}
            await app.control.probe_now()
            assert not heard


@pytest.mark.promise(
    "The router connects only to configured hosts and `admin.replicas_allowed`, without redirects.", "admin"
)
@given(st.text(max_size=40) | st.from_regex(r"https?://[0-9a-fx.:\[\]@#/]{1,30}:[0-9]{1,5}", fullmatch=True))
def test_only_plain_addresses_are_taken(url: str) -> None:
    """What is taken is within a network that is allowed, on its port, and is said as `ipaddress` says it."""
    rules = parse_networks(["http://10.0.0.0/8:8000", "https://[fd00::/8]:443", "http://192.0.2.7:80"])
    try:
        assert check_replica_url(url, rules) == url
    except NotAllowed:
        return
    assert url.startswith(("http://10.", "https://[fd", "http://192.0.2.7:80"))


@pytest.mark.parametrize(
    "url", ["http://10.1.2.3:8000", "http://10.255.255.255:8000", "https://[fd12::1]:443", "http://192.0.2.7:80"]
)
def test_what_is_allowed_is_taken(url: str) -> None:
    """And nothing beside it: another port, another scheme, the next address, metadata services within the network."""
    rules = parse_networks(["http://10.0.0.0/8:8000", "https://[fd00::/8]:443", "http://192.0.2.7:80"])
    assert check_replica_url(url, rules) == url
    other = url.replace("https:", "ftp:").replace("http:", "https:")
    for wrong in (other, f"{url}0", url.replace("10.", "11."), url.replace("192.0.2.7", "192.0.2.8"), f"{url}#dp1"):
        if wrong != url:
            with pytest.raises(NotAllowed):
                check_replica_url(wrong, rules)
    with pytest.raises(NotAllowed):
        check_replica_url("https://[fd00:ec2::254]:443", rules)


def test_no_address_within_another() -> None:
    """Where any address of IPv6 is allowed, none is taken that stands for one of IPv4."""
    rules = parse_networks(["http://[::/0]:80"])
    for host in ("64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "::a9fe:a9fe", "2002:a9fe:a9fe::", "::2", "::"):
        with pytest.raises(NotAllowed, match="cannot belong to a replica"):
            check_replica_url(f"http://[{host}]:80", rules)
    for host in ("::1", "2001:db8::1", "64:ff9b:2::1"):
        assert check_replica_url(f"http://[{host}]:80", rules)


@pytest.mark.promise("Prompts, answers and keys are in no log, metric, span, admin page or error.", "records")
async def test_what_cannot_be_read_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a head that is no HTTP there may be the token, whole but for a byte: nothing of it is in the log."""
    caplog.set_level("DEBUG")
    async with running(admin__token=ADMIN) as app:
        port = int(app.admin_url.rpartition(":")[2])
        for line in (f"Authorization: Bearer {ADMIN}\x1b", f"Authorization: Bearer\n{ADMIN}", f"{ADMIN}\x00: x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
    assert "Traceback" not in caplog.text
    assert ADMIN not in caplog.text


async def test_a_replica_comes_and_goes(client: ClientSession, engine: FakeEngine) -> None:
    """An added replica is probed, listed as added, and takes requests; removed, it takes none. Those of the settings
    stay, and nothing is added twice."""
    async with FakeEngine(models=("other",)) as added:
        async with running(engine, admin__replicas_allowed=f"http://127.0.0.0/8:{added.port}") as app:
            url = app.admin_url + REPLICAS
            for code in (201, 200):
                async with client.post(url, json={"url": added.url + "/"}) as response:
                    assert (response.status, await response.json()) == (code, {"url": added.url})
            await _until(lambda: added.url in {member.id for member in app.router.fleet.ready()})
            async with client.get(url) as response:
                rows = {row["id"]: row["added"] for row in (await response.json())["replicas"]}
            assert rows == {engine.url: False, added.url: True}
            async with client.post(app.url + "/v1/completions", json={"model": "other", "prompt": "x"}) as response:
                assert (response.status, len(added.seen)) == (200, 1)
            for gone, code in ((engine.url, 409), ("http://127.0.0.1:1", 404), (added.url, 200), (added.url, 404)):
                async with client.delete(url, params={"url": gone}) as response:
                    assert response.status == code
            await _until(lambda: set(app.router.fleet.members) == {engine.url})


async def _until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


async def test_what_else_is_refused(client: ClientSession, engine: FakeEngine) -> None:
    """Nothing can be added unless the settings say where; bodies are short and say nothing else."""
    async with running(engine) as app:
        async with client.post(app.admin_url + REPLICAS, json={"url": engine.url}) as response:
            assert (response.status, "none_allowed" in await response.text()) == (403, True)
    async with running(engine, admin__replicas_allowed="http://127.0.0.1:1") as app:
        for body, code in ((b"{", 400), (b"[]", 400), (b'{"url": 1}', 400), (b'{"url":"x","y":1}', 400), (b"", 400),
                           (b"[" * 4_000, 400), (b'{"url":"' + b"x" * 5_000 + b'"}', 413)):  # fmt: skip
            async with client.post(app.admin_url + REPLICAS, data=body, headers=JSON) as response:
                assert response.status == code, body[:20]


@pytest.mark.promise(
    "The router connects only to configured hosts and `admin.replicas_allowed`, without redirects.", "admin"
)
async def test_no_redirect_is_followed(client: ClientSession) -> None:
    """A replica that redirects our probes, or a client's request, elsewhere has us go nowhere; and a model's name is
    never part of where we go."""
    async with canary() as (port, heard):
        elsewhere = f"http://127.0.0.1:{port}/"

        async def away(request: web.Request) -> web.Response:
            if request.path == "/v1/models":
                return web.json_response({"data": [{"id": f"@127.0.0.1:{port}/#", "owned_by": "vllm"}]})
            seen.append(request.raw_path)
            code = 200 if request.path == "/health" else 307
            return web.Response(status=code, headers={"Location": elsewhere})

        seen: list[str] = []
        app_ = web.Application()
        app_.router.add_route("*", "/{path:.*}", away)
        runner = web.AppRunner(app_, shutdown_timeout=0.1)
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await web.SockSite(runner, listening).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with running(url, events__request_full_reports=True) as app:
                body = {"model": f"@127.0.0.1:{port}/#", "messages": []}
                async with client.post(app.url + "/v1/chat/completions", json=body, allow_redirects=False) as response:
                    assert (response.status, response.headers["Location"]) == (307, elsewhere)
            await runner.cleanup()
        assert seen
        assert not any(str(port) in path for path in seen)
        assert not heard
