"""Replicas of the zoo that publish KV events: a router follows each kind, and predicts what it finds."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.fake_engine.zoo.pages import page_of
from router.core.cache_state.calibration import CHECKS
from router.core.fleet.breaker import State
from router.core.fleet.engine_metrics import parse_load
from router.core.types.placements import Confidence
from tests.engines.test_exact import BLOCK, COMPLETIONS, ask, caught_up, graded, replicas, routing

KINDS = [
    ("vllm-hybrid", CHECKS),  # groups beside the first may not hold a prefix
    ("vllm-dcp", 0),
    ("vllm-eagle", CHECKS),  # the last block that is found is computed again, which is learned
    ("vllm-processes", 0),
    ("sglang", 0),
    ("vllm-0.15", 0),
    ("sglang-0.5.8", 0),
]


def where(engines: Engines) -> list[str]:
    """Where events are published, for engines that do not say."""
    pairs = zip(engines.urls, engines.publishers, strict=True)
    return [f"{url}={each.endpoint}={each.replay_endpoint}" for url, each in pairs]


@pytest.mark.parametrize(("name", "earned"), KINDS)
async def test_predictions(name: str, earned: int) -> None:
    """Prompts that share their beginnings, through a cache that holds a few. The grade takes `earned` answers."""
    member = MEMBERS[name]
    async with (
        replicas(1, kv_tokens=4_096, member=member) as engines,
        routing(*engines.urls, events__endpoints=where(engines) if member.earlier else ()) as app,
        ClientSession() as client,
    ):
        if not earned:
            await graded(app, Confidence.EXACT)
        async with asyncio.timeout(60):
            while any(each.grade is Confidence.ESTIMATED for each in app.router.fleet.members.values()):
                await asyncio.sleep(0.01)
        hits = 0
        for n in range(earned + 30):
            prompt = f"{n if n % 2 else n % 6:04d}" * 600 + f"{n % 4:04d}" * (n % 5 * 40)
            grade, predicted, actual, *_ = await ask(client, app, COMPLETIONS, {"prompt": prompt})
            assert n < earned or (grade, predicted) == ("exact", actual), n
            hits += actual
            await caught_up(app, engines)
        assert hits > 0


@pytest.mark.parametrize("name", MEMBERS)
def test_load(name: str) -> None:
    """The capacity, and what runs and waits for room, whichever kind of page says so."""
    member, calibration = MEMBERS[name], CALIBRATIONS[CALIBRATION]
    limits = member.limits(Limits(block_tokens=BLOCK, sequences_max=3))
    model = EngineModel(calibration.times, 20 * 2 * BLOCK, limits)
    for number in range(5):
        model.submit(EngineRequest(number, BLOCK, 8, [], None))
    step = model.begin()
    assert step is not None
    model.complete(step)
    load = parse_load(page_of(model, "m", member, 0))
    assert (load.running, load.waiting, load.kv_tokens_max) == (3, 2, 20 * 2 * BLOCK)


async def test_asleep() -> None:
    """A replica that sleeps is not ready, and is once it is awake."""
    chosen = EngineSettings(replicas=1, port=0, member=MEMBERS["vllm-asleep"])
    async with Engines(chosen) as engines, routing(*engines.urls) as app:
        (member,) = app.router.fleet.members.values()
        assert not member.ready
        async with ClientSession(engines.urls[0]) as session, session.post("/wake_up"):
            pass
        await app.control.probe_now()
        assert member.ready


async def test_processes() -> None:
    """What is known of a cache outlasts probes that read the pages of several processes, from the third page on."""
    several = MEMBERS["vllm-processes"]
    async with replicas(1, events=False, member=several) as engines, routing(*engines.urls) as app:
        for _ in range(3):
            await app.control.probe_now()
        async with ClientSession() as client:
            for n in range(4):
                _, predicted, actual, *_ = await ask(client, app, COMPLETIONS, {"prompt": "river " * 200})
                assert (predicted > 0) == (actual > 0), n
                await app.control.probe_now()


async def test_a_full_queue() -> None:
    """Requests that a full queue refuses open no breaker, and their clients are told when to come again."""
    async with replicas(1, events=False, member=MEMBERS["sglang-queue"]) as engines, routing(*engines.urls) as app:
        engines.replicas[0].model._sequences_max = 0  # nobody is admitted
        async with ClientSession() as client:
            body = {"model": "sim", "prompt": "river", "max_tokens": 8}
            waiting = [asyncio.create_task(client.post(engines.urls[0] + COMPLETIONS, json=body)) for _ in range(2)]
            while engines.replicas[0].model.waiting_n < 2:
                await asyncio.sleep(0.001)
            for n in range(4):
                async with client.post(app.url + COMPLETIONS, json=body | {"stream": n % 2 == 1}) as response:
                    assert response.status in (429, 503) or (n % 2 == 1 and b"queue is full" in await response.read())
                    assert response.status == 200 or "Retry-After" in response.headers
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        (member,) = app.router.fleet.members.values()
        assert member.breaker.state(0.0) is not State.OPEN
