"""Replicas that join, restart or fail while their caches are warmed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.config.schema import SettingsError
from router.core.types.replicas import Replica
from router.router_server import RouterServer
from tests.prewarm.warmed import CHAT, HEAD, ask, asking, call, chat, jobs, page
from tests.support.discovered import Told
from tests.support.fakes import FakeEngine, Reply, idle, mute, reset, running, settings, status
from tests.support.keyring import Keyring
from tests.support.waiting import until


def file_of(folder: Path, *bodies: dict[str, Any]) -> str:
    """A file of prefixes."""
    file = folder / "prefixes.jsonl"
    file.write_text("\n".join(json.dumps({"path": CHAT, "body": body}) for body in bodies) + "\n\n")
    return str(file)


@asynccontextmanager
async def joining(source: Told, *engines: FakeEngine, **overrides: Any) -> AsyncIterator[RouterServer]:
    """A router that has the first of these, and is told of the others when it is ready."""
    first, *others = engines
    async with RouterServer(
        resolve(settings(**{"prewarm__block_readiness": True, "probe__interval_s": 0.02} | overrides))
    ) as app:
        source.say(Replica(first.url, "1"))
        await until(app.router.fleet.ready)
        await until(lambda: not jobs(app))
        source.say(Replica(first.url, "1"), *(Replica(engine.url, "2") for engine in others))
        await until(lambda: len(app.router.fleet.members) == len(engines))
        yield app


def ready(app: RouterServer) -> list[str]:
    """Ids of replicas that get traffic."""
    return [member.id for member in app.router.fleet.ready()]


async def test_before_its_traffic(client: ClientSession, told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """Who joins gets nothing while it is warmed, and says so; then it is one like any other, and is believed to hold
    what it was sent."""
    async with FakeEngine() as new:
        new.script.append(mute)
        policy = {"routing__policy": "round_robin"}
        async with joining(told, engine, new, prewarm__prefixes_file=file_of(tmp_path, chat("a")), **policy) as app:
            await new.at_work.wait()
            assert ready(app) == [engine.url]
            for _ in range(3):
                assert (await ask(client, app.url, chat("b")))[0] == engine.url
            rows = {
                row["id"]: (row["ready"], row["warming"]) for row in (await page(client, app, "replicas"))["replicas"]
            }
            assert rows == {engine.url: (True, False), new.url: (False, True)}
            overview = (await page(client, app, "observatory"))["replicas"]
            assert {row["id"]: row["warming"] for row in overview} == {engine.url: False, new.url: True}
            assert app.router.fitness.panics == 0
            new.go_on.set()
            await until(lambda: len(ready(app)) == 2)
            assert app.router.index.blocks(new.url) > 5
            assert {(await ask(client, app.url, chat("b")))[0] for _ in range(2)} == {engine.url, new.url}
            assert [json.loads(seen.body)["max_tokens"] for seen in new.seen] == [1, 4]


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([mute], "prewarming took longer than prewarm.timeout_s"),
        ([status(500)] * 3, "status 500"),
        ([reset], "closed"),
    ],
)
async def test_warming_that_fails(
    told: Told, engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, replies: list[Reply], why: str
) -> None:
    """Too slow, refused or broken: the replica receives traffic as it is, the log says why, and what is left of the
    prompts is not sent. Nobody holds that against the replica where it answered."""
    file, late_s = file_of(tmp_path, *(chat(text) for text in "abcde")), 0.3 if replies == [mute] else 60.0
    async with FakeEngine() as new:
        new.script.extend(replies)
        async with joining(told, engine, new, prewarm__prefixes_file=file, prewarm__timeout_s=late_s) as app:
            await until(lambda: len(ready(app)) == 2)
            await until(lambda: not jobs(app))
            assert len(new.seen) == len(replies)
            assert why in str(app.control.warmer.state()["last"][0]["errors"])
            assert app.router.fleet.members[new.url].breaker.failures == (replies == [reset])
            new.go_on.set()
            assert idle(app)
    assert "prewarming of a replica was incomplete" in [record.message for record in caplog.records]


async def test_an_outage_is_worse_than_a_miss(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """The only replica receives traffic at once; one that is held does so as soon as it is the only one."""
    async with FakeEngine() as new:
        engine.script.append(mute)
        new.script.append(mute)
        async with RouterServer(
            resolve(settings(prewarm__block_readiness=True, prewarm__prefixes_file=file_of(tmp_path, chat("a"))))
        ) as app:
            told.say()
            await app.control.lifecycle.discovered.wait()
            told.say(Replica(engine.url))
            await engine.at_work.wait()
            assert ready(app) == [engine.url]
            engine.go_on.set()
            await until(lambda: not jobs(app))
            told.say(Replica(engine.url), Replica(new.url))
            await new.at_work.wait()
            assert ready(app) == [engine.url]
            told.say(Replica(new.url))
            await until(lambda: ready(app) == [new.url])
            new.go_on.set()


async def test_a_restart_is_warmed_again(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """Counters that went back, nobody who listens, another engine at the address: each is a new life, held and warmed
    as one that joins. Nothing happens as long as nothing changes."""
    async with FakeEngine() as new:
        new.metrics = "vllm:prompt_tokens_total 500.0\n"
        file = file_of(tmp_path, chat("a"))
        async with joining(told, engine, new, prewarm__prefixes_file=file) as app:
            await until(lambda: len(ready(app)) == 2)
            probed = new.probes["metrics"]
            await until(lambda: new.probes["metrics"] > probed + 1)
            assert len(new.seen) == 1
            new.script.append(mute)
            new.metrics = "vllm:prompt_tokens_total 7.0\n"
            await new.at_work.wait()
            assert ready(app) == [engine.url]
            new.go_on.set()
            await until(lambda: len(ready(app)) == 2)
            await new.stop()
            await until(lambda: len(ready(app)) == 1)
            async with FakeEngine(port=new.port) as again:
                await until(lambda: len(ready(app)) == 2)
                assert len(again.seen) == 1
                told.say(Replica(engine.url, "1"), Replica(again.url, "3"))
                await until(lambda: len(again.seen) == 2)
                await until(lambda: len(ready(app)) == 2)
            assert [row["why"] for row in app.control.warmer.state()["last"]] == [
                "joined", "restarted", "restarted", "joined", "joined"
            ]  # fmt: skip


async def test_another_engine_comes_while_one_is_warmed(
    client: ClientSession, told: Told, engine: FakeEngine, tmp_path: Path
) -> None:
    """What is under way to the former ends at once, and nobody waits for it: neither the call that asked, nor the next
    one, which is held and warmed for itself."""
    async with FakeEngine() as new:
        new.script.append(mute)
        async with joining(told, engine, new, prewarm__prefixes_file=file_of(tmp_path, chat("a"))) as app:
            await new.at_work.wait()
            asked = asyncio.create_task(call(client, app, asking(chat("b"), replicas=[new.url])))
            await until(lambda: len(jobs(app)) == 2)
            told.say(Replica(engine.url, "1"), Replica(new.url, "3"))
            assert (await asked)["replicas"][0]["errors"] == ["it left"]
            await until(lambda: len(ready(app)) == 2)
            assert new.cancelled.is_set()
            assert len(new.seen) == 2
            assert idle(app)
            assert app.control.admission._admission.tenants == {}
            assert [row["state"] for row in app.control.warmer.state()["last"]] == ["done", "failed", "failed", "done"]


async def test_a_replica_that_restarts_too_often(
    told: Told, engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Is not warmed for ever, nor held."""
    async with FakeEngine() as new:
        async with joining(told, engine, new, prewarm__prefixes_file=file_of(tmp_path, chat("a"))) as app:
            for _ in range(9):
                await until(lambda: len(ready(app)) == 2)
                app.router.observations.forget(new.url)
            await until(lambda: not jobs(app))
            assert len(new.seen) == 6
            assert len(ready(app)) == 2
    assert "replica is not prewarmed again: it restarts too often" in [record.message for record in caplog.records]


async def test_settings_that_change(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """On SIGHUP another file holds from the next replica on; who is held for what is switched off is let go."""
    async with FakeEngine() as new, FakeEngine() as third:
        new.script.append(mute)
        file = file_of(tmp_path, chat("a"))
        async with joining(told, engine, new, prewarm__prefixes_file=file) as app:
            await new.at_work.wait()
            app.apply(resolve(settings(probe__interval_s=0.02)))
            assert len(ready(app)) == 2
            new.go_on.set()
            await until(lambda: not jobs(app))
            app.apply(resolve(settings(probe__interval_s=0.02, prewarm__prefixes_file=file)))
            told.say(Replica(engine.url, "1"), Replica(new.url, "2"), Replica(third.url, "3"))
            await until(lambda: third.seen)
            assert len(new.seen) == len(engine.seen) == 1


async def test_those_that_were_there_are_not_held(engine: FakeEngine, other: FakeEngine, tmp_path: Path) -> None:
    """A router that is new before a fleet that serves takes nobody out; all are warmed, one after another. Who did not
    listen when it came is held when it does."""
    await other.stop()
    file = file_of(tmp_path, chat("a"))
    options = {"prewarm__block_readiness": True, "prewarm__prefixes_file": file, "probe__interval_s": 0.02}
    engine.script.append(mute)
    third = FakeEngine(script=deque([mute]))
    async with third, running(engine, third, other, **options) as app:
        await until(lambda: len(ready(app)) == 2)
        await until(lambda: engine.seen or third.seen)
        assert len(engine.seen) + len(third.seen) == 1
        engine.go_on.set()
        third.go_on.set()
        await until(lambda: engine.seen and third.seen)
        late = FakeEngine(port=other.port)
        late.script.append(mute)
        async with late:
            await late.at_work.wait()
            assert len(ready(app)) == 2
            late.go_on.set()
            await until(lambda: len(ready(app)) == 3)


async def test_without_prompts_nobody_waits(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """A file that is gone, or templates that nobody has learned, hold up nobody for long; without either there is no
    warming at all."""
    file = file_of(tmp_path, chat("a"))
    async with FakeEngine() as new:
        async with RouterServer(resolve(settings(prewarm__block_readiness=True, prewarm__prefixes_file=file))) as app:
            await asyncio.to_thread(Path(file).unlink)
            told.say(Replica(engine.url))
            await until(app.router.fleet.ready)
            told.say(Replica(engine.url), Replica(new.url))
            await until(lambda: len(ready(app)) == 2)
            assert "No such file" in str(app.control.warmer.state()["last"])
        async with joining(told, engine, new, prewarm__templates=3) as app:
            await until(lambda: len(ready(app)) == 2)
        async with joining(told, engine, new) as app:
            await until(lambda: len(ready(app)) == 2)
            assert app.control.warmer.state() == {"running": [], "queue": [], "last": []}
        assert engine.seen == new.seen == []


def test_a_file_of_prefixes_is_checked(tmp_path: Path) -> None:
    """With the line of each problem, when the router starts and when the settings are checked."""
    file = tmp_path / "prefixes.jsonl"
    lines = [{"path": CHAT, "body": chat("a")}, {"path": "/v1/embeddings", "body": {}}, {"body": {}}]
    file.write_text("\n".join([*map(json.dumps, lines), "", "{", json.dumps({"path": CHAT, "body": []})]))
    with pytest.raises(SettingsError) as error:
        settings(prewarm__prefixes_file=str(file))
    assert [f"line {number}:" in problem for number, problem in zip((3, 5, 2, 6), error.value.problems, strict=True)]
    assert all(problem.startswith("'prewarm.prefixes_file'") for problem in error.value.problems)
    with pytest.raises(SettingsError, match="No such file"):
        settings(prewarm__prefixes_file=str(tmp_path / "none"))
    file.write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(SettingsError, match="longer than 16 MiB"):
        settings(prewarm__prefixes_file=str(file))


@pytest.mark.promise(
    "Prewarming sends no isolated tenant's text, within bounds, and only to replicas of the fleet.", "tenants"
)
async def test_a_tenants_template_stays_its_own(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """What an isolated tenant's requests share is warmed for nobody: without its salt it would be in a cache that
    others can ask."""
    ring = Keyring(tmp_path, acme={"isolate": True})
    engine.owned_by = "vllm"
    async with running(engine, **ring.settings) as app:
        for number in range(4):
            body = chat(f"question {number} " * 50)
            async with client.post(app.url + CHAT, json=body, headers=ring.of("acme")) as response:
                assert response.status == 200
        observatory = app.control.observatory
        assert observatory is not None
        observatory.register_templates(app.control.frontends.templates())
        assert observatory.hottest(9)
        sent = len(engine.seen)
        (row,) = (await call(client, app, {"templates": 9, "wait": True}))["replicas"]
        assert row["sent"] == 0
        assert row["errors"] == ["its request does not begin with the shared prefix"]
        assert len(engine.seen) == sent


async def test_ranks(client: ClientSession, engine: FakeEngine) -> None:
    """Each rank of a server is warmed by itself: it is named in a header, and for SGLang in the body."""
    engine.kv_event_sources = {"0": {"publisher": "zmq"}, "1": {"publisher": "zmq"}}
    async with running(engine) as app:
        ranks = [f"{engine.url}#dp{rank}" for rank in (0, 1)]
        assert ready(app) == ranks
        body = {"requests": [{"path": "/generate", "body": {"text": HEAD}}], "replicas": ranks[::-1], "wait": True}
        await call(client, app, body)
        assert [seen.headers["X-data-parallel-rank"] for seen in engine.seen] == ["1", "0"]
        assert [app.router.index.blocks(rank) > 5 for rank in ranks] == [True, True]
        assert "rank" in str(engine.seen[0].json)
