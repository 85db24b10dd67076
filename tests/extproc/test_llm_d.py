"""What llm-d's own tests of its picker want, restated here; each says which one it is.

They are of llm-d/llm-d-router: pkg/epp/handlers, pkg/epp/server, pkg/epp/requestcontrol (candidates_test), and
test/integration/epp (hermetic_test), which runs a whole picker. Its mode is full duplex both ways, and so is ours here.
Not restated is what this router has no part of: scores in metadata, eviction of a request that runs, model names that
are written back into answers, and what is tested of plugins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from router.extproc import extproc_pb2 as pb
from router.extproc import metadata
from router.extproc.request_headers import request_of
from router.router_server import RouterServer
from router.telemetry.request_record import RequestRecord
from tests.extproc.asking import Asking, asking, chat, destinations, endpoint, error_of, nobody, picking, set_headers
from tests.support.fakes import USAGE, FakeEngine, data_event, message_events
from tests.support.waiting import until

DONE = b"data: [DONE]\n\n"
WORD = data_event({"choices": [{"index": 0, "delta": {"content": "Hello"}}]})
STOP = data_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
SPENT = data_event({"choices": [], "usage": USAGE})
CONTROL = {*map(bytes.decode, (*metadata.OBJECTIVE, *metadata.FAIRNESS, *metadata.MODEL))}


async def heard(it: Asking) -> pb.ProcessingResponse:
    """The next answer, which there must be."""
    said = await it.hear()
    assert said is not None
    return said


async def sent(it: Asking, *pieces: bytes, **head: Any) -> tuple[pb.ProcessingResponse, bytes]:
    """Send a request in full duplex, and return what is made of its head, and the body that goes on."""
    await it.head(**head)
    for n, piece in enumerate(pieces):
        await it.body(piece, end=n == len(pieces) - 1)
    first = await heard(it)
    body, end = b"", first.HasField("immediate_response")
    while not end:
        piece_ = (await heard(it)).request_body.response.body_mutation.streamed_response
        body, end = body + piece_.body, piece_.end_of_stream
    return first, body


async def answered(
    app: RouterServer, pieces: Sequence[bytes], *, stream: bool, path: str = ""
) -> tuple[RequestRecord, bytes]:
    """One request whose answer comes in these pieces: its record, and what the client got."""
    kind, got = "text/event-stream; charset=utf-8" if stream else "application/json", b""
    before = len(app.control.history.recent)
    async with asking(app, "duplex", "duplex") as it:
        body = chat(stream=stream, max_tokens=5)
        await sent(it, body, **({"path": path} if path else {}))
        await it.answer(content_type=kind)
        await heard(it)
        for n, piece in enumerate(pieces):
            await it.piece(piece, end=n == len(pieces) - 1)
            got += (await heard(it)).response_body.response.body_mutation.streamed_response.body
        await it.finish()
    await until(lambda: len(app.control.history.recent) == before + 1)
    return app.control.history.recent[-1], got


# handlers/request_test


def test_heads_are_read_alike() -> None:
    """TestHandleRequestHeaders: lower-case names, `raw_value` before `value`, and present names before old ones.
    Hermetic `passthrough: model not in objectives`: an objective that nobody knows changes nothing."""
    pairs = [pb.HeaderValue(key="X-Test", value="val"), pb.HeaderValue(key="x-raw", raw_value=b"a", value="b")]
    for new, old in (metadata.OBJECTIVE, metadata.MODEL):
        pairs += [pb.HeaderValue(key=old.decode(), value="old"), pb.HeaderValue(key=new.decode(), value="new")]
    request = request_of(pairs, nobody())
    metadata.apply(request, {"other": "high"})
    assert request.header(b"x-warmroute-priority") == ""
    assert (request.fields[b"x-test"], request.fields[b"x-raw"]) == (b"val", b"a")
    assert metadata.model_of(request) == "new"
    metadata.apply(request, {"new": "high", "old": "low"})
    assert request.header(b"x-warmroute-priority") == "high"


async def test_control_headers_are_nobodys_answer(engine: FakeEngine) -> None:
    """TestGenerateHeaders_Sanitization, TestGenerateResponseHeaders_Sanitization: of what a client or an engine says
    under the names of the protocol nothing is said again; the destination is the picked one, the length the body's."""
    said = dict.fromkeys(CONTROL - set(map(bytes.decode, metadata.MODEL)), "of-somebody")
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        forged = {"x-user-data": "kept", "content-length": "99999", metadata.DESTINATION: "1.1.1.1:666"}
        first, body = await sent(it, chat(), headers=said | forged)
        assert destinations(first) == [endpoint(engine)]
        told = set_headers(first)
        assert told["content-length"] == str(len(body))
        assert not CONTROL & set(told)
        assert "x-user-data" not in first.request_headers.response.header_mutation.remove_headers
        await it.answer(headers=said | {metadata.DESTINATION: "10.2.0.5:8080", "x-backend-server": "vllm"})
        back = set_headers(await heard(it))
        assert not (CONTROL | {metadata.DESTINATION, "content-length"}) & set(back)


# handlers/response_test


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        pytest.param({"usage": {"prompt_tokens": 11, "completion_tokens": 5}}, (11, 5, None), id="success"),
        pytest.param({"usage": USAGE}, (100, 3, 32), id="success with cached tokens"),
        pytest.param({"choices": []}, None, id="success body without usage"),
        pytest.param(b"{not json", None, id="success invalid json body"),
    ],
)
async def test_usage_of_whole_answers(
    engine: FakeEngine, body: Any, tokens: tuple[int, int, int | None] | None
) -> None:
    """TestHandleResponseBody; hermetic `response buffering: multi-chunk JSON`, `invalid JSON`, `empty EOS chunk`: usage
    is read of an answer that comes in pieces, and whatever it is the client gets every byte of it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with picking(engine) as app:
        record, got = await answered(app, [raw[:9], raw[9:], b""], stream=False)
    assert got == raw
    assert (record.usage and _counts(record)) == tokens


def _counts(record: RequestRecord) -> tuple[int, int, int | None]:
    assert record.usage is not None
    return record.usage.prompt_tokens, record.usage.completion_tokens, record.usage.cached_tokens


def _cut(pieces: Iterable[bytes], at: int) -> list[bytes]:
    """The same bytes, cut once more at a place where no event ends."""
    whole = b"".join(pieces)
    return [whole[:at], whole[at:]]


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        pytest.param([WORD + STOP + SPENT + DONE], (100, 3, 32), id="Usage and DONE in same chunk"),
        pytest.param([WORD + STOP + SPENT, DONE], (100, 3, 32), id="Usage in Chunk 1, DONE in Chunk 2"),
        pytest.param([WORD, STOP, SPENT, DONE], (100, 3, 32), id="Content -> Usage -> DONE"),
        pytest.param([WORD + STOP, DONE], None, id="No Usage Data"),
        pytest.param(_cut([WORD, STOP, SPENT, DONE], -30), (100, 3, 32), id="usage cut at a chunk boundary"),
    ],
)
async def test_usage_of_streams(engine: FakeEngine, pieces: list[bytes], tokens: tuple[int, int, int] | None) -> None:
    """TestHandleStreamedResponseBody, TestHandleResponseBodyModelStreaming_TokenAccumulation; hermetic `response
    streaming: SSE token counting`: wherever a stream is cut into pieces, its usage is read once, of its end."""
    async with picking(engine) as app:
        record, got = await answered(app, pieces, stream=True)
    assert got == b"".join(pieces)
    assert (record.usage and _counts(record)) == tokens


async def test_usage_of_anthropics_streams(engine: FakeEngine) -> None:
    """TestHandleResponseBodyModelStreaming_AnthropicUsageAccumulation: what `message_start` says of the prompt is not
    lost by what `message_delta` says of the answer."""
    async with picking(engine) as app:
        record, _ = await answered(app, message_events(), stream=True, path="/v1/messages")
    assert _counts(record) == (100, 3, 32)


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        pytest.param([WORD + WORD, WORD + DONE], 4, id="events accumulate across chunks"),
        pytest.param([WORD], 1, id="a truncated stream keeps the count it reached"),
        pytest.param(_cut([WORD, WORD, DONE], len(WORD) + 10), 3, id="an event cut at a chunk boundary counts once"),
    ],
)
async def test_events_are_counted(engine: FakeEngine, pieces: list[bytes], count: int) -> None:
    """TestStreamedEventAccumulation: each once, wherever it is cut; the end of a stream is one of them here."""
    async with picking(engine) as app:
        record, _ = await answered(app, pieces, stream=True)
    assert record.times.events == count


# server/server_test


@pytest.mark.parametrize("trailers", [True, False], ids=["with trailers", "without trailers"])
@pytest.mark.parametrize("asked", [True, False], ids=["stream=true", "no stream"])
@pytest.mark.parametrize("streams", [True, False], ids=["streaming response", "non-streaming response"])
async def test_a_whole_exchange(engine: FakeEngine, *, streams: bool, asked: bool, trailers: bool) -> None:
    """TestServer, in all its seven forms and one more: nothing is said of the head before the body is here; head, body,
    head of the answer, its body and its trailers are answered in order, each once, and the model is rewritten."""
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        headers = {"x-test": "body", "x-llm-d-inference-fairness-id": "a-fairness-id", metadata.MODEL[0].decode(): "m"}
        first, body = await sent(it, chat("x", stream=asked).replace(b'"m"', b'"food-review"'), headers=headers)
        assert destinations(first) == [endpoint(engine)]
        assert json.loads(body)["model"] == "m"
        assert set_headers(first)["content-length"] == str(len(body))
        await it.answer(content_type="text/event-stream" if streams else "application/json")
        assert (await heard(it)).HasField("response_headers")
        await it.piece(b"test response body", end=not trailers)
        passed = (await heard(it)).response_body.response.body_mutation.streamed_response
        assert (passed.body, passed.end_of_stream) == (b"test response body", not trailers)
        if trailers:
            await it.send(response_trailers={})
            assert (await heard(it)).HasField("response_trailers")
        await it.finish()
        assert not any(member.leases for member in app.router.members)


async def test_what_is_not_parsed_is_passed_on(engine: FakeEngine) -> None:
    """TestServer_Skip, hermetic `passthrough parser success`: a path that is passed on is placed though its body is no
    prompt, and every byte of it goes on. It is JSON here, as a model may be named in it."""
    raw = b'{"model" : "m", "anything": [1, 2,  3]}'
    async with picking(engine, api__passthrough=["/passed"]) as app, asking(app, "duplex", "duplex") as it:
        first, body = await sent(it, raw[:12], raw[12:], path="/passed", headers={"hi": "mom"})
        assert (destinations(first), body) == ([endpoint(engine)], raw)


async def test_a_body_beyond_grpcs_own_limit(engine: FakeEngine) -> None:
    """TestServer_GRPCReceiveLimit, turned round: there 5 MB in one message end the stream with an error of gRPC unless
    a flag says otherwise; here they are served, as `limits.body_bytes_max` is the one limit."""
    long = chat("a" * (5 << 20))
    async with picking(engine, limits__body_bytes_max=8 << 20) as app, asking(app, "duplex", "duplex") as it:
        first, body = await sent(it, long)
        assert (destinations(first), body) == ([endpoint(engine)], long)


# requestcontrol/candidates_test


def test_a_hint_with_junk_in_it() -> None:
    """TestDatastoreEndpointCandidates_Locate, `malformed data (non-string)`: what is no text in the list is no
    endpoint, and the rest holds."""
    message = pb.ProcessingRequest()
    listed = message.metadata_context.filter_metadata[metadata.SUBSET_HINT].fields[metadata.SUBSET].list_value
    listed.values.add(string_value="10.0.0.1:8080")
    listed.values.add(number_value=12345)
    assert metadata.subset_of(message, request_of([], nobody()), conformance=False) == {"10.0.0.1:8080"}


# hermetic_test


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        pytest.param([b"no healthy upstream"], "invalid_json", id="invalid json body"),
        pytest.param([b'{"model": 1, "messages": []}'], "invalid_model", id="model that is none"),
    ],
)
async def test_bodies_that_are_none(engine: FakeEngine, pieces: list[bytes], code: str) -> None:
    """Hermetic `invalid json body`: 400, in words."""
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        first, _ = await sent(it, *pieces)
        assert (error_of(first)[0], error_of(first)[1]["error"]["code"]) == (400, code)


async def test_a_request_that_names_no_model(engine: FakeEngine, other: FakeEngine) -> None:
    """Hermetic `request missing model field`: 400 there. Here the only model that there is is meant, as at the proxy,
    and it is 400 where there are two."""
    body = b'{"messages": [{"role": "user", "content": "hello world"}]}'
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        first, _ = await sent(it, body)
        assert destinations(first) == [endpoint(engine)]
    other.models = ("n",)
    async with picking(engine, other) as app, asking(app, "duplex", "duplex") as it:
        first, _ = await sent(it, body)
        assert error_of(first)[0] == 400


async def test_a_split_body_is_rewritten(engine: FakeEngine) -> None:
    """Hermetic `split body across chunks`, `rewrite request model`: a body in pieces is one request, and the named
    model replaces its own."""
    headers = {metadata.MODEL[0].decode(): "m"}
    pieces = b'{"max_tokens":100,"model":"sql-lo', b'ra-sheddable","prompt":"test6","temperature":0}'
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        first, body = await sent(it, *pieces, path="/v1/completions", headers=headers)
        assert destinations(first) == [endpoint(engine)]
        assert json.loads(body) == {"max_tokens": 100, "model": "m", "prompt": "test6", "temperature": 0}


async def test_subsets(engine: FakeEngine, other: FakeEngine) -> None:
    """Hermetic `subsetting: select best from subset`, `partial match`, `no pods match`: among those that are named and
    there one is picked, and where none is there the client is told 503 and why the request was dropped."""
    both = [endpoint(engine), endpoint(other)]
    async with picking(engine, other) as app:
        for subset, allowed in ((both, set(both)), ([both[1], "192.168.1.3:8000"], {both[1]})):
            async with asking(app, "duplex", "duplex") as it:
                first, _ = await sent(it, chat(), subset=subset)
                assert set(destinations(first)) <= allowed
                await it.finish()
        async with asking(app, "duplex", "duplex") as it:
            first, _ = await sent(it, chat(), subset=["192.168.1.99:8000"])
            assert error_of(first)[0] == 503
            assert set_headers(first)[metadata.DROPPED] == error_of(first)[1]["error"]["code"]


async def test_nobody_is_there(engine: FakeEngine) -> None:
    """Hermetic `no backend pods available`: an error at once. It is 503 here, by which clients try again, not 500."""
    async with picking(engine) as app:
        await until(lambda: app.extproc._parts.known)
        engine.healthy = False
        await until(lambda: not app.router.fleet.ready())
        async with asking(app, "duplex", "duplex") as it:
            first, _ = await sent(it, chat())
            assert error_of(first)[0] == 503
