"""Cluster of the on-call table: five simulated replicas, each behind a hop, one router, and agents at work.

The replicas are in this process, so that a trouble can change them. The router is a process on fixed ports, so that it
can be restarted. A hop is a proxy, which stands for a mesh or a load balancer. A trouble of one replica is that of the
busiest one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from loadtest.common.client import Client, open_unlimited_session
from loadtest.common.processes import HOST, free_ports, router
from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.http import BODY_BYTES_MAX
from loadtest.insights.agents import Conversation, ReleaseClock
from router.config.api_keys import entry_of, make_key

MODEL, SMALL = "large", "small"
REPLICAS = 5
AGENTS, SMALL_AGENTS = 24, 2
KV_TOKENS = 80_000  # of a replica: the conversations need all five
TIME_SCALE = 0.5  # simulated seconds a second: the requests need all five
TENANTS = ("shop", "forge")
FLOOD_TENANT, FLOOD_LANES, FLOOD_BYTES = "batch", 40, 32_768  # 8,192 tokens of the simulated engine
THINK_S = (0.5, 3.0)
ANSWER_TOKENS = 40
TIMEOUT_S = 60.0
REFUSED_S = 1.0  # pause of a client after a failed request
CHUNK_BYTES = 65_536
GENERATES = "/v1/chat/completions"
SETTINGS = ("log.requests=false",)


@dataclass(slots=True)
class Hop:
    """Reverse proxy before one replica. Its delays apply to generation only: probes and metrics pass untouched."""

    target: str
    url: str = ""
    before_s: float = 0.0
    """Delay of each request on its way to the engine."""
    gathered_s: float = 0.0
    """Time after the first byte of an answer in which the answer is gathered; it is then sent in one burst."""
    hangs: bool = False
    """If true, requests never reach the engine."""
    passed: int = 0
    """Requests to generate."""
    _session: aiohttp.ClientSession = field(init=False)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Hop]:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        async with open_unlimited_session() as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, HOST, 0).start()
                self.url = f"http://{HOST}:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        generates = request.path == GENERATES
        self.passed += generates
        body = await request.read()
        if generates and self.hangs:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.before_s if generates else 0.0)
        headers = {name: request.headers[name] for name in ("Content-Type", "X-Request-Id") if name in request.headers}
        url = self.target + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            first = await answer.content.readany()
            if generates and self.gathered_s:
                await asyncio.sleep(self.gathered_s)
            with suppress(ConnectionResetError):  # the router has left
                await response.prepare(request)
                await response.write(first)
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    await response.write(chunk)
        return response


class Cluster:
    """The running parts. `clock` is where the agents' current release states the time."""

    def __init__(
        self, engines: Engines, hops: list[Hop], small: Engines | None, ports: list[int], folder: Path, seed: int
    ) -> None:
        self.engines, self._hops, self.small = engines, hops, small
        self.url, self.admin_url = (f"http://{HOST}:{port}" for port in ports)
        self.clock = ReleaseClock.NOWHERE
        self.busiest = 0
        """Number of the replica with a trouble."""
        self.requests = self.failures = 0
        self._ports, self._seed = ports, seed
        # Without keys a router has no tenants: anybody could name any.
        self._keys = {tenant: make_key() for tenant in (*TENANTS, FLOOD_TENANT)}
        self._keys_file = folder / "keys.yaml"
        self._router = AsyncExitStack()
        self._tasks = set[asyncio.Task[None]]()

    @property
    def replicas(self) -> list[str]:
        """URLs of the replicas as the router has them."""
        return [hop.url for hop in self._hops] + (self.small.urls if self.small else [])

    @property
    def hop(self) -> Hop:
        """The hop before the busiest replica."""
        return self._hops[self.busiest]

    @property
    def subject(self) -> str:
        """Address of the busiest replica."""
        return self.hop.url.removeprefix("http://")

    def choose_busiest(self) -> None:
        """Choose the replica that got the most requests since the last call."""
        passed = [hop.passed for hop in self._hops]
        self.busiest = passed.index(max(passed))
        for hop in self._hops:
            hop.passed = 0

    async def start_router(self) -> None:
        """Start the router on its ports. Raises ProcessError."""
        port, admin_port = self._ports
        self._keys_file.write_text("".join(entry_of(key, tenant) for tenant, key in self._keys.items()))
        settings = (*SETTINGS, f"auth.keys_file={self._keys_file}")
        await self._router.enter_async_context(
            router(self.replicas, policy="warm", port=port, admin_port=admin_port, settings=settings)
        )

    async def stop_router(self) -> None:
        """Stop the router, if it runs."""
        await self._router.aclose()

    def start_agents(self, session: aiohttp.ClientSession) -> None:
        """Begin all conversations."""
        for model, count in ((MODEL, AGENTS), (SMALL, SMALL_AGENTS if self.small else 0)):
            client = Client(session, self.url, model=model, endpoint="chat", timeout_wall_s=TIMEOUT_S)
            for _ in range(count):
                self._start(self._agent(client, model, random.Random(self._seed * 1_000 + len(self._tasks))))

    def start_flood(self, session: aiohttp.ClientSession) -> None:
        """Begin to send long new prompts of one tenant, without a pause."""
        client = Client(session, self.url, model=MODEL, endpoint="chat", timeout_wall_s=TIMEOUT_S)
        for number in range(FLOOD_LANES):
            self._start(self._flood(client, random.Random(f"flood {self._seed} {number}")))

    async def stop_clients(self) -> None:
        """Stop all conversations."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, lane: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(lane))

    async def _agent(self, client: Client, model: str, rng: random.Random) -> None:
        while True:
            conversation, tenant = Conversation.start_random(rng, model, ANSWER_TOKENS), rng.choice(TENANTS)
            for _ in range(conversation.turns()):
                await asyncio.sleep(rng.uniform(*THINK_S))
                body, step = conversation.next_body(self.clock)
                await self._send(client, body, tenant, step)

    async def _flood(self, client: Client, rng: random.Random) -> None:
        while True:
            messages = [{"role": "user", "content": rng.randbytes(FLOOD_BYTES // 2).hex()}]
            body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
            await self._send(client, msgspec.json.encode(body), FLOOD_TENANT, "import")

    async def _send(self, client: Client, body: bytes, tenant: str, step: str) -> None:
        names = {"Authorization": f"Bearer {self._keys[tenant]}", "x-warmroute-step": step}
        answer = await client.send(body, time.perf_counter(), {"Content-Type": "application/json", **names})
        self.requests += 1
        if answer.failure:
            self.failures += 1
            await asyncio.sleep(REFUSED_S)


@asynccontextmanager
async def run_cluster(
    folder: Path, *, has_small: bool, seed: int
) -> AsyncIterator[tuple[Cluster, aiohttp.ClientSession]]:
    """Run all parts, with agents at work; `has_small`: the last replica alone serves a second model. Keys
    are written into `folder`. Raises ProcessError, OSError."""
    events = KvEventsSettings(port=0, replay_port=0)
    large = EngineSettings(
        replicas=REPLICAS - has_small,
        port=0,
        model=MODEL,
        kv_tokens=KV_TOKENS,
        time_scale=TIME_SCALE,
        kv_events=events,
    )
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(Engines(large))
        small = None
        if has_small:
            small = await stack.enter_async_context(Engines(replace(large, replicas=1, model=SMALL)))
        hops = [await stack.enter_async_context(Hop(url).run()) for url in engines.urls]
        session = await stack.enter_async_context(open_unlimited_session())
        cluster = Cluster(engines, hops, small, free_ports(2), folder, seed)
        stack.push_async_callback(cluster.stop_router)
        stack.push_async_callback(cluster.stop_clients)
        await cluster.start_router()
        cluster.start_agents(session)
        yield cluster, session
