"""Replicas that are warmed before their traffic comes, of a whole router before simulated engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.fake_engine.command import Engines
from router.core.types.cache_misses import Template
from router.core.types.disagg_types import KvConnector
from router.prewarm.sender import PromptSender
from tests.prewarm.warmed import CHAT, HEAD, ask, asking, call, chat, jobs, page
from tests.support.fakes import FakeEngine, idle, mute, ok, running
from tests.support.waiting import until


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
        assert app.control.admission._admission.tenants == {}
        text = app.control.metrics.page().decode()
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
        assert row["errors"] == ["it would exceed the token budget"]
        assert [len(seen.body) < 4_000 for seen in engine.seen] == [True, True]
    engine.metrics = 'vllm:cache_config_info{num_gpu_blocks="10",block_size="16"} 1.0\n'
    async with running(engine) as app:
        (row,) = (await call(client, app, asking(*bodies)))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 3)


async def test_clients_come_first(client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has as many requests as it may have is sent nothing until one has ended; and what it was warmed
    with is in no mean of clients' requests."""
    looks: list[str] = []
    full = PromptSender.is_at_capacity
    monkeypatch.setattr("router.prewarm.warmer.PAUSE_S", 0.0)
    monkeypatch.setattr(
        PromptSender, "is_at_capacity", lambda self, replica: looks.append(replica) or full(self, replica)
    )
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
        observatory = app.control.observatory
        assert observatory is not None
        first, second = engines.urls
        long = chat("first question", "answer " * 500, "second question " * 300, model="sim")
        await call(client, app, asking(long, replicas=[first]))
        (*_, key) = list(app.router.index.holders[first].recency.owner)[: len(HEAD) // 512]
        body = json.dumps(long).encode()
        observatory.register_templates(
            [Template(7, 0, len(HEAD), key, messages=1, conversations=3, path=CHAT, body=body)]
        )
        observatory.register_templates(
            [Template(8, 0, len(HEAD), 12_345, messages=1, conversations=3, path=CHAT, body=body)]
        )
        (row,) = (await call(client, app, {"templates": 9, "replicas": [second], "wait": True}))["replicas"]
        assert (row["sent"], row["skipped"]) == (1, 1)
        assert row["errors"] == ["its request does not begin with the shared prefix"]
        assert row["prompt_tokens"] < len(HEAD) / 3
        (row,) = (await call(client, app, {"templates": 9, "replicas": [second], "wait": True}))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 2)
        assert "it is cached already" in row["errors"]
        observatory.register_templates([Template(7, 0, len(HEAD), key, path="/v1/embeddings", body=body)])
        (row,) = (await call(client, app, {"templates": 9, "wait": True, "replicas": [first]}))["replicas"]
        assert (row["sent"], row["skipped"]) == (0, 2)


async def test_a_template_learned_from_traffic(client: ClientSession, engines: Engines) -> None:
    """What conversations share is warmed elsewhere: one that never came there finds it, by the engine's own count."""
    async with running(*engines.urls) as app:
        for number in range(4):
            holder, *_ = await ask(client, app.url, chat(f"question {number} " * 60, model="sim"))
        observatory = app.control.observatory
        assert observatory is not None
        observatory.register_templates(app.control.frontends.templates())
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


async def test_a_server_that_takes_no_whole_prompts_is_sent_none(client: ClientSession, engine: FakeEngine) -> None:
    """SGLang's servers that prefill or decode would refuse each."""
    async with running(engine, **{"disagg.kv_connector": "sglang"}) as app:
        app.router.disaggregator.set_connector(engine.url, KvConnector.SGLANG, "")
        (row,) = (await call(client, app, asking(chat("a"))))["replicas"]
        assert (row["sent"], row["skipped"], row["errors"]) == (0, 1, ["it accepts only disaggregated requests"])
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
