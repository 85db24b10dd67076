"""What is told of requests is told without their words: in logs, metrics, admin pages and our own errors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import string
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession, web

from router.core.dialects import PATHS
from tests.support.examples import examples
from tests.support.fakes import FakeEngine, Reply, running, status, stream
from tests.support.keyring import ADMIN, SECRET, Keyring, bearer
from tests.telemetry.collector import Collector

CHAT = "/v1/chat/completions"
PROMPT, SYSTEM, COMPLETION, STRANGER = (f"CANARY{n}" for n in range(4))
SERIES_MAX = 20
REQUESTS = examples(int(os.environ.get("WARMROUTE_RANDOM_REQUESTS", "500")))


@dataclass
class Command:
    """The running command, and what it wrote."""

    url: str = ""
    admin_url: str = ""
    wrote: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def command(engine: FakeEngine, ring: Keyring, **more: str) -> AsyncIterator[Command]:
    """`warmroute serve` with all it can log; left, it has written everything."""
    given = {
        "auth.keys_file": str(ring.file),
        "auth.secret": SECRET,
        "admin.token": ADMIN,
        "log.level": "debug",
        **more,
    }
    given |= {"probe.timeout_s": "60", "upstream.connect_timeout_s": "60"}
    given |= {"listen.port": "0", "listen.admin_port": "0", "listen.lame_duck_s": "0", "probe.interval_s": "0.05"}
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    pipe, running = asyncio.subprocess.PIPE, Command()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "serve", "--replica", engine.url, *sets, stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    assert process.stderr is not None

    async def read(errors: asyncio.StreamReader) -> None:
        running.wrote += [line async for line in errors]

    reading = asyncio.create_task(read(process.stderr))
    try:
        _, running.url, _, running.admin_url = (await process.stdout.readline()).decode().split()
        yield running
        process.send_signal(signal.SIGINT)
        await process.wait()
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def bodies(path: str) -> list[bytes]:
    """Healthy and odd ones, with canaries wherever words may be."""
    parts = [{"type": "text", "text": PROMPT}]
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    prompts: dict[str, Any] = {"messages": chat, "prompt": PROMPT, "input": PROMPT, "text": PROMPT, "system": SYSTEM}
    good = {"model": "m", "max_tokens": 3, "instructions": SYSTEM, **prompts}
    odd: list[Any] = [
        good, good | {"stream": True}, good | {"model": [PROMPT]}, good | {"model": {"a": PROMPT}},
        good | {"stream": PROMPT}, good | {"messages": PROMPT}, good | {"messages": [PROMPT]},
        good | {"messages": [{"role": PROMPT, "content": parts}]}, good | {"tools": PROMPT},
        good | {"cache_salt": PROMPT}, good | {"metadata": {"user_id": PROMPT}},
        good | {"prompt_cache_key": PROMPT}, good | {"extra_key": [PROMPT]}, good | {"lora_path": [PROMPT]},
        good | {"tools": [{"type": "function", "function": {"name": PROMPT}}], "tool_choice": PROMPT},
        good | {"input": [{"type": PROMPT, "content": PROMPT}]}, good | {"previous_response_id": 7}, [good], PROMPT,
    ]  # fmt: skip
    made = [json.dumps(each).encode() for each in odd]
    whole = made[0]
    return [*made, whole[:-1], whole + whole, whole.replace(PROMPT.encode(), PROMPT.encode() + b"\xff\xfe"),
            whole.replace(PROMPT.encode(), PROMPT.encode() + b"\\ud800"), b"[" * 5_000 + whole, whole[1:],
            b"\0" + whole, b'{"messages":' + b'{"a":' * 2_000 + whole]  # fmt: skip


def replies() -> list[Reply]:
    """What engines may say of it: words of the prompt, of the answer, errors with both, and what is no HTTP."""
    said = json.dumps({"error": {"message": f"{PROMPT} {COMPLETION}", "code": 500}})

    async def raw(_: FakeEngine, request: web.Request, data: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(data)
        request.transport.close()
        return web.Response()

    def wire(data: bytes) -> Reply:
        return lambda engine, request: raw(engine, request, data)

    async def events(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [f"data: {said}\n\n".encode()])

    canary = COMPLETION.encode()
    return [
        status(500, said), status(400, said), status(503, f"{PROMPT} {COMPLETION}"), events,
        status(200, f'{{"id": "{COMPLETION}"'),
        wire(b"HTTP/1.1 200 " + canary), wire(canary * 20), wire(b"HTTP/1.1 200 OK\r\n" + canary + b"\r\n\r\n"),
        wire(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + canary + b"\r\n"),
        wire(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
             b"18\r\ndata: {\"a\": \"" + canary + b"\"}\n\n\r\nzz" + canary),
        wire(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + canary),
    ]  # fmt: skip


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """Where spans go."""
    async with Collector() as it:
        yield it


@pytest.mark.promise("Prompts, answers and keys are in no log, metric, span, admin page or error.", "records")
@pytest.mark.parametrize("format_", ["json", "text"])
async def test_nothing_is_told_of_what_was_said(
    client: ClientSession, engine: FakeEngine, collector: Collector, tmp_path: Path, format_: str
) -> None:
    """Prompts, system prompts, answers and keys of healthy, failing, odd and aborted requests are nowhere in the log
    at its most talkative, in metrics, traces, on admin pages, or in errors of the router's own."""
    ring = Keyring(tmp_path, acme={}, apart={"isolate": True, "models": ["m"]})
    engine.owned_by = "vllm"
    traced = {"tracing.endpoint": collector.url, "tracing.sample_ratio": "1"}
    secrets = [PROMPT, SYSTEM, COMPLETION, STRANGER, ADMIN, SECRET, *ring.keys.values()]
    ours: list[str] = []

    async def ask(url: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            async with client.post(url, data=body, headers=headers) as response:
                text = await response.text(errors="replace")
        except aiohttp.ClientError:
            return
        if len(engine.seen) == before:
            ours.append(text)

    async with command(engine, ring, **{"log.format": format_}, **traced) as app:
        async with asyncio.timeout(60):
            while (await client.get(f"{app.url}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        for path in PATHS:
            for body in bodies(path):
                for tenant in ring.keys:
                    before = len(engine.seen)
                    headers = ring.of(tenant) | {"x-session-id": PROMPT}
                    await ask(f"{app.url}{path}?api_key={STRANGER}", body, headers)
            for reply in replies():
                before = -1
                engine.script.append(reply)
                await ask(app.url + path, bodies(path)[len(engine.seen) % 2], ring.of("acme"))
                engine.script.clear()
            before = len(engine.seen)
            await ask(app.url + path, bodies(path)[0], bearer(f"wr-{STRANGER}"))
            await ask(app.url + path, bodies(path)[0], {**ring.of("acme"), "x-api-key": STRANGER})
            await ask(app.url + path, bodies(path)[0], ring.of("acme") | {"x-warmroute-priority": STRANGER})
            with suppress(TimeoutError, aiohttp.ClientError):
                engine.script.append(_slow)
                timeout = aiohttp.ClientTimeout(0.05)
                await client.post(app.url + path, data=bodies(path)[1], headers=ring.of("acme"), timeout=timeout)
            engine.script.clear()
        assert len(engine.seen) > 100
        await collector.until(lambda: len(collector.named("POST /v1/completions")) > 50)
        pages = []
        for page in ("/metrics", "/admin/decisions?limit=500", "/admin/replicas", "/admin/index"):
            async with client.get(app.admin_url + page, headers=bearer(ADMIN)) as response:
                assert response.status == 200
                pages.append(await response.text())
    log = b"".join(app.wrote).decode()
    spans = b"".join(collector.bodies).decode("latin-1")
    assert spans.count("POST /v1/completions") > 50
    assert log.count("/v1/completions") > 50
    assert len(ours) > 50
    for secret in secrets:
        for told in (log, spans, *pages, *ours):
            at = told.find(secret)
            assert at < 0, told[max(0, at - 300) : at + 100]


def differing(path: str, at: int) -> list[bytes]:
    """Prompts of one conversation, of which each differs from the one before it; canaries are wherever words may be."""
    rest = f"{PROMPT} is what it is about, and so it goes on. " * 30
    what = f"at 10:0{at} {PROMPT} \x1e{PROMPT}\x1f{at} \x1d{PROMPT}\x1f{at}\r\n{PROMPT} "
    call = {"id": PROMPT, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": what})}}
    function = {"name": "f", "description": what, "parameters": {"type": "object", "description": rest}}
    tool = {"type": "function", "function": function}
    if path != CHAT:
        tool = {"name": "f", "description": what, "input_schema": {"type": "object", "description": rest}}
    made = []
    for system, role, content, tools in (
        (what, "user", rest, []), (SYSTEM, "user", what, []), (SYSTEM, PROMPT, what, []), (SYSTEM, "user", rest, [tool])
    ):  # fmt: skip
        first = [{"role": "system", "content": system + rest}] if path == CHAT else []
        messages = [*first, {"role": role, "content": content + rest}, {"role": "assistant", "content": rest}]
        if path == CHAT:
            messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": rest}]
        messages.append({"role": "user", "content": rest})
        body = {"model": "m", "max_tokens": 3, "messages": messages, "prompt": what + rest, "system": system + rest}
        made.append(json.dumps(body | ({"tools": tools} if tools else {})).encode())
    return made


async def test_nothing_is_told_of_what_differed(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Where prompts differ is told with excerpts off, on every page, in logs, warnings and refusals; what they said is
    not, whatever separators their words hold."""
    ring = Keyring(tmp_path, acme={}, strict={"history_policy": "reject"})
    told: list[str] = []
    warned = {"insights.history_policy": "warn", "prewarm.templates": "4"}
    async with command(engine, ring, **warned) as app:
        async with asyncio.timeout(60):
            while (await client.get(f"{app.url}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        for path in (CHAT, "/v1/messages", "/v1/completions"):
            for tenant in ring.keys:
                for kind, _ in enumerate(differing(path, 0)):
                    for at in range(4):
                        headers = ring.of(tenant) | {"x-session-id": f"{PROMPT}{kind}{tenant}"}
                        async with client.post(app.url + path, data=differing(path, at)[kind], headers=headers) as got:
                            told.append(str(got.headers) + (await got.text() if got.status != 200 else ""))
        await asyncio.sleep(2.2)  # templates are asked for now and then
        async with client.post(app.admin_url + "/admin/prewarm", headers=bearer(ADMIN), json={"wait": True}) as got:
            told.append(await got.text())
        pages = {}
        for page in ("observatory", "templates", "advice", "decisions?limit=500", "prewarm", "replicas", "index"):
            async with client.get(f"{app.admin_url}/admin/{page}", headers=bearer(ADMIN)) as got:
                pages[page] = await got.text()
        async with client.get(app.admin_url + "/metrics", headers=bearer(ADMIN)) as got:
            pages["metrics"] = await got.text()
    told.append(b"".join(app.wrote).decode())
    assert sum("history_changed" in each for each in told) > 5
    assert pages["decisions?limit=500"].count('"change"') > 5
    assert '"text"' in pages["advice"]
    for each in (*told, *pages.values()):
        at = each.find("CANARY")
        assert at < 0, each[max(0, at - 300) : at + 100]


async def _slow(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f'data: {{"choices": [{{"delta": {{"content": "{COMPLETION}"}}}}]}}\n\n'.encode())
    await asyncio.sleep(0.5)
    return response


@pytest.mark.promise("Names from clients forge no log lines and no fields of a line.", "records")
@pytest.mark.parametrize("format_", ["json", "text"])
async def test_names_make_no_lines_of_their_own(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, format_: str
) -> None:
    """Line ends and control characters in ids, paths and names of models are escaped: each request is one line."""
    ring = Keyring(tmp_path, acme={})
    forged = 'x\r\n12:00:00.000 error   forged\n{"message": "forged"}\x1b[31m\u2028\x00'
    async with command(engine, ring, **{"log.format": format_}) as app:
        async with asyncio.timeout(60):
            while (await client.get(f"{app.url}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        async with client.post(app.url + CHAT, json={"model": forged}, headers=ring.of("acme")) as response:
            assert response.status == 404
        path = "/v1/responses/" + "".join(f"%{byte:02x}" for byte in forged.replace("/", "").encode())
        async with client.get(aiohttp.client.URL(app.url + path, encoded=True), headers=ring.of("acme")) as response:
            assert response.status == 404
    lines = [line for line in b"".join(app.wrote).split(b"\n") if line]
    begin = rb'\{"time":"' if format_ == "json" else rb"\d\d:\d\d:\d\d\.\d{3} (debug|info|warning|error)"
    assert all(re.match(begin, line) for line in lines), lines
    assert sum(b"forged" in line for line in lines) == 2
    assert not any(line.startswith(b"12:00:00.000") or b"\x1b" in line or b"\r" in line for line in lines)


@pytest.mark.inside
@pytest.mark.promise("Names of tenants cause no unbounded growth.", "tenants")
@pytest.mark.promise("Made-up models, paths and tenants create no unbounded series.", "records")
async def test_metrics_stay_few(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each route was asked for, random models, paths, methods, tenants and keys add next to no series (10,000 with
    WARMROUTE_RANDOM_REQUESTS=10000)."""
    monkeypatch.setattr("router.engines.probe.LOOK_S", 0.0)  # each unknown model has the lists of models read again
    rng = random.Random(1)
    ring = Keyring(tmp_path, acme={})

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters + string.digits + "._-/:@", k=rng.randint(1, 40)))

    async def series(app: Any) -> set[str]:
        async with client.get(app.admin_url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        rows = {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}
        return {row for row in rows if "_bucket{" not in row and not row.endswith(("_created", "_sum"))}

    for keys in (False, True):
        async with running(engine, **(ring.settings if keys else {})) as app:
            for path in (*PATHS, "/tokenize", "/v1/responses/resp_1", "/nowhere"):  # what one client makes by itself
                for headers in ({}, ring.of("acme")):
                    async with client.post(app.url + path, json={"model": "unknown"}, headers=headers) as response:
                        assert response.status < 500
            before = await series(app)
            for n in range(REQUESTS // 2):
                path = rng.choice([*PATHS, "/" + word(), "/v1/" + word(), f"/v1/responses/{word()}", "/tokenize"])
                headers = {"x-warmroute-tenant": f"t{n}", "x-request-id": f"id-{n}", "x-session-id": word()}
                headers |= ring.of("acme") if keys and n % 3 else bearer(word()) if n % 2 else {}
                body = {"model": word(), "prompt": word(), "messages": []}
                method = rng.choice(["POST", "POST", "GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"])
                url = aiohttp.client.URL(app.url + path, encoded=True)
                async with client.request(method, url, json=body, headers=headers) as response:
                    assert response.status < 500
            new = await series(app) - before
            print(f"{len(new)} new series")
            assert len(new) <= SERIES_MAX, sorted(new)
