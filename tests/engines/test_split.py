"""Roles, handshakes and pairs as a control plane finds them; whole requests in two legs by the Router's own choice."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout

from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.disagg_http import LegRefused, Moment
from router.config.schema import DisaggSettings
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.replicas import Replica
from router.engines.disagg_probes.kv_connectors import KvConnectorProber
from router.engines.disagg_probes.pair_warmup import PairWarmer
from router.extproc import stream_handler
from router.ingress.gateway_rules import FORGEABLE
from router.router_server import RouterServer
from tests.core.placement.paired import PairedFleet
from tests.extproc.asking import asking, set_headers
from tests.support import fakes
from tests.support.keyring import Keyring
from tests.support.splitting import hub_fleet, warm_pairs
from tests.support.waiting import until

COMPLETIONS = "/v1/completions"
LONG = "abcd" * 12_000
LONG_BODY = json.dumps({"model": "sim", "prompt": LONG, "max_tokens": 3, "stream": True}).encode()
GATEWAY: dict[str, Any] = {"listen__mode": "both", "extproc__port": 0, "extproc__health_port": 0}
STREAMS = 12


async def _ask(url: str, prompt: str, tokens: int) -> dict[str, str]:
    """Headers of a stream that was read to its end."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": True}
    async with ClientSession() as client, client.post(url + COMPLETIONS, json=body) as response:
        assert (response.status, "[DONE]" in await response.text()) == (200, True)
        return dict(response.headers)


@asynccontextmanager
async def _streams(engines: Engines, app: RouterServer) -> AsyncIterator[list[str]]:
    """Many streams that decode for minutes; yields the replicas that prefill for them."""
    begun: list[str] = []
    tasks = [asyncio.create_task(_endless(app.url, n, begun)) for n in range(STREAMS)]
    try:
        await until(lambda: sum(member.work.decoding for member in app.router.members) >= STREAMS == len(begun))
        for replica in engines.replicas:
            replica.time_scale = 1.0
        yield begun
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _endless(url: str, number: int, begun: list[str]) -> None:
    body = {"model": "sim", "prompt": f"{number} short", "max_tokens": 16_000, "stream": True}
    async with ClientSession(timeout=ClientTimeout()) as client, client.post(url + COMPLETIONS, json=body) as response:
        begun.append(response.headers.get("x-warmroute-prefill-replica", ""))
        await response.read()


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_a_long_prompt_is_prefilled_apart(handshake: KvConnector, caplog: pytest.LogCaptureFixture) -> None:
    """Where many streams decode, a long new prompt is prefilled by the replica that does nothing else, once its pairs
    have handed a prompt of ours over; receipts and metrics say so, and short prompts stay in one leg."""
    caplog.set_level(logging.INFO)
    async with hub_fleet(handshake) as (engines, app):
        await until(lambda: warm_pairs(app) == 2)
        assert sum(link.legs.fetched for link in engines.links) == 2
        async with _streams(engines, app) as prefilled:
            assert not any(prefilled)
            headers = await _ask(app.url, LONG, 3)
        assert headers["x-warmroute-reason"] == "split"
        assert headers["x-warmroute-prefill-replica"] == engines.urls[0]
        assert headers["x-warmroute-replica"] in engines.urls[1:]
        await until(lambda: fakes.idle(app))
        assert not app.router.disaggregator.pairs.open
        async with ClientSession() as client, client.get(app.admin_url + "/metrics") as response:
            page = await response.text()
        assert 'warmroute_disagg_decisions_total{decision="prefill-decode",model="sim"} 1.0' in page
        split = await _split_page(app)
        assert [row["role"] for row in split["replicas"]] == ["prefill", "decode", "decode"]
        assert [row["pairs"]["warm"] for row in split["replicas"]] == [2, 1, 1]
        used = {row["decode"]: row["sent"] for row in split["pairs"]}
        assert (used.pop(headers["x-warmroute-replica"]), list(used.values())) == (1, [0])
        assert {(row["state"], row["prefills_failed"], row["broken"]) for row in split["pairs"]} == {("warm", 0, 0)}
        events = [getattr(line, "event", "") for line in caplog.records]
        assert events.count("pair_warmed") == 2
        assert events.count("kv_connector_up") == (handshake is not KvConnector.NIXL)


@pytest.mark.parametrize("handshake", KvConnector)
async def test_a_pair_that_fails_is_followed_by_another_one(handshake: KvConnector) -> None:
    """The replica that prefills dies: the Router places both legs once more, without it, and only it is blamed."""
    async with hub_fleet(handshake, 1, 2) as (engines, app):
        await until(lambda: warm_pairs(app) == 2)
        guilty: list[int] = []

        async def dies(role: Role, _: object) -> None:
            if role is Role.PREFILL and not guilty:
                guilty.append(next(n for n in (0, 1) if engines.links[n].waiting))
                deaths.append(asyncio.create_task(engines.kill(guilty[0])))
                await asyncio.Event().wait()

        deaths: list[asyncio.Task[None]] = []
        async with _streams(engines, app):
            for link in engines.links:
                link.trip = dies
            headers = await _ask(app.url, LONG, 3)
        assert headers["x-warmroute-reason"] == "retry"
        assert headers["x-warmroute-prefill-replica"] == engines.urls[1 - guilty[0]]
        (kind, replica), *more = app.control.pages.decisions[-1].retries
        assert (kind.startswith("prefill_"), replica, more) == (True, engines.urls[guilty[0]], [])
        member = app.router.fleet.members[engines.urls[2]]
        assert member.breaker.failures == 0
        await asyncio.gather(*deaths)
        await until(lambda: fakes.idle(app))
        assert not app.router.disaggregator.pairs.open


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_blocks_that_do_not_come_are_computed_where_they_were_wanted(handshake: KvConnector) -> None:
    """By the decoding replica, if there is no other one, and not by the one that prefills, which may have died behind
    its answer while nothing else shows that yet."""
    async with hub_fleet(handshake, 1) as (engines, app):
        await until(lambda: warm_pairs(app) == 1)

        async def fails(role: Role, moment: Moment) -> None:
            if (role, moment) == (Role.DECODE, Moment.ARRIVED):
                raise LegRefused(500, "Internal server error")

        async with _streams(engines, app):
            for link in engines.links:
                link.trip = fails
            headers = await _ask(app.url, LONG, 3)
        assert headers["x-warmroute-replica"] == engines.urls[1]
        assert "x-warmroute-prefill-replica" not in headers
        assert app.control.pages.decisions[-1].retries == (("blocks", engines.urls[1]),)


async def test_sglangs_servers_are_sent_no_request_in_one_leg() -> None:
    """Not a short prompt, nor one before any pair is warm: that is 503, and no engine's 400. What may not be split goes
    to a server that does both, where there is one."""
    async with hub_fleet(KvConnector.SGLANG, 1) as (engines, app):
        await until(lambda: len(app.router.disaggregator.pairs.hands) == 2)
        app.router.disaggregator.pairs._pairs.clear()
        async with ClientSession() as client, client.post(app.url + COMPLETIONS, json={"prompt": "hi"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica_ready")
        await until(lambda: warm_pairs(app) == 1)
        headers = await _ask(app.url, "short", 3)
        assert headers["x-warmroute-prefill-replica"] == engines.urls[0]
        both = fakes.FakeEngine(models=("sim",), owned_by="sglang")
        async with both:
            app.control.replicas.add(both.url)
            await until(lambda: any(m.id == both.url for m in app.router.members))
            await app.control.probe_now()
            body = {"model": "sim", "prompt": "two", "n": 2}
            async with ClientSession() as client, client.post(app.url + COMPLETIONS, json=body) as response:
                assert (response.status, response.headers["x-warmroute-replica"]) == (200, both.url)


async def test_a_pair_that_hands_nothing_over_takes_no_traffic(caplog: pytest.LogCaptureFixture) -> None:
    """The decoding engine cannot reach the other one, though the router can: the log says so, the pair rests, and
    requests go in one leg."""
    async with hub_fleet(KvConnector.NIXL) as (engines, app):
        engines._directory.clear()
        await until(lambda: [line for line in caplog.records if getattr(line, "event", "") == "disagg_pair_failed"])
        headers = await _ask(app.url, LONG, 3)
        assert headers["x-warmroute-replica"] in engines.urls[1:]
        assert "x-warmroute-prefill-replica" not in headers
        assert warm_pairs(app) == 0


async def test_an_odd_address_fails_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be asked cannot be warmed: the pair rests, and the log says why."""
    pair = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE}, pair=False)
    for name in "pd":
        pair.router.disaggregator.set_connector(name, KvConnector.SGLANG, "odd")
    warmer = PairWarmer(pair.router, KvConnector.SGLANG, {"p": "odd"}, api_key=str, clock=lambda: pair.now_s)
    watching = asyncio.create_task(warmer.watch())
    await until(lambda: [line for line in caplog.records if getattr(line, "event", "") == "disagg_pair_failed"])
    watching.cancel()
    await warmer.close()
    assert pair.router.disaggregator.pairs_to_warm(pair.now_s + 5.0) == [("p", "d")]


async def test_nothing_is_split_without_a_handshake() -> None:
    """Roles mean nothing then, and nobody looks for hands."""
    async with fakes.FakeEngine() as engine, fakes.running(engine) as app:
        assert app.control.lifecycle._hands is None
        assert [member.replica.role for member in app.router.members] == [Role.BOTH]
        assert not hasattr(app.router.disaggregator, "pairs")
        assert await _split_page(app) is None


async def _split_page(app: RouterServer) -> Any:
    """What the dashboard is told of replicas that pair."""
    async with ClientSession() as client, client.get(app.admin_url + "/admin/observatory") as response:
        return (await response.json())["split"]


@pytest.mark.parametrize("handshake", KvConnector)
async def test_an_engine_that_is_to_be_asked_must_answer(handshake: KvConnector) -> None:
    """Each handshake's own sign of life; an engine that is not there, or gone, shakes no hands, and one that only
    decodes is not asked."""
    proved: list[tuple[str, KvConnector | None, str]] = []
    settings = EngineSettings(replicas=1, port=0, handshake=handshake, prefills=1)
    async with Engines(settings) as engines:
        url, address = engines.urls[0], (engines.addresses or [""])[0]
        named = () if handshake is KvConnector.NIXL else (f"{url}={address}",)
        given = DisaggSettings(handshake.value, (url,), ("http://127.0.0.1:1",), 0, named, 0.01)
        prober = KvConnectorProber(lambda *said: proved.append(said), given)
        replica, other = (
            prober.with_configured_role(Replica(url)),
            prober.with_configured_role(Replica("http://127.0.0.1:1")),
        )
        assert (replica.role, other.role) == (Role.PREFILL, Role.DECODE)
        tasks = [asyncio.create_task(prober.watch(each)) for each in (replica, other)]
        await until(lambda: len({said[0] for said in proved}) == 2)
        wanted = f"{address}#{engines.links[0].engine_id}" if handshake is KvConnector.MOONCAKE else address
        assert next(said for said in proved if said[0] == url)[1:] == (handshake, wanted)
        assert next(said for said in proved if said[0] != url)[1:] == (handshake, "")
    if handshake is not KvConnector.NIXL:  # which has nobody to be asked
        await until(lambda: proved[-1] == (url, None, ""))
        assert url not in prober.addresses
    for task in tasks:
        task.cancel()
    await prober.close()


async def test_a_look_that_finds_nobody_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that was there is gone when three looks in a row found nobody; one that never was is not waited for.
    Each change is told once, however long nobody is there."""
    caplog.set_level("INFO")
    said: list[KvConnector | None] = []
    prober = KvConnectorProber(lambda *told: said.append(told[1]), DisaggSettings("sglang", probe_interval_s=0.01))
    finds = iter(("", "", "a:1", "", "", "a:1", "", "", "", "", "", "a:1"))

    async def look(_: Replica, __: str) -> str:
        found = next(finds, None)
        if found is None:
            await asyncio.Event().wait()
        return found or ""

    monkeypatch.setattr(prober, "_probe", look)
    task = asyncio.create_task(prober.watch(Replica("http://a:1", role=Role.PREFILL)))
    there = KvConnector.SGLANG
    await until(lambda: len(said) == 8)
    assert said == [None, None, there, there, None, None, None, there]
    events = [getattr(line, "event", "").removeprefix("kv_connector_") for line in caplog.records]
    assert events == ["down", "up", "down", "up"]
    task.cancel()
    await prober.close()


async def test_where_engines_are_asked() -> None:
    """The settings' entry for an engine goes before discovery's word, and that before the port for all; a p2p tier has
    a port for each rank, a bootstrap server one for all."""
    one = KvConnectorProber(lambda *_: None, DisaggSettings("offloading", endpoints=("http://a:1=10.0.0.9:7",)))
    assert one.address(Replica("http://a:1", peer="10.0.0.1:8")) == "10.0.0.9:7"
    assert one.address(Replica("http://b:1#dp2", peer="10.0.0.1:8")) == "10.0.0.1:10"
    assert one.address(Replica("http://b:1")) == "b:5710"
    assert one.address(Replica("http://b:1", role=Role.DECODE)) == ""
    two = KvConnectorProber(lambda *_: None, DisaggSettings("sglang", port=9000))
    assert two.address(Replica("http://[fd00::1]:1#dp2", role=Role.PREFILL)) == "[fd00::1]:9000"
    same = KvConnectorProber(
        lambda *_: None, DisaggSettings("sglang", ("HTTP://A:80/",), endpoints=("http://A=10.0.0.9:7",))
    )
    assert same.with_configured_role(Replica("http://a#dp1")).role is Role.PREFILL
    assert same.address(Replica("http://a:80#dp1", role=Role.PREFILL)) == "10.0.0.9:7"
    three = KvConnectorProber(lambda *_: None, DisaggSettings("nixl"))
    assert three.address(Replica("http://b:1")) == ""
    for each in (one, two, three, same):
        await each.close()


async def test_a_server_of_sglangs_without_a_role_takes_no_legs(caplog: pytest.LogCaptureFixture) -> None:
    """It prefills or decodes, as it was started, and nothing says which."""
    proved: list[Any] = []
    prober = KvConnectorProber(lambda *said: proved.append(said), DisaggSettings("sglang"))
    await prober.watch(Replica("http://b:1"))
    assert proved == []
    assert [getattr(line, "event", "") for line in caplog.records] == ["role_unknown"]
    await prober.close()


async def test_a_gateways_sidecar_is_told_who_prefills() -> None:
    """The picker names the prefilling replica in llm-d's header, whatever the client has put there, and leaves the body
    alone; the prefill leg's lease ends with the decode leg's."""
    async with hub_fleet(KvConnector.NIXL, 1, **GATEWAY) as (engines, app):
        await until(lambda: warm_pairs(app) == 1)
        async with _streams(engines, app), asking(app) as it:
            told = await it.pick(LONG_BODY, path=COMPLETIONS, headers={"x-prefiller-host-port": "10.0.0.9:1"})
        assert set_headers(told)["x-prefiller-host-port"] == engines.urls[0].removeprefix("http://")
        assert not told.request_body.response.HasField("body_mutation")
        await until(lambda: fakes.idle(app))
        assert not app.router.disaggregator.pairs.open


@pytest.mark.parametrize(("status", "retry_after", "left"), [(500, "", 0), (503, "1", 1), (400, "", 1)])
async def test_a_pair_whose_answers_fail_behind_a_gateway_rests(status: int, retry_after: str, left: int) -> None:
    """No engine says which of the two was at fault, so the pair is warmed anew; one that asks for a rest, or refuses
    the request, says nothing of the pair."""
    async with hub_fleet(KvConnector.NIXL, 1, **GATEWAY) as (engines, app):
        await until(lambda: warm_pairs(app) == 1)
        async with _streams(engines, app), asking(app) as it:
            told = await it.pick(LONG_BODY, path=COMPLETIONS)
            assert "x-prefiller-host-port" in set_headers(told)
            await it.answer(status, end=True, headers={"retry-after": retry_after} if retry_after else None)
            await it.hear()
            assert warm_pairs(app) == left


@pytest.mark.inside
async def test_a_replica_with_a_name_prefills_for_no_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has addresses only: nothing is booked for a replica that it cannot have."""
    async with hub_fleet(KvConnector.NIXL, 1, **GATEWAY) as (engines, app):
        monkeypatch.setattr(
            stream_handler, "endpoint_of", lambda replica: "" if replica == engines.urls[0] else "10.0.0.1:1"
        )
        await until(lambda: warm_pairs(app) == 1)
        async with _streams(engines, app), asking(app) as it:
            told = await it.pick(LONG_BODY, path=COMPLETIONS)
            assert "x-prefiller-host-port" not in set_headers(told)
            assert not app.router.fleet.members[engines.urls[0]].leases
            assert not app.router.disaggregator.pairs.open


@pytest.mark.parametrize("prompts", [1, 2])
async def test_without_keys_no_client_names_engines(prompts: int) -> None:
    """Where requests are split the router alone says what is transferred, in one leg as in two."""
    said = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1}
    async with fakes.FakeEngine(owned_by="vllm") as engine, fakes.running(engine, disagg__kv_connector="nixl") as app:
        body = {"model": "m", "prompt": ["a"] * prompts, "kv_transfer_params": said, "bootstrap_room": 7}
        async with ClientSession() as client, client.post(app.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
        seen = engine.seen[-1].json
        assert (seen["kv_transfer_params"], seen["bootstrap_room"]) == (None, None)


async def test_clients_name_no_engines(tmp_path: Path) -> None:
    """What clients say of transfers never reaches an engine: fields of tenants, and headers of anybody."""
    ring = Keyring(tmp_path, one={})
    said = {name: "10.0.0.9:1" if "host" in name else "1" for name in FORGEABLE}
    async with fakes.FakeEngine(owned_by="vllm") as engine, fakes.running(engine, **ring.settings) as app:
        asked = {"bootstrap_room": 7, "kv_transfer_params": {"transfer_id": "x"}, "routed_dp_rank": 1}
        body = {"model": "m", "messages": [], **asked}
        headers = {**ring.of("one"), **said}
        async with (
            ClientSession() as client,
            client.post(app.url + "/v1/chat/completions", json=body, headers=headers) as response,
        ):
            assert response.status == 200
        seen = engine.seen[-1]
        assert [seen.json[name] for name in asked] == [None] * len(asked)
        assert not set(said) & {name.lower() for name in seen.headers}
