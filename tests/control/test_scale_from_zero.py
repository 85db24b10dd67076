"""Replicas that are started by the requests which a router without any refuses."""

from __future__ import annotations

import json

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.core.types.replicas import Replica
from router.router_server import RouterServer
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


async def refused(client: ClientSession, app: RouterServer, model: str) -> float:
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
    async with RouterServer(resolve(settings(discovery__scale_from_zero=allowed))) as app, FakeEngine() as engine:
        assert await status(client, app.url + "/readyz") == 503, "nothing is known yet"
        told.say()
        await until(app.control.lifecycle.discovered.is_set)
        for url in (app.url, app.admin_url):
            assert await status(client, url + "/readyz") == expected
        assert await refused(client, app, "none") == 0
        async with client.post(app.url + CHAT, data=ASKED) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert await refused(client, app, "none") == 1
        engine.healthy = False
        told.say(Replica(engine.url))
        await until(lambda: app.control.router.members)
        assert await status(client, app.url + "/readyz") == expected
        engine.healthy = True
        await app.control.probe_now()
        assert await status(client, app.url + "/readyz") == 200
        assert await refused(client, app, "m") == 0
        app.control.drain()
        assert await status(client, app.url + "/readyz") == 503


async def test_replicas_that_are_listed_are_looked_at_first(client: ClientSession, told: Told) -> None:
    """A router that starts beside replicas must not refuse what they could serve a moment later."""
    async with FakeEngine() as engine, RouterServer(resolve(settings(discovery__scale_from_zero=True))) as app:
        seen = []
        told.say(Replica(engine.url))
        while not seen or seen[-1] != 200:
            seen.append(await status(client, app.url + "/readyz"))
            assert seen[-1] == 503 or app.control.router.fleet.usable()


async def asked(client: ClientSession, app: RouterServer, model: str | None) -> int:
    """The status of a request for this model, or for none."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | ({"model": model} if model is not None else {})
    async with client.post(app.url + CHAT, json=body) as response:
        assert response.status not in (429, 503) or "Retry-After" in response.headers
        return response.status


async def test_each_model_of_several_is_counted_by_its_name(client: ClientSession, told: Told) -> None:
    """A model that settings declare, and one whose last replica has left, are refused as ones that come again, beside
    another that is served; names that nobody knows are not, and count under no name of theirs."""
    declared = settings(discovery__scale_from_zero=True, discovery__models=("new",))
    async with RouterServer(resolve(declared)) as app, FakeEngine() as engine, FakeEngine(models=("b",)) as other:
        engine.rows = [{"id": "m", "owned_by": "vllm"}, {"id": "lora", "parent": "m", "owned_by": "vllm"}]
        told.say(Replica(engine.url), Replica(other.url))
        await until(lambda: len(app.control.router.members) == 2)
        await app.control.probe_now()
        assert [await refused(client, app, model) for model in ("new", "m", "b")] == [0, 0, 0]
        assert [await asked(client, app, model) for model in ("new", "m", "lora", "b", "gpt")] == [
            *(503, 200, 200, 200, 404),
        ]
        told.say(Replica(other.url))
        await until(lambda: len(app.control.router.members) == 1)
        assert [await asked(client, app, model) for model in ("m", "lora", "b", "gpt")] == [503, 503, 200, 404]
        told.say()
        await until(lambda: not app.control.router.members)
        assert [await asked(client, app, model) for model in ("new", "m", "b", "gpt", None)] == [503] * 5
        counted = {model: await refused(client, app, model) for model in ("new", "m", "b", "none")}
        assert counted == {"new": 2, "m": 3, "b": 1, "none": 2}, "an adapter counts for its base model"
        told.say(Replica(engine.url))
        await until(lambda: app.control.router.members)
        await app.control.probe_now()
        assert await asked(client, app, "m") == 200
        assert await refused(client, app, "m") == 3


async def test_a_model_that_was_unloaded_does_not_exist(client: ClientSession, told: Told) -> None:
    """Its replica is there still, and lists it no more."""
    async with (
        RouterServer(resolve(settings(discovery__scale_from_zero=True))) as app,
        FakeEngine(models=("m", "b")) as engine,
    ):
        told.say(Replica(engine.url))
        await until(lambda: app.control.router.members)
        await app.control.probe_now()
        engine.models = ("m",)
        await app.control.probe_now()
        assert await asked(client, app, "b") == 404
