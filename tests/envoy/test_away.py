"""What is closed while no picker answers, behind a real Envoy as documented: a picker that is away opens no door."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from yarl import URL

from loadtest.common.envoy import EnvoyMode
from loadtest.common.processes import free_port, free_ports
from router.extproc.service import METHOD, SERVICE
from router.ingress.gateway_rules import DESTINATION, FORGEABLE, SECRETS
from tests.envoy.envoy import MODES, chat, front, picker_process
from tests.extproc.asking import CHAT
from tests.support.fakes import FakeEngine, events, half_then_waits
from tests.support.keyring import Keyring
from tests.support.waiting import until

FORGED = dict.fromkeys(FORGEABLE, "6.6.6.6:6")
# What no client may ask of an engine. As they stand, and in spellings that an engine might read so.
CLOSED = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/flush_cache"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("GET", "/v1/chat/completions"),
    ("PUT", "/v1/chat/completions"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/chat/completions/../../sleep"),
    ("POST", "/v1/chat/completions%2f..%2f..%2f..%2fsleep"),
    ("POST", "/v1/chat/completions;/sleep"),
    ("POST", "//sleep"),
    ("POST", "/v1/chat/completionsX"),
]


async def statuses(
    client: aiohttp.ClientSession, url: str, headers: dict[str, str], paths: list[tuple[str, str]] = CLOSED
) -> set[int]:
    """What Envoy answers on these paths."""
    found = set()
    for method, path in paths:
        async with client.request(
            method, URL(url + path, encoded=True), json=chat("x"), headers=headers, allow_redirects=False
        ) as answer:
            await answer.read()
            found.add(answer.status)
    return found


@asynccontextmanager
async def with_keys(
    folder: Path, mode: EnvoyMode
) -> AsyncIterator[tuple[str, int, FakeEngine, Keyring, dict[str, Any]]]:
    """Envoy's URL, the picker's port, an engine, keys of an isolated tenant, and the settings of a picker with them."""
    async with FakeEngine(owned_by="vllm") as engine:
        ring, port = Keyring(folder, acme={"isolate": True, "models": ["m"]}), free_port()
        async with front(folder, port, [engine.port], mode) as envoy:
            yield envoy.url, port, engine, ring, ring.settings


@pytest.mark.promise(
    "With the picker away, a gateway with keys serves no request and shows an engine nothing.", "gateway"
)
@pytest.mark.finding("2026-11-28/1")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *[("cheap", how) for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, None)],
        *[(name, signal.SIGKILL) for name in ("headers", "duplex", "named")],
    ],
)
async def test_with_keys_nothing_passes(
    tmp_path: Path, client: aiohttp.ClientSession, how: signal.Signals | None, name: str
) -> None:
    """Before it starts, and while it is killed, hung or ended: without a key and with one, on paths of prompts and on
    others, with headers that llm-d's sidecar obeys and without, no request is served and nothing reaches an engine. So
    no key is shown to one, and no isolated tenant's prompt comes unsalted. While the picker is there all that holds by
    its word, and it serves."""
    mode = EnvoyMode(MODES[name].request, MODES[name].response, message_timeout="0.3s", named=MODES[name].named)
    async with with_keys(tmp_path, mode) as (url, port, engine, ring, settings):
        if how is not None:
            more = {"extproc.fallbacks_max": 0, "auth.isolate": name != "headers"}
            async with picker_process(port, engine, **settings, **more) as picker:
                if name != "headers":  # without the body the picker salts nothing, and so serves nobody here
                    async with asyncio.timeout(60):
                        while await statuses(client, url, ring.of("acme"), [("POST", CHAT)]) != {200}:
                            await asyncio.sleep(0.05)
                    assert '"cache_salt"' in engine.seen[-1].body.decode()
                    assert not set(SECRETS) & {each.lower() for each in engine.seen[-1].headers}
                engine.seen.clear()
                assert 200 not in await statuses(client, url, {}, [("POST", CHAT), *CLOSED])
                assert 200 not in await statuses(client, url, ring.of("acme"), CLOSED)
                picker.send_signal(how)
                if how is not signal.SIGSTOP:
                    await picker.wait()
                await nothing_passes(client, url, ring, engine)
        else:
            await nothing_passes(client, url, ring, engine)


async def nothing_passes(client: aiohttp.ClientSession, url: str, ring: Keyring, engine: FakeEngine) -> None:
    """Nobody is served, and no engine hears of anything."""
    paths = [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), *CLOSED[:3]]
    for headers in ({}, ring.of("acme"), FORGED, ring.of("acme") | FORGED):
        found = await statuses(client, url, headers, paths)
        assert all(status >= 400 for status in found), found
    assert [(each.method, each.path) for each in engine.seen] == []


@pytest.mark.promise(
    "A gateway that fails open sends on prompts alone, without credentials or steering headers.", "gateway"
)
@pytest.mark.finding("2026-11-28/1")
async def test_fail_open_is_bounded(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Without keys, at a gateway that fails open: prompts are served by an engine in turn, and nothing else is. No
    credential of a client reaches an engine, nor a header by which it could choose one."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        port = free_port()
        envoy = await stack.enter_async_context(front(tmp_path, port, [engine.port], EnvoyMode(fail_open=True)))
        secret = {"authorization": "Bearer mine", "x-api-key": "mine"}
        for path in (CHAT, "/v1/messages", "/tokenize", "/v1/responses", "/v1/rerank?x=1"):
            assert await statuses(client, envoy.url, FORGED | secret, [("POST", path)]) == {200}
        assert len(engine.seen) == 5
        for seen in engine.seen:
            names = {name.lower() for name in seen.headers}
            assert not names & (set(FORGEABLE) | set(SECRETS))
            assert "6.6.6.6:6" not in seen.headers.values()
        engine.seen.clear()
        assert await statuses(client, envoy.url, FORGED | secret) <= {400, 404}
        assert engine.seen == []
        async with picker_process(port, engine):  # as soon as it is back it is asked
            async with asyncio.timeout(60):
                while not (engine.seen and DESTINATION in engine.seen[-1].headers):
                    await statuses(client, envoy.url, {}, [("POST", CHAT)])
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_says_nothing(tmp_path: Path, client: aiohttp.ClientSession, fail_open: bool) -> None:
    """Streams that end well and unanswered, which Envoy takes for leave to pass: by its routes nothing passes that no
    picker has placed, but for prompts at a gateway that fails open."""

    async def silent(_: Any, context: Any) -> None:
        await context.read()

    handler = grpc.stream_stream_rpc_method_handler(silent)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with FakeEngine() as engine:
            async with front(tmp_path, port, [engine.port], EnvoyMode(fail_open=fail_open)) as envoy:
                assert all(each >= 400 for each in await statuses(client, envoy.url, FORGED))
                assert engine.seen == []
                served = await statuses(client, envoy.url, FORGED, [("POST", CHAT)])
            assert served == ({200} if fail_open else {404})
            assert len(engine.seen) == fail_open
    finally:
        await server.stop(None)


# Two pickers


@pytest.mark.promise("Two pickers that restart in turn refuse no request.", "gateway")
@pytest.mark.finding("2026-11-28/1")
async def test_pickers_restart_one_after_the_other(tmp_path: Path) -> None:
    """Two pickers before whom Envoy fails closed, each told to end and started again in turn under load: no request is
    refused, every one is placed by a picker, and a stream that was under way all the time comes whole."""
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        ring = Keyring(tmp_path, acme={})
        settings = ring.settings | {"listen.lame_duck_s": 3.5, "extproc.response_sample_ratio": 0.0}
        pickers = [await stack.enter_async_context(picker_process(port, engine, **settings)) for port in ports]
        envoy = await stack.enter_async_context(front(tmp_path, ports, [engine.port]))
        client = await stack.enter_async_context(aiohttp.ClientSession(headers=ring.of("acme")))
        async with asyncio.timeout(60):
            while await statuses(client, envoy.url, {}, [("POST", CHAT)]) != {200}:
                await asyncio.sleep(0.05)
        engine.script.append(half_then_waits)
        under_way = await client.post(envoy.url + CHAT, json=chat("x", stream=True))
        over, results = asyncio.Event(), list[tuple[int, bool]]()

        async def load() -> None:
            while not over.is_set():
                async with client.post(envoy.url + CHAT, json=chat(f"{len(results)} " * 50, stream=True)) as answer:
                    results.append((answer.status, await answer.read() == b"".join(events())))

        loaded = [asyncio.create_task(load()) for _ in range(8)]
        for n, port in enumerate(ports):
            pickers[n].send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await pickers[n].wait() == 0
            before = len(results)
            await until(lambda before=before: len(results) > before + 40)
            await stack.enter_async_context(picker_process(port, engine, **settings))
            await healthy(envoy, 2)
        over.set()
        await asyncio.gather(*loaded)
        assert set(results) == {(200, True)}
        assert len(results) > 200
        engine.go_on.set()
        assert await under_way.read() == b"".join(events())


async def healthy(envoy: Any, count: int) -> None:
    """Wait until Envoy knows so many pickers to be ready."""
    async with asyncio.timeout(60):
        while (await envoy.stats("cluster.pickers.membership_healthy"))["cluster.pickers.membership_healthy"] != count:
            await asyncio.sleep(0.05)
