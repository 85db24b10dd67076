"""The simulated replica behaves over HTTP as a real vLLM does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import looptime
import openai
import pytest

from loadtest.fake_engine import tokens
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.fake_engine.command import Engines, EngineSettings, settings
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.replica import Choices, SimulatedReplica
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits

ROOT = Path(__file__).parents[3]
BLOCK = 16


@contextlib.asynccontextmanager
async def running(**changes: object) -> AsyncIterator[Engines]:
    """Engines on free ports, 200 times faster than life."""
    given = {"replicas": 1, "port": 0, "time_scale": 200.0, "limits": Limits(block_tokens=BLOCK)}
    async with Engines(EngineSettings(**(given | changes))) as engines:  # type: ignore[arg-type]
        yield engines


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """One replica."""
    async with running() as started:
        yield started


@pytest.fixture
async def client(engines: Engines) -> AsyncIterator[aiohttp.ClientSession]:
    """Speaks to that replica."""
    async with aiohttp.ClientSession(engines.urls[0]) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: object, status: int = 200) -> dict[str, Any]:
    """The parsed answer, after a look at its status."""
    async with client.post(path, json=body) as response:
        assert response.status == status, await response.text()
        parsed: dict[str, Any] = await response.json()
        return parsed


async def metric(client: aiohttp.ClientSession, name: str) -> float:
    """One sample of the metrics page."""
    async with client.get("/metrics") as response:
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", await response.text(), re.MULTILINE)
    assert found, name
    return float(found.group(1))


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until it holds."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError


def events(stream: str) -> list[dict[str, Any]]:
    """Server-sent events but the closing one, which must be there."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def chat(*turns: str, **fields: object) -> dict[str, Any]:
    """A chat of alternating user and assistant turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": "sim", "messages": messages, **fields}


@pytest.mark.parametrize("length", [200, 201, 202, 203])
async def test_a_quoted_answer_hits_the_cache(client: aiohttp.ClientSession, length: int) -> None:
    """The next turn finds the last prompt and its answer cached, wherever the prompt ends within a token."""
    question = "q" * length
    first = await post(client, "/v1/chat/completions", chat(question, max_tokens=100))
    text = first["choices"][0]["message"]["content"]
    computed = first["usage"]["total_tokens"] - 1  # the last token is never fed back
    assert len(text) == 400
    again = await post(client, "/v1/chat/completions", chat(question, text, "and?", max_tokens=2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // BLOCK * BLOCK


async def test_greedy_answers_repeat(client: aiohttp.ClientSession) -> None:
    """The same prompt gets the same answer, a longer one continues a shorter one, and a whole-prompt hit still
    computes one block."""
    prompt = "p" * 4 * 64
    short = await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 10})
    long = await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 20})
    assert long["choices"][0]["text"].startswith(short["choices"][0]["text"])
    assert long["usage"] == {
        "prompt_tokens": 64,
        "total_tokens": 84,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 48, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4_096}, {"max_completion_tokens": 8_192}, {"max_tokens": 30}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_ends_as_soon_as_it_may(
    client: aiohttp.ClientSession, path: str, limit: dict[str, int]
) -> None:
    """An answer has `min_tokens` tokens whatever its limit, streamed or not, and stops by itself but at the limit."""
    body = {**chat("hi"), "prompt": "hi", "min_tokens": 30, **limit, "stream_options": {"include_usage": True}}
    whole = await post(client, path, body)
    async with client.post(path, json={**body, "stream": True}) as response:
        *streamed, usage = events(await response.text())

    ended = "length" if limit.get("max_tokens") == 30 else "stop"
    assert whole["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"] == 30
    assert whole["choices"][0]["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == ended


async def test_an_answer_without_limits_has_a_default_length(client: aiohttp.ClientSession) -> None:
    """128 tokens; a `min_tokens` of 0, which is vLLM's own default, is none."""
    for fields in ({}, {"min_tokens": 0}, {"min_tokens": None}):
        answer = await post(client, "/v1/chat/completions", chat("hi", **fields))
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (128, "length")


async def test_stream_has_vllms_events(client: aiohttp.ClientSession) -> None:
    """Role first, then text; usage only when asked for and without choices; the request id names the answer."""
    body = chat("hi", max_tokens=30, stream=True, stream_options={"include_usage": True})
    async with client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc"}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        got = events(await response.text())
    assert {event["id"] for event in got} == {"chatcmpl-abc"}
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len("".join(event["choices"][0]["delta"]["content"] for event in got[:-1])) == 30 * 4
    assert [event["choices"][0]["finish_reason"] for event in got[:-1]] == [None] * (len(got) - 2) + ["length"]
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 30
    async with client.post("/v1/chat/completions", json=body | {"stream_options": None}) as response:
        assert all("usage" not in event for event in events(await response.text()))


async def test_every_token_is_an_event_at_lifes_own_speed() -> None:
    """At time scale 1 nothing is coalesced: steps are longer than a tick."""
    async with running(time_scale=1.0) as engines, aiohttp.ClientSession(engines.urls[0]) as client:
        body = {"prompt": "hello", "max_tokens": 6, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            got = events(await response.text())
    assert [len(event["choices"][0]["text"]) for event in got] == [4] * 6


async def test_headers_come_before_the_prefill() -> None:
    """A stream's status and headers are there while its prompt is still being computed."""
    async with running(time_scale=1.0) as engines, aiohttp.ClientSession(engines.urls[0]) as client:
        body = {"prompt": "x" * 400_000, "max_tokens": 1, "stream": True}  # 7 s of prefill
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200
            assert await metric(client, "vllm:prompt_tokens_total") == 0
            response.close()


async def test_several_prompts_in_one_request(client: aiohttp.ClientSession) -> None:
    """A list of prompts gives a choice each, streamed or not; token ids are the same prompt as their text."""
    prompts = ["one prompt of some length", "another"]
    whole = await post(client, "/v1/completions", {"prompt": prompts, "max_tokens": 5})
    by_ids = [tokens.ids(prompt.encode()) for prompt in prompts]
    assert (await post(client, "/v1/completions", {"prompt": by_ids, "max_tokens": 5}))["choices"] == whole["choices"]
    async with client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 5, "stream": True}) as response:
        got = events(await response.text())
    for choice in whole["choices"]:
        parts = [e["choices"][0]["text"] for e in got if e["choices"][0]["index"] == choice["index"]]
        assert "".join(parts) == choice["text"]


async def test_a_client_that_leaves_frees_the_engine() -> None:
    """Closing the connection cancels the work, streamed or not, queued or running."""
    async with running(time_scale=1.0) as engines, aiohttp.ClientSession(engines.urls[0]) as client:
        model = engines.replicas[0].model
        for stream in (True, False):
            body = {"prompt": "x" * 4000, "max_tokens": 5000, "stream": stream}
            task = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await until(lambda: model.running_n > 0)
            if stream:
                (await task).close()
            task.cancel()
            await until(lambda: not model.running_n)
        assert model.kv_usage == 0
        assert model.counters.cancelled == 2


async def test_metrics_speak_vllms_names(client: aiohttp.ClientSession) -> None:
    """Counters count tokens, and the cache's size can be read for self-configuration."""
    for _ in range(2):
        await post(client, "/v1/completions", {"prompt": "m" * 400, "max_tokens": 7})
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 200,
        "vllm:prefix_cache_hits_total": 96,
        "vllm:prompt_tokens_total": 200,
        "vllm:prompt_tokens_cached_total": 96,
        "vllm:generation_tokens_total": 14,
        "vllm:num_preemptions_total": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:cache_config_info": 1,
    }
    assert {name: await metric(client, name) for name in expected} == expected
    async with client.get("/metrics") as response:
        page = await response.text()
    assert 'num_gpu_blocks="19208"' in page
    assert 'kv_cache_size_tokens="307328"' in page
    assert 'finished_reason="length",engine="0",model_name="sim"} 2.0' in page


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", {"model": "other", "messages": []}, 404, "NotFoundError"),
        ("/v1/chat/completions", {"model": "sim"}, 400, "Bad Request"),
        ("/v1/chat/completions", {"messages": [{"content": "no role"}]}, 400, "Bad Request"),
        ("/v1/chat/completions", chat("hi", max_tokens=0), 400, "BadRequestError"),
        ("/v1/chat/completions", chat("hi", max_tokens=200_000, stream=True), 400, "BadRequestError"),
        ("/v1/chat/completions", chat("hi", max_tokens=5, min_tokens=6), 400, "BadRequestError"),
        ("/v1/chat/completions", chat("hi", min_tokens=-1), 400, "BadRequestError"),
        ("/v1/completions", {"prompt": ""}, 400, "BadRequestError"),
        ("/v1/completions", {"prompt": [1, "mixed"]}, 400, "Bad Request"),
        ("/v1/completions", {"prompt": [-1]}, 400, "BadRequestError"),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "Bad Request"),
        ("/v1/embeddings", {"model": "sim", "input": "x"}, 400, "BadRequestError"),
        ("/detokenize", {"ids": []}, 400, "Bad Request"),
    ],
)
async def test_errors_have_vllms_shape(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    """Wrong requests get a JSON error with message, type, param and code, also when they asked for a stream."""
    error = (await post(client, path, body, status))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)


async def test_invalid_json_is_a_400(client: aiohttp.ClientSession) -> None:
    """A body that is not JSON is the client's fault."""
    async with client.post("/v1/completions", data=b'{"prompt": ') as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "Bad Request"


async def test_small_pages(client: aiohttp.ClientSession) -> None:
    """Health, models, version, tokenizer and cache reset answer as vLLM's do."""
    async with client.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.get("/v1/models") as response:
        card = (await response.json())["data"][0]
    assert (card["id"], card["max_model_len"], card["owned_by"]) == ("sim", 131_072, "vllm")
    async with client.get("/kv_event_sources") as response:
        assert await response.json() == {}
    async with client.get("/unknown") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
    split = await post(client, "/tokenize", {"prompt": "abcdefg"})
    assert split == {"count": 2, "max_model_len": 131_072, "tokens": [0x64636261, 0x676665]}
    assert await post(client, "/detokenize", {"tokens": split["tokens"]}) == {"prompt": "abcdefg"}
    rendered = await post(client, "/tokenize", chat("hi", tools=[{"a": 1}]))
    assert await post(client, "/detokenize", {"tokens": rendered["tokens"]}) == {
        "prompt": '<|tools|>\n[{"a":1}]\n<|user|>\nhi\n<|assistant|>\n'
    }
    await post(client, "/v1/completions", {"prompt": "r" * 400, "max_tokens": 1})
    assert await post(client, "/reset_prefix_cache", {}) == {"success": True}
    again = await post(client, "/v1/completions", {"prompt": "r" * 400, "max_tokens": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_salt_and_images_separate(client: aiohttp.ClientSession) -> None:
    """Another cache salt, or another image in the same place, is another prefix."""

    def body(image: str, salt: str | None) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "w" * 400}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "cache_salt": salt}

    seen = []
    for image, salt in (("a", None), ("b", None), ("a", "s"), ("a", None), ("a", "s"), ("a", "t")):
        answer = await post(client, "/v1/chat/completions", body(image, salt))
        seen.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert seen == [False, False, False, True, True, False]


async def test_the_openai_client_streams_a_chat(engines: Engines) -> None:
    """The official client reads our stream, usage included."""
    async with openai.AsyncOpenAI(base_url=engines.urls[0] + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) == 12 * 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_simulated_time_does_not_drift() -> None:
    """A thousand steps take the simulated time of a thousand steps, and no less of the wall's."""
    async with running(tick_s=1e-6) as engines, aiohttp.ClientSession(engines.urls[0]) as client:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await post(client, "/v1/completions", {"prompt": "t" * 400, "max_tokens": 1000})
        wall_s = loop.time() - began_s
        simulated_s = await metric(client, "vllm:e2e_request_latency_seconds_sum")
        assert engines.replicas[0].model.counters.iterations == 1000
    assert simulated_s == pytest.approx(1000 * 0.01485, rel=0.02)
    assert simulated_s / 200 - 0.002 <= wall_s


def test_late_timers_add_up_to_nothing() -> None:
    """A thousand steps of a tenth of a millisecond take a tenth of a second, though no timer is that fine: one that is
    late by most of a millisecond makes the next step shorter."""
    loop = looptime.new_event_loop()
    timer = loop.call_later

    def coarse(delay_s: float, what: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        return timer(math.ceil(delay_s * 1e3) / 1e3, what, *arguments)

    loop.call_later = coarse  # type: ignore[assignment]

    async def takes_s() -> float:
        model = EngineModel(CALIBRATIONS[CALIBRATION].times, 100_000, Limits(block_tokens=BLOCK))
        replica = SimulatedReplica(model, time_scale=200.0, tick_s=1e-6, clock=loop.time)
        answer = Choices(1)
        replica.submit(EngineRequest(0, 100, 1_000, list(range(68))), answer, 0)
        while not answer.finished:
            await answer.more()
        assert model.counters.iterations == 1_000
        return loop.time()

    try:
        took_s = loop.run_until_complete(takes_s())
    finally:
        loop.close()
    assert 1_000 * 0.0148 / 200 < took_s < 1_000 * 0.0158 / 200 + 0.001


async def test_the_command_stops_at_once() -> None:
    """It says where it listens, and SIGTERM ends it with status 0 in the middle of a request."""
    code = "import sys; from loadtest.fake_engine.command import main; sys.exit(main(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "--replicas", "2", "--port", "0", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        urls = [(await process.stdout.readline()).decode().split()[1] for _ in range(2)]
        async with aiohttp.ClientSession() as client:
            body = {"prompt": "x", "max_tokens": 10_000, "stream": True}
            async with client.post(urls[1] + "/v1/completions", json=body) as response:
                assert (await response.content.readany()).startswith(b"data: ")
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_is_an_error(engines: Engines) -> None:
    """Nothing stays open when a port cannot be had."""
    port = int(engines.urls[0].rsplit(":", 1)[1])
    others = Engines(EngineSettings(replicas=1, port=port))
    with pytest.raises(OSError, match="address already in use"):
        await others.start()


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line names what is wrong."""
    for wrong in (["--replicas", "0"], ["--time-scale", "-1"], ["--calibration", "gpt-9"]):
        with pytest.raises(SystemExit, match="2"):
            settings(wrong)
        assert wrong[0] in capsys.readouterr().err
