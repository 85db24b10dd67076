"""Lifecycle of the frontend: health, TLS, both frontends in one process, draining, misuse, and its messages."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from aiohttp import ClientSession
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.cli.config_loader import load
from router.config.runtime import resolve
from router.config.schema import SettingsError
from router.extproc import extproc_pb2 as pb
from router.extproc.service import SERVICE
from router.router_server import RouterServer
from tests.extproc.asking import CHAT, PATH, asking, chat, destinations, endpoint, picking
from tests.support.fakes import FakeEngine, events
from tests.support.waiting import until

PROTO = Path(pb.__file__).with_name("extproc.proto")


async def health(port: int, service: str) -> int:
    """What a check of this service says."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def test_health_says_whether_a_replica_is_ready(engine: FakeEngine) -> None:
    """Liveness always; readiness and the service itself while a replica is ready and the router does not end, on both
    ports. The name by which the upstream's manifests ask for both fails at the end alone: a picker that waits for its
    replicas is not to be started again."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with picking(engine) as app:
        await app.extproc._look()
        for port in (app.extproc.port, app.extproc.health_port):
            for service in ("liveness", "readiness", "inference-extension", SERVICE, ""):
                assert await health(port, service) == serving
        engine.healthy = False
        await until(lambda: not app.router.fleet.ready())
        await app.extproc._look()
        for port in (app.extproc.port, app.extproc.health_port):
            assert await health(port, "liveness") == await health(port, "inference-extension") == serving
            for service in ("readiness", SERVICE, ""):
                assert await health(port, service) == not_serving
        engine.healthy = True
        await until(app.router.fleet.ready)
        app.lame_duck()
        await app.extproc._look()
        for service in ("readiness", "inference-extension"):
            assert await health(app.extproc.health_port, service) == not_serving
        async with asking(app) as it:  # who asks all the same is served
            assert destinations(await it.pick()) == [endpoint(engine)]
            await it.finish()


async def test_a_picker_without_replicas_is_ready_where_that_is_wanted() -> None:
    """It refuses and counts what comes, which an autoscaler sees, instead of leaving the choice to the gateway."""
    async with picking(discovery__scale_from_zero=True) as app:
        await app.extproc._look()
        assert await health(app.extproc.health_port, "readiness") == health_pb2.HealthCheckResponse.SERVING
        async with asking(app) as it:
            assert (await it.pick()).immediate_response.status.code == 503


async def test_tls_and_its_renewal(engine: FakeEngine, tmp_path: Path) -> None:
    """The picker speaks TLS with the certificate of its settings, and shows a renewed one after a reload."""
    file, authorities = tmp_path / "own.pem", [trustme.CA(), trustme.CA()]

    def write(number: int) -> bytes:
        issued = authorities[number].issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(str(file))
        return authorities[number].cert_pem.bytes()

    async def picks(app: RouterServer, ca: bytes) -> bool:
        secure = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(f"localhost:{app.extproc.port}", secure) as channel:
            try:
                async with asyncio.timeout(60):
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
            except grpc.aio.AioRpcError:
                return False
        return True

    old = write(0)
    async with picking(engine, extproc__tls_certificate=str(file)) as app:
        assert await picks(app, old)
        new = write(1)
        app.apply(resolve(app._config.settings))
        assert await picks(app, new)
        assert not await picks(app, old)


async def test_both_faces_in_one_process(engine: FakeEngine, other: FakeEngine, client: ClientSession) -> None:
    """A conversation that began at one frontend is known at the other: they share the control plane."""
    text = "word " * 2_000
    async with picking(engine, other, listen__mode="both") as app:
        async with client.post(app.http.url + CHAT, json={"model": "m", "messages": [
            {"role": "user", "content": text}]}) as answer:  # fmt: skip
            home = answer.headers["x-warmroute-replica"]
            await answer.read()
        async with asking(app) as it:
            assert destinations(await it.pick(chat(text)))[0] == home.removeprefix("http://")
            assert app.extproc.in_flight == 1
            await it.finish()
        await until(lambda: len(app.control.history.recent) == 2)
        assert app.control.frontends.in_flight == 0
        assert app.url == app.http.url


async def test_streams_that_pass_us_by_are_let_go(engine: FakeEngine) -> None:
    """A router that ends does not wait for answers that go past it, and waits for those that it is shown."""
    async with picking(engine, listen__drain_s=20) as app:
        async with asking(app) as past, asking(app, "buffered", "streamed") as shown:
            for it in (past, shown):
                await it.pick(chat(stream=True))
                await it.answer()
                await it.hear()
            leaving = asyncio.create_task(app.extproc.__aexit__(None, None, None))
            assert await past.hear() is None
            pieces = events()
            for n, piece in enumerate(pieces):
                await shown.piece(piece, end=n == len(pieces) - 1)
                assert await shown.hear() is not None
            assert not leaving.done()
            await shown.finish()
            await leaving
        assert not any(member.leases for member in app.router.members)


async def test_a_gateway_that_only_watches_is_told(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A gateway that sends what nothing can be picked for is named once in the log. Its stream ends with an error: one
    that ended well would let the request pass unpicked, even at a gateway that fails closed."""
    async with picking(engine) as app:
        for _ in range(2):
            async with asking(app) as it:
                await it.send(observability_mode=True, request_headers=pb.HttpHeaders())
                assert await it.failure() == "FAILED_PRECONDITION"
            async with asking(app) as it:
                await it.body(chat())
                assert await it.failure() == "FAILED_PRECONDITION"
    said = [
        vars(record)["fields"]["next"]
        for record in caplog.records
        if vars(record).get("event") == "extproc_misconfigured"
    ]
    assert len(said) == 2
    assert "observability_mode" in said[0]
    assert "request_header_mode" in said[1]


async def test_a_picker_that_knows_nobody_yet_says_nothing(engine: FakeEngine) -> None:
    """Before a replica was ready the stream ends with an error of gRPC, so that a gateway that fails open chooses by
    itself; later an outage is an answer of 503."""
    engine.healthy = False
    async with picking(engine) as app:
        with pytest.raises(grpc.aio.AioRpcError):
            async with asking(app) as it:
                await it.pick()
        engine.healthy = True
        await until(app.router.fleet.ready)
        async with asking(app) as it:
            assert destinations(await it.pick()) == [endpoint(engine)]
            await it.finish()
        engine.healthy = False
        await until(lambda: not app.router.fleet.ready())
        async with asking(app) as it:
            assert (await it.pick()).immediate_response.status.code == 503


async def test_an_outage_before_the_first_request_is_one(engine: FakeEngine) -> None:
    """A picker that has seen a replica ready says 503 when none is any more, though nobody has asked it before."""
    async with picking(engine) as app:
        await until(lambda: app.extproc._parts.known)
        engine.healthy = False
        await until(lambda: not app.router.fleet.ready())
        async with asking(app) as it:
            assert (await it.pick()).immediate_response.status.code == 503


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"replicas": ("http://vllm.default.svc:8000",)}, "addresses"),
        ({"extproc.objectives": ("batch",)}, "NAME=high"),
        ({"extproc.tls_key": "/nowhere"}, "extproc.tls_certificate"),
        ({"extproc.host": ""}, "extproc.host"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    """Each with what to do next, before anything is started."""
    with pytest.raises(SettingsError, match=re.escape(problem)):
        load(overrides={"listen.mode": "extproc", **settings})


def test_messages_are_made_of_the_proto() -> None:
    """extproc_pb2.py has the fields of extproc.proto, and no others: `python -m deploy.protos` makes it anew."""
    text = re.sub(r"//.*", "", PROTO.read_text(encoding="utf-8"))
    stated = {(name, int(number)) for name, number in re.findall(r"(\w+) = (\d+);", text)}
    made = set[tuple[str, int]]()
    todo = list(pb.DESCRIPTOR.message_types_by_name.values())
    while todo:
        message = todo.pop()
        if message.GetOptions().map_entry:
            continue
        made |= {(each.name, each.number) for each in message.fields}
        made |= {(value.name, value.number) for enum in message.enum_types for value in enum.values}
        todo += message.nested_types
    assert made == stated


def test_the_method_is_envoys() -> None:
    """The name under which Envoy calls."""
    assert f"/{SERVICE}/Process" == PATH
