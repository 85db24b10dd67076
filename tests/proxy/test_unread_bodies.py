"""Bodies that engines read and the router does not pass byte for byte; those that must be read are refused in words."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.core.dialects import PATHS
from router.core.prompts.lenient_json import PARSED_BYTES_MAX
from tests.extproc.asking import asking, chat, picking
from tests.proxy.test_errors import error_of
from tests.support.fakes import USAGE, FakeEngine, events, idle, running, stream
from tests.support.keyring import Keyring

CHAT, MARK = "/v1/chat/completions", b"\xef\xbb\xbf"
FIELDS: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": 'héllo ✓ \\" {[ "}'}],
    "prompt": "hi",
    "input": "hi",
    "text": "hi",
    "max_tokens": 5,
}
PLAIN = json.dumps(FIELDS, ensure_ascii=False)
UNREAD = {
    **{name: PLAIN.encode(name) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")},
    "NaN": json.dumps(FIELDS | {"temperature": float("nan")}).encode(),
    "Infinity": json.dumps(FIELDS | {"logit_bias": {"1": float("-inf")}}).encode(),
    "half a surrogate": json.dumps(FIELDS | {"user": "\ud83d"}).encode(),
    "a long one": json.dumps(FIELDS | {"temperature": float("nan"), "user": "x" * PARSED_BYTES_MAX}).encode(),
}
WORDS = ["utf-8", "UTF-8", "", "identity", "Identity", "identity, utf-8", "iso-8859-1", "none", "8bit"]


async def sent(client: ClientSession, url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer to a POST."""
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with client.post(url, data=BytesIO(body), headers=headers) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("body", UNREAD.values(), ids=UNREAD)
async def test_what_python_reads_is_passed_on(client: ClientSession, engine: FakeEngine, body: bytes) -> None:
    """On every path, with a byte order mark or without."""
    async with running(engine, api__ask_usage=True) as app:
        for path in (*PATHS, "/tokenize"):
            assert (await sent(client, app.url + path, body))[0] == 200
            assert engine.seen[-1].body == body
        assert idle(app)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be"])
async def test_its_stream_comes_as_one(client: ClientSession, engine: FakeEngine, encoding: str) -> None:
    """Its end is judged, and nothing is asked for that its client did not ask for."""

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, events()[:-1])

    async with running(engine, api__ask_usage=True) as app:
        body = json.dumps(FIELDS | {"stream": True}).encode(encoding)
        for _ in range(2):
            engine.script.append(reply)
            status, answer = await sent(client, app.url + CHAT, body)
            assert (status, engine.seen[-1].body) == (200, body)
            assert answer == b"".join(events()[:-1])
        assert app.control.pages.decisions[-1].stream


@pytest.mark.parametrize("body", UNREAD.values(), ids=UNREAD)
async def test_its_model_decides_where_it_goes(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, body: bytes
) -> None:
    """Of several models the one that is named; where none can be read it is 400, and an unknown one 404."""
    other.models = ("n",)
    async with running(engine, other) as app:
        status, answer = await sent(client, app.url + CHAT, body)
        assert status == (400 if len(body) > PARSED_BYTES_MAX else 200)
        assert not other.seen
        if status == 400:
            assert json.loads(answer)["error"]["code"] == "model_not_found"
    async with running(other) as app:
        assert (await sent(client, app.url + CHAT, body))[0] == (200 if len(body) > PARSED_BYTES_MAX else 404)


async def test_a_byte_order_mark_is_passed_over(client: ClientSession, tmp_path: Path) -> None:
    """The prompt is read and known again, usage is asked for, and the engine gets the mark. With keys, too."""
    ring = Keyring(tmp_path, acme={"isolate": True})
    long = json.dumps(FIELDS | {"stream": True, "messages": [{"role": "user", "content": "word " * 20_000}]}).encode()
    async with FakeEngine(owned_by="vllm") as engine:
        async with running(engine) as app:
            for body in (long, long, MARK + long):
                if body.startswith(MARK):  # which the fake does not read
                    engine.script.append(lambda _, request: stream(request, events(usage=USAGE)))
                async with client.post(app.url + CHAT, data=body) as answer:
                    assert answer.status == 200
                    assert b'"usage"' not in await answer.read()
            assert int(answer.headers["x-warmroute-predicted-cached-tokens"]) > 1_000
            assert engine.seen[-1].body.startswith(MARK + long[:-1])
            assert engine.seen[-1].body[3:] == engine.seen[-2].body
            assert (await sent(client, app.url + CHAT, MARK + PLAIN.encode()))[0] == 200
            assert engine.seen[-1].body == MARK + PLAIN.encode()
        async with running(engine, **ring.settings) as app:
            for body in (PLAIN.encode(), MARK + PLAIN.encode()):
                assert (await sent(client, app.url + CHAT, body, **ring.of("acme")))[0] == 200
            salts = [json.loads(each.body)["cache_salt"] for each in engine.seen[-2:]]
            assert salts[0] == salts[1]


async def test_keys_need_the_body_read(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """What a tenant may ask depends on it: what cannot be read is 400 and compressed 415, and no engine gets it."""
    ring = Keyring(tmp_path, acme={})
    async with running(engine, **ring.settings) as app:
        for body in UNREAD.values():
            code, error = await error_of(client, app.url + CHAT, data=BytesIO(body), headers=ring.of("acme"))
            assert (code, error["code"]) == (400, "invalid_json")
        zstd = {"x-body-compressed": "zstd", **ring.of("acme")}
        code, error = await error_of(client, app.url + CHAT, data=b"\x28\xb5\x2f\xfd", headers=zstd)
        assert (code, error["code"]) == (415, "unsupported_encoding")
        assert engine.seen == []


async def test_two_legs_need_the_body_read(client: ClientSession, engine: FakeEngine) -> None:
    """Their bodies are made of it, and what clients say of transfers is taken out. A byte order mark goes."""
    async with running(engine, disagg__kv_connector="nixl") as app:
        code, error = await error_of(client, app.url + CHAT, data=UNREAD["utf-16"])
        assert (code, error["code"]) == (400, "invalid_json")
        code, _ = await error_of(client, app.url + CHAT, data=b"\x28\xb5", headers={"x-body-compressed": "zstd"})
        assert code == 415
        assert (await sent(client, app.url + CHAT, MARK + PLAIN.encode()))[0] == 200
        assert json.loads(engine.seen[-1].body) == FIELDS


@pytest.mark.parametrize("word", WORDS)
async def test_a_charset_is_no_compression(client: ClientSession, engine: FakeEngine, word: str) -> None:
    """Whatever Content-Encoding says that is no coding changes nothing, and the engine gets it as it came."""
    async with running(engine) as app:
        assert (await sent(client, app.url + CHAT, PLAIN.encode(), Content_Encoding=word))[0] == 200
    assert engine.seen[-1].body == PLAIN.encode()
    assert engine.seen[-1].headers["Content-Encoding"] == word


@pytest.mark.parametrize("word", ["gzip", "x-gzip", "GZIP", "deflate", "br", "zstd", "compress", "identity, gzip"])
async def test_compression_is_refused_with_what_is_taken(client: ClientSession, engine: FakeEngine, word: str) -> None:
    """RFC 9110 section 12.5.3: Accept-Encoding in an answer says which codings would have been."""
    async with (
        running(engine) as app,
        client.post(app.url + CHAT, data=PLAIN.encode(), headers={"Content-Encoding": word}) as answer,
    ):
        assert (answer.status, answer.headers["Accept-Encoding"]) == (415, "identity")
        assert (await answer.json())["error"]["code"] == "unsupported_encoding"
    assert engine.seen == []


async def test_sglang_may_take_what_it_decompresses(client: ClientSession, engine: FakeEngine) -> None:
    """The router cannot: it goes by load, as it came, to the one model that there is."""
    body = b"\x28\xb5\x2f\xfd\x04}"
    async with running(engine) as app:
        for path in (CHAT, "/generate", "/tokenize"):
            assert (await sent(client, app.url + path, body, x_body_compressed="zstd"))[0] == 200
            assert (engine.seen[-1].body, engine.seen[-1].headers["x-body-compressed"]) == (body, "zstd")


async def test_a_body_that_is_no_json_is_the_engines_where_no_prompt_is_read(
    client: ClientSession, engine: FakeEngine
) -> None:
    """Audio, for one. What says that it is JSON and is none is refused, and so is JSON over the limits."""
    async with running(engine, api__passthrough=("/v1/odd",)) as app:
        for body, status in ((b"\0\1\2[[[", 200), (b"RIFF" + b"[" * 100_000, 200), (b" " + b"[" * 100_000, 400)):
            assert (await sent(client, app.url + "/v1/odd", body, Content_Type="audio/wav"))[0] == status
            assert (await sent(client, app.url + "/v1/odd", body))[0] == 400
    assert [each.body[:4] for each in engine.seen] == [b"\0\1\2[", b"RIFF"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
async def test_depth_and_parts_are_counted_in_every_encoding(
    client: ClientSession, engine: FakeEngine, encoding: str
) -> None:
    """A body is as deep in UTF-16 as in UTF-8, and brackets in strings are none."""
    quoted = json.dumps(FIELDS | {"user": '\\"[{' * 500}).encode(encoding)
    deep = ('{"model":"m","x":' + "[" * 300 + "]" * 300 + "}").encode(encoding)
    many = ('{"model":"m","x":[' + "[]," * 70_000 + "0]}").encode(encoding)
    async with running(engine) as app:
        assert (await sent(client, app.url + CHAT, quoted))[0] == 200
        for body, expected in ((deep, "invalid_json"), (many, "too_many_parts")):
            code, error = await error_of(client, app.url + CHAT, data=body)
            assert (code, error["code"]) == (400, expected)


async def test_a_gateway_passes_it_on(engine: FakeEngine) -> None:
    """Nothing is put into what cannot be read, not even the model that the gateway names."""
    body = PLAIN.encode("utf-16-be")
    async with picking(engine) as app:
        for headers in ({}, {"x-gateway-model-name-rewrite": "m"}):
            async with asking(app, "buffered") as it:
                picked = await it.pick(body, headers=headers)
                assert picked.HasField("request_body")
                assert not picked.request_body.response.HasField("body_mutation")
        async with asking(app, "buffered") as it:
            picked = await it.pick(MARK + chat())
            assert not picked.HasField("immediate_response")
