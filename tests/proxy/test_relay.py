"""Bodies, headers and paths between client and engine."""

import asyncio
import json
import re

import pytest
from aiohttp import ClientSession, web

from router.proxy.relay import Relay
from tests.support.fakes import USAGE, FakeEngine, data_event, events, idle, running, status

CHAT = "/v1/chat/completions"
ODD = b'{ "model" : "m",\n\t"messages":[{"role":"user","content":"h\\u00e9llo \\ud83d\\ude00"}], "x_new": [1, 2.50] }'


async def test_request_bytes(client: ClientSession, engine: FakeEngine) -> None:
    """An engine gets the client's body byte for byte, unknown fields and odd white space included."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT + "?a=%20b", data=ODD, headers={"X-Extra": "1"}) as response:
            assert response.status == 200

        assert engine.seen[0].body == ODD
        assert engine.seen[0].path == CHAT + "?a=%20b"
        assert engine.seen[0].headers["X-Extra"] == "1"


async def test_stream_bytes(client: ClientSession, engine: FakeEngine) -> None:
    """A client gets an engine's stream byte for byte."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "stream": True, "messages": []}) as response:
            assert response.content_type == "text/event-stream"
            assert await response.read() == b"".join(events())
        assert idle(app)


async def test_whole_answer(client: ClientSession, engine: FakeEngine) -> None:
    """An answer that does not stream arrives whole, with its length and the engine's status and headers."""
    engine.script.append(status(418, '{"short": "and stout"}', {"X-Pot": "tea"}))
    async with running(engine) as app, client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
        assert response.status == 418
        assert response.headers["X-Pot"] == "tea"
        assert response.headers["Content-Length"] == "22"
        assert await response.read() == b'{"short": "and stout"}'


async def test_answers_too_long_to_hold(client: ClientSession, engine: FakeEngine) -> None:
    """An answer above the limit for holding is passed on as it comes, unchanged."""
    big = json.dumps({"data": "x" * 300_000})
    engine.script.append(status(200, big))
    async with running(engine, limits__buffered_response_bytes_max=1000) as app:
        async with client.post(app.url + "/v1/embeddings", json={"model": "m", "input": "a"}) as response:
            assert await response.text() == big
        assert idle(app)


async def test_receipt_headers(client: ClientSession, engine: FakeEngine) -> None:
    """Every placed answer says where it went, why, and what was predicted; the request id is echoed."""
    async with running(engine) as app:
        headers = {"X-Request-Id": "abc-1"}
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}, headers=headers) as response:
            got = response.headers
        assert got["x-warmroute-replica"] == engine.url
        assert got["x-warmroute-reason"] == "only"
        assert got["x-warmroute-grade"] == "estimated"
        assert got["x-warmroute-predicted-cached-tokens"] == "0"
        assert got["x-warmroute-request-id"] == "abc-1"
        assert engine.seen[0].headers["X-Request-Id"] == "abc-1"


async def test_receipts_off(client: ClientSession, engine: FakeEngine) -> None:
    """With receipts off, an answer says nothing of where it was made."""
    async with running(engine, api__receipts=False) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
            named = {name.lower() for name in response.headers if name.lower().startswith("x-warmroute")}
        assert named == {"x-warmroute-request-id"}


async def test_bad_request_id(client: ClientSession, engine: FakeEngine) -> None:
    """A request id that is too long is replaced, not passed on."""
    async with running(engine) as app:
        headers = {"X-Request-Id": "a" * 500}
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}, headers=headers) as response:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-warmroute-request-id"])


@pytest.mark.promise(
    "Headers of one connection are not forwarded in either direction, however many lines name them.", "clients"
)
async def test_hop_by_hop_headers_stay(client: ClientSession, engine: FakeEngine) -> None:
    """What belongs to one connection is not passed on (RFC 9110 section 7.6.1)."""
    async with running(engine) as app:
        headers = {"Connection": "keep-alive, X-Private", "X-Private": "1", "TE": "trailers"}
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}, headers=headers):
            pass
        assert not {"X-Private", "Te"} & {name.title() for name in engine.seen[0].headers}


async def test_no_compression_is_asked_for(engine: FakeEngine) -> None:
    """The router does not ask for an encoding that the client did not ask for."""
    async with running(engine) as app, ClientSession(skip_auto_headers=("Accept-Encoding", "User-Agent")) as bare:
        async with bare.post(app.url + CHAT, json={"model": "m", "messages": []}):
            pass
        assert not {"Accept-Encoding", "User-Agent"} & {name.title() for name in engine.seen[0].headers}


async def test_usage_on_behalf(client: ClientSession, engine: FakeEngine) -> None:
    """Opted in, usage is asked for and taken out again: the client sees the stream it would have seen."""
    body = b'{"model": "m", "stream": true, "messages": [] }'
    async with running(engine, api__ask_usage=True) as app:
        for _ in range(2):
            async with client.post(app.url + CHAT, data=body) as response:
                assert await response.read() == b"".join(events())
        assert (
            engine.seen[1].body
            == b'{"model": "m", "stream": true, "messages": [] ,"stream_options":{"include_usage":true}}'
        )
        assert app.control.pages.decisions[-1].usage is not None
        assert app.control.pages.decisions[-1].usage.cached_tokens == 32


@pytest.mark.parametrize(
    ("kind", "asks", "asked"),
    [("vllm", "auto", True), ("sglang", "auto", True), ("other", "auto", False), ("vllm", False, False)],
)
async def test_usage_is_asked_of_engines_that_are_known_to_tell(
    client: ClientSession, kind: str, asks: bool | str, asked: bool
) -> None:
    """Unless told otherwise, engines that end a stream with its usage where they are asked to are asked, once a stream
    has shown that they send none unasked; others get the body as it is, and no client sees a difference."""
    body = b'{"model":"m","stream":true,"messages":[]}'
    more = b',"stream_options":{"include_usage":true}}'
    async with FakeEngine(owned_by=kind) as engine, running(engine, api__ask_usage=asks) as app:
        for _ in range(2):
            async with client.post(app.url + CHAT, data=body) as response:
                assert await response.read() == b"".join(events())
        assert [each.body for each in engine.seen] == [body, body[:-1] + more if asked else body]
        row = app.control.pages.decisions[-1]
        assert (row.usage is not None) is asked


@pytest.mark.inside
async def test_what_is_no_usage_takes_the_shortcut(client: ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long stream whose usage only the router asked for, the few events that may have it are looked at: text that
    speaks of usage arrives, the event with the usage does not, and nearly all others pass as they come."""
    looked: list[bytes] = []
    seen = Relay._pass

    def counted(relay: Relay, data: bytes) -> None:
        looked.append(data)
        seen(relay, data)

    monkeypatch.setattr(Relay, "_pass", counted)
    pieces = events(300)
    pieces[150:150] = [data_event({"choices": [{"index": 0, "delta": {"content": 'of "usage", '}}], "usage": None})]
    asked = [*pieces[:-1], *events(0, usage=USAGE)[-2:]]
    async with FakeEngine(owned_by="vllm") as engine, running(engine) as app:
        body = {"model": "m", "stream": True, "messages": []}
        async with client.post(app.url + CHAT, json=body) as left_alone:
            await left_alone.read()
        looked.clear()
        engine.script.append(lambda _, request: one_by_one(request, asked))
        async with client.post(app.url + CHAT, json=body) as response:
            assert await response.read() == b"".join(pieces)
        row = app.control.pages.decisions[-1]
    assert row.usage is not None
    assert row.usage.cached_tokens == 32
    assert len(looked) < 100


async def one_by_one(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    """A stream whose pieces are chunks that come by themselves."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0.002)
    return response


async def test_usage_of_clients_who_asked(client: ClientSession, engine: FakeEngine) -> None:
    """A client that asked for usage itself gets it, opted in or not."""
    body = {"model": "m", "stream": True, "messages": [], "stream_options": {"include_usage": True}}
    async with running(engine, api__ask_usage=True) as app, client.post(app.url + CHAT, json=body) as response:
        assert await response.read() == b"".join(events(usage=USAGE))


async def test_long_bodies(client: ClientSession, engine: FakeEngine) -> None:
    """Bodies parsed off the event loop are placed and passed on like any other."""
    text = "long " * 100_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    async with running(engine, limits__offload_bytes_min=1000) as app:
        for _ in range(2):
            async with client.post(app.url + CHAT, data=body) as response:
                assert response.status == 200
        assert engine.seen[1].body == body
        assert int(response.headers["x-warmroute-predicted-cached-tokens"]) > 1000


async def test_other_paths(client: ClientSession, engine: FakeEngine) -> None:
    """Allow-listed paths pass, with bodies of any kind; multipart ones are placed by their model."""
    async with running(engine) as app:
        for path, body in (
            ("/tokenize", b'{"model":"m","prompt":"x"}'),
            ("/v1/rerank", b'{"query":"q"}'),
            ("/pooling", b""),
        ):
            async with client.post(app.url + path, data=body) as response:
                assert response.status == 200
            assert (engine.seen[-1].path, engine.seen[-1].body) == (path, body)
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with client.post(app.url + "/v1/audio/transcriptions", data=form, headers=headers) as response:
            assert response.status == 200
        assert app.control.pages.decisions[-1].model == "m"
        assert app.router.index.keys == 0


@pytest.mark.promise("Paths that are not for clients do not reach engines.", "engines")
async def test_paths_not_for_clients(client: ClientSession, engine: FakeEngine) -> None:
    """Cache flushes, sleep, adapter loading and the like are 404 and never reach an engine."""
    async with running(engine) as app:
        for path in (
            "/flush_cache",
            "/sleep",
            "/v1/load_lora_adapter",
            "/reset_prefix_cache",
            "/v1/../sleep",
            "/admin/replicas",
        ):
            async with client.post(app.url + path, data=b"{}") as response:
                assert response.status == 404
                assert (await response.json())["error"]["code"] == "unknown_path"
        async with client.get(app.url + CHAT) as response:
            assert response.status == 404
        assert engine.seen == []


async def test_stored_responses(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A response id goes back to the replica that made it, read, cancelled or continued; ids are bounded."""
    async with running(engine, other, limits__response_ids_max=2, routing__policy="round_robin") as app:
        made: dict[str, FakeEngine] = {}
        for n in range(3):
            for fake in (engine, other):
                fake.script.append(status(200, f'{{"id": "resp_{n}", "object": "response"}}'))
            async with client.post(app.url + "/v1/responses", json={"model": "m", "input": "x"}):
                pass
            made[f"resp_{n}"] = engine if app.control.pages.decisions[-1].receipt.replica == engine.url else other  # type: ignore[union-attr]
            engine.script.clear()
            other.script.clear()
        for _ in range(3):
            for id_ in ("resp_1", "resp_2"):
                async with client.get(f"{app.url}/v1/responses/{id_}") as response:
                    assert response.headers["x-warmroute-replica"] == made[id_].url
                async with client.post(f"{app.url}/v1/responses/{id_}/cancel") as response:
                    assert response.headers["x-warmroute-replica"] == made[id_].url
                body = {"model": "m", "input": "y", "previous_response_id": id_}
                async with client.post(app.url + "/v1/responses", json=body) as response:
                    assert response.headers["x-warmroute-replica"] == made[id_].url
        assert app.control.placer.owners.owner("resp_0", "") is None
