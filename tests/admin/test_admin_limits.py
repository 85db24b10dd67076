"""The admin listener under attack: what is slow, silent, too many or too long ends, before any token, and the main
listener does not notice."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import pytest
from aiohttp import ClientSession

from router.http.client_timeouts import BODY_TIMEOUT, HEAD_TIMEOUT, IDLE, TOO_MANY, TOO_MANY_OF_CLIENT
from router.router_server import RouterServer
from tests.http.looks import Looks
from tests.http.wire import Client, connect, on_uvloop
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN

HALF_OPEN, SILENT, SLOW = 300, 100, 10  # connections of the attack
JSON = "Host: localhost\r\nContent-Type: application/json\r\n"
SLOW_POST = f"POST /admin/prewarm HTTP/1.1\r\n{JSON}Content-Length: 100000\r\n\r\n{{".encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


async def asked(url: str, raw: bytes) -> Client:
    """A client that has written this."""
    client = await connect(url)
    client.ask(raw, "POST" if raw.startswith(b"POST") else "GET")
    return client


async def healthy(url: str) -> bool:
    """Whether a listener serves a client that comes now."""
    client = await asked(url, HEALTH)
    await client.until(lambda: bool(client.answers) or client.lost.is_set())
    client.transport.close()
    return [answer.status for answer in client.answers] == [200]


def port_of(app: RouterServer) -> int:
    """The admin listener's port."""
    return int(app.admin_url.rpartition(":")[2])


@pytest.mark.promise("Half-open heads and silent connections are closed within `listen.head_timeout_s`.", "clients")
@pytest.mark.parametrize("token", ["", ADMIN])
@on_uvloop
async def test_the_attack(token: str) -> None:
    """300 half-open heads, 100 connections without a byte and 10 bodies that drip are ended by the main listener's
    deadlines, with or without a token, and leave nothing behind; the main port is served all the while. With a token
    the bodies do not even begin."""
    options = {"admin__connections_max": 1_000, "admin__connections_per_client_max": 1_000, "admin__token": token}
    async with FakeEngine() as engine, running(engine, **options) as app:
        server = app.control.admin.server
        looks = Looks(server)
        heads = [await asked(app.admin_url, b"GET /metrics HTTP/1.1\r\nHos") for _ in range(HALF_OPEN)]
        silent = [await connect(app.admin_url) for _ in range(SILENT)]
        slow = [await asked(app.admin_url, SLOW_POST) for _ in range(SLOW)]
        served = 0
        while server.connections < HALF_OPEN + SILENT + (0 if token else SLOW):
            await asyncio.sleep(0)
        assert await healthy(app.admin_url)  # by then all that was written has come
        async with asyncio.timeout(120):
            while not all(client.lost.is_set() for client in (*heads, *silent, *slow)):
                for client in (*heads[::3], *slow):  # 20 bytes each
                    if not client.lost.is_set() and not client.raw and served < 20:
                        client.transport.write(b"x")
                assert await healthy(app.url)
                served += 1
                await looks.look(1.0)
        assert served
        statuses = Counter(answer.status for client in (*heads, *slow) for answer in client.answers)
        assert statuses == ({408: HALF_OPEN, 401: SLOW} if token else {408: HALF_OPEN + SLOW})
        assert not any(client.answers for client in silent)
        assert (server.closed[HEAD_TIMEOUT], server.closed[IDLE]) == (HALF_OPEN, SILENT)
        assert server.closed[BODY_TIMEOUT] == (0 if token else SLOW)
        while server.clients:
            await asyncio.sleep(0.01)  # those that were refused linger
        assert server.connections == 0
        assert await healthy(app.admin_url)


@pytest.mark.promise("The admin listener limits its own connections, in all and per address.", "admin")
@pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.1 alone is loopback there")
@on_uvloop
async def test_connections_are_limited() -> None:
    """One address may open 32 connections, all together 64; who comes then is closed at once, whoever is there stays,
    and a place that is left can be taken. None of them is the main listener's."""
    async with FakeEngine() as engine, running(engine) as app:
        server, loop = app.control.admin.server, asyncio.get_running_loop()

        async def come(address: str, count: int) -> list[Client]:
            clients = list[Client]()
            for _ in range(count):
                _, client = await loop.create_connection(Client, "127.0.0.1", port_of(app), local_addr=(address, 0))
                clients.append(client)
            return clients

        first = await come("127.0.0.1", 40)
        async with asyncio.timeout(60):
            while sum(client.lost.is_set() for client in first) < 8:
                await asyncio.sleep(0.001)
        assert server.connections == 32
        assert server.closed[TOO_MANY_OF_CLIENT] == 8
        second = await come("127.0.0.2", 32)
        for client in second:
            client.ask(HEALTH, "GET")
            assert (await client.answer()).status == 200
        (late,) = await come("127.0.0.3", 1)
        await late.until(late.lost.is_set)
        assert (server.connections, server.closed[TOO_MANY]) == (64, 1)
        assert await healthy(app.url)
        for client in second:
            client.transport.close()
        async with asyncio.timeout(60):
            while server.connections > 32:
                await asyncio.sleep(0.001)
        (late,) = await come("127.0.0.3", 1)
        late.ask(HEALTH, "GET")
        assert (await late.answer()).status == 200
        for client in first:
            client.transport.close()


@pytest.mark.promise(
    "The admin listener reads no body before its token, and no body longer than a page takes.", "admin"
)
@pytest.mark.parametrize("framing", ["Content-Length: 1000\r\n", CHUNKED])
@on_uvloop
async def test_the_token_is_asked_before_the_body(framing: str) -> None:
    """Who shows no token, comes from a web page, or means a page that is not there gets that answer to the head alone,
    and is not told to go on; who may send a body is."""
    expects = f"{JSON}{framing}Expect: 100-continue\r\n"
    async with running(admin__token=ADMIN, admin__replicas_allowed="http://127.0.0.0/8:1") as app:
        for lines, status in (
            ("", 401), ("Authorization: Bearer wrong\r\n", 401),
            (f"Authorization: Bearer {ADMIN}\r\nOrigin: http://evil\r\n", 403),
            (f"Authorization: Bearer {ADMIN}\r\nSec-Fetch-Site: cross-site\r\n", 403),
        ):  # fmt: skip
            for more in (f"{JSON}{framing}", expects):
                client = await asked(app.admin_url, f"POST /admin/replicas HTTP/1.1\r\n{more}{lines}\r\n".encode())
                assert (await client.answer()).status == status, lines
                assert client.raw.count(b"HTTP/1.1") == 1
                client.transport.close()
        head = f"POST /admin/replicas HTTP/1.1\r\n{expects}Authorization: Bearer {ADMIN}\r\n\r\n"
        client = await asked(app.admin_url, head.encode())
        await client.until(lambda: client.raw.startswith(b"HTTP/1.1 100 "))
        client.transport.close()


@pytest.mark.promise(
    "The admin listener reads no body before its token, and no body longer than a page takes.", "admin"
)
@on_uvloop
async def test_long_bodies() -> None:
    """A body that is longer than its page takes is refused by its head where that says so, and otherwise when it has
    come, in the words of the page; who may not use the page is told that first."""
    async with running(admin__token=ADMIN, admin__replicas_allowed="http://127.0.0.0/8:1") as app:
        shows = f"Authorization: Bearer {ADMIN}\r\n"
        long = b"1388\r\n" + b" " * 5_000 + b"\r\n0\r\n\r\n"
        for path, lines, body, most in (
            ("replicas", "Content-Length: 4097\r\n", b"", "4096 bytes"), ("replicas", CHUNKED, long, "4096 bytes"),
            ("prewarm", f"Content-Length: {(4 << 20) + 1}\r\n", b"", "4 MiB"),
            ("prewarm", "Content-Length: 99999999999\r\n", b"", "4 MiB"),
        ):  # fmt: skip
            for shown, status in ((shows, 413), ("", 401)):
                raw = f"POST /admin/{path} HTTP/1.1\r\n{JSON}{lines}{shown}\r\n".encode() + body
                client = await asked(app.admin_url, raw)
                answer = await client.answer()
                assert (answer.status, most.encode() in answer.body) == (status, status == 413), (path, lines)
                client.transport.close()


# -- browsers ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("The admin listener does no work for other sites.", "admin")
@pytest.mark.parametrize("token", ["", ADMIN])
async def test_other_sites_have_no_work_done(client: ClientSession, engine: FakeEngine, token: str) -> None:
    """What a page of another site asks for, as a script or image would be, is refused before any work, but for what is
    anybody's; what the user asks for, or our own page, is served."""
    shows = {"Authorization": f"Bearer {token}"} if token else {}
    async with running(engine, admin__token=token) as app:
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200), (None, 200)):
            headers = shows | ({"Sec-Fetch-Site": site} if site is not None else {})
            for path in ("/admin/decisions", "/admin/observatory", "/metrics", "/"):
                async with client.get(app.admin_url + path, headers=headers) as response:
                    assert response.status == status, (site, path)
            for path in ("/healthz", "/runbook", "/dashboard", "/dashboard/app.js"):
                async with client.get(app.admin_url + path, headers=headers) as response:
                    assert response.status == 200, (site, path)


@pytest.mark.promise("No web page can use the admin listener or read from it.", "admin")
async def test_no_other_site_reads_anything(client: ClientSession, engine: FakeEngine) -> None:
    """Every answer, errors and data included, is what it says and for pages of this listener only."""
    async with running(engine) as app:
        asked_for = [(route.method, route.path) for route in app.control.admin.table.routes]
        for method, path in [*asked_for, ("GET", "/nowhere"), ("PUT", "/admin/replicas"), ("GET", "/admin/index?x=1")]:
            async with client.request(method, app.admin_url + path, allow_redirects=False) as response:
                assert response.headers["X-Content-Type-Options"] == "nosniff", path
                assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin", path
                assert response.status < 500


async def test_addresses_that_hide_a_slash(client: ClientSession, engine: FakeEngine) -> None:
    """A path with an encoded slash is none: a proxy that closes `/admin/` would let it through."""
    async with running(engine) as app:
        port = port_of(app)
        for target, status in ((b"/admin%2Findex", 404), (b"/admin%2findex", 404), (b"/%61dmin/index", 200)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target)
            assert (await reader.read()).startswith(b"HTTP/1.1 %d" % status), target
            writer.close()


async def test_a_page_that_fails(
    client: ClientSession, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of one page is a 500 in the form of all errors and a line in the log, and the connection goes on."""
    async with running(engine) as app:
        monkeypatch.setattr(app.control.warmer, "state", None)
        for _ in range(2):
            async with client.get(app.admin_url + "/admin/prewarm") as response:
                assert response.status == 500
                assert (await response.json())["error"]["code"] == "internal_error"
        assert [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "bug"]
        async with client.get(app.admin_url + "/admin/index") as response:
            assert response.status == 200
