"""Replicas that lie, clients that leave at bad moments, and shutting down."""

import asyncio
import os
import signal
import sys

import pytest
from aiohttp import ClientSession, web

from router.cli.config_loader import load
from router.config.schema import SettingsError
from tests.support.fakes import FakeEngine, Reply, events, half_then_waits, idle, running, status

CHAT = "/v1/chat/completions"


def body(text: str = "x", *, stream: bool = True, model: str = "m") -> dict[str, object]:
    """A chat request."""
    return {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}


async def test_a_replica_that_fails_fast_is_no_black_hole(
    client: ClientSession, engine: FakeEngine, other: FakeEngine
) -> None:
    """A replica that looks healthy and idle but fails all it is sent rests after three failures."""
    engine.script.extend([status(500, '{"error": "CUDA"}')] * 100)
    async with running(engine, other) as app:
        codes = []
        for n in range(60):
            async with client.post(app.url + CHAT, json=body(f"{n} " * 400)) as response:
                codes.append(response.status)
        assert codes.count(500) == len(engine.seen) <= 4
        assert len(app.router.fleet.ready()) == 2


async def test_what_the_only_engine_says_is_passed_on(client: ClientSession, engine: FakeEngine) -> None:
    """With nobody else to try, an engine's own 503 reaches the client, body, headers and all."""
    engine.script.append(status(503, '{"error": "queue full"}', {"X-Queue": "7"}))
    async with running(engine) as app, client.post(app.url + CHAT, json=body()) as response:
        assert (response.status, response.headers["X-Queue"]) == (503, "7")
        assert await response.text() == '{"error": "queue full"}'
    assert idle(app)


def _split_error() -> Reply:
    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"error": {"message"')
        await asyncio.sleep(0.05)  # two reads on the wire
        await response.write(b': "dead", "code": 500}}\n\n')
        return response

    return reply


async def test_an_error_event_in_two_pieces(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A first event that is an error is read whole before it counts as an answer, and is retried."""
    async with running(engine, other) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            first = engine if response.headers["x-warmroute-replica"] == engine.url else other
        first.script.append(_split_error())
        async with client.post(app.url + CHAT, json=body()) as response:
            assert await response.read() == b"".join(events())
            assert response.headers["x-warmroute-reason"] == "retry"


async def test_whole_url_as_target(engine: FakeEngine) -> None:
    """A client that takes the router for a forward proxy is served (RFC 9112 section 3.2.2)."""
    async with running(engine) as app:
        host, port = app.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = b'{"model":"m"}'
        head = f"POST http://elsewhere{CHAT}?q=1 HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: {len(request)}\r\n\r\n"
        writer.write(head.encode() + request)
        assert b"200" in await reader.readline()
        writer.close()
        assert engine.seen[0].path == CHAT + "?q=1"


async def test_a_model_whose_replica_is_down(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A model that is served, but by nobody who is up, is 503 and not 404: it will be back."""
    other.models = ("n",)
    async with running(engine, other) as app:
        other.healthy = False
        for _ in range(2):
            await app.control.probe_now()
        async with client.post(app.url + CHAT, json=body(model="n")) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers


async def test_strange_models_page(client: ClientSession, engine: FakeEngine) -> None:
    """Of a models page only the ids must be readable; an unreadable page is a failed probe, and the next one comes."""
    pages = [
        b'{"data":[{"id":"m","created":null,"owned_by":5,"max_model_len":"x"}]}',
        b'{"data":[{"id":"\xff"}]}',
        b"[",
    ]

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=pages[0], content_type="application/json")

    engine._models = page  # type: ignore[method-assign]
    async with FakeEngine() as strange:
        strange._models = page  # type: ignore[method-assign]
        await strange.stop()
        await strange.__aenter__()
        async with running(strange) as app:
            assert app.router.fleet.ready()
            for _ in range(2):
                pages.pop(0)
                await app.control.probe_now()
            assert not app.router.fleet.ready()


async def test_a_late_metrics_page_forgets_nothing(engine: FakeEngine) -> None:
    """When `/metrics` fails once, what was known of the replica's load and capacity stays."""
    engine.metrics = 'vllm:num_requests_waiting 5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    async with running(engine) as app:
        known = app.router.fleet.members[engine.url].load
        assert known.kv_tokens_max == 1600

        async def broken(_: web.Request) -> web.Response:
            return web.Response(status=500)

        engine._metrics = broken  # type: ignore[method-assign]
        await app.control.probe_now()
        assert app.router.fleet.members[engine.url].load == known


async def test_drain_ends_in_time(client: ClientSession, engine: FakeEngine) -> None:
    """A drain takes no longer than `listen.drain_s`, however long an answer takes."""
    engine.script.append(half_then_waits)
    loop = asyncio.get_running_loop()
    async with running(engine, listen__drain_s=0.3) as app:
        response = await client.post(app.url + CHAT, json=body())
        await engine.at_work.wait()
        began_s = loop.time()
    assert loop.time() - began_s < 30  # aiohttp's own would take a minute
    response.close()


@pytest.mark.parametrize(("signals", "status_"), [(1, 0), (2, 130)])
async def test_signals(client: ClientSession, engine: FakeEngine, signals: int, status_: int) -> None:
    """SIGTERM closes the listener, lets the answer finish and exits 0; a second one ends the drain."""
    engine.script.append(half_then_waits)
    command = ["-m", "router", "serve", "--replica", engine.url, "--port", "0", "--admin-port", "0"]
    command += ["--set", "listen.lame_duck_s=0"]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
    router = await asyncio.create_subprocess_exec(sys.executable, *command, **pipes)  # type: ignore[arg-type]
    try:
        assert router.stdout is not None
        url = (await router.stdout.readline()).split()[1].decode()
        while (await client.get(url + "/readyz")).status != 200:
            await asyncio.sleep(0.05)  # another process
        response = await client.post(url + CHAT, json=body())
        await engine.at_work.wait()
        router.send_signal(signal.SIGTERM)
        while not await _refused(url):
            await asyncio.sleep(0.05)  # another process
        if signals == 2:
            router.send_signal(signal.SIGTERM)
        else:
            engine.go_on.set()
            assert await response.read() == b"".join(events())
        assert await router.wait() == status_
        response.close()
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()


async def _refused(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    writer.close()
    return False


def test_service_links_are_nobodys_typo() -> None:
    """What Kubernetes sets for a Service named warmroute does not stop the router; a typo still does."""
    links = {"WARMROUTE_SERVICE_HOST": "10.0.0.1", "WARMROUTE_PORT": "tcp://10.0.0.1:80"}
    links |= {f"WARMROUTE_PORT_80_TCP{part}": "x" for part in ("", "_PROTO", "_PORT", "_ADDR")}
    assert load(env={**links, "WARMROUTE_SERVICE_PORT": "80", "PATH": os.environ["PATH"]})
    with pytest.raises(SettingsError, match="WARMROUTE_PROT"):
        load(env={"WARMROUTE_PROT": "1"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("replicas", ["http://user:secret@h"]),
        ("replicas", ["http://h", "http://H:80"]),
        ("replicas", [" http://h"]),
        ("replicas", ["http://a b"]),
        ("replicas", ["http://h?"]),
        ("listen.host", ""),
        ("api.passthrough", ["/x{"]),
        ("api.passthrough", ["/x", "/x"]),
    ],
)
def test_what_cannot_run_is_refused(key: str, value: object) -> None:
    """Settings that would fail at start, or show a password to clients, are refused with a reason."""
    with pytest.raises(SettingsError, match=key):
        load(overrides={key: value})
