"""Streams that do not finish: whatever the engine does, official clients raise, and no part passes for the whole."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientPayloadError, ClientSession

import router.http.upstream
from router.router_server import RouterServer
from tests.http.wire import RawEngine, Wire, proxied
from tests.support.fakes import GENERATED, events, generate_events, idle, message_events, response_events, running
from tests.support.recorded import SSE, head

pytestmark = pytest.mark.promise("A partial answer never passes for a complete one: official clients raise.", "faults")

KILLS = int(os.environ.get("WARMROUTE_KILLS", "2"))  # 200 for the full size, of each fault and API
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chunk(data: bytes) -> bytes:
    """Framed."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def completion_events() -> list[bytes]:
    """A stream of completions."""
    choices = [{"index": 0, "text": f"w{n} ", "finish_reason": None if n < 3 else "length"} for n in range(4)]
    return [b"data: " + json.dumps({"choices": [each]}).encode() + b"\n\n" for each in choices] + [DONE]


DONE = b"data: [DONE]\n\n"
# The events of a whole answer, and how many at its end say that it is one.
STREAMS: dict[str, tuple[Callable[[], list[bytes]], int]] = {
    CHAT: (events, 2),
    COMPLETIONS: (completion_events, 2),
    RESPONSES: (response_events, 1),
    MESSAGES: (message_events, 2),
    "/generate": (generate_events, 2),
}


class Faults:
    """An engine that sends the beginning of an answer and then does what it should not."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.fault = ""
        self.engine = RawEngine(self.play)

    async def play(self, wire: Wire) -> None:
        """The engine's part: each event a chunk, and a read of its own as far as the machine allows."""
        wire.transport.write(head(SSE, "transfer-encoding: chunked"))
        for event in self.events:
            wire.transport.write(chunk(event))
            await asyncio.sleep(0)
        end = {"RST": wire.reset, "FIN": wire.transport.close}.get(self.fault)
        if end is not None:
            end()
        elif self.fault == "short chunk":
            wire.transport.write(b"ff\r\ndata: {")
            wire.transport.close()
        elif self.fault == "garbage":
            wire.transport.write(chunk(b"\xff\x00 no event") + b"0\r\n\r\n")
        elif self.fault == "clean end":
            wire.transport.write(b"0\r\n\r\n")
        elif self.fault == "done":
            wire.transport.write(chunk(DONE) + b"0\r\n\r\n")
        elif self.fault == "done together":
            wire.transport.write(chunk(b": ping\n\n" + DONE) + b"0\r\n\r\n")


FAULTS = ("RST", "FIN", "short chunk", "clean end", "done", "done together", "garbage", "stall")


@asynccontextmanager
async def faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> AsyncIterator[tuple[Faults, RouterServer]]:
    """A router before such an engine."""
    faults = Faults()
    faults.fault = fault
    if fault == "stall":
        monkeypatch.setattr(router.http.upstream, "WATCH_INTERVAL_S", 0.02)
    # The latter counts behind events that come of no work.
    limits = {"upstream__idle_timeout_s": 0.3, "upstream__first_byte_timeout_s": 2.0}
    settings = limits if fault == "stall" else {}
    async with faults.engine as engine, running(engine.url, **settings) as app:
        monkeypatch.setattr("router.core.fleet.breaker.BREAKER_FAILURES", 1 << 30)
        yield faults, app
        async with asyncio.timeout(60):
            while not idle(app):
                await asyncio.sleep(0)


def begun(path: str, rng: random.Random) -> list[bytes]:
    """The beginning of an answer: one event at least, and not those by which it ends."""
    make, last = STREAMS[path]
    whole = make()
    return whole[: rng.randint(1, len(whole) - last)]


@pytest.mark.promise("An error event holds no address of a replica.", "records")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", STREAMS)
async def test_error_events(client: ClientSession, monkeypatch: pytest.MonkeyPatch, path: str, fault: str) -> None:
    """What came stands as it came, and behind it one error event with a stable code, and the clean end of the body; no
    reason to finish, no [DONE], no address. The replica is blamed."""
    async with faulty(monkeypatch, fault) as (faults, app):
        for seed in range(KILLS):
            faults.events = begun(path, random.Random(seed))
            body = {"model": "m", "stream": True, "max_tokens": 8, "text": "x", "prompt": "x", "messages": SAID}
            async with client.post(app.url + path, json=body | {"input": "x"}) as response:
                got = await response.read()
            came = b"".join(faults.events) + (b": ping\n\n" if fault == "done together" else b"")
            assert got.startswith(came)
            name, _, data = got.removeprefix(came).rpartition(b"data: ")
            assert name == (b"event: error\n" if path in (MESSAGES, RESPONSES) else b"")
            said = json.loads(data)
            assert said["error"]["code"] == ("stream_stalled" if fault == "stall" else "stream_broken")
            assert b"127.0.0.1" not in data
            if path == RESPONSES:
                assert (said["type"], said["code"]) == ("error", said["error"]["code"])
                assert said["sequence_number"] == len(faults.events)
            record = app.control.pages.decisions[-1]
            assert (record.ending, record.status) == ("failed", 200)
        kinds = {"stall": "stalled", "RST": "broke_midway", "FIN": "broke_midway", "short chunk": "broke_midway"}
        failures = f'kind="{kinds.get(fault, "unfinished")}",replica="{faults.engine.url}"}} {KILLS}.0'
        assert failures.encode() in app.control.metrics.page()


async def use(app: RouterServer, path: str) -> list[Any]:
    """What an official client makes of a stream."""
    if path == MESSAGES:
        http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        async with anthropic.AsyncAnthropic(base_url=app.url, api_key="x", max_retries=0, http_client=http) as claude:
            stream = await claude.messages.create(model="m", max_tokens=8, messages=SAID, stream=True)  # type: ignore[arg-type]
            return [event async for event in stream]
    other = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x", max_retries=0, http_client=other) as gpt:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            CHAT: lambda: gpt.chat.completions.create(model="m", messages=SAID, stream=True),  # type: ignore[call-overload, no-any-return]
            COMPLETIONS: lambda: gpt.completions.create(model="m", prompt="x", stream=True),
            RESPONSES: lambda: gpt.responses.create(model="m", input="x", stream=True),
        }
        return [event async for event in await calls[path]()]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_official_clients_raise(monkeypatch: pytest.MonkeyPatch, path: str, fault: str) -> None:
    """OpenAI's and Anthropic's clients raise the error that their API has for it, whatever the fault and wherever it
    strikes."""
    async with faulty(monkeypatch, fault) as (faults, app):
        for seed in range(KILLS):
            faults.events = begun(path, random.Random(100 + seed))
            with pytest.raises(anthropic.APIError if path == MESSAGES else openai.APIError) as caught:
                await use(app, path)
            assert "stream_" in str(caught.value.body)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/generate"])
@pytest.mark.parametrize("fault", ["RST", "FIN", "short chunk", "garbage", "stall", "clean end"])
async def test_a_whole_answer_stays_one(
    client: ClientSession, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    """What breaks behind the last event of a whole answer is no fault: every byte comes, and a clean end."""
    async with faulty(monkeypatch, fault) as (faults, app):
        faults.events = STREAMS[path][0]()
        body = {"model": "m", "stream": True, "max_tokens": 8, "text": "x", "prompt": "x", "messages": SAID}
        async with client.post(app.url + path, json=body | {"input": "x"}) as response:
            got = await response.read()
        assert got.removesuffix(b"\xff\x00 no event") == b"".join(faults.events)
        assert app.control.pages.decisions[-1].ending == "ok"


async def test_an_engines_own_error_is_an_end(client: ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error event of the engine's, midway, is passed on and nothing is added; it is the replica's failure."""
    error = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    async with faulty(monkeypatch, "clean end") as (faults, app):
        for end in ([error, DONE], [error]):
            faults.events = [*events()[:2], *end]
            async with client.post(app.url + CHAT, json={"model": "m", "stream": True, "messages": SAID}) as response:
                assert await response.read() == b"".join(faults.events)
            assert app.control.pages.decisions[-1].ending == "failed"


async def test_what_cannot_be_judged_is_not(client: ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream on a path without a dialect is passed on as it is, whatever it ends with."""
    async with faulty(monkeypatch, "clean end") as (faults, app):
        faults.events = [b"data: 1\n\n", b"data: 2\n\n"]
        async with client.post(app.url + "/pooling", json={"model": "m", "stream": True}) as response:
            assert await response.read() == b"".join(faults.events)


async def test_compressed_streams(client: ClientSession) -> None:
    """Nor is one that the engine has compressed, however it ends."""
    body = b"\x1f\x8b\x08\x00 not for us\n\n"

    async def play(wire: Wire) -> None:
        wire.transport.write(head(SSE, "content-encoding: gzip", f"content-length: {len(body)}") + body)

    async with RawEngine(play) as engine, running(engine.url) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "stream": True, "messages": SAID}) as response:
            assert await response.read() == body
        assert app.control.pages.decisions[-1].ending == "ok"


async def test_a_break_within_a_long_event(client: ClientSession) -> None:
    """An event too long to be held back, which has passed in part, is ended where it breaks off, so that the error
    behind it is heard: clients that do not notice a broken connection would take the answer for a short one."""

    async def play(wire: Wire) -> None:
        beginning = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 200_000
        wire.transport.write(head(SSE, "transfer-encoding: chunked") + chunk(events()[0]) + chunk(beginning))
        wire.transport.close()

    async with RawEngine(play) as engine, running(engine.url) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "stream": True, "messages": SAID}) as response:
            said = await response.read()
        before, _, error = said.rpartition(b"\n\ndata: ")
        assert before.endswith(b"x" * 100_000)
        assert json.loads(error)["error"]["code"] == "stream_broken"
        assert app.control.pages.decisions[-1].ending == "failed"


async def test_a_long_last_event(client: ClientSession) -> None:
    """An answer whose last event is longer than what is kept of a stream's end is whole."""
    for path, last in (
        (CHAT, b'data: {"choices":[{"index":0,"delta":{"hidden_states":[' + b"0.5," * 30_000 + b"0]}}]}\n\n"),
        (RESPONSES, response_events()[-1].replace(b"w0 w1 ", b"w" * 100_000)),
    ):
        begun_ = [*events()[:-1], last, DONE] if path == CHAT else [*response_events()[:-1], last]

        async def play(wire: Wire, pieces: list[bytes] = begun_) -> None:
            wire.transport.write(head(SSE, "transfer-encoding: chunked") + b"".join(map(chunk, pieces)) + b"0\r\n\r\n")

        async with RawEngine(play) as engine, running(engine.url) as app:
            body = {"model": "m", "stream": True, "messages": SAID, "input": "x"}
            async with client.post(app.url + path, json=body) as response:
                assert await response.read() == b"".join(begun_)
            assert app.control.pages.decisions[-1].ending == "ok"


def said_early(path: str) -> list[bytes]:
    """An answer that says in the middle of its long last event why it finished, as SGLang does where logprobs are
    wanted, and vLLM where token ids are."""
    if path == COMPLETIONS:
        choice = {"index": 0, "text": "w " * 1_000, "finish_reason": "length", "prompt_token_ids": [12345] * 20_000}
        return [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n", DONE]
    meta = GENERATED["meta_info"] | {"output_token_logprobs": [[-0.5, 12345, None]] * 1_000}
    return [
        *generate_events()[:-2],
        b"data: " + json.dumps({"text": "w " * 1_000, "meta_info": meta}).encode() + b"\n\n",
        DONE,
    ]


@pytest.mark.inside
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/generate"])
async def test_a_reason_in_the_middle_of_a_long_event(
    client: ClientSession, monkeypatch: pytest.MonkeyPatch, path: str, together: bool
) -> None:
    """A reason to finish counts wherever it stands in an event that is longer than what is kept."""
    pieces = said_early(path)

    async def play(wire: Wire) -> None:
        await wire.send(head(SSE, "transfer-encoding: chunked"))
        await wire.send(*map(chunk, [b"".join(pieces)] if together else pieces), b"0\r\n\r\n")

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        async with client.post(app.url + path, json={"model": "m", "stream": True, "text": "x", "prompt": "x"}) as got:
            assert await got.read() == b"".join(pieces)
        assert app.control.pages.decisions[-1].ending == "ok"


async def test_pings_do_not_hide_the_end(client: ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many comments come behind a reason to finish, and behind [DONE], the answer is whole."""
    async with faulty(monkeypatch, "clean end") as (faults, app):
        for pings in ([*events()[:-1], *[b": ping\n\n"] * 30, DONE], [*events(), *[b": ping\n\n"] * 30]):
            faults.events = pings
            async with client.post(app.url + CHAT, json={"model": "m", "stream": True, "messages": SAID}) as response:
                assert await response.read() == b"".join(pings)
            assert app.control.pages.decisions[-1].ending == "ok"


async def test_a_stored_response_that_is_fetched_as_a_stream(client: ClientSession) -> None:
    """Its events reach the client while the engine still works, and a stream that stops ends in an error event."""
    go_on = asyncio.Event()
    pieces = response_events()

    async def play(wire: Wire) -> None:
        wire.transport.write(head(SSE, "transfer-encoding: chunked") + b"".join(map(chunk, pieces[:3])))
        await go_on.wait()
        wire.transport.write(b"".join(map(chunk, pieces[3:] if whole else [])) + b"0\r\n\r\n")

    async with RawEngine(play) as engine, running(engine.url) as app:
        for whole in (True, False):
            go_on.clear()
            async with client.get(app.url + RESPONSES + "/resp_1?stream=true") as response:
                came = await response.content.readexactly(len(b"".join(pieces[:3])))
                go_on.set()
                rest = await response.read()
            if whole:
                assert came + rest == b"".join(pieces)
            else:
                assert rest.startswith(b"event: error\n")


async def test_answers_that_do_not_stream(client: ClientSession) -> None:
    """An answer that is cut reaches no client as if it were whole: a held one is 502, a longer one is broken off."""
    for length, status in ((1_000, 502), (100_000, 200)):

        async def play(wire: Wire, length: int = length) -> None:
            wire.transport.write(head(f"content-length: {length}") + b"[" + b"1," * (length // 3))
            wire.transport.close()

        async with RawEngine(play) as engine:
            async with running(engine.url, limits__buffered_response_bytes_max=10_000) as app:
                async with client.post(app.url + "/v1/embeddings", json={"model": "m", "input": "x"}) as response:
                    assert response.status == status
                    if status == 502:
                        assert (await response.json())["error"]["code"] == "engine_failed"
                    else:
                        with pytest.raises(ClientPayloadError):
                            await response.read()
                assert idle(app)
