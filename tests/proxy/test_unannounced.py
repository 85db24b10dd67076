"""The answer decides what streams: nothing is held that may be a stream, and none that breaks off looks whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.router_server import RouterServer
from tests.http.wire import Client, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.support.fakes import events, message_events, response_events
from tests.support.recorded import SSE, chunked, head

pytestmark = pytest.mark.inside

CHAT, MESSAGES, SPEECH, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/audio/speech", "/v1/audio/transcriptions"
ASKED, WHOLE = b'{"model":"m","stream":true,"messages":[]}', b'{"model":"m","messages":[]}'
CHUNKED, PLAIN = "transfer-encoding: chunked", "content-type: application/json"
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\nTrue\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)
IN_PARTS = "Content-Type: multipart/form-data; boundary=b"
NDJSON = [b'{"response":"a"}\n', b'{"response":"b"}\n', b'{"done":true}\n']
SLOW_JSON = [b" ", b"\n", b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}']
PCM = [bytes([n]) * 50 for n in (1, 0, 10)]
HEARD = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % n for n in range(3)]

# Path, request, further header lines of it, lines of the answer's head, and pieces of its body.
Case = tuple[str, bytes, str, tuple[str, ...], list[bytes]]
CASES: dict[str, Case] = {
    "chat, unannounced": (CHAT, WHOLE, "", (SSE, CHUNKED), events()),
    "chat, announced in a word": (CHAT, ASKED.replace(b"true", b'"yes"'), "", (SSE, CHUNKED), events()),
    "messages, unannounced": (MESSAGES, WHOLE, "", (SSE, CHUNKED), message_events()),
    "responses, unannounced": ("/v1/responses", b'{"model":"m","input":"x"}', "", (SSE, CHUNKED), response_events()),
    "chat as JSON": (CHAT, ASKED, "", (PLAIN, CHUNKED), events()),
    "chat as text": (CHAT, ASKED, "", ("content-type: text/plain", CHUNKED), events()),
    "chat as nothing": (CHAT, ASKED, "", (CHUNKED,), events()),
    "chat of a known length": (CHAT, ASKED, "", (SSE, f"content-length: {len(b''.join(events()))}"), events()),
    "chat until the end": (CHAT, ASKED, "", (SSE,), events()),
    "lines": (CHAT, ASKED, "", ("content-type: application/x-ndjson", CHUNKED), NDJSON),
    "lines, unannounced": (CHAT, WHOLE, "", (CHUNKED,), NDJSON),
    "slow JSON": (CHAT, WHOLE, "", (PLAIN, CHUNKED), SLOW_JSON),
    "a compressed stream": (CHAT, ASKED, "", (SSE, "content-encoding: gzip", CHUNKED), PCM),
    "speech": (SPEECH, b'{"model":"m"}', "", ("content-type: audio/pcm", CHUNKED), PCM),
    "speech until the end": (SPEECH, b'{"model":"m"}', "", ("content-type: audio/pcm",), PCM),
    "long speech": (SPEECH, b'{"model":"m"}', "", ("content-type: audio/wav", "content-length: 150"), PCM),
    "a transcription": (TEXT, FORM, IN_PARTS, (SSE, CHUNKED), HEARD),
}


class Steps:
    """An engine that sends a piece each time it may."""

    def __init__(self, lines: tuple[str, ...], pieces: list[bytes]) -> None:
        self.start, self.chunked = head(*lines), CHUNKED in lines
        self.closes = not self.chunked and not any(line.startswith("content-length") for line in lines)
        self.pieces = [b"%x\r\n%b\r\n" % (len(each), each) if self.chunked else each for each in pieces]
        self.may = asyncio.Queue[str]()
        self.engine = RawEngine(self.play)

    async def play(self, wire: Wire) -> None:
        """The engine's part."""
        await wire.send(self.start)
        for piece in self.pieces:
            if await self.may.get() != "go on":
                wire.transport.close()
                return
            await wire.send(piece)
        if self.chunked:
            await wire.send(b"0\r\n\r\n")
        elif self.closes:
            wire.transport.close()


@asynccontextmanager
async def asked(case: Case, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Steps, RouterServer, Client]]:
    """A router before such an engine, and a client that has asked it. Of what is held, 100 bytes are."""
    path, body, lines, answer, pieces = case
    steps = Steps(answer, pieces)
    settings = {"limits__buffered_response_bytes_max": 100, "api__passthrough": (SPEECH, TEXT)}
    async with steps.engine as engine, proxied(engine, monkeypatch, **settings) as app:
        client = await connect(app.url)
        client.ask(post(path, body, *filter(None, [lines])))
        yield steps, app, client
        client.transport.close()
        await settled(app)


def came(client: Client) -> bytes:
    """The body so far."""
    return bytes(client.answers[0].body) if client.answers else b""


@pytest.mark.parametrize("name", CASES)
@on_uvloop
async def test_each_piece_passes_as_it_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has a piece before the engine sends the next, and in the end every byte of the body and no other."""
    async with asked(CASES[name], monkeypatch) as (steps, _, client):
        so_far = b""
        for piece in CASES[name][4]:
            steps.may.put_nowait("go on")
            so_far += piece
            await client.until(lambda so_far=so_far: came(client) == so_far)  # type: ignore[misc]
        answer = await client.answer()
        assert (client.error, answer.status, answer.whole, bytes(answer.body)) == (None, 200, True, so_far)


CUT = [name for name, case in CASES.items() if CHUNKED in case[3] or "length" in case[3][-1]]


@pytest.mark.parametrize("name", CUT)
@on_uvloop
async def test_a_cut_never_looks_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events have a known meaning, an error event ends the stream. Elsewhere the connection breaks, behind such
    an event if there are events at all."""
    path, _, _, lines, pieces = CASES[name]
    is_events = pieces[0].startswith((b"data:", b"event:"))
    async with asked(CASES[name], monkeypatch) as (steps, app, client):
        steps.may.put_nowait("go on")
        await client.until(lambda: came(client) == pieces[0])
        steps.may.put_nowait("break")
        known = SSE in lines and is_events and path != TEXT
        if known:
            assert (await client.answer()).whole
            assert client.error is None
        else:
            await client.lost.wait()
            assert not client.answers[0].whole
        said = came(client).removeprefix(pieces[0])
        assert (b"stream_broken" in said) is is_events
        assert is_events or not said
        while not app.control.pages.decisions:
            await asyncio.sleep(0)
        record = app.control.pages.decisions[-1]
        assert (record.ending, record.error) == ("failed", "broke_midway: connection closed")


@on_uvloop
async def test_an_unlabelled_stream_must_say_that_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with the right type must, though its connection breaks as well: who reads no events sees that."""
    async with asked((CHAT, ASKED, "", (PLAIN, CHUNKED), events()[:2]), monkeypatch) as (steps, _, client):
        for _ in range(2):
            steps.may.put_nowait("go on")
        await client.lost.wait()
        assert not client.answers[0].whole
        assert json.loads(came(client).rpartition(b"data: ")[2])["error"]["code"] == "stream_broken"


@pytest.mark.parametrize(
    "name", ["chat, unannounced", "messages, unannounced", "a transcription", "slow JSON", "speech"]
)
@on_uvloop
async def test_what_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that nobody announced has a time to its first token. No speed is learned from it: the length of such a
    prompt may be a guess. The usage of an answer in chunks is read at its end."""
    async with asked(CASES[name], monkeypatch) as (steps, app, client):
        for _ in CASES[name][4]:
            steps.may.put_nowait("go on")
        await client.answer()
        while not app.control.pages.decisions:
            await asyncio.sleep(0)
        record = app.control.pages.decisions[-1]
        streams = SSE in CASES[name][3]
        assert (record.stream, record.times.ttft_s is not None, record.ending) == (streams, streams, "ok")
        assert (record.times.events > 0) is streams
        assert (record.usage is not None) is (name in ("messages, unannounced", "slow JSON"))
        member = next(iter(app.router.fleet.members.values()))
        assert member.batches.first_token_s == 0.0


@pytest.mark.parametrize("status", [200, 500])
@on_uvloop
async def test_what_is_held_never_passes_in_part(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short answer of a known length, and any error: the client has nothing of one that breaks off."""
    start = f"HTTP/1.1 {status} X\r\n{PLAIN}\r\n".encode()
    cut = start + (b"content-length: 9\r\n\r\n{" if status == 200 else b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")

    async def play(wire: Wire) -> None:
        await wire.send(cut)
        wire.transport.close()

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, WHOLE))
        answer = await client.answer()
        assert (answer.status, answer.whole) == (502, True)
        assert json.loads(answer.body)["error"]["code"] == "engine_failed"
        client.transport.close()


@on_uvloop
async def test_a_stored_response_is_known_before_its_client_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes before its id waits, since a client may use the id at once."""
    pieces = [b" ", b'{"object":"response",', b'"id":"resp_1",', b'"output":[]}']
    body = b'{"model":"m","input":"x"}'
    async with asked(("/v1/responses", body, "", (PLAIN, CHUNKED), pieces), monkeypatch) as (steps, app, client):
        for _ in pieces[:3]:
            steps.may.put_nowait("go on")
        await client.until(lambda: came(client) == b"".join(pieces[:3]))
        assert app.control.placer.owners.knows("resp_1")
        steps.may.put_nowait("go on")
        assert (await client.answer()).body == b"".join(pieces)


@on_uvloop
async def test_a_whole_body_in_chunks_is_sent_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's chunks that come together are no reason for chunks."""
    raw = chunked([b"{", b"}"], kind=PLAIN)
    async with RawEngine(lambda wire: wire.send(raw)) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, WHOLE))
        answer = await client.answer()
        assert (answer.headers[b"content-length"], bytes(answer.body)) == (b"2", b"{}")
        client.transport.close()
