"""A scriptable engine: a real aiohttp server on port 0 that speaks as much of each dialect as the router needs.

Replies are played from `script` (one per generation request, then the default again), so a test says exactly what
goes wrong, and when.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from loadtest.common import answers
from loadtest.common.answers import DONE, data_event, named_event
from router.cli.config_loader import load
from router.config.runtime import resolve
from router.config.schema import Settings
from router.router_server import RouterServer

Answer = TypeVar("Answer")
Reply = Callable[["FakeEngine", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


async def listening(
    app: web.Application, port: int = 0, *, handler_cancellation: bool = False
) -> tuple[web.AppRunner, int]:
    """The application on loopback, and its port; whoever asked cleans the runner up."""
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, runner.addresses[0][1]


@dataclass
class FakeEngine:
    """`async with FakeEngine() as engine`."""

    models: tuple[str, ...] = ("m",)
    owned_by: str = "fake"  # the kind of engine
    script: deque[Reply] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    healthy: bool = True
    health_after_s: float = 0.0  # time that a health check takes
    metrics: str | None = None
    api_key: str | None = None  # /v1/... needs it, as under vLLM's --api-key
    kv_event_sources: dict[str, Any] | None = None  # vLLM's page; there is none unless given
    server_info: dict[str, Any] | None = None  # SGLang's
    version: dict[str, Any] | None = None  # vLLM's page of its version
    sleeping: dict[str, Any] | None = None  # vLLM's page of its sleep state, with VLLM_SERVER_DEV_MODE only
    probes: Counter[str] = field(default_factory=Counter)  # requests of each page
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # a client left while we were at work
    at_work: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)  # what `held` replies wait for
    allow_origin: str | None = None  # its answer to preflights: "*" as vLLM's, "" names the page that asks, as SGLang's
    preflights: list[Seen] = field(default_factory=list)
    mute: bool = False  # preflights wait for `go_on`
    port: int = 0
    rows: list[dict[str, Any]] | None = None  # of its page of models, in place of what `models` makes

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/version", self._version)
        app.router.add_get("/is_sleeping", self._sleeping)
        app.router.add_options("/{path:.*}", self._preflight)
        app.router.add_route("*", "/{path:.*}", self._generate)
        self._runner, self.port = await listening(app, self.port, handler_cancellation=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the listener and all connections: what a kill -9 looks like from outside."""
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, _: web.Request) -> web.Response:
        self.probes["health"] += 1
        await asyncio.sleep(self.health_after_s)
        return web.Response(status=200 if self.healthy else 503)

    async def _preflight(self, request: web.Request) -> web.Response:
        self.preflights.append(Seen(request.method, request.raw_path, CIMultiDict(request.headers), b""))
        if self.mute:
            await self.go_on.wait()
        if self.allow_origin is None:
            return web.Response(status=405)
        more = {} if self.allow_origin else {"Access-Control-Allow-Credentials": "true", "Vary": "Origin"}
        allowed = self.allow_origin or request.headers["Origin"]
        headers = {"Access-Control-Allow-Origin": allowed, "Access-Control-Max-Age": "600", **more}
        return web.Response(text="OK", headers=headers)

    async def _sources(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.kv_event_sources is None else web.json_response(self.kv_event_sources)

    async def _info(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.server_info is None else web.json_response(self.server_info)

    async def _version(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.version is None else web.json_response(self.version)

    async def _sleeping(self, _: web.Request) -> web.Response:
        self.probes["is_sleeping"] += 1
        return web.Response(status=404) if self.sleeping is None else web.json_response(self.sleeping)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.probes["metrics"] += 1
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)

    async def _models(self, request: web.Request) -> web.Response:
        self.probes["models"] += 1
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.Response(status=401)
        if self.rows is not None:
            return web.json_response({"object": "list", "data": self.rows})
        return web.json_response(answers.models(*self.models, owned_by=self.owned_by))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.method, request.raw_path, CIMultiDict(request.headers), body))
        reply = self.script.popleft() if self.script else ok
        try:
            return await reply(self, request)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise


def events(words: int = 3, *, usage: dict[str, Any] | None = None) -> list[bytes]:
    """A chat stream, event by event."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": f"w{i} "}}]} for i in range(words)]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    return [*map(data_event, chunks), DONE]


USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}


MESSAGE_USAGE = {"input_tokens": 68, "cache_read_input_tokens": 32, "output_tokens": 3}
MESSAGE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "w0 w1 "}],
    "stop_reason": "end_turn",
    "usage": MESSAGE_USAGE,
}
RESPONSE: dict[str, Any] = {
    "id": "x",  # not one to be remembered
    "created_at": 1,
    "object": "response",
    "status": "completed",
    "model": "m",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "w0 w1 ", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 103,
    },
}


def message_events() -> list[bytes]:
    """A Messages stream as vLLM 0.32 sends it; usage is whole only at the end."""
    start = {**MESSAGE, "content": [], "stop_reason": None, "usage": {"input_tokens": 100, "output_tokens": 0}}
    deltas = [{"type": "text_delta", "text": f"w{i} "} for i in range(2)]
    return [
        named_event("message_start", message=start),
        named_event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(named_event("content_block_delta", index=0, delta=delta) for delta in deltas),
        named_event("content_block_stop", index=0),
        named_event("message_delta", delta={"stop_reason": "end_turn"}, usage=MESSAGE_USAGE),
        named_event("message_stop"),
    ]


def response_events() -> list[bytes]:
    """A Responses stream; the first two events come before prefill."""
    begun = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}
    item = {**RESPONSE["output"][0], "content": [], "status": "in_progress"}
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    parts = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.content_part.added", {**where, "part": part}),
        *(("response.output_text.delta", {**where, "delta": f"w{i} ", "logprobs": []}) for i in range(2)),
        ("response.completed", {"response": RESPONSE}),
    ]
    return [named_event(kind, sequence_number=n, **fields) for n, (kind, fields) in enumerate(parts)]


META = {"id": "x", "finish_reason": None, "prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": 32}
GENERATED: dict[str, Any] = {
    "text": "w0 w1 w2",
    "output_ids": [7, 8, 9],
    "meta_info": {**META, "finish_reason": {"type": "stop", "matched": 2}},
}


def generate_events() -> list[bytes]:
    """A stream of `/generate` as SGLang 0.5.23 sends it: every event has the text from its beginning, and usage."""
    pieces = [{"text": text, "output_ids": [7], "meta_info": META} for text in ("w0", "w0 w1")]
    return [*map(data_event, (*pieces, GENERATED)), DONE]


async def ok(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A healthy answer, streaming if asked to."""
    body = engine.seen[-1].json if engine.seen[-1].body[:1] == b"{" else {}
    if request.path in ("/v1/messages", "/v1/responses"):
        whole, pieces = (MESSAGE, message_events()) if request.path == "/v1/messages" else (RESPONSE, response_events())
        return await stream(request, pieces) if body.get("stream") else web.json_response(whole)
    if request.path == "/generate":
        streams = body.get("stream")
        return await stream(request, generate_events()) if streams else web.json_response(GENERATED)
    if not body.get("stream"):
        answer = {
            "id": "x",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}],
            "usage": USAGE,
        }
        return web.json_response(answer)
    asked = (body.get("stream_options") or {}).get("include_usage")
    return await stream(request, events(usage=USAGE if asked else None))


async def stream(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    """Send these pieces as an event stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def status(code: int, body: str = "{}", headers: dict[str, str] | None = None) -> Reply:
    """An error answer."""

    async def reply(_: FakeEngine, __: web.Request) -> web.Response:
        return web.Response(status=code, text=body, content_type="application/json", headers=headers)

    return reply


async def reset(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Close the connection instead of an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def headers_then_reset(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Headers, as engines send them before prefill, and then nothing but a closed connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    assert request.transport is not None
    request.transport.close()
    return response


async def empty_stream(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A stream that ends cleanly before its first event."""
    return await stream(request, [])


async def error_event(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """What vLLM 0.32 sends when its core dies: an error as first event, and [DONE]."""
    return await stream(request, [b'data: {"error": {"message": "dead", "code": 500}}\n\n', DONE])


async def breaks_midway(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Two events, then the connection is gone."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in events()[:2]:
        await response.write(piece)
    assert request.transport is not None
    request.transport.close()
    return response


async def silent(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Headers, then silence until `go_on`; then a healthy stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    engine.at_work.set()
    await engine.go_on.wait()
    for piece in events():
        await response.write(piece)
    return response


async def mute(engine: FakeEngine, _: web.Request) -> web.StreamResponse:
    """Not even headers until `go_on`."""
    engine.at_work.set()
    await engine.go_on.wait()
    return web.json_response({"choices": [], "usage": USAGE})


async def half_then_waits(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Two events, then waits for `go_on`, then the rest."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    pieces = events()
    for piece in pieces[:2]:
        await response.write(piece)
    engine.at_work.set()
    await engine.go_on.wait()
    for piece in pieces[2:]:
        await response.write(piece)
    return response


def settings(*engines: FakeEngine | str, **overrides: Any) -> Settings:
    """Settings for tests: free ports, no waiting for the next probe round, and no limit of a few seconds, which a
    machine that stands still for a while would reach."""
    urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
    base = {"listen.port": 0, "listen.admin_port": 0, "listen.drain_s": 2.0, "probe.interval_s": 3600.0}
    base |= {f"upstream.{name}": 60.0 for name in ("connect_timeout_s", "keepalive_s")}
    base |= {"probe.timeout_s": 60.0, "upstream.stall_timeout_s": 300.0}
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(overrides={"replicas": urls, **base, **dotted})


@asynccontextmanager
async def running(*engines: FakeEngine | str, **overrides: Any) -> AsyncIterator[RouterServer]:
    """A router in front of these engines, every replica probed once."""
    async with RouterServer(resolve(settings(*engines, **overrides))) as app:
        await app.control.probe_now()
        yield app


async def outwaited(app: RouterServer, asked: asyncio.Future[Answer], *engines: FakeEngine | str) -> Answer:
    """What comes of a request whose time at these replicas is over: as if they had been silent for longer than any
    limit, for which no test waits."""
    urls = {engine if isinstance(engine, str) else engine.url for engine in engines}
    long_ago_s = asyncio.get_running_loop().time() - 1_000.0
    while not asked.done():
        for answer in app.http.upstream._answers:
            if answer.replica in urls:
                answer.silent_since(long_ago_s)  # what has come by now is seen
                answer.since_s = long_ago_s
        await asyncio.sleep(0.01)
    return await asked


def idle(app: RouterServer) -> bool:
    """Nothing is left open, anywhere."""
    members = app.router.fleet.members.values()
    empty = all(not m.leases and m.work.kv.blocks == m.work.kv.own_tokens == 0 for m in members)
    return empty and app.http.proxy.in_flight == 0
