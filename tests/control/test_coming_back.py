"""Replicas that die and come back, and fleets of which nothing is left, through the whole router."""

import asyncio
from typing import Any

from aiohttp import ClientSession, web

from tests.support.fakes import FakeEngine, events, idle, reset, running
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
PROBING = {"probe__interval_s": 0.2, "probe__timeout_s": 30.0}  # that long only a machine that stands still takes


class Shy(FakeEngine):
    """Its health checks have no answer while it is shy."""

    shy = False

    async def _health(self, request: web.Request) -> web.Response:
        if self.shy:
            await asyncio.sleep(1.0)
        return await super()._health(request)


async def ask(client: ClientSession, url: str, text: str = "x") -> tuple[int, str]:
    """One request: status and replica. What is answered is answered whole."""
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
    async with client.post(url + CHAT, json=body) as response:
        page = await response.read()
        assert response.status != 200 or page == b"".join(events())
        return response.status, response.headers.get("x-warmroute-replica", "")


async def test_killed_and_back(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Under load a replica dies and comes back: no request fails, and by the fifteenth look at its health, which is
    within three seconds of its return, it is used again, a little at first."""
    async with running(engine, other, **PROBING, upstream__slow_start_s=1.0) as app:
        for n in range(20):
            await ask(client, app.url, f"{n}")
        await engine.stop()
        for n in range(40):
            assert await ask(client, app.url, f"{n}") == (200, other.url)
        async with FakeEngine(port=engine.port) as again:
            n = 0
            while not again.seen:
                assert (await ask(client, app.url, f"back {n}"))[0] == 200
                n += 1
            assert again.probes["health"] <= 15
            assert engine.url in app.router.fleet.restricted
            await asyncio.sleep(1.0)
            for n in range(20):
                assert (await ask(client, app.url, f"later {n}"))[0] == 200
            assert not app.router.fleet.restricted
            await until(lambda: idle(app))


async def test_everything_dead_and_one_back(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """After an outage of the whole fleet, with all breakers open, requests are answered by the fifth look at the health
    of the first replica that is back, which is within a second."""
    async with running(engine, other, **PROBING) as app:
        engine.script.extend([reset] * 64)
        other.script.extend([reset] * 64)
        while not all(member.breaker.backoff_s for member in app.router.fleet.members.values()):
            assert (await ask(client, app.url))[0] == 502
        await engine.stop()
        await other.stop()
        for _ in range(5):
            assert (await ask(client, app.url))[0] in (502, 503)
        await until(lambda: not app.router.fleet.ready())
        async with FakeEngine(port=other.port) as again:
            while (await ask(client, app.url))[0] != 200:
                await asyncio.sleep(0.02)
            assert again.probes["health"] <= 5
            assert again.seen


async def test_health_checks_of_all_time_out(client: ClientSession) -> None:
    """When no health check is answered any more, requests still are; one that refuses connections gets none, and
    `/readyz` says that they are: a router that is taken out of its Service could serve none."""
    impatient = PROBING | {"probe__timeout_s": 0.2}
    async with Shy() as one, Shy() as two, FakeEngine() as three, running(one, two, three, **impatient) as app:
        one.shy = two.shy = True
        await three.stop()
        await until(lambda: not app.router.fleet.ready())
        assert {await ask(client, app.url, f"{n}") for n in range(12)} <= {(200, one.url), (200, two.url)}
        async with client.get(app.admin_url + "/metrics") as response:
            assert "warmroute_panic_mode_placements_total 12.0" in await response.text()
        for url in (app.url, app.admin_url):
            async with client.get(url + "/readyz") as response:
                assert response.status == 200
        one.shy = False
        await until(lambda: app.router.fleet.ready())
        assert {await ask(client, app.url, f"{n}") for n in range(5)} == {(200, one.url)}


async def test_who_refuses_is_looked_at_again_at_once(
    client: ClientSession, engine: FakeEngine, other: FakeEngine
) -> None:
    """A replica that refuses a request is asked for its health then, and not at the next round an hour later."""
    async with running(engine, other, routing__policy="round_robin") as app:
        await engine.stop()
        while engine.url in {member.id for member in app.router.fleet.ready()}:
            assert await ask(client, app.url) == (200, other.url)
        async with FakeEngine(port=engine.port):
            app.control.prober.probe_soon(engine.url)
            await until(lambda: engine.url in {member.id for member in app.router.fleet.ready()})
