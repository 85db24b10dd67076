"""The chart's own Envoy: the program takes what is rendered, and does what is promised while no picker answers."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from loadtest.common.processes import free_ports
from tests.envoy import install as envoy
from tests.extproc.asking import CHAT, chat, picking
from tests.k8s.tools import CHART, NAMESPACE, RELEASE, by_name, helm, picker, run, template
from tests.support.fakes import FakeEngine, events
from tests.support.waiting import until

STANDALONE = picker("standalone")
CLIENTS, STATUS, ADMIN = 8080, 8081, 9901
START_S = 120.0
SIX_MB = 6_000_000


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    """Without Envoy nothing here says anything: a failure, never a skip."""
    if not envoy.installed():
        pytest.fail("Envoy is not installed: python -m tests.envoy.install", pytrace=False)


def rendered(*options: str) -> str:
    """Envoy's configuration."""
    found = by_name(template("--values", STANDALONE, *options))
    return str(found["ConfigMap", NAMESPACE, f"{RELEASE}-warmroute-envoy"]["data"]["envoy.yaml"])


def refused(config: Path) -> str:
    """What Envoy has against a configuration, warnings of fields that will go included; "" for nothing."""
    done = run([envoy.program(), "--mode", "validate", "-c", config, "--disable-hot-restart", "-l", "warning"])
    return "" if done.returncode == 0 and "OK" in done.stdout and not done.stderr.strip() else done.stdout + done.stderr


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--set", "pool.failureMode=FailClose,envoy.pickerTimeout=0.5s,envoy.bindAddress=::"),
        ("--set", "pool.create=true", "--set-json", "pool.targetPorts=[8000,8001]"),
        ("--set", "config.extproc.port=19002", "--set", "config.limits.body_bytes_max=1048576"),
    ],
)
def test_envoy_takes_the_configuration(options: tuple[str, ...], tmp_path: Path) -> None:
    """Every field is known, and none is one that the next version drops."""
    file = tmp_path / "envoy.yaml"
    file.write_text(rendered(*options), encoding="utf-8")
    assert refused(file) == ""


def test_a_wrong_configuration_is_seen(tmp_path: Path) -> None:
    """A field that Envoy does not have, so that the test above says something."""
    file = tmp_path / "envoy.yaml"
    file.write_text(rendered().replace("failure_mode_allow:", "failure_mode_alow:"), encoding="utf-8")
    assert "failure_mode_alow" in refused(file)


def test_the_program_is_of_the_charts_version() -> None:
    """What is tried here is what the chart installs."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["envoy"]["image"]["tag"] == f"distroless-v{envoy.version()}"


# A running one


@dataclass
class Engine:
    """An engine that remembers the headers of its requests, and answers a stream slowly."""

    port: int = 0
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[int] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Engine]:
        """Listening."""
        app = web.Application(client_max_size=SIX_MB * 2)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(len(await request.read()))
        if request.path != "/v1/messages":
            return web.json_response({"ok": True})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await self.go_on.wait()
        await response.write(b"data: 2\n\n")
        return response


@dataclass
class RunningEnvoy:
    """An Envoy with the chart's configuration, before one engine."""

    url: str
    status: str
    admin_port: int


@asynccontextmanager
async def running(
    folder: Path, engine: Engine | FakeEngine, *options: str, picker_ports: tuple[int, int] | None = None
) -> AsyncIterator[RunningEnvoy]:
    """The rendered configuration, in which names and ports are those of this machine; nothing else is changed. Without
    `picker_ports`, of the picker and of its health checks, there is no picker."""
    clients, status, admin, nobody = free_ports(4)
    text = rendered(*options)
    asked, checked = picker_ports or (nobody, nobody)
    for old, new in ((CLIENTS, clients), (STATUS, status), (ADMIN, admin), (9002, asked), (9003, checked)):
        text = text.replace(f"port_value: {old}", f"port_value: {new}")
    text = text.replace("port_value: 8000", f"port_value: {engine.port}").replace("0.0.0.0", "127.0.0.1")
    text = re.sub(rf"{RELEASE}-warmroute-(engines|pickers)\.{NAMESPACE}\.svc", "127.0.0.1", text)
    file = folder / "envoy.yaml"
    file.write_text(text, encoding="utf-8")
    words = ("-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "error")
    process = await asyncio.create_subprocess_exec(str(envoy.program()), *words)
    made = RunningEnvoy(f"http://127.0.0.1:{clients}", f"http://127.0.0.1:{status}", admin)
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while not await _ready(session, made.status):
                assert process.returncode is None, "Envoy has ended"
                await asyncio.sleep(0.05)
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_requests_are_served_while_no_picker_answers(tmp_path: Path) -> None:
    """FailOpen: an engine in turn serves, bodies of 6 MB and streams, whose events come as they are made, too."""
    async with Engine().up() as engine, running(tmp_path, engine) as made, aiohttp.ClientSession(made.url) as session:
        for size in (10, SIX_MB):
            async with session.post("/v1/completions", data=io.BytesIO(b"x" * size)) as answer:
                assert (answer.status, await answer.json()) == (200, {"ok": True})
        assert engine.bodies == [10, SIX_MB]
        async with session.post("/v1/messages", data=b"{}") as answer:
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            engine.go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"


async def test_requests_go_where_a_picker_says(tmp_path: Path) -> None:
    """A live picker before which the chart's Envoy stands: once it is healthy every answer has its receipt, the one
    that served is told to it, forged headers reach no engine, a refusal is the picker's, and the lease is back at the
    end of each stream. Without it requests are served all the same."""
    forged = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-prefiller-host-port": "127.0.0.1:1"}
    async with FakeEngine() as engine, picking(engine) as app:
        ports = (app.extproc.port, app.extproc.health_port)
        async with running(tmp_path, engine, picker_ports=ports) as made, aiohttp.ClientSession(made.url) as session:
            body, told = chat("x", stream=True), ""
            async with asyncio.timeout(START_S):
                while not told:  # the health check of the chart's configuration passes first
                    async with session.post(CHAT, data=body) as answer:
                        assert await answer.read() == b"".join(events())
                        told = answer.headers.get("x-warmroute-replica", "")
            assert told == engine.url
            async with session.post(CHAT, data=body, headers=forged) as answer:
                assert (answer.status, answer.headers["x-warmroute-reason"]) == (200, "only")
                await answer.read()
            assert not set(forged) & set(map(str.lower, engine.seen[-1].headers)) - {"x-gateway-destination-endpoint"}
            assert "127.0.0.1:1" not in engine.seen[-1].headers.values()
            async with session.post(CHAT, data=chat().replace(b'"m"', b'"other"')) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
            await until(lambda: not any(member.leases for member in app.router.members))
            assert app.extproc._parts.served_told
            await app.extproc.__aexit__(None, None, None)
            async with session.post(CHAT, data=body) as answer:
                assert await answer.read() == b"".join(events())


def test_fail_open_with_keys_is_refused() -> None:
    """Unless the values say that it is meant."""
    options = ["--set", "apiKeys.existingSecret=keys,pool.failureMode=FailOpen"]
    done = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", STANDALONE, *options)
    assert "pool.failureMode: while no picker answers, FailOpen serves clients without a key" in done.stderr
    assert "failure_mode_allow: true" in rendered(*options, "--set", "pool.failOpenWithoutKeys=true")


@pytest.mark.promise("With keys the chart has its gateways fail closed by default.", "gateway")
@pytest.mark.finding("2026-11-28/1")
@pytest.mark.parametrize("options", ["pool.failureMode=FailClose", "apiKeys.existingSecret=keys"])
async def test_fail_close_is_an_error(tmp_path: Path, options: str) -> None:
    """FailClose, which is the default with API keys: 503, and no engine is asked."""
    async with (
        Engine().up() as engine,
        running(tmp_path, engine, "--set", options) as made,
        aiohttp.ClientSession(made.url) as session,
        session.post("/v1/completions", data=b"{}") as answer,
    ):
        assert answer.status == 503
        assert engine.heads == []


@pytest.mark.promise(
    "Clients of the chart's Envoy or example gateways choose no destination, picker or not.", "kubernetes"
)
async def test_a_forged_destination_goes_nowhere(tmp_path: Path) -> None:
    """A client that names where to connect, Envoy's own admin page say, is served by an engine, and none of its names
    reaches that; nor do those by which llm-d's sidecar could be sent elsewhere."""
    async with Engine().up() as engine, running(tmp_path, engine) as made, aiohttp.ClientSession(made.url) as session:
        forged = f"127.0.0.1:{made.admin_port}"
        headers = {
            "x-gateway-destination-endpoint": forged,
            "x-gateway-destination-endpoint-subset": forged,
            "X-Prefiller-Host-Port": forged,
            "x-encoder-hosts-ports": forged,
            "x-data-parallel-host-port": forged,
            "x-kv-cache-source-host-port": forged,
            "x-session-id": "kept",
        }
        secret = {"authorization": "Bearer mine", "x-api-key": "mine"}
        for path in ("/v1/completions", "/generate", "/rerank"):
            async with session.post(path, data=b"{}", headers=headers | secret) as answer:
                assert (answer.status, await answer.json()) == (200, {"ok": True})
        for path in ("/server_info", "/quitquitquit", "/sleep", "/v1/load_lora_adapter"):
            async with session.post(path, data=b"{}", headers=headers | secret) as answer:
                assert answer.status == 404
        assert len(engine.heads) == 3
        for head in engine.heads:
            assert forged not in head.values()
            assert not set(secret) & set(head)
            assert head["x-session-id"] == "kept"


@pytest.mark.promise(
    "The chart's Envoy reaches engines, pickers and DNS only, and exposes readiness and metrics.", "kubernetes"
)
async def test_the_status_port_shows_two_pages_alone(tmp_path: Path) -> None:
    """Readiness and metrics, to be read; nothing else of the admin interface, whose pages could end Envoy."""
    async with (
        Engine().up() as engine,
        running(tmp_path, engine) as made,
        aiohttp.ClientSession(made.status) as session,
    ):
        async with session.get("/stats/prometheus") as answer:
            assert "envoy_cluster_" in await answer.text()
        for path in ("/", "/config_dump", "/quitquitquit", "/stats", "/stats/prometheus/../../quitquitquit"):
            async with session.post(path) as answer:
                assert answer.status == 404
        async with session.post("/ready") as answer:
            assert answer.status == 404
