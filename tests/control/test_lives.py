"""Replicas that discovery brings, takes away, and replaces at their address, in a whole router."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.config.schema import SettingsError, UpstreamSettings
from router.core.fleet.lease import Lease
from router.core.types.replicas import Replica
from router.engines.discovery import Status
from router.http.failures import ReplicaRemoved
from router.http.upstream import Upstream
from router.router_server import RouterServer
from tests.http.wire import CHAT
from tests.support.discovered import Told, told
from tests.support.fakes import FakeEngine, events, half_then_waits, idle, settings
from tests.support.waiting import until

__all__ = ["told"]
LONG = "word " * 2_000


def body(prompt: str = LONG, *, stream: bool = True) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]}


@asynccontextmanager
async def routing(source: Told, *replicas: Replica, **overrides: Any) -> AsyncIterator[RouterServer]:
    """A router that knows these from its source, all of them ready."""
    async with RouterServer(resolve(settings(**overrides))) as app:
        source.say(*replicas)
        await until(lambda: len(app.router.fleet.ready()) == len(replicas))
        yield app


def predicted(response: aiohttp.ClientResponse) -> int:
    """Tokens that the router believed cached."""
    return int(response.headers["x-warmroute-predicted-cached-tokens"])


@pytest.mark.promise("An engine at a reused address is credited with no block of its predecessor.", "discovery")
async def test_another_engine_on_the_same_port(client: ClientSession, told: Told) -> None:
    """A stream of the former ends well while the next serves: no block of the former is credited, the next one's books
    have its own requests only, and at the end there is nothing in anybody's. No connection to the former is kept."""
    async with FakeEngine(version={"version": "0.32.0"}) as first:
        async with routing(told, Replica(first.url, "uid-1", "ns/a")) as app:
            for expected in (False, True):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert (predicted(response) > 0) is expected
                    await response.read()
            first.script.extend([half_then_waits] * 2)  # on two connections
            both = [await client.post(app.url + CHAT, json=body()) for _ in range(2)]
            first.go_on.set()
            for stream in both:
                await stream.read()
            first.go_on.clear()
            first.at_work.clear()
            (pool,) = app.http.upstream._pools.values()
            await until(lambda: len(pool._free) == 2)
            first.script.append(half_then_waits)
            stream = await client.post(app.url + CHAT, json=body())
            await first.at_work.wait()
            member = app.router.fleet.members[first.url]
            assert (len(member.leases), len(pool._free)) == (1, 1)
            told.say(Replica(first.url, "uid-2", "ns/b"))
            await until(lambda: app.router.fleet.members.get(first.url) not in (None, member))
            assert not pool._free
            await until(app.router.fleet.ready)
            assert app.router.index.blocks(first.url) == 0
            async with client.post(app.url + CHAT, json=body()) as response:
                assert predicted(response) == 0
                await response.read()
            first.go_on.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: app.http.in_flight == 0)
            assert idle(app)
            assert app.control.admission._admission.tenants == {}
            text = app.control.metrics.page().decode()
            labels = f'model="m",name="ns/b",namespace="ns",node="",pod="b",replica="{first.url}",version="0.32.0"'
            assert f'warmroute_replica_info{{engine="fake",{labels}}} 1.0' in text
            assert "ns/a" not in text


async def test_two_engines_one_after_the_other(client: ClientSession, told: Told) -> None:
    """The same with another process behind the port, that serves another model: it is asked anew what it serves."""
    async with FakeEngine() as first:
        async with routing(told, Replica(first.url, "uid-1")) as app:
            async with client.post(app.url + CHAT, json=body()) as response:
                assert response.status == 200
                await response.read()
            await first.stop()
            async with FakeEngine(models=("other",), port=first.port) as second:
                told.say(Replica(second.url, "uid-2"))
                await until(lambda: app.router.fleet.model_names() == {"other"})
                async with client.post(app.url + CHAT, json={**body(), "model": "other"}) as response:
                    assert (response.status, predicted(response)) == (200, 0)
                    await response.read()
                assert len(second.seen) == 1
                told.say(Replica(second.url, "uid-2", "ns/renamed", "node-7"))
                await until(lambda: app.router.fleet.members[second.url].replica.name)
                assert app.router.fleet.ready(), "other facts of the same engine change nothing else"
                assert app.control.events is not None
                assert app.control.events._followers[second.url].replica.name == "ns/renamed"
                async with client.post(app.url + CHAT, json={**body(), "model": "other"}) as response:
                    assert predicted(response) > 0
                    await response.read()


@pytest.mark.promise("A replica that is not ready or was removed gets no new request.", "discovery")
@pytest.mark.promise("Labels of metrics are bounded, and series of a replica end with it.", "records")
async def test_who_leaves_gets_nothing_more(client: ClientSession, told: Told) -> None:
    """From the moment on that discovery says so; its stream ends well, and its series are gone, those of failures
    too, however late one is heard of."""
    async with FakeEngine() as stays, FakeEngine() as leaves:
        both = Replica(stays.url, "1"), Replica(leaves.url, "2", "ns/leaves")
        async with routing(told, *both, routing__policy="round_robin") as app:
            for engine in (stays, leaves):
                engine.script.append(half_then_waits)
            streams = [await client.post(app.url + CHAT, json=body()) for _ in range(2)]
            await asyncio.gather(stays.at_work.wait(), leaves.at_work.wait())
            app.control.count_attempt_failure(leaves.url, "connect")
            assert leaves.url in app.control.metrics.page().decode()
            told.say(both[0])
            await until(lambda: leaves.url not in app.router.fleet.members)
            for _ in range(4):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert response.status == 200
                    await response.read()
            assert (len(stays.seen), len(leaves.seen)) == (5, 1)
            for engine in (stays, leaves):
                engine.go_on.set()
            for stream in streams:
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: app.http.in_flight == 0)
            app.control.count_attempt_failure(leaves.url, "connect")
            assert leaves.url not in app.control.metrics.page().decode()
            assert idle(app)


@pytest.mark.promise("A replica that is not ready or was removed gets no new request.", "discovery")
@pytest.mark.parametrize("listed", [False, True])
async def test_not_ready_for_a_while(client: ClientSession, told: Told, listed: bool) -> None:
    """Nothing more is sent there, while its stream goes on; when it is ready again it holds what it held, with the
    books in order. One that is listed too is no less in use than it was."""
    async with FakeEngine() as stays, FakeEngine() as busy:
        both = Replica(stays.url, "1"), Replica(busy.url, "2")
        lists = (busy.url,) if listed else ()
        overrides = {"replicas": lists, "routing__policy": "round_robin"}
        async with routing(told, *both, **overrides) as app:
            for engine in (stays, busy):
                engine.script.append(half_then_waits)
            streams = [await client.post(app.url + CHAT, json=body()) for _ in range(2)]
            await asyncio.gather(stays.at_work.wait(), busy.at_work.wait())
            life = app.router.fleet.members[busy.url].cache_epoch
            told.say(both[0], replace(both[1], ready=False))
            if listed:
                await asyncio.sleep(0.1)
                assert len(app.router.fleet.ready()) == 2
                return
            await until(lambda: len(app.router.fleet.ready()) == 1)
            for _ in range(4):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert response.status == 200
                    await response.read()
            assert (len(stays.seen), len(busy.seen)) == (5, 1)
            async with client.get(app.control.admin_url + "/admin/replicas") as page:
                rows = {row["id"]: row for row in (await page.json())["replicas"]}
            assert (rows[busy.url]["ready"], rows[busy.url]["why"]) == (False, "not ready according to discovery")
            for engine in (stays, busy):
                engine.go_on.set()
            for stream in streams:
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            told.say(*both)
            await until(lambda: len(app.router.fleet.ready()) == 2)
            assert app.router.fleet.members[busy.url].cache_epoch == life
            for _ in range(2):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert predicted(response) > 1_000
                    await response.read()
            assert len(busy.seen) == 2
            await until(lambda: idle(app))


def once_placed(app: RouterServer, url: str, act: Callable[[], object]) -> list[Lease]:
    """Act whenever a request was placed on that replica. Returns their leases, as they come."""
    place, taken = app.control.placer.place, list[Lease]()

    async def then_act(*asked: Any) -> Any:
        placed = await place(*asked)
        if placed.replica == url:
            taken.append(placed)
            act()
        return placed

    app.control.placer.place = then_act  # type: ignore[method-assign]  # for this test alone
    return taken


@pytest.mark.inside
@pytest.mark.parametrize("stays_known", [False, True])
async def test_a_request_whose_replica_left_before_it_was_sent(
    client: ClientSession, told: Told, stays_known: bool
) -> None:
    """It waited for a place, got one, and its replica is gone, or not ready, when its turn of the event loop comes: it
    is placed elsewhere, and that is no attempt."""
    async with FakeEngine() as stays, FakeEngine() as leaves:
        both = Replica(stays.url, "1"), Replica(leaves.url, "2")
        async with routing(told, *both, routing__policy="round_robin", upstream__retries_max=0) as app:
            after = [replace(both[1], ready=False)] if stays_known else []
            taken = once_placed(app, leaves.url, lambda: app.control.lifecycle.replace(frozenset([both[0], *after])))
            for _ in range(2):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert response.status == 200
                    await response.read()
            assert len(taken) == 1
            assert (len(stays.seen), len(leaves.seen)) == (2, 0)
            assert not any(record.retries for record in app.control.pages.decisions)
            await until(lambda: idle(app))


@pytest.mark.inside
async def test_a_replica_that_leaves_while_we_connect_costs_no_retry(client: ClientSession, told: Told) -> None:
    """Nothing was sent to it, which is no attempt: its request is placed elsewhere, though no retry is allowed, nor any
    left in the budget."""
    async with FakeEngine() as stays, FakeEngine() as leaves:
        both = Replica(stays.url, "1"), Replica(leaves.url, "2")
        none = {"upstream__retries_max": 0, "upstream__retry_ratio": 0.0, "upstream__retry_floor_per_s": 0.0}
        async with routing(told, *both, routing__policy="round_robin", **none) as app:
            app.http._budget.tokens = 0.0
            # A connection takes a turn of the loop at least, and what is called soon comes first in the next.
            soon = asyncio.get_running_loop().call_soon
            taken = once_placed(app, leaves.url, lambda: soon(app.control.lifecycle.replace, frozenset(both[:1])))
            for _ in range(2):
                async with client.post(app.url + CHAT, json=body()) as response:
                    assert (response.status, await response.read()) == (200, b"".join(events()))
            assert len(taken) == 1
            assert (len(stays.seen), len(leaves.seen)) == (2, 0)
            assert [kind for record in app.control.pages.decisions for kind, _ in record.retries] == ["left"]
            assert app.http._budget.tokens == 0.0
            await until(lambda: idle(app))


async def test_a_replica_that_leaves_while_we_connect(engine: FakeEngine) -> None:
    """Nothing is sent there, and the connection is closed; where nothing was sent another may be asked."""
    upstream = Upstream(UpstreamSettings(connect_timeout_s=60.0, first_byte_timeout_s=60.0), whole_bytes_max=1 << 20)
    calling = asyncio.ensure_future(upstream.call(engine.url, "POST", CHAT, [], json.dumps({}).encode(), whole=True))
    await asyncio.sleep(0)
    upstream.forget(engine.url)
    with pytest.raises(ReplicaRemoved) as left:
        await calling
    assert left.value.retry
    assert not engine.seen
    assert not upstream._pools
    await upstream.close()


async def test_pages_say_where_replicas_come_from(client: ClientSession, told: Told) -> None:
    """Name, node, instance and engine version of each, and how fresh the list is; the same in metrics; and a log line
    for each who comes and goes."""
    async with FakeEngine() as listed, FakeEngine(version={"version": "0.32.0"}) as found:
        pod = Replica(found.url, "uid-1", "ns/pod-1", "node-7")
        async with RouterServer(resolve(settings(listed))) as app:
            told.say(pod)
            await until(lambda: len(app.router.fleet.ready()) == 2)
            told.now = Status(fresh=False, why="403: list pods", stale_s=7.5, errors=3, replicas=1)
            async with client.get(app.admin_url + "/admin/replicas") as response:
                page = await response.json()
            rows = {
                row["id"]: [row[key] for key in ("name", "node", "instance", "version")] for row in page["replicas"]
            }
            assert rows == {listed.url: ["", "", "", ""], found.url: ["ns/pod-1", "node-7", "uid-1", "0.32.0"]}
            fresh = {"fresh": True, "why": "", "stale_s": 0.0, "errors": 0, "replicas": 1}
            stale = {"fresh": False, "why": "403: list pods", "stale_s": 7.5, "errors": 3, "replicas": 1}
            assert page["discovery"] == {"static": fresh, "told": stale}
            lines = app.control.metrics.page().decode().splitlines()
            for source, *values in (("static", 1.0, 0.0, 1.0, 0.0), ("told", 0.0, 7.5, 1.0, 3.0)):
                for name, value in zip(("fresh", "stale_seconds", "replicas", "errors_total"), values, strict=True):
                    assert f'warmroute_discovery_{name}{{source="{source}"}} {value}' in lines


async def test_comings_and_goings_are_logged(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    """With the name that people know; an engine that was replaced has left, and another has joined."""
    caplog.set_level("INFO")
    async with FakeEngine() as engine:
        async with routing(told, Replica(engine.url, "uid-1", "ns/a")) as app:
            told.say(Replica(engine.url, "uid-2", "ns/b"))
            await until(lambda: [m.replica.name for m in app.router.fleet.members.values()] == ["ns/b"])
            told.say()
            await until(lambda: not app.router.fleet.members)
    said = [(r.message, r.fields["name"]) for r in caplog.records if r.message in ("replica joined", "replica left")]  # type: ignore[attr-defined]
    assert said == [
        ("replica joined", "ns/a"), ("replica left", "ns/a"), ("replica joined", "ns/b"), ("replica left", "ns/b")
    ]  # fmt: skip


async def test_readiness_without_a_list(client: ClientSession, told: Told, caplog: pytest.LogCaptureFixture) -> None:
    """With nothing but a source that has not spoken the router is not ready, and does not complain that nothing is
    configured; with a replica of the settings it does not wait for the source."""
    source = {"discovery__source": "dns", "discovery__dns_name": "vllm.svc", "discovery__port": 8000}
    async with FakeEngine() as engine:
        async with RouterServer(resolve(settings(**source))) as app:
            assert not app.control.lifecycle.discovered.is_set()
            async with client.get(app.url + "/readyz") as response:
                assert response.status == 503
            told.say(Replica(engine.url))
            await until(app.control.lifecycle.discovered.is_set)
            await until(app.router.fleet.ready)
            async with client.get(app.url + "/readyz") as response:
                assert response.status == 200
        assert "no replicas are configured" not in caplog.text
        async with RouterServer(resolve(settings(engine))) as app:
            await until(app.router.fleet.ready)
        async with RouterServer(resolve(settings())):
            assert "no replicas are configured" in caplog.text


async def test_a_source_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of its settings ends the start, as any other problem of theirs does."""

    class Refuses:
        def __init__(self, _settings: object, *, split: bool) -> None:
            raise ValueError("discovery.namespaces: is required outside of a pod")

    module = types.ModuleType("router.engines.discovery.kubernetes")
    module.KubernetesDiscovery = Refuses  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(SettingsError, match="is required outside of a pod"):
        async with RouterServer(resolve(settings(discovery__source="kubernetes", discovery__selector="app=vllm"))):
            pass
