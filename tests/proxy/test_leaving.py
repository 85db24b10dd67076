"""Clients that leave: their work ends at once, wherever it was, and nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.placement_api import TokenizationSpec
from router.router_server import RouterServer
from tests.http.wire import CHAT, post
from tests.proxy.test_attempts import Hole
from tests.support.examples import examples
from tests.support.fakes import FakeEngine, events, half_then_waits, idle, mute, running, silent
from tests.support.figures import figure

pytestmark = pytest.mark.promise(
    "A client that leaves ends its work at any point, and all its reservations are released.", "faults"
)

LEAVERS = examples(int(os.environ.get("WARMROUTE_DISCONNECTS", "200")))  # 10000 for the full size
AT_ONCE = 20
CLOSED_MS = 50.0  # of the slowest but one in a hundred


class Point:
    """A place in a request's life at which it is held."""

    def __init__(self, app: RouterServer, engine: FakeEngine, patch: pytest.MonkeyPatch) -> None:
        self.app, self.engine, self.patch = app, engine, patch
        self.reached = asyncio.Event()

    async def hold(self, *_: Any) -> Any:
        """In place of what would go on."""
        self.reached.set()
        await asyncio.Event().wait()

    def tokenizing(self) -> None:
        """The prompt is on its way to token ids."""
        view = TokenizationSpec("m", "vllm", self.engine.url, "", (16,))
        self.patch.setattr(self.app.control.placer, "wants_token_ids", lambda: True)
        self.patch.setattr(self.app.control.placer, "tokenization_spec", lambda _: view)
        self.patch.setattr(self.app.http.reader, "_tokens", self)
        self.tokenize_request = self.hold

    def queued(self) -> None:
        """No replica has been given to it yet."""
        self.patch.setattr(self.app.control.placer, "place", self.hold)

    def before_the_first_byte(self) -> None:
        """The engine has the request, and has said nothing."""
        self.engine.script.append(mute)
        self.reached = self.engine.at_work

    def behind_the_head(self) -> None:
        """The engine has sent its headers."""
        self.engine.script.append(silent)
        self.reached = self.engine.at_work

    def midway(self) -> None:
        """The engine has sent a part."""
        self.engine.script.append(half_then_waits)
        self.reached = self.engine.at_work


@asynccontextmanager
async def leaver(app: RouterServer, *, streams: bool) -> AsyncIterator[asyncio.StreamWriter]:
    """A client with a request under way, gone at the end."""
    host, port = app.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    said = {"model": "m", "stream": streams, "messages": [{"role": "user", "content": "hi"}]}
    writer.write(post(CHAT, json.dumps(said).encode()))
    yield writer
    writer.transport.abort()


async def nothing_left(app: RouterServer) -> None:
    """No request, no lease, no connection in use."""
    async with asyncio.timeout(60):
        while not idle(app) or app.http.upstream._answers or app.http._server.clients:
            await asyncio.sleep(0)
    await asyncio.sleep(0)  # it is counted behind the turn in which it ended
    assert b'status="499"' in app.control.metrics.page()
    assert all(member.breaker.failures == 0 for member in app.router.fleet.members.values())


POINTS: list[Callable[[Point], None]] = [
    Point.queued,
    Point.tokenizing,
    Point.before_the_first_byte,
    Point.behind_the_head,
    Point.midway,
]


@pytest.mark.inside
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("at", POINTS)
async def test_a_client_leaves(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, at: Callable[[Point], None], streams: bool
) -> None:
    """At every point of its life a request ends with its client: the engine's connection is closed, its lease is given
    back, and nobody is blamed."""
    async with running(engine) as app:
        point = Point(app, engine, monkeypatch)
        at(point)
        async with leaver(app, streams=streams):
            await asyncio.wait_for(point.reached.wait(), 60)
        if engine.seen:
            await asyncio.wait_for(engine.cancelled.wait(), 60)
        await nothing_left(app)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_leaves_while_we_connect(engine: FakeEngine, streams: bool) -> None:
    """The same while the replica takes no connection."""
    async with running(engine, upstream__connect_timeout_s=30.0) as app:
        await engine.stop()
        hole = Hole(engine.port)
        async with leaver(app, streams=streams), asyncio.timeout(60):
            while not app.http.upstream._answers:
                await asyncio.sleep(0)
        await nothing_left(app)
        hole.close()


@pytest.mark.figures
async def test_many_clients_leave() -> None:
    """Whenever they leave, streaming or not, half of them once they have arrived: each engine hears of it, and of
    nothing else."""
    rng, loop = random.Random(7), asyncio.get_running_loop()
    arrived = {str(number): asyncio.Event() for number in range(LEAVERS)}
    left_s: dict[str, float] = {}
    closed_s: dict[str, float] = {}

    async def plays(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        id_, pieces = request.headers["X-Request-Id"], rng.randint(0, 3)
        arrived[id_].set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if pieces or rng.random() < 0.5:
                await response.prepare(request)
            for piece in events()[:pieces]:
                await response.write(piece)
            await asyncio.Event().wait()
        finally:
            closed_s[id_] = loop.time()
        return response

    async def leaves(app: RouterServer, number: int) -> None:
        host, port = app.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        said = {"model": "m", "stream": rng.random() < 0.7, "messages": [{"role": "user", "content": f"{number}"}]}
        writer.write(post(CHAT, json.dumps(said).encode(), f"X-Request-Id: {number}"))
        if number % 2:
            await arrived[str(number)].wait()
        await asyncio.sleep(rng.random() * 0.02)
        left_s[str(number)] = loop.time()
        writer.transport.abort()

    async with FakeEngine() as one, FakeEngine() as two:
        async with running(one, two) as app:
            for first in range(0, LEAVERS, AT_ONCE):
                for engine in (one, two):
                    engine.script.extend([plays] * AT_ONCE)
                await asyncio.gather(*(leaves(app, n) for n in range(first, min(first + AT_ONCE, LEAVERS))))
                await nothing_left(app)
            async with asyncio.timeout(60):
                while len(closed_s) < len(one.seen) + len(two.seen):
                    await asyncio.sleep(0)
            assert len(app.router.fleet.ready()) == 2
    took_ms = sorted((closed_s[id_] - left_s[id_]) * 1e3 for id_ in closed_s)
    print(f"\n{LEAVERS} clients left, {len(took_ms)} at an engine")
    figure("a client leaves: closed at the engine, p99, ms", CLOSED_MS, took_ms[int(0.99 * len(took_ms))])
    assert len(took_ms) >= LEAVERS // 2
