"""What an engine answers, asked directly and through a router: the parts of test_transparency.py."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import aiohttp

from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.zoo.members import MEMBERS
from router.http.request import HOP_HEADERS, OWN_HEADERS
from router.router_server import RouterServer
from tests.http.wire import Answered, Client, RawEngine, Wire, connect
from tests.support.fakes import running

HELD_BYTES_MAX = 2_000
"""`limits.buffered_response_bytes_max` here."""
WAIT_S = 60.0
"""The longest wait for a first piece: only a test that fails reaches it."""
AUDIO = ("/v1/audio/speech", "/v1/audio/transcriptions")
FORM = "multipart/form-data; boundary=b"
JSON = "application/json"
EVENTS = "text/event-stream"
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_FRAMING = (b"content-length", b"transfer-encoding")


@dataclass(frozen=True)
class Asked:
    """A request."""

    path: str
    body: bytes
    kind: str = JSON


@dataclass(frozen=True)
class Case:
    """An answer and how it is sent. `framing`: length, chunked, eof; `seed`: of all cuts."""

    asked: Asked
    status: int
    kind: str | None
    """The content type; None: there is none."""
    body: bytes
    framing: str = "length"
    seed: int = 0

    @property
    def events(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self.kind is not None and self.kind.startswith(EVENTS)

    @property
    def held(self) -> bool:
        """Whether a router may hold it until it is whole."""
        return not self.events and self.framing == "length" and len(self.body) <= HELD_BYTES_MAX

    def wire(self) -> tuple[list[bytes], list[bytes], int]:
        """Pieces of the answer before the client has to have seen something, those behind it, and how many bytes of the
        body it is to have seen: of events, the first; of a body that is longer than is held, more than that."""
        rng = random.Random(self.seed)
        least = _EVENT_END.search(self.body).end() if self.events else 1  # type: ignore[union-attr]
        if not self.events and self.framing == "length":
            least = min(len(self.body), HELD_BYTES_MAX + 1)
        first = rng.randint(least, len(self.body))
        raw, offset = self._raw(rng, first)
        seen = least if self.events else first
        return _cut(raw[:offset], rng), _cut(raw[offset:], rng), seen

    def _raw(self, rng: random.Random, first: int) -> tuple[bytes, int]:
        """All bytes, and the place behind the first so many of the body."""
        head = [f"HTTP/1.1 {self.status} X", "server: uvicorn", "x-cost: 1", "cache-control: no-store"]
        if self.kind is not None:
            head.append(f"content-type: {self.kind}")
        if self.framing == "length":
            head.append(f"content-length: {len(self.body)}")
        elif self.framing == "chunked":
            head.append("transfer-encoding: chunked")
        raw = "\r\n".join((*head, "", "")).encode()
        if self.framing != "chunked":
            return raw + self.body, len(raw) + first
        offset = 0
        places = sorted(rng.sample(range(1, len(self.body)), min(len(self.body) - 1, rng.randint(0, 6))))
        for start, end in itertools.pairwise([0, *places, len(self.body)]):
            raw += b"%x\r\n" % (end - start)
            if start < first <= end:
                offset = len(raw) + first - start + (2 if first == end else 0)
            raw += self.body[start:end] + b"\r\n"
        return raw + b"0\r\n\r\n", offset


def _cut(raw: bytes, rng: random.Random) -> list[bytes]:
    """A few reads."""
    places = sorted(rng.sample(range(1, len(raw)), min(len(raw) - 1, rng.randint(0, 3)))) if len(raw) > 1 else []
    return [raw[start:end] for start, end in itertools.pairwise([0, *places, len(raw)])]


@dataclass
class Got:
    """An answer as a client has it. `first`: bytes of the body that had come before the engine sent the rest."""

    answered: Answered
    first: int


@dataclass
class Bench:
    """An engine that answers as the case says, and a router before it."""

    engine: RawEngine = field(init=False)
    case: Case = field(init=False)
    app: RouterServer = field(init=False)
    gate: asyncio.Event = field(init=False)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, **settings: Any) -> Self:
        """Listen."""
        self.engine = await self._stack.enter_async_context(RawEngine(self.play))
        settings = {"limits__buffered_response_bytes_max": HELD_BYTES_MAX, **settings}
        self.app = await self._stack.enter_async_context(running(self.engine.url, **settings))
        return self

    async def stop(self) -> None:
        """End both."""
        await self._stack.aclose()

    async def play(self, wire: Wire) -> None:
        """The engine's part."""
        before, behind, _ = self.case.wire()
        for piece in before:
            wire.transport.write(piece)
            await asyncio.sleep(0)
        await self.gate.wait()
        for piece in behind:
            wire.transport.write(piece)
            await asyncio.sleep(0)
        if self.case.framing == "eof":
            wire.transport.close()

    async def ask(self, case: Case, url: str, wait_s: float = WAIT_S) -> Got:
        """One answer. The rest is sent once the client has the first piece, or at once of one that may be held.

        Raises TimeoutError where the first piece does not come."""
        self.case, self.gate, seen = case, asyncio.Event(), case.wire()[2]
        client = await connect(url)
        try:
            client.ask(_request(case.asked))
            if not case.held:
                async with asyncio.timeout(wait_s):
                    await client.until(lambda: _body_bytes(client) >= seen)
            first = _body_bytes(client)
            self.gate.set()
            answered = await client.answer()
            assert client.error is None, client.error
            assert answered.whole
            return Got(answered, first)
        finally:
            client.transport.abort()


def _request(asked: Asked) -> bytes:
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nContent-Type: {asked.kind}\r\nContent-Length: {len(asked.body)}"
    return head.encode() + b"\r\n\r\n" + asked.body


def _body_bytes(client: Client) -> int:
    return len(client.answers[0].body) if client.answers else 0


def headers(got: Got) -> dict[bytes, bytes]:
    """Headers that must be the same: all but those of one connection, and the router's own."""
    return {
        name: value
        for name, value in got.answered.headers.items()
        if name not in HOP_HEADERS and name not in _FRAMING and not name.startswith(OWN_HEADERS)
    }


# -- answers of the zoo ----------------------------------------------------------------------------------------------


def requests() -> Iterator[Asked]:
    """A request of each API, and two that are refused; none says whether it wants a stream."""
    chat = '{"model":"m","max_tokens":12,"messages":[{"role":"user","content":"tell me of the river"}]%s}'
    yield Asked("/v1/chat/completions", chat.encode())
    yield Asked("/v1/messages", chat.encode())
    yield Asked("/v1/completions", b'{"model":"m","prompt":"the river","max_tokens":8%s}')
    yield Asked("/v1/responses", b'{"model":"m","input":"the river","store":false,"max_output_tokens":8%s}')
    yield Asked("/v1/audio/speech", b'{"model":"m","input":"the river","max_tokens":8%s}')
    yield Asked("/v1/audio/speech", b'{"model":"m","input":"the river","max_tokens":8,"stream_format":"sse"%s}')
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    parts = [part % (b"model", b"", b"m"), part % (b"max_tokens", b"", b"8")]
    parts.append(part % (b"file", b'; filename="a.wav"', b"RIFF"))
    yield Asked("/v1/audio/transcriptions", b"".join(parts) + b"%s--b--\r\n", FORM)
    yield Asked("/v1/chat/completions", b'{"model":"m","max_tokens":0,"messages":[]%s}')
    yield Asked("/v1/embeddings", b'{"model":"m","input":"the river"%s}')


def asking(asked: Asked, stream: bytes) -> Asked:
    """The request with this value of `stream`; b"": without."""
    more = b""
    if stream:
        form = b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\n%b\r\n'
        more = form % stream if asked.kind == FORM else b',"stream":' + stream
    return replace(asked, body=asked.body.replace(b"%s", more))


async def recorded(*names: str) -> list[Case]:
    """Answers of these members to every request, as streams and whole. Their request says `true` or nothing."""
    cases = []
    for name in names:
        settings = EngineSettings(replicas=1, port=0, model="m", time_scale=1000.0, member=MEMBERS[name])
        async with Engines(settings) as engines, aiohttp.ClientSession(engines.urls[0]) as session:
            for asked in requests():
                for stream in (b"true", b""):
                    told = asking(asked, stream)
                    async with session.post(told.path, data=told.body, headers={"Content-Type": told.kind}) as response:
                        kind = response.headers["Content-Type"]
                        cases.append(Case(asked, response.status, kind, await response.read()))
    return list(dict.fromkeys(cases))
