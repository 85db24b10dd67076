"""The official clients of each dialect through the router: whole, streamed, and errors in the dialect's own body."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientSession, web

from router.core.types.placements import Usage
from router.router_server import RouterServer
from router.telemetry.request_record import RequestRecord
from tests.support.fakes import (
    GENERATED,
    MESSAGE,
    FakeEngine,
    error_event,
    generate_events,
    idle,
    message_events,
    named_event,
    ok,
    reset,
    response_events,
    running,
    status,
    stream,
)

MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
ASK: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
COUNTED = Usage(100, 3, 32)


@pytest.fixture
async def app(engine: FakeEngine, other: FakeEngine) -> AsyncIterator[RouterServer]:
    """A router before two engines, idle at the end."""
    async with running(engine, other, api__ask_usage=True) as running_app:
        yield running_app
        assert idle(running_app)


def claude_of(app: RouterServer) -> anthropic.AsyncAnthropic:
    """Anthropic's client of a router."""
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    return anthropic.AsyncAnthropic(base_url=app.url, api_key="x", max_retries=0, http_client=http)


@pytest.fixture
async def claude(app: RouterServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client."""
    async with claude_of(app) as client:
        yield client


@pytest.fixture
async def gpt(app: RouterServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x", max_retries=0, http_client=http) as client:
        yield client


def last(app: RouterServer) -> RequestRecord:
    """The last request's record."""
    return app.control.pages.decisions[-1]


async def test_messages_whole(claude: anthropic.AsyncAnthropic, app: RouterServer) -> None:
    """An answer arrives as the engine sent it, and its usage is read."""
    answer = await claude.messages.create(**ASK)
    assert answer.content[0].text == "w0 w1 "
    assert last(app).usage == COUNTED


async def test_messages_streamed(
    claude: anthropic.AsyncAnthropic, app: RouterServer, engine: FakeEngine, other: FakeEngine
) -> None:
    """A stream passes event by event; the body is not edited to ask for usage, which is there anyway."""
    async with claude.messages.stream(**ASK) as events:
        assert [text async for text in events.text_stream] == ["w0 ", "w1 "]
        assert (await events.get_final_message()).usage.cache_read_input_tokens == 32
    assert last(app).usage == COUNTED
    assert last(app).times.ttft_s is not None
    assert set((engine.seen or other.seen)[-1].json) == {*ASK, "stream"}


async def test_messages_errors(claude: anthropic.AsyncAnthropic, app: RouterServer) -> None:
    """The router's own errors are Anthropic's, with our code."""
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(**{**ASK, "model": "other"})
    error = caught.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["error"]["type"], error["error"]["code"]) == (
        "error",
        "not_found_error",
        "model_not_found",
    )
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.batches.list()
    assert missing.value.body["error"]["code"] == "unknown_path"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="give it the base URL without /v1"):
        await claude.with_options(base_url=f"{app.url}/v1").messages.create(**ASK)


async def test_messages_without_a_replica(unused_tcp_port: int) -> None:
    """Nobody there is 503, in Anthropic's words overloaded, and says when to come again."""
    async with running(f"http://127.0.0.1:{unused_tcp_port}") as app, claude_of(app) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**ASK)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


@pytest.mark.parametrize("dead", [named_event("error", error={"type": "internal_error", "message": "dead"}), None])
async def test_an_error_event_is_made_good_elsewhere(
    claude: anthropic.AsyncAnthropic, engine: FakeEngine, other: FakeEngine, app: RouterServer, dead: bytes | None
) -> None:
    """A Messages stream that begins with an engine's failure is tried on another replica; the client sees no trace."""
    failed: list[FakeEngine] = []

    async def fails_once(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        if failed:
            return await stream(request, message_events())
        failed.append(fake)
        return await (stream(request, [dead]) if dead else error_event(fake, request))

    for fake in (engine, other):
        fake.script.append(fails_once)
    async with claude.messages.stream(**ASK) as events:
        assert await events.get_final_text() == "w0 w1 "
    assert len(last(app).retries) == 1
    assert (len(engine.seen), len(other.seen)) == (1, 1)


async def test_a_message_given_up_is_made_good_elsewhere(
    claude: anthropic.AsyncAnthropic, engine: FakeEngine, other: FakeEngine
) -> None:
    """Half an answer of an engine told to stop is not passed on as a whole one."""
    half = {key: value for key, value in MESSAGE.items() if key != "stop_reason"}
    failed: list[FakeEngine] = []

    async def gives_up_once(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        failed.append(fake)
        fake.healthy = len(failed) > 1  # it is about to leave
        return web.json_response(half if len(failed) == 1 else MESSAGE)

    for fake in (engine, other):
        fake.script.append(gives_up_once)
    assert (await claude.messages.create(**ASK)).stop_reason == "end_turn"
    assert len(failed) == 2


async def test_counting_tokens_needs_no_prefill(
    claude: anthropic.AsyncAnthropic, app: RouterServer, engine: FakeEngine, other: FakeEngine
) -> None:
    """count_tokens goes to any replica as it is; its errors are Anthropic's too."""
    for fake in (engine, other):
        fake.script.append(status(200, '{"input_tokens": 7}'))
    counted = await claude.messages.count_tokens(model="m", messages=ASK["messages"])
    assert counted.input_tokens == 7
    assert last(app).receipt.prompt_tokens == 0  # type: ignore[union-attr]
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.count_tokens(model="other", messages=ASK["messages"])
    assert caught.value.body["type"] == "error"  # type: ignore[index]


async def test_one_chain_through_every_api(client: ClientSession, app: RouterServer) -> None:
    """What chat put in the cache is foretold for the same conversation through Messages and Responses."""
    said = [{"role": "user", "content": "word " * 400}]
    chat = {"model": "m", "messages": [{"role": "system", "content": "terse"}, *said]}
    async with client.post(app.url + "/v1/chat/completions", json=chat) as response:
        where = response.headers["x-warmroute-replica"]
    bodies = {
        MESSAGES: {**ASK, "system": "terse", "messages": said},
        RESPONSES: {"model": "m", "instructions": "terse", "input": said, "store": False},
    }
    for path, body in bodies.items():
        async with client.post(app.url + path, json=body) as response:
            assert response.headers["x-warmroute-replica"] == where
            assert int(response.headers["x-warmroute-predicted-cached-tokens"]) > 0


async def test_responses_whole_and_streamed(gpt: openai.AsyncOpenAI, app: RouterServer) -> None:
    """OpenAI's client gets the answer, whole and as a stream, and the usage of both is read."""
    assert (await gpt.responses.create(model="m", input="hi")).output_text == "w0 w1 "
    assert last(app).usage == COUNTED
    async with gpt.responses.stream(model="m", input="hi") as events:
        kinds = [event.type async for event in events]
        assert (await events.get_final_response()).output_text == "w0 w1 "
    assert kinds.count("response.output_text.delta") == 2
    assert last(app).usage == COUNTED


async def test_the_first_token_of_a_response_is_not_its_first_event(
    client: ClientSession, app: RouterServer, engine: FakeEngine, other: FakeEngine
) -> None:
    """`response.created` comes before prefill: it tells the response's id, but not yet the time to first token."""

    async def created_then_waits(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pieces = [piece.replace(b'"id":"x"', b'"id":"resp_1"') for piece in response_events()]
        await response.write(b"".join(pieces[:2]))
        await engine.go_on.wait()
        for piece in pieces[2:]:
            await response.write(piece)
        return response

    for fake in (engine, other):
        fake.script.append(created_then_waits)
    async with client.post(app.url + RESPONSES, json={"model": "m", "input": "hi", "stream": True}) as response:
        assert b"response.created" in await response.content.readline()
        (lease,) = [lease for member in app.router.fleet.members.values() for lease in member.leases.values()]
        assert lease.first_token_s is None
        assert app.control.placer.owners.owner("resp_1", "") == lease.replica
        engine.go_on.set()
        await response.read()
    assert lease.first_token_s is not None
    assert last(app).times.ttft_s is not None


async def test_responses_errors(gpt: openai.AsyncOpenAI, engine: FakeEngine, other: FakeEngine) -> None:
    """The router's own errors are OpenAI's; a stored response that failed is not made twice."""
    with pytest.raises(openai.NotFoundError) as caught:
        await gpt.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"
    for fake in (engine, other):
        fake.script.append(reset)
    with pytest.raises(openai.InternalServerError) as failed:
        await gpt.responses.create(model="m", input="hi")
    assert failed.value.code == "engine_failed"
    assert len(engine.seen) + len(other.seen) == 1


GENERATE = "/generate"


async def test_generate_whole_and_streamed(
    client: ClientSession, app: RouterServer, engine: FakeEngine, other: FakeEngine
) -> None:
    """SGLang's own API passes byte for byte, no model named, and the usage of both kinds of answer is read."""
    async with client.post(app.url + GENERATE, json={"text": "hi"}) as response:
        assert await response.json() == GENERATED
    assert last(app).usage == COUNTED
    body = b'{"text": "hi",  "stream": true}'
    async with client.post(app.url + GENERATE, data=body) as response:
        assert await response.read() == b"".join(generate_events())
    assert last(app).usage == COUNTED
    assert last(app).times.ttft_s is not None
    assert {seen.body for seen in engine.seen + other.seen} == {body, b'{"text": "hi"}'}


async def test_generate_is_foretold(client: ClientSession, app: RouterServer) -> None:
    """The same text again, also as a completion, goes where it was before; with another salt nothing is foretold."""
    text = "word " * 400
    async with client.post(app.url + GENERATE, json={"text": text}) as response:
        where = response.headers["x-warmroute-replica"]
    for path, body in ((GENERATE, {"text": text + "more"}), ("/v1/completions", {"model": "m", "prompt": text})):
        async with client.post(app.url + path, json=body) as response:
            assert response.headers["x-warmroute-replica"] == where
            assert int(response.headers["x-warmroute-predicted-cached-tokens"]) > 0
    async with client.post(app.url + GENERATE, json={"text": text, "extra_key": "t"}) as response:
        assert response.headers["x-warmroute-predicted-cached-tokens"] == "0"


async def test_generate_errors(client: ClientSession, app: RouterServer) -> None:
    """The router's own errors are flat, as SGLang's, with our code."""
    async with client.post(app.url + GENERATE, json={"text": "hi", "model": "nope"}) as response:
        assert response.status == 404
        error = await response.json()
    assert (error["object"], error["code"], error["param"]) == ("error", "model_not_found", "model")
    async with client.post(app.url + GENERATE, data=b"[1]") as response:
        assert response.status == 400
        assert (await response.json())["code"] == "invalid_json"


ABORT = {"type": "abort", "message": "Abort in waiting queue", "status_code": 503}
GIVEN_UP = {"text": "", "output_ids": [], "meta_info": {**GENERATED["meta_info"], "finish_reason": ABORT}}


DEAD = {"error": {"message": "dead", "code": 500}}


@pytest.mark.parametrize(("dead", "streams"), [(DEAD, True), (GIVEN_UP, True), (GIVEN_UP, False)])
async def test_a_generation_given_up_is_made_good_elsewhere(
    client: ClientSession, app: RouterServer, engine: FakeEngine, other: FakeEngine, dead: dict[str, Any], streams: bool
) -> None:
    """An engine's failure in the first event, or an answer that it gave up, is tried on another replica."""
    failed: list[FakeEngine] = []

    async def fails_once(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        if failed:
            return await ok(fake, request)
        failed.append(fake)
        if streams:
            return await stream(request, [b"data: " + json.dumps(dead).encode() + b"\n\n", b"data: [DONE]\n\n"])
        return web.json_response(dead)

    for fake in (engine, other):
        fake.script.append(fails_once)
    async with client.post(app.url + GENERATE, json={"text": "hi", "stream": streams}) as response:
        assert GENERATED["text"] in await response.text()
    assert len(last(app).retries) == 1


@pytest.mark.parametrize("streams", [True, False])
async def test_flat_errors_on_openais_paths(client: ClientSession, engine: FakeEngine, streams: bool) -> None:
    """SGLang's errors are flat there too: they pass as they are, and are the request's fault."""
    flat = '{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
    async with running(engine) as app:
        engine.script.append(status(400, flat))
        body = {"model": "m", "prompt": "x", "stream": streams}
        async with client.post(app.url + "/v1/completions", json=body) as response:
            assert (response.status, await response.text()) == (400, flat)
        assert last(app).ending == "refused"
        assert last(app).retries == ()


async def test_a_passthrough_that_names_a_dialects_path(client: ClientSession, engine: FakeEngine) -> None:
    """A file written for 0.1, whose `api.passthrough` holds /v1/responses, still starts."""
    async with running(engine, api__passthrough=[RESPONSES, "/tokenize"]) as app:
        async with client.post(app.url + RESPONSES, data=json.dumps({"model": "m", "input": "x"})) as response:
            assert response.status == 200
