"""Streams in one leg whose first events come of no work: two of the Responses API, `message_start`. Clients get them at
once, and they are no beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession, web

from loadtest.common.answers import named_event
from router.config.runtime import resolve
from router.control.control_plane import ControlPlane
from router.control.local_placement import LocalPlacementService
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import ExternalKv, Pull
from router.proxy.http_frontend import HttpFrontend
from router.router_server import FrontendGroup, RouterServer
from tests.support import fakes
from tests.support.fakes import FakeEngine, Reply, idle, message_events, response_events, running
from tests.support.splitting import frontend
from tests.support.waiting import until

SAID = {"role": "user", "content": "hi"}
# Path -> (body, events that come of no work, those that follow).
STREAMS: dict[str, tuple[dict[str, Any], list[bytes], list[bytes]]] = {
    "/v1/responses": ({"input": "hi", "store": False}, response_events()[:2], response_events()[2:]),
    "/v1/messages": (
        {"messages": [SAID], "max_tokens": 9},
        [message_events()[0], named_event("ping")],
        message_events()[1:],
    ),
}


def held(*parts: Sequence[bytes]) -> Reply:
    """Streams these parts, each behind a wait for `go_on`, which is to be set each time."""

    async def reply(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n, part in enumerate(parts):
            if n:
                engine.at_work.set()
                await engine.go_on.wait()
                engine.go_on.clear()
            await response.write(b"".join(part))
        return response

    return reply


@asynccontextmanager
async def asked(url: str, path: str) -> AsyncIterator[ClientResponse]:
    """A stream that has begun, as its client sees it."""
    body = {"model": "m", "stream": True, **STREAMS[path][0]}
    async with ClientSession() as client, client.post(url + path, json=body) as response:
        assert response.status == 200
        yield response


def later(app: RouterServer, by_s: float) -> None:
    """The watchdog looks now, and so much later, in which nothing comes."""
    now_s = asyncio.get_running_loop().time()
    app.http.upstream.look(now_s)
    app.http.upstream.look(now_s + by_s)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_prefill_may_take_its_time_behind_early_events(engine: FakeEngine, path: str) -> None:
    """A client has heard that its request arrived, and waits for its first token as long as any other may: in a chat
    nothing comes before that."""
    _, early, rest = STREAMS[path]
    async with running(engine, upstream__idle_timeout_s=120.0, upstream__first_byte_timeout_s=600.0) as app:
        engine.script.append(held(early, rest))
        async with asked(app.url, path) as response:
            assert await response.content.readexactly(len(b"".join(early))) == b"".join(early)
            later(app, 590.0)
            engine.go_on.set()
            assert await response.read() == b"".join(rest)
        assert app.control.pages.decisions[-1].ending == "ok"
        assert idle(app)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("works", [False, True])
async def test_silence_has_an_end(engine: FakeEngine, path: str, works: bool) -> None:
    """Behind early events after `upstream.first_byte_timeout_s`, and behind others after `upstream.idle_timeout_s`; the
    client is told."""
    _, early, (first, *rest) = STREAMS[path]
    said = [*early, first] if works else early
    async with running(engine, upstream__idle_timeout_s=120.0, upstream__first_byte_timeout_s=600.0) as app:
        engine.script.append(held(said, rest))
        async with asked(app.url, path) as response:
            assert await response.content.readexactly(len(b"".join(said))) == b"".join(said)
            later(app, 121.0 if works else 601.0)
            assert code(path, await response.read()) == "stream_stalled"
        async with asyncio.timeout(60):
            await engine.cancelled.wait()
        assert idle(app)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stuck_replica_ends_what_it_has_not_begun(engine: FakeEngine, path: str) -> None:
    """Another replica cannot go on behind what the client has heard: the stream ends, with an error that says so at
    once, as a chat would be tried elsewhere at once. A stream at work goes on."""
    _, early, (first, *rest) = STREAMS[path]
    async with running(engine) as app:
        engine.script.append(held([*early, first], rest))
        async with asked(app.url, path) as works:
            assert await works.content.readexactly(len(b"".join([*early, first])))
            engine.script.append(held(early, rest))
            async with asked(app.url, path) as response:
                assert await response.content.readexactly(len(b"".join(early)))
                app.http.on_replica_stalled(engine.url)
                assert code(path, await response.read()) == "stream_stalled"
                record = app.control.pages.decisions[-1]
                assert (record.ending, record.times.ttft_s, (record.error or "").partition(":")[0]) == (
                    "failed", None, "stalled",
                )  # fmt: skip
            engine.go_on.set()
            assert await works.read() == b"".join(rest)
        assert idle(app)


def code(path: str, told: bytes) -> str:
    """The code of the error event at the end of a stream."""
    (data,) = [line[6:] for line in told.splitlines() if line.startswith(b"data: ")]
    error = msgspec.json.decode(data)["error"]
    return str(error["code"])


class PullPlacer:
    """Places as the control plane does, and has each request that may pull its prompt do so from a replica that never
    sends."""

    def __init__(self, inner: LocalPlacementService) -> None:
        self._inner = inner
        self.pulls: list[bool] = []  # of each placement, whether it was to pull
        self.stalled: list[str] = []
        self.failures: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def place(self, wanted: PlacementRequest, exclude: frozenset[str]) -> Lease:
        """A lease."""
        lease = await self._inner.place(wanted, exclude)
        self.pulls.append(wanted.may_pull)
        if wanted.may_pull:
            lease.receipt.brought = ExternalKv(pull=Pull("http://source", "127.0.0.1:9", 100, 1.0, 1.0, 0.0))
        return lease

    def report_pull_timeout(self, source: str) -> None:
        """Nothing came from there."""
        self.stalled.append(source)

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """An attempt failed."""
        self.failures.append(kind)


@asynccontextmanager
async def pulling(*engines: FakeEngine) -> AsyncIterator[tuple[HttpFrontend, PullPlacer]]:
    """A frontend before these replicas, which pull all prompts."""
    settings = fakes.settings(*engines)
    group = FrontendGroup()
    async with ControlPlane(resolve(settings), group) as control:
        placer = PullPlacer(control.placer)
        async with frontend(settings, placer, control, group) as http:
            await control.probe_now()
            yield http, placer


@pytest.mark.parametrize("path", STREAMS)
async def test_a_pull_that_stalls_behind_early_events_is_made_good(
    engine: FakeEngine, other: FakeEngine, path: str
) -> None:
    """Where a prompt is pulled, early events wait for the first that comes of work: so the request can be sent again
    without the pull, its source rests, and its client hears of one answer alone."""
    _, early, rest = STREAMS[path]
    async with pulling(engine, other) as (http, placer):
        for fake in (engine, other):
            fake.script.append(held(early, rest))
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(_whole(http, path))
            first = await _at_work(engine, other)
            second = other if first is engine else engine
            second.script.clear()
            second.script.append(held([*early, *rest]))
            now_s = asyncio.get_running_loop().time()
            http.upstream.look(now_s)
            http.upstream.look(now_s + 100.0)
        assert answer.result() == b"".join([*early, *rest])
        assert (placer.pulls, placer.stalled, placer.failures) == ([True, False], ["http://source"], ["pull"])
        async with asyncio.timeout(60):
            await first.cancelled.wait()


@pytest.mark.parametrize("path", STREAMS)
async def test_a_pull_that_succeeds_keeps_every_byte(engine: FakeEngine, path: str) -> None:
    """What waited comes first, and all of it."""
    _, early, rest = STREAMS[path]
    async with pulling(engine) as (http, placer):
        engine.script.append(held(early, rest[:1], rest[1:]))
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(_whole(http, path))
            for _ in range(2):
                async with asyncio.timeout(60):
                    await engine.at_work.wait()
                engine.at_work.clear()
                engine.go_on.set()
        assert answer.result() == b"".join([*early, *rest])
        assert (placer.pulls, placer.stalled) == ([True], [])


async def _whole(http: HttpFrontend, path: str) -> bytes:
    async with asked(http.url, path) as response:
        return await response.read()


async def _at_work(*engines: FakeEngine) -> FakeEngine:
    """The first engine that has begun to answer."""
    await until(lambda: any(fake.at_work.is_set() for fake in engines))
    return next(fake for fake in engines if fake.at_work.is_set())
