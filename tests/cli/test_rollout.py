"""What a rollout does to the command: SIGTERM behind a load balancer, SIGHUP, and kill -9 of one router of three.

Full size: WARMROUTE_CONNECTS=10000 connects during a lame duck, WARMROUTE_KILL_REQUESTS=4500 after a kill (30 s of
150 a second).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.config.reload import REFUSED
from tests.http.wire import spliced
from tests.support.command import CHAT, Command, body, command, json_of, metric, rest_of, streams
from tests.support.examples import examples
from tests.support.fakes import FakeEngine, half_then_waits, ok
from tests.support.waiting import until

CONNECTS = examples(int(os.environ.get("WARMROUTE_CONNECTS", "300")))
KILL_REQUESTS = examples(int(os.environ.get("WARMROUTE_KILL_REQUESTS", "150")))
AT_ONCE = 50
RESET_MAX = 2
RATE_PER_S = 150


async def asked(url: str) -> str:
    """What becomes of one request on a connection of its own: `ok`, `refused`, or how it failed."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body()).encode()
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it closed while we connected
        return "refused"
    except OSError as error:
        return f"not connected: {error}"
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        writer.write(head + content)
        fields = (await reader.readuntil(b"\r\n\r\n")).lower()
    except ConnectionResetError:
        return "reset"
    except (OSError, EOFError) as error:
        return f"connected, and then: {error!r}"
    finally:
        writer.close()
    if not fields.startswith(b"http/1.1 200"):
        return f"connected, and then: {fields!r}"
    return "ok" if b"connection: close\r\n" in fields else "ok, but the connection is kept"


async def status_of(url: str) -> int:
    """Of a page, on a connection of its own; 0 where there is none."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status
    except aiohttp.ClientError:
        return 0


async def test_sigterm_behind_a_load_balancer(engine: FakeEngine) -> None:
    """Not ready at once on both listeners; until the lame duck is over nobody is refused, whoever connects is answered
    and told to come back elsewhere; then the listener closes, the stream ends well, and so does the command."""
    engine.script.append(half_then_waits)
    async with command(engine, listen__lame_duck_s="1") as router, streams(router.url, 1) as (stream,):
        began_s = time.monotonic()
        router.process.send_signal(signal.SIGTERM)
        while 200 in [await status_of(url + "/readyz") for url in (router.url, router.admin_url)]:
            await asyncio.sleep(0.005)
        unready_s = time.monotonic() - began_s
        seen = Counter[str]()
        seconds = list[float]()

        async def connects() -> None:
            while "refused" not in seen:
                seen[await asked(router.url)] += 1
                seconds.append(time.monotonic() - began_s)

        await asyncio.gather(*(connects() for _ in range(AT_ONCE)))
        # Between the last accept and the close one more may enter the kernel's queue; it is reset with that.
        assert seen.pop("reset", 0) <= RESET_MAX
        assert set(seen) - {"ok"} == {"refused"}, seen  # that many are answered is said of a lame duck without an end
        assert await metric(router, "warmroute_in_flight_requests") == 1
        engine.go_on.set()
        assert await rest_of(stream)
        ended_s = time.monotonic()
        assert await router.process.wait() == 0
        print(
            f"\nnot ready after {unready_s * 1e3:.0f} ms, {seen['ok']} connects answered, the first "
            f"refused after {min(seconds[-AT_ONCE:]):.2f} s, ended {time.monotonic() - ended_s:.2f} s after the stream"
        )
        assert min(seconds[-AT_ONCE:]) > 0.9  # the lame duck's second


@pytest.mark.long
async def test_none_of_many_connects_is_refused(engine: FakeEngine) -> None:
    """So many connects while the command gets SIGTERM: none is refused, each is
    answered, before the lame duck is over; it lasts as long as it takes to make them."""
    async with command(engine, listen__lame_duck_s="600") as router:
        seen, left = Counter[str](), iter(range(CONNECTS))

        async def connects() -> None:
            for number in left:
                if number == CONNECTS // 3:
                    router.process.send_signal(signal.SIGTERM)
                seen[(await asked(router.url)).removesuffix(", but the connection is kept")] += 1

        await asyncio.gather(*(connects() for _ in range(AT_ONCE)))
        print(f"\n{dict(seen)}")
        assert seen == {"ok": CONNECTS}
        assert await status_of(router.url + "/readyz") == 503


@pytest.mark.long
async def test_sigint_is_no_lame_duck(engine: FakeEngine) -> None:
    """Ctrl-C drains at once; and a second signal during a lame duck ends it."""
    async with command(engine, listen__lame_duck_s="600") as router:
        router.process.send_signal(signal.SIGINT)
        assert await router.process.wait() == 0
    async with command(engine, listen__lame_duck_s="600") as router:
        router.process.send_signal(signal.SIGTERM)
        while await status_of(router.url + "/readyz") == 200:
            await asyncio.sleep(0.005)
        router.process.send_signal(signal.SIGTERM)
        assert await router.process.wait() == 130


def write(file: Path, *engines: FakeEngine, **settings: Any) -> None:
    """A settings file."""
    file.write_text(json.dumps({"replicas": [engine.url for engine in engines], **settings}))


async def replicas_are(router: Command, *engines: FakeEngine) -> None:
    """Wait until these are there and ready."""
    wanted = {engine.url: True for engine in engines}
    while True:
        rows = (await json_of(router.admin_url + "/admin/replicas"))["replicas"]
        if {row["id"]: row["ready"] for row in rows} == wanted:
            return
        await asyncio.sleep(0.02)


@pytest.mark.long
async def test_sighup(engine: FakeEngine, other: FakeEngine, tmp_path: Path) -> None:
    """The command takes over what changed; a bad file is kept out."""
    file = tmp_path / "settings.yaml"
    write(file, engine)
    engine.script.append(half_then_waits)
    async with command(config=file) as router, streams(router.url, 1) as (stream,):
        write(file, other, api={"receipts": False}, listen={"keepalive_s": 30})
        router.process.send_signal(signal.SIGHUP)
        await replicas_are(router, other)
        await until(lambda: router.said("configuration reloaded") == 1)
        await receipts_are(router, None)
        file.write_text("replicas: [nonsense]\nlog: {level: loud}\n")
        router.process.send_signal(signal.SIGHUP)
        await until(lambda: router.said(REFUSED) == 2)
        await receipts_are(router, None)
        engine.go_on.set()
        assert await rest_of(stream)
        assert await metric(router, "warmroute_reloads_total") == 2
        write(file, engine, other, routing={"policy": "round_robin"})
        router.process.send_signal(signal.SIGHUP)
        await replicas_are(router, engine, other)
        await receipts_are(router, engine.url, other.url)
        assert router.said("changed settings need a restart") == 1
        (kept,) = (line for line in router.lines if line["message"] == "changed settings need a restart")
        assert kept["settings"] == ["routing.policy"]


async def receipts_are(router: Command, *wanted: str | None) -> None:
    """Wait until so many answers in a row have a receipt of one of these replicas."""
    in_a_row = 0
    while in_a_row < 12:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            async with session.post(router.url + CHAT, json=body()) as response:
                assert response.status == 200
                good = response.headers.get("x-warmroute-replica") in wanted
                in_a_row = in_a_row + 1 if good else 0


class Balancer:
    """A plain TCP load balancer: round robin, and the next one where a connect fails."""

    def __init__(self, urls: list[str]) -> None:
        self._ports = [int(url.rpartition(":")[2]) for url in urls]
        self._turn = 0
        self.url = ""
        self._pipes = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Balancer]:
        """Until the block ends."""
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for pipe in self._pipes:
                pipe.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn = turn = (self._turn + 1) % len(self._ports)  # others come while this one connects
        for port in self._ports[turn:] + self._ports[:turn]:
            if await spliced(reader, writer, port, self._pipes):
                return
        writer.close()


async def slow_ok(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Some are always in flight."""
    await asyncio.sleep(0.05)
    return await ok(engine, request)


@pytest.mark.long
async def test_one_router_of_three_is_killed(engine: FakeEngine, other: FakeEngine) -> None:
    """kill -9 of one of three routers behind a plain load balancer, at 150 requests a second: whatever was begun after
    the kill is answered; before it, only what was in flight on the victim fails."""
    for each in (engine, other):
        each.script.extend([slow_ok] * (KILL_REQUESTS + RATE_PER_S))
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(command(engine, other)) for _ in range(3)]
        balancer = await stack.enter_async_context(Balancer([router.url for router in routers]).serving())
        before, after = Counter[str](), Counter[str]()
        killed = False

        async def ask() -> None:
            begun = after if killed else before
            said = await asked(balancer.url)
            begun["ok" if said.startswith("ok") else said] += 1

        asking = list[asyncio.Task[None]]()
        loop, in_flight = asyncio.get_running_loop(), 0
        began_s = loop.time()
        for number in range(KILL_REQUESTS + RATE_PER_S):
            if number == RATE_PER_S:
                in_flight = sum(not task.done() for task in asking)
                routers[0].process.kill()
                await routers[0].process.wait()
                killed = True
            asking.append(asyncio.create_task(ask()))
            await asyncio.sleep(max(0.0, began_s + number / RATE_PER_S - loop.time()))
        await asyncio.gather(*asking)
        print(f"\nbefore the kill {dict(before)}, {in_flight} in flight; after it {dict(after)}")
        assert after == {"ok": KILL_REQUESTS}
        assert before["ok"] >= RATE_PER_S - in_flight
        assert in_flight
