"""The whole router: conversations stay where their cache is, and what is said about it is true."""

import asyncio
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings
from tests.support.fakes import FakeEngine, running

CHAT = "/v1/chat/completions"


async def test_conversation_stays(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Every turn of a conversation goes where the first went, with a growing prediction."""
    async with running(engine, other) as app:
        messages = [{"role": "user", "content": "tell me " * 300}]
        homes, predicted = set(), []
        for turn in range(5):
            async with client.post(app.url + CHAT, json={"model": "m", "messages": messages}) as response:
                homes.add(response.headers["x-warmroute-replica"])
                predicted.append(int(response.headers["x-warmroute-predicted-cached-tokens"]))
            messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": f"more {turn} " * 200}]
        assert len(homes) == 1
        assert predicted[0] == 0
        assert predicted == sorted(set(predicted))


async def test_salt_and_adapter_separate(client: ClientSession, engine: FakeEngine) -> None:
    """A cache salt, another model name or other tools share nothing with an otherwise equal prompt."""
    engine.models = ("m", "lora")
    text = [{"role": "user", "content": "same " * 500}]
    variants: list[dict[str, Any]] = [
        {"model": "m"},
        {"model": "lora"},
        {"model": "m", "cache_salt": "s"},
        {"model": "m", "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    async with running(engine) as app:
        for expect_hit in (False, True):
            for variant in variants:
                async with client.post(app.url + CHAT, json={"messages": text, **variant}) as response:
                    hit = int(response.headers["x-warmroute-predicted-cached-tokens"]) > 0
                assert hit is expect_hit


async def test_actual_tokens_are_counted(client: ClientSession, engine: FakeEngine) -> None:
    """What the engine reports as cached is in the metrics, beside what was predicted."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}):
            pass
        async with client.get(app.url + "/metrics") as response:
            page = await response.text()
        assert 'warmroute_cached_tokens_total{model="m"} 32.0' in page
        assert 'warmroute_reported_prompt_tokens_total{model="m"} 100.0' in page
        assert 'warmroute_token_hit_ratio{model="m"} 0.32' in page
        assert 'warmroute_token_hit_verified_ratio{model="m"} 1.0' in page
        assert 'warmroute_token_hit_rate{kind="actual"} 0.32' in page
        assert 'warmroute_decisions_total{model="m",policy="warm",reason="only"} 1.0' in page


@pytest.mark.inside
async def test_label_values_are_bounded(
    client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models and paths make no new series."""
    monkeypatch.setattr("router.engines.probe.LOOK_S", 0.0)  # each unknown model has the lists of models read again
    async with running(engine) as app:

        async def series() -> int:
            async with client.get(app.admin_url + "/metrics") as response:
                return (await response.text()).count("\n")

        for n in range(2):
            async with client.post(app.url + CHAT, json={"model": f"no-{n}", "messages": []}):
                pass
            async with client.post(f"{app.url}/path/{n}"):
                pass
        before = await series()
        for n in range(50):
            async with client.post(app.url + CHAT, json={"model": f"random-{n}", "messages": []}):
                pass
            async with client.get(f"{app.url}/random/{n}"):
                pass
        assert await series() == before


async def test_prediction_against_simulated_engine(client: ClientSession) -> None:
    """Against the simulated engine, predicted and reported cached tokens differ by less than our block and the tail,
    also where an answer became part of the prompt."""
    async with Engines(EngineSettings(replicas=2, port=0, time_scale=500.0)) as engines, running(*engines.urls) as app:
        messages: list[dict[str, str]] = [{"role": "user", "content": "please tell me a very long story " * 40}]
        for turn in range(5):
            body = {"model": "sim", "messages": messages, "max_tokens": 150}
            async with client.post(app.url + CHAT, json=body) as response:
                predicted = int(response.headers["x-warmroute-predicted-cached-tokens"])
                answer = await response.json()
            usage = answer["usage"]
            if turn:
                assert abs(predicted - usage["prompt_tokens_details"]["cached_tokens"]) < 128 + 16
            messages.append(answer["choices"][0]["message"] | {"refusal": None})
            messages.append({"role": "user", "content": f"and then, {turn}? " * 30})


async def test_openai_client(engine: FakeEngine) -> None:
    """The official client works through the router: chat, streaming, tools, embeddings' error path, models."""
    async with (
        Engines(EngineSettings(replicas=2, port=0, time_scale=500.0)) as engines,
        running(*engines.urls) as app,
        openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x") as ai,
    ):
        ask: Any = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        whole = await ai.chat.completions.create(**ask)
        assert whole.choices[0].message.content
        parts = [part async for part in await ai.chat.completions.create(**ask, stream=True)]
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert said == whole.choices[0].message.content
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        assert (await ai.chat.completions.create(**ask, tools=tools)).usage
        with pytest.raises(openai.BadRequestError):
            await ai.embeddings.create(model="sim", input="x")
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(**{**ask, "model": "gpt"})
        assert [model.id async for model in ai.models.list()] == ["sim"]
        assert (await ai.completions.create(model="sim", prompt=[1, 2, 3], max_tokens=4)).choices[0].text


async def test_of_two_models_one_is_down(client: ClientSession) -> None:
    """Requests for a model whose replicas are not ready count as failed for that model, and its number of ready
    replicas is 0 while the other model is served; a name that nobody serves is no label."""
    async with FakeEngine(models=("large",)) as large, FakeEngine(models=("small",)) as small:
        async with running(large, small) as app:
            small.healthy = False
            async with asyncio.timeout(60):
                while len(app.router.fleet.ready()) > 1:
                    await app.control.probe_now()
            statuses = []
            for model in ("large", "small", "nobody's"):
                async with client.post(app.url + CHAT, json={"model": model, "messages": []}) as response:
                    statuses.append(response.status)
            page = app.control.metrics.page().decode()
    assert statuses == [200, 503, 404]
    assert f'warmroute_requests_total{{model="small",route="{CHAT}",status="503"}} 1.0' in page
    assert f'warmroute_requests_total{{model="none",route="{CHAT}",status="404"}} 1.0' in page
    assert 'warmroute_model_ready_replicas{model="small"} 0.0' in page
    assert 'warmroute_model_ready_replicas{model="large"} 1.0' in page
