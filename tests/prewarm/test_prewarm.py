"""Replicas that are warmed before their traffic comes, of a whole router before simulated engines."""

from __future__ import annotations

import asyncio
import io
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.engine.command import Engines, EngineSettings
from router.app import App
from router.core.facts.misses import Template
from router.core.facts.replicas import Replica
from router.prewarm.sending import PromptSender
from router.settings.schema import SettingsError
from tests.support.discovered import Told, told
from tests.support.fakes import FakeEngine, Reply, idle, mute, ok, reset, running, settings, status
from tests.support.keyring import Keyring
from tests.workers.test_processes import command

__all__ = ["told"]
CHAT = "/v1/chat/completions"
HEAD = "You answer in few words, and never in rhyme. " * 100


async def until(true: Callable[[], object]) -> None:
    """Return when it is true."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.002)


def chat(*texts: str, model: str = "m", head: str = HEAD) -> dict[str, Any]:
    """A conversation so far, on the shared system prompt."""
    messages = [{"role": "system", "content": head}]
    messages += [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
    return {"model": model, "messages": messages, "max_tokens": 4}


def asking(*bodies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A call's body."""
    return {"requests": [{"path": CHAT, "body": body} for body in bodies], "wait": True, **more}


async def call(client: ClientSession, app: App, body: Any, code: int = 200) -> dict[str, Any]:
    """POST /admin/prewarm."""
    sent: dict[str, Any] = {
        "data": io.BytesIO(json.dumps(body).encode()),
        "headers": {"Content-Type": "application/json"},
    }
    async with client.post(f"{app.admin_url}/admin/prewarm", **sent) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == code, answer
        return answer


async def page(client: ClientSession, app: App, name: str) -> dict[str, Any]:
    """One of the admin listener's."""
    async with client.get(f"{app.admin_url}/admin/{name}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def ask(client: ClientSession, url: str, body: dict[str, Any]) -> tuple[str, int, int]:
    """As a client: (replica, predicted tokens, tokens that the engine found cached)."""
    async with client.post(url + CHAT, json=body) as response:
        assert response.status == 200
        usage = (await response.json())["usage"]
        replica, predicted = (
            response.headers[f"x-warmroute-{each}"] for each in ("replica", "predicted-cached-tokens")
        )
        return replica, int(predicted), usage["prompt_tokens_details"]["cached_tokens"]


def file_of(folder: Path, *bodies: dict[str, Any]) -> str:
    """A file of prefixes."""
    file = folder / "prefixes.jsonl"
    file.write_text("\n".join(json.dumps({"path": CHAT, "body": body}) for body in bodies) + "\n\n")
    return str(file)


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Two of them, quick."""
    async with Engines(EngineSettings(replicas=2, port=0, time_scale=500.0)) as both:
        yield both


@asynccontextmanager
async def joining(source: Told, *engines: FakeEngine, **overrides: Any) -> AsyncIterator[App]:
    """A router that has the first of these, and is told of the others when it is ready."""
    first, *others = engines
    async with App(settings(**{"prewarm__hold_ready": True, "probe__interval_s": 0.02} | overrides)) as app:
        source.say(Replica(first.url, "1"))
        await until(app.router.fleet.ready)
        await until(lambda: not jobs(app))
        source.say(Replica(first.url, "1"), *(Replica(engine.url, "2") for engine in others))
        await until(lambda: len(app.router.fleet.members) == len(engines))
        yield app


def jobs(app: App) -> list[dict[str, Any]]:
    """What has not ended."""
    state = app.hub.warmer.state()
    return [*state["running"], *state["queue"]]


def ready(app: App) -> list[str]:
    """Ids of replicas that get traffic."""
    return [member.id for member in app.router.fleet.ready()]


# -- when asked ----------------------------------------------------------------------------------------------------


async def test_the_first_request_of_a_warmed_prompt_is_a_hit(client: ClientSession, engines: Engines) -> None:
    """By the engine's own count, on the replica that was warmed and no other; the router knew it, and nothing is left
    open. The request that warmed is none of the router's requests."""
    async with running(*engines.urls) as app:
        warm = engines.urls[1]
        answer = await call(client, app, asking(chat("hello", model="sim"), replicas=[warm]))
        (row,) = answer["replicas"]
        assert [row[key] for key in ("replica", "why", "state", "sent", "failed", "skipped", "cached_tokens")] == [
            warm, "asked", "done", 1, 0, 0, 0
        ]  # fmt: skip
        assert row["prompt_tokens"] > 1_000
        assert engines.replicas[0].model.counters.queried_tokens == 0
        replica, predicted, cached = await ask(client, app.url, chat("another question", model="sim"))
        assert replica == warm
        assert cached > 1_000
        assert abs(predicted - cached) < 200
        assert idle(app)
        assert app.hub.admission._admission._open == {}
        text = app.hub.metrics.page().decode()
        assert 'warmroute_prewarm_requests_total{result="ok"} 1.0' in text
        assert f"warmroute_prewarm_tokens_total {float(row['prompt_tokens'])}" in text
        assert len((await page(client, app, "decisions"))["decisions"]) == 1
        assert (await page(client, app, "prewarm"))["last"] == [row]


async def test_one_at_a_time(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """However many calls, replicas and prompts: one prompt is on its way. Calls that do not wait are told what will be
    sent."""
    at_once, most = 0, 0

    async def counted(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.002)  # while others could come
        at_once -= 1
        return await ok(fake, request)

    engine.script.extend([counted] * 6)
    other.script.extend([counted] * 6)
    async with running(engine, other) as app:
        body = asking(*(chat(text) for text in "abc"), wait=False)
        will = {"replicas": sorted((engine.url, other.url)), "requests": 3, "prefixes_file": "", "templates": 0}
        assert await call(client, app, body, 202) == {**will, "tokens_max": 200_000}
        await call(client, app, asking(*(chat(text) for text in "def")))
        assert (len(engine.seen), len(other.seen), most) == (6, 6, 1)
        assert [row["sent"] for row in (await page(client, app, "prewarm"))["last"]] == [3] * 4


async def test_calls_that_wait_are_limited(client: ClientSession, engine: FakeEngine) -> None:
    """Each keeps its prompts; what is there too much is turned away, and all goes on once there is room."""
    engine.script.append(mute)
    async with running(engine) as app:
        for _ in range(8):
            await call(client, app, asking(chat("hello"), wait=False), 202)
        assert (await call(client, app, asking(chat("hello")), 409))["error"]["code"] == "busy"
        state = await page(client, app, "prewarm")
        assert (len(state["running"]), len(state["queue"])) == (1, 7)
        assert (await page(client, app, "replicas"))["replicas"][0]["warming"] is True
        engine.go_on.set()
        await until(lambda: not jobs(app))
        await call(client, app, asking(chat("hello")))
        assert (await page(client, app, "replicas"))["replicas"][0]["warming"] is False


async def test_within_a_budget(client: ClientSession, engine: FakeEngine) -> None:
    """What would be more is skipped, and what is shorter still sent; what the engine has no room for is not either."""
    async with running(engine) as app:
        bodies = [chat("a", head="word " * 400), chat("b", head="word " * 4_000), chat("c", head="word " * 400)]
        (row,) = (await call(client, app, asking(*bodies, tokens_max=900)))["replicas"]
        assert (row["sent"], row["skipped"], row["state"]) == (2, 1, "done")
        assert row["errors"] == ["it would be more than the budget of tokens"]
        assert [len(seen.body) < 4_000 for seen in engine.seen] == [True, True]
    engine.metrics = 'vllm:cache_config_info{num_gpu_blocks="10",block_size="16"} 1.0\n'
    async with running(engine) as app:
        (row,) = (await call(client, app, asking(*bodies)))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 3)


async def test_clients_come_first(client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has as many requests as it may have is sent nothing until one has ended; and what it was warmed
    with is in no mean of clients' requests."""
    looks: list[str] = []
    full = PromptSender.full
    monkeypatch.setattr("router.prewarm.warmer.PAUSE_S", 0.0)
    monkeypatch.setattr(PromptSender, "full", lambda self, replica: looks.append(replica) or full(self, replica))
    engine.script.append(mute)
    async with running(engine, admission__in_flight_max=1) as app:
        first = asyncio.create_task(ask(client, app.url, chat("a")))
        await engine.at_work.wait()
        await call(client, app, asking(chat("b"), wait=False), 202)
        await until(lambda: len(looks) > 2)
        assert len(engine.seen) == 1
        engine.go_on.set()
        await first
        mean_tokens, answers = app.router.fleet.means.common.mean_answer_tokens, app.router.fleet.means.common.answers
        await until(lambda: not jobs(app))
        assert len(engine.seen) == 2
        speeds = app.router.fleet.means.common
        assert (speeds.mean_answer_tokens, speeds.answers) == (mean_tokens, answers) == (3.0, 1)


async def test_a_learned_template(client: ClientSession, engines: Engines) -> None:
    """Its request is sent, cut behind what is shared; one that does not begin with it, as an isolated tenant's without
    its salt does not, is not sent; nor is what is held already. The other conversation finds it."""
    async with running(*engines.urls) as app:
        observatory = app.hub.observatory
        assert observatory is not None
        first, second = engines.urls
        long = chat("first question", "answer " * 500, "second question " * 300, model="sim")
        await call(client, app, asking(long, replicas=[first]))
        (*_, key) = list(app.router.index.holders[first].recency.owner)[: len(HEAD) // 512]
        body = json.dumps(long).encode()
        observatory.know([Template(7, 0, len(HEAD), key, messages=1, conversations=3, path=CHAT, body=body)])
        observatory.know([Template(8, 0, len(HEAD), 12_345, messages=1, conversations=3, path=CHAT, body=body)])
        (row,) = (await call(client, app, {"templates": 9, "replicas": [second], "wait": True}))["replicas"]
        assert (row["sent"], row["skipped"]) == (1, 1)
        assert row["errors"] == ["its request does not begin with what is shared"]
        assert row["prompt_tokens"] < len(HEAD) / 3
        (row,) = (await call(client, app, {"templates": 9, "replicas": [second], "wait": True}))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 2)
        assert "it is held already" in row["errors"]
        observatory.know([Template(7, 0, len(HEAD), key, path="/v1/embeddings", body=body)])
        (row,) = (await call(client, app, {"templates": 9, "wait": True, "replicas": [first]}))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 2)


async def test_a_template_learned_from_traffic(client: ClientSession, engines: Engines) -> None:
    """What conversations share is warmed elsewhere: one that never came there finds it, by the engine's own count."""
    async with running(*engines.urls) as app:
        for number in range(4):
            holder, *_ = await ask(client, app.url, chat(f"question {number} " * 60, model="sim"))
        observatory = app.hub.observatory
        assert observatory is not None
        observatory.know(app.edge.templates()[""])
        (cold,) = {*engines.urls} - {holder}
        (row,) = (await call(client, app, {"templates": 1, "replicas": [cold], "wait": True}))["replicas"]
        assert (row["sent"], row["errors"]) == (1, [])
        async with client.post(cold + CHAT, json=chat("something else", model="sim")) as response:
            assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_000


async def test_other_dialects_and_keys(client: ClientSession, engine: FakeEngine) -> None:
    """Each prompt goes to its own path with the key that replicas are asked with, and its usage is read; what names a
    model that is not served is skipped."""
    head = [{"role": "user", "content": HEAD}]
    rows = [
        ("/v1/messages", {"model": "m", "messages": head, "max_tokens": 5}),
        ("/v1/responses", {"model": "m", "input": HEAD}),
        ("/v1/completions", {"prompt": HEAD}),
        ("/generate", {"text": HEAD}),
        (CHAT, {"model": "nobody-has-this", "messages": head}),
    ]
    key = {"upstream__api_key": "sk-of-replicas", "probe__api_key": "sk-of-probes"}
    async with running(engine, **key) as app:
        body = {"requests": [{"path": path, "body": body} for path, body in rows], "wait": True}
        (row,) = (await call(client, app, body))["replicas"]
        assert (row["sent"], row["skipped"]) == (4, 1)
        assert (row["prompt_tokens"], row["cached_tokens"]) == (400, 128)
        assert [seen.path for seen in engine.seen] == [path for path, _ in rows[:4]]
        assert {seen.headers["Authorization"] for seen in engine.seen} == {"Bearer sk-of-replicas"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "bad_body"), ({}, "nothing_wanted"), ({"replica": []}, "unknown field"), ({"templates": -1}, ">= 0"),
        ({"templates": 1, "tokens_max": 0}, ">= 1"), ({"templates": 1, "replicas": ["http://nobody"]}, "nobody"),
        ({"templates": 1, "replicas": []}, "no_replica"), ({"requests": [{"path": CHAT}]}, "body"),
        (asking([1]), "requests[0]"), ({"requests": [{"path": "/v1/embeddings", "body": {}}]}, "requests[0]: the path"),
        (asking(*[{}] * 65), "<= 64"),
    ],
)  # fmt: skip
async def test_bad_input(client: ClientSession, engine: FakeEngine, body: Any, said: str) -> None:
    """400, and it says what is wrong; nothing is sent."""
    async with running(engine) as app:
        assert said in str(await call(client, app, body, 400))
        assert not engine.seen


async def test_what_is_too_long_or_not_ready(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """More than 4 MiB are not read; less than that are, though other pages take no more than 4 KiB. A replica that is
    not ready is named."""
    other.healthy = False
    async with running(engine, other) as app:
        await call(client, app, asking(chat("x" * (4 << 20))), 413)
        await call(client, app, asking(chat("x" * (3 << 20)), tokens_max=1 << 24, replicas=[engine.url]))
        assert len(engine.seen) == 1
        answer = await call(client, app, asking(chat("a"), replicas=[other.url]), 400)
        assert answer["error"]["code"] == "not_ready"


# -- by itself -----------------------------------------------------------------------------------------------------


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
    [([mute], "it took longer than prewarm.timeout_s"), ([status(500)] * 3, "status 500"), ([reset], "Disconnected")],
)
async def test_warming_that_fails(
    told: Told, engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, replies: list[Reply], why: str
) -> None:
    """Too slow, refused or broken: the replica takes traffic as it is, the log says why, and what is left of the
    prompts is not sent. Nobody holds that against the replica where it answered."""
    file = file_of(tmp_path, *(chat(text) for text in "abcde"))
    async with FakeEngine() as new:
        new.script.extend(replies)
        async with joining(told, engine, new, prewarm__prefixes_file=file, prewarm__timeout_s=0.3) as app:
            await until(lambda: len(ready(app)) == 2)
            await until(lambda: not jobs(app))
            assert len(new.seen) == len(replies)
            assert why in str(app.hub.warmer.state()["last"][0]["errors"])
            assert app.router.fleet.members[new.url].breaker.failures == (replies == [reset])
            new.go_on.set()
            assert idle(app)
    assert "replica was not warmed as it should be" in [record.message for record in caplog.records]


async def test_an_outage_is_worse_than_a_miss(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """The only replica takes traffic at once; one that is held does so from the moment on that it is the only one."""
    async with FakeEngine() as new:
        engine.script.append(mute)
        new.script.append(mute)
        async with App(settings(prewarm__hold_ready=True, prewarm__prefixes_file=file_of(tmp_path, chat("a")))) as app:
            told.say()
            await app.hub.discovered.wait()
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
            assert [row["why"] for row in app.hub.warmer.state()["last"]] == [
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
            assert app.hub.admission._admission._open == {}
            assert [row["state"] for row in app.hub.warmer.state()["last"]] == ["done", "failed", "failed", "done"]


async def test_a_replica_that_restarts_too_often(
    told: Told, engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Is not warmed for ever, nor held."""
    async with FakeEngine() as new:
        async with joining(told, engine, new, prewarm__prefixes_file=file_of(tmp_path, chat("a"))) as app:
            for _ in range(9):
                await until(lambda: len(ready(app)) == 2)
                app.router.forget(new.url)
            await until(lambda: not jobs(app))
            assert len(new.seen) == 6
            assert len(ready(app)) == 2
    assert "replica is not warmed again: it restarts too often" in [record.message for record in caplog.records]


async def test_settings_that_change(told: Told, engine: FakeEngine, tmp_path: Path) -> None:
    """On SIGHUP another file holds from the next replica on; who is held for what is switched off is let go."""
    async with FakeEngine() as new, FakeEngine() as third:
        new.script.append(mute)
        file = file_of(tmp_path, chat("a"))
        async with joining(told, engine, new, prewarm__prefixes_file=file) as app:
            await new.at_work.wait()
            app.reload(settings(probe__interval_s=0.02))
            assert len(ready(app)) == 2
            new.go_on.set()
            await until(lambda: not jobs(app))
            app.reload(settings(probe__interval_s=0.02, prewarm__prefixes_file=file))
            told.say(Replica(engine.url, "1"), Replica(new.url, "2"), Replica(third.url, "3"))
            await until(lambda: third.seen)
            assert len(new.seen) == len(engine.seen) == 1


async def test_those_that_were_there_are_not_held(engine: FakeEngine, other: FakeEngine, tmp_path: Path) -> None:
    """A router that is new before a fleet that serves takes nobody out; all are warmed, one after another. Who did not
    listen when it came is held when it does."""
    await other.stop()
    file = file_of(tmp_path, chat("a"))
    options = {"prewarm__hold_ready": True, "prewarm__prefixes_file": file, "probe__interval_s": 0.02}
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
        async with App(settings(prewarm__hold_ready=True, prewarm__prefixes_file=file)) as app:
            await asyncio.to_thread(Path(file).unlink)
            told.say(Replica(engine.url))
            await until(app.router.fleet.ready)
            told.say(Replica(engine.url), Replica(new.url))
            await until(lambda: len(ready(app)) == 2)
            assert "No such file" in str(app.hub.warmer.state()["last"])
        async with joining(told, engine, new, prewarm__templates=3) as app:
            await until(lambda: len(ready(app)) == 2)
        async with joining(told, engine, new) as app:
            await until(lambda: len(ready(app)) == 2)
            assert app.hub.warmer.state() == {"running": [], "queue": [], "last": []}
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
        observatory = app.hub.observatory
        assert observatory is not None
        observatory.know(app.edge.templates()[""])
        assert observatory.hottest(9)
        sent = len(engine.seen)
        (row,) = (await call(client, app, {"templates": 9, "wait": True}))["replicas"]
        assert row["sent"] == 0
        assert row["errors"] == ["its request does not begin with what is shared"]
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


@pytest.mark.usefixtures("bare_environment")
async def test_with_two_workers(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """The hub warms, whoever serves: the first request of either worker is predicted to be a hit."""
    file = file_of(tmp_path, chat("a"))
    async with command(engine, prewarm__prefixes_file=file, prewarm__hold_ready="true") as router:
        await until(lambda: router.said("replica is warm"))
        assert (await ask(client, router.url, chat("b")))[1] > 0
        assert [json.loads(seen.body)["max_tokens"] for seen in engine.seen] == [1, 4]
