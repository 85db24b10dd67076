"""Replicas that are started by the requests which a router without any refuses."""

from __future__ import annotations

import json

import pytest
from aiohttp import ClientSession

from router.app import App
from router.core.facts.replicas import Replica
from tests.http.wire import CHAT
from tests.support.discovered import Told, told
from tests.support.fakes import FakeEngine, settings
from tests.support.waiting import until

__all__ = ["told"]
ASKED = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
REFUSED = 'warmroute_requests_total{model="%s",route="/v1/chat/completions",status="503"} '


async def status(client: ClientSession, url: str) -> int:
    """Of a page."""
    async with client.get(url) as response:
        return response.status


async def refused(client: ClientSession, app: App, model: str) -> float:
    """How many requests were refused, by the metrics."""
    async with client.get(app.admin_url + "/metrics") as response:
        (line,) = [each for each in (await response.text()).splitlines() if each.startswith(REFUSED % model)]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_router_without_replicas_is_ready_where_that_is_wanted(
    client: ClientSession, told: Told, allowed: bool
) -> None:
    """Once its source has said that there are none; a replica that comes then, and is not looked at yet, takes nothing
    of that away. What it refuses is counted from 0, so that the first refusal is seen."""
    expected = 200 if allowed else 503
    async with App(settings(discovery__scale_from_zero=allowed)) as app, FakeEngine() as engine:
        assert await status(client, app.url + "/readyz") == 503, "nothing is known yet"
        told.say()
        await until(app.hub.discovered.is_set)
        for url in (app.url, app.admin_url):
            assert await status(client, url + "/readyz") == expected
        assert await refused(client, app, "none") == 0
        async with client.post(app.url + CHAT, data=ASKED) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert await refused(client, app, "none") == 1
        engine.healthy = False
        told.say(Replica(engine.url))
        await until(lambda: app.hub.router.members)
        assert await status(client, app.url + "/readyz") == expected
        engine.healthy = True
        await app.hub.probe_now()
        assert await status(client, app.url + "/readyz") == 200
        assert await refused(client, app, "m") == 0
        app.hub.drain()
        assert await status(client, app.url + "/readyz") == 503


async def test_replicas_that_are_listed_are_looked_at_first(client: ClientSession, told: Told) -> None:
    """A router that starts beside replicas must not refuse what they could serve a moment later."""
    async with FakeEngine() as engine, App(settings(discovery__scale_from_zero=True)) as app:
        seen = []
        told.say(Replica(engine.url))
        while not seen or seen[-1] != 200:
            seen.append(await status(client, app.url + "/readyz"))
            assert seen[-1] == 503 or app.hub.router.usable()
