"""What clients see when the picker or a replica fails, behind a real Envoy; tests/envoy/test_away.py has what is closed
then."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from loadtest.common.envoy import EnvoyMode
from loadtest.common.processes import free_port
from router.core.types.placements import PlacementReason
from tests.envoy.envoy import MODES, behind, chat, front, picker_process
from tests.extproc.asking import CHAT, endpoint, picking
from tests.support.fakes import FakeEngine, events, half_then_waits
from tests.support.keyring import Keyring
from tests.support.waiting import until


async def asked(client: aiohttp.ClientSession, url: str, count: int = 6) -> list[int]:
    """Statuses of so many requests, one after the other."""
    statuses = []
    for n in range(count):
        async with client.post(url + CHAT, json=chat(f"{n}")) as answer:
            statuses.append(answer.status)
            await answer.read()
    return statuses


async def test_a_picker_that_dies_hangs_and_comes_back(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """At a gateway that fails open: killed, stopped and started again under load, no request fails and no stream is
    cut. Envoy serves from the cluster by itself, and asks again as soon as there is a picker to ask. The upstream's
    conformance test EppUnAvailableFailOpen is the half of it that kills."""
    port = free_port()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(3)]
        mode = EnvoyMode(message_timeout="0.5s", fail_open=True)
        envoy = await stack.enter_async_context(front(tmp_path, port, [each.port for each in engines], mode))
        assert await asked(client, envoy.url) == [200] * 6  # nobody listens yet
        over = asyncio.Event()
        loaded = [asyncio.create_task(_loaded(client, envoy.url, over)) for _ in range(4)]
        async with picker_process(port, *engines) as picker:
            await _picked(client, envoy.url)
            picker.send_signal(signal.SIGSTOP)
            assert await asked(client, envoy.url, 3) == [200] * 3
            picker.send_signal(signal.SIGCONT)
            await _picked(client, envoy.url)
            picker.kill()
            assert await asked(client, envoy.url) == [200] * 6
        async with picker_process(port, *engines):
            await _picked(client, envoy.url)
            over.set()
            results = [result for each in await asyncio.gather(*loaded) for result in each]
        assert len(results) > 20
        assert set(results) == {(200, b"".join(events()))}


async def _loaded(client: aiohttp.ClientSession, url: str, over: asyncio.Event) -> list[tuple[int, bytes]]:
    """Statuses and bodies of streams that are asked for until it is over, whatever becomes of the picker meanwhile."""
    results = []
    while not over.is_set():
        async with client.post(url + CHAT, json=chat(f"{len(results)} " * 50, stream=True)) as answer:
            results.append((answer.status, await answer.read()))
    return results


async def _picked(client: aiohttp.ClientSession, url: str) -> None:
    """Ask until an answer bears a receipt; every answer is 200."""
    async with asyncio.timeout(120):
        while True:
            async with client.post(url + CHAT, json=chat("x")) as answer:
                assert answer.status == 200
                if "x-warmroute-replica" in answer.headers:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_streams_outlive_their_picker(tmp_path: Path, client: aiohttp.ClientSession, how: signal.Signals) -> None:
    """Streams that pass a picker by come whole if it is told to end, and then it does not wait for them; if it dies, at
    a gateway that fails open. One that fails closed cuts them, as it would a request of which nothing is known."""
    port = free_port()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine())
        mode = EnvoyMode(fail_open=how is signal.SIGKILL)
        envoy = await stack.enter_async_context(front(tmp_path, port, [engine.port], mode))
        async with picker_process(
            port, engine, **{"extproc.response_sample_ratio": 0.0}
        ) as picker:  # one that is shown would be waited for
            await _picked(client, envoy.url)
            engine.script.append(half_then_waits)
            async with client.post(envoy.url + CHAT, json=chat("x", stream=True)) as answer:
                await engine.at_work.wait()
                picker.send_signal(how)
                async with asyncio.timeout(120):  # of a drain of ten minutes
                    assert await picker.wait() == (0 if how is signal.SIGTERM else -how)
                engine.go_on.set()
                assert await answer.read() == b"".join(events())


async def test_a_dead_replica_is_walked_past_and_the_lease_moves(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Envoy cannot connect and takes the next endpoint: the client has its answer, the record says who gave it, and the
    lease was moved there."""
    async with behind(tmp_path, **{"probe.interval_s": 3600}) as (envoy, app, engines):
        dead = engines[0]
        await dead.stop()
        statuses, moved = [], []
        for n in range(12):
            async with client.post(envoy.url + CHAT, json=chat(f"{n} " * 200)) as answer:
                statuses.append(answer.status)
                if answer.headers["x-warmroute-reason"] == PlacementReason.RETRY:
                    moved.append(answer.headers["x-warmroute-replica"])
        assert statuses == [200] * 12
        assert moved
        assert dead.url not in moved
        await until(lambda: len(app.control.history.recent) == 12)
        kinds = {each for record in app.control.history.recent for each in record.retries}
        assert kinds == {("fallback", dead.url)}
        assert not any(member.leases for member in app.router.members)
        assert app.router.fleet.member(dead.url).breaker.failures or app.router.fleet.member(dead.url).breaker.backoff_s  # type: ignore[union-attr]  # it is there


async def test_a_replica_that_dies_in_mid_stream(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """The client's stream breaks off, so that it can tell, the lease comes back, and the next request is served."""
    for mode in (EnvoyMode(), MODES["streamed"]):
        async with behind(tmp_path, count=2, mode=mode) as (envoy, app, engines):
            for each in engines:
                each.script.append(half_then_waits)
            async with client.post(envoy.url + CHAT, json=chat("x", stream=True)) as answer:
                (dying,) = [each for each in engines if each.url == answer.headers["x-warmroute-replica"]]
                await answer.content.readexactly(len(b"".join(events()[:2])))
                await dying.stop()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            await until(lambda app=app: not any(member.leases for member in app.router.members))
            for each in engines:
                each.script.clear()
            assert await asked(client, envoy.url) == [200] * 6


async def test_the_official_client_understands_refusals(tmp_path: Path) -> None:
    """429 with its wait, 503, 401, 400 and 404 come as the official OpenAI client's own exceptions, with their codes;
    the list of models is the router's own."""
    ring = Keyring(tmp_path, acme={"requests_per_min": 1})
    async with behind(tmp_path, count=1, **{"auth.keys_file": str(ring.file)}) as (envoy, app, (engine,)):
        key, messages = ring.keys["acme"], [{"role": "user", "content": "x"}]

        async def failing(kind: type[openai.APIStatusError], *, key: str, **body: Any) -> openai.APIStatusError:
            async with openai.AsyncOpenAI(base_url=envoy.url + "/v1", api_key=key, max_retries=0) as official:
                with pytest.raises(kind) as caught:
                    await official.chat.completions.create(**({"model": "m", "messages": messages} | body))
            return caught.value

        async with openai.AsyncOpenAI(base_url=envoy.url + "/v1", api_key=key, max_retries=0) as official:
            assert [model.id async for model in official.models.list()] == ["m"]
            answer = await official.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]  # a list of dicts
            assert answer.choices[0].message.content == "hi"
        limited = await failing(openai.RateLimitError, key=key)
        assert (limited.code, limited.response.headers["x-llm-d-request-dropped-reason"]) == ("rate_limited",) * 2
        assert int(limited.response.headers["retry-after"]) >= 1
        assert (await failing(openai.AuthenticationError, key="nobody")).code == "invalid_api_key"
        assert len(engine.seen) == 1
    async with behind(tmp_path, count=1) as (envoy, app, (engine,)):
        assert (await failing(openai.NotFoundError, key="x", model="none")).code == "model_not_found"
        assert (await failing(openai.BadRequestError, key="x", model=1)).code == "invalid_model"
        engine.healthy = False
        await until(lambda: not app.router.fleet.ready())
        nobody = await failing(openai.InternalServerError, key="x")
        assert (nobody.status_code, nobody.code) == (503, "no_replica_ready")


async def test_replicas_restart_one_after_the_other(tmp_path: Path) -> None:
    """All replicas are restarted in turn under streaming load, each when nothing runs there any more: no request
    fails, and no stream is cut."""
    async with behind(tmp_path, count=3) as (envoy, app, engines):
        over, results = asyncio.Event(), list[tuple[int, bool]]()

        async def stream(number: int) -> None:
            async with aiohttp.ClientSession() as client:
                n = 0
                while not over.is_set():
                    n += 1
                    body = chat(f"{number} {n % 5} " * 100, stream=True)
                    async with client.post(envoy.url + CHAT, json=body) as answer:
                        got = await answer.read()
                        results.append((answer.status, got == b"".join(events())))

        streaming = [asyncio.create_task(stream(number)) for number in range(8)]
        for engine in engines:
            member = app.router.fleet.member(engine.url)
            assert member is not None
            engine.healthy = False  # as a pod that is told to end: not ready first, gone when it has answered
            await until(lambda member=member: not member.ready and not member.leases)
            port = engine.port
            await engine.stop()
            await asyncio.sleep(0.2)
            engine.port, engine.healthy = port, True
            await engine.__aenter__()
            await until(lambda member=member: app.router.fleet.member(member.id) is not None and member.ready)
            before = len(results)
            await until(lambda before=before: len(results) > before + 40)
        over.set()
        await asyncio.gather(*streaming)
        assert len(results) > 120
        assert set(results) == {(200, True)}


async def test_two_pickers_decide_alike(tmp_path: Path, engine: FakeEngine, other: FakeEngine) -> None:
    """Two pickers that are asked alike decide alike: the same conversations go to the same replicas by either."""
    async with picking(engine, other) as one, picking(engine, other) as two:
        async with AsyncExitStack() as stack:
            fronts = []
            for n, app in enumerate((one, two)):
                folder = tmp_path / str(n)
                folder.mkdir()
                ports = [engine.port, other.port]
                fronts.append(await stack.enter_async_context(front(folder, app.extproc.port, ports)))
            homes = []
            async with aiohttp.ClientSession() as client:
                for each in fronts:
                    told = []
                    for n in range(8):
                        async with client.post(each.url + CHAT, json=chat(f"{n} " * 400)) as answer:
                            told.append(answer.headers["x-warmroute-replica"])
                    homes.append(told)
            assert homes[0] == homes[1]
            assert {endpoint(engine), endpoint(other)} == {url.removeprefix("http://") for url in homes[0]}
