"""Requests that two servers could read in two ways: none goes on to an engine.

The engine here is h11, which is strict, and so is the second reader of what the client sent: every message that the
router passes on must be one that h11 finds in the client's bytes too, at the same place, with the same body, and must
itself be clear to h11, with one length. Behind each request comes another, which is only served if the first was.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Self, cast

import h11
import pytest

from router.app import App
from tests.http.test_server import BODY, CHUNKED, HOST, LINE, PATH, coding, length
from tests.http.wire import PAGES, Client, connect, on_uvloop
from tests.support.fakes import running

MUTATED = int(os.environ.get("WARMROUTE_SMUGGLING_RUNS", "600"))
SEED = 20_260
QUIET_S = 0.01
MARKER = b'{"model":"m","input":"behind"}'
BEHIND = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(MARKER) + MARKER
WHOLE = length(len(BODY)) + b"\r\n" + BODY


@dataclass
class Said:
    """A message as h11 reads it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Read:
    """h11's reading of what came on one connection."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.whole = 0  # of these
        self.error = ""
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)

    def feed(self, data: bytes) -> list[Said]:
        """Read on; returns messages that are whole now."""
        whole: list[Said] = []
        if self.error:
            return whole
        try:
            self._parser.receive_data(data)
            while (event := self._parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self.said.append(Said(event.method, event.target, list(event.headers), b""))
                elif isinstance(event, h11.Data):
                    self.said[-1].body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    whole.append(self.said[-1])
                    self.whole += 1
                    self._next()
                else:
                    break
        except h11.RemoteProtocolError as error:
            self.error = str(error)
        return whole

    def _next(self) -> None:
        left = self._parser.trailing_data[0]
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        if left.lstrip(b"\r\n"):
            self._parser.receive_data(left.lstrip(b"\r\n"))


class StrictWire(asyncio.Protocol):
    """The engine's end of a connection."""

    def __init__(self, engine: StrictEngine) -> None:
        self._engine, self._read = engine, Read()
        self._transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self._engine.transports.append(self._transport)
        self._engine.reads.append(self._read)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for said in self._read.feed(data):
            page = PAGES.get(said.target) if said.method == b"GET" else None
            if page is None:
                self._engine.seen.append(said)
            status, body = page or (200, b'{"usage":{"prompt_tokens":1}}')
            self._transport.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        if self._read.error:
            self._engine.errors.append(self._read.error)


@dataclass
class StrictEngine:
    """`async with StrictEngine() as engine`."""

    seen: list[Said] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    transports: list[asyncio.Transport] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(lambda: StrictWire(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for transport in self.transports:
            transport.abort()


async def exchanged(app: App, engine: StrictEngine, raw: bytes, messages: int) -> tuple[Client, list[Said]]:
    """Send it and wait for an end, for so many answers, or until nothing moves; what came, and what went on."""
    engine.seen.clear()
    client = await connect(app.url)
    client.ask(raw, *["POST"] * 50)
    before, quiet = -1, 0
    while not client.lost.is_set() and len([each for each in client.answers if each.whole]) < messages and quiet < 5:
        moved = before != (before := len(client.raw) + len(engine.seen)) or app.edge.in_flight > 0
        quiet = 0 if moved else quiet + 1
        await asyncio.sleep(QUIET_S)
    client.transport.abort()
    return client, list(engine.seen)


def judge(raw: bytes, client: Client, went_on: list[Said], engine: StrictEngine, name: str) -> None:
    """What went on is clear, and what h11 finds in the client's bytes."""
    assert engine.errors == [], name
    assert all(len(read.said) == read.whole for read in engine.reads), name
    assert client.error is None, name
    reading = Read()
    meant = reading.feed(raw)
    served = sum(200 <= answer.status < 300 for answer in client.answers)
    # An answer that is under way when the client is gone is not counted; a request without an answer would be.
    assert served <= len(went_on) <= served + (not client.lost.is_set()), name
    at = 0
    for said in went_on:
        lengths = [value for low, value in said.headers if low == b"content-length"]
        assert lengths == [b"%d" % len(said.body)], name
        assert not any(low == b"transfer-encoding" for low, _ in said.headers), name
        assert sum(low == b"host" for low, _ in said.headers) == 1, name
        found = [n for n, each in enumerate(meant[at:], at) if (each.method, each.body) == (said.method, said.body)]
        assert found, (name, said, reading.error, raw)
        at = found[0] + 1


VALID = {
    "length": HOST + WHOLE,
    "chunks": HOST + coding("chunked") + b"\r\n" + CHUNKED,
    "small chunks": HOST
    + coding("chunked")
    + b"\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(BODY[n : n + 7]), BODY[n : n + 7]) for n in range(0, len(BODY), 7))
    + b"0\r\n\r\n",
    "more headers": HOST + b"A: b\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n" + WHOLE,
    "trailers": HOST + coding("chunked") + b"\r\n" + CHUNKED[:-2] + b"A: b\r\n\r\n",
    "expect": HOST + b"Expect: 100-continue\r\n" + WHOLE,
    "HTTP/1.0": LINE.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n" + WHOLE,
}

# Lines that make a request ambiguous where they are put into one, and others that only look like it.
LINES = [
    *(length(value) for value in (0, 1, 41, 42, 43, "+42", "-1", "0x2a", "42, 42", "42,43", "42 ", " 42", "4 2", "")),
    *(coding(value) for value in ("chunked", "Chunked", "identity", "gzip, chunked", "chunked, identity", "xchunked")),
    *(coding(value) for value in (" chunked", "chunked ", "\tchunked", "\x0bchunked", "chunked\x00", '"chunked"', "")),
    *(coding(value) for value in ("chunked;q=1", "chunked,", ",chunked", "chunked, chunked", "identity, chunked")),
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding\t: chunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Transfer-Encoding\r\n: chunked\r\n",
    b" Transfer-Encoding: chunked\r\n",
    b"X: y\rTransfer-Encoding: chunked\r\n",
    b"X: y\nTransfer-Encoding: chunked\r\n",
    b"X: y\n\rTransfer-Encoding: chunked\r\n",
    b"Transfer_Encoding: chunked\r\n",
    b"Content_Length: 1\r\n",
    b"Content-Length\0: 1\r\n",
    b"Content-Length:1\r\nContent-Length: 42\r\n",
    b"Host: y\r\n",
    b"Connection: content-length\r\n",
    b"Connection: transfer-encoding, host\r\n",
    b"Connection: close\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    b"Trailer: Content-Length\r\n",
    b"TE: trailers\r\n",
    b": x\r\n",
    b"X\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"X: \x7f\r\n",
    b"X: \x01\r\n",
    b"X[]: y\r\n",
    b"\xc3\xa9: y\r\n",
]
BYTES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"0",
    b"1",
    b"a",
    b"-",
    b"+",
    b"\x80",
    b"\xff",
    b"/",
]


def mutated(choose: random.Random) -> tuple[str, bytes]:
    """A valid request with one to three changes of a few bytes or a line."""
    kind = choose.choice(list(VALID))
    raw, changes = VALID[kind], []
    for _ in range(choose.choice((1, 1, 1, 2, 2, 3))):
        how = choose.choice(("line", "line", "insert", "delete", "replace", "double", "swap", "move"))
        changes.append(how)
        at = choose.randrange(len(raw))
        if how == "line":
            ends = [n + 2 for n in range(len(raw)) if raw[n : n + 2] == b"\r\n"]
            at = choose.choice(ends) if ends else at
            raw = raw[:at] + choose.choice(LINES) + raw[at:]
        elif how == "insert":
            raw = raw[:at] + choose.choice(BYTES) * choose.choice((1, 1, 2)) + raw[at:]
        elif how == "delete":
            raw = raw[:at] + raw[at + choose.choice((1, 1, 2, 5)) :]
        elif how == "replace":
            raw = raw[:at] + choose.choice(BYTES) + raw[at + 1 :]
        elif how == "double":
            lines = raw.split(b"\r\n")
            at = choose.randrange(len(lines))
            raw = b"\r\n".join([*lines[: at + 1], *lines[at:]])
        elif how == "swap":
            raw = raw.replace(*choose.choice(((b"\r\n", b"\n"), (b"\r\n", b"\r"), (b": ", b":"), (b" ", b"\t"))), 1)
        else:
            end = min(len(raw), at + choose.randrange(1, 20))
            to = choose.randrange(len(raw))
            raw = raw[:to] + raw[at:end] + raw[to:]
    return f"{kind}: {', '.join(changes)}", raw


@on_uvloop
async def test_valid_ones_are_served() -> None:
    """What the others are made from is served, and so is what comes behind: else the rest would show nothing."""
    async with StrictEngine() as engine, running(engine.url) as app:
        for name, raw in VALID.items():
            last = b"close" in raw or b"HTTP/1.0" in raw
            client, went_on = await exchanged(app, engine, raw + BEHIND, 2)
            assert [each.body for each in went_on] == ([BODY] if last else [BODY, MARKER]), name
            judge(raw + BEHIND, client, went_on, engine, name)


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        (b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", b"{}"),
        (b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"content-length: 2\r\n\r\n{}", b"[]"),
    ],
)
def test_the_judge(message: bytes, meant: bytes) -> None:
    """It objects to two ways of saying how long a body is, to the wrong one, and to another body."""
    read, client = Read(), Client()
    went_on = read.feed(b"POST /a HTTP/1.1\r\nhost: x\r\n" + message)
    engine = StrictEngine(errors=[read.error] if read.error else [], reads=[read])
    with pytest.raises(AssertionError):
        judge(HOST + length(len(meant)) + b"\r\n" + meant, client, went_on, engine, "")


@pytest.mark.parametrize("part", range(4))
def test_mutated(part: int) -> None:
    """Hundreds of requests with changes that were drawn once and for all: nothing ambiguous goes on, and nothing that
    came behind something ambiguous."""
    counts = Counter[str]()

    @on_uvloop
    async def all_of_them() -> None:
        choose = random.Random(SEED + part)
        async with StrictEngine() as engine, running(engine.url) as app:
            for _ in range(MUTATED // 4):
                name, raw = mutated(choose)
                reading = Read()
                whole = len(reading.feed(raw + BEHIND))
                client, went_on = await exchanged(app, engine, raw + BEHIND, whole + bool(reading.error))
                judge(raw + BEHIND, client, went_on, engine, name)
                counts["passed on" if went_on else "refused" if client.answers else "unfinished"] += 1

    all_of_them()
    assert counts["passed on"] > MUTATED // 100
    assert counts["refused"] > MUTATED // 20
    print(f"mutated requests: {dict(counts)}, none ambiguous passed on")


@pytest.mark.parametrize("line", LINES, ids=repr)
@pytest.mark.parametrize("kind", ["length", "chunks"])
@on_uvloop
async def test_lines(kind: str, line: bytes) -> None:
    """Each of these lines, before and behind the one that says how long the body is."""
    async with StrictEngine() as engine, running(engine.url) as app:
        valid = VALID[kind]
        at = valid.index(b"\r\n\r\n") + 2
        for place in (len(HOST), at):
            raw = valid[:place] + line + valid[place:] + BEHIND
            client, went_on = await exchanged(app, engine, raw, 2)
            judge(raw, client, went_on, engine, repr(line))


@dataclass
class Case:
    """A request, and what a server must say to it: a status from and to, none, or 0 for waiting."""

    raw: bytes
    low: int = 0
    high: int = 0


GET = b"GET /healthz HTTP/1.1\r\n"
HEAD = GET + b"Host: localhost\r\n"
ELSEWHERE = b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\n"
# What h1spec asks of a server, by name, said again from RFC 9110 and 9112.
H1SPEC: dict[str, Case] = {
    **{f"cut off behind {HEAD[:n]!r}": Case(HEAD[:n]) for n in (1, 4, 12, 13, 17, 21, 22, 23, 26, 28, 29, 38, 39, 40)},
    "cut off in its last line end": Case(HEAD + b"\r"),
    "no version": Case(b"GET /healthz \r\n\r\n", 400, 599),
    "expects 100": Case(HEAD + b"Expect: 100-continue\r\n\r\n", 100, 299),
    "a GET": Case(HEAD + b"\r\n", 200, 299),
    "a tab, and an empty value": Case(GET + b"hoSt:\tlocalhost\r\nempty:\r\n\r\n", 200, 299),
    "brackets in a name": Case(HEAD + b"Bad[]: x\r\n\r\n", 400, 499),
    "no Host": Case(GET + b"Content-Length: 5\r\n\r\n", 400, 499),
    "two Hosts": Case(HEAD + b"Host: other\r\n\r\n", 400, 499),
    "a length below all numbers": Case(HEAD + length("-" + "9" * 27) + b"\r\n", 400, 499),
    "a negative length": Case(HEAD + length(-1_234) + b"\r\n", 400, 499),
    "letters for a length": Case(HEAD + length("abc") + b"\r\n", 400, 499),
    "a blank value": Case(HEAD + b"Blank: \r\n\r\n", 200, 299),
    "a control character": Case(HEAD + b"Bad: x\x07\r\n\r\n", 400, 499),
    "a version that is none": Case(HEAD.replace(b"1.1", b"9.9") + b"\r\n", 400, 599),
    "something before the method": Case(b"Some words" + HEAD + b"\r\n", 400, 599),
    "a carriage return alone": Case(HEAD + b"\rName: x\r\n\r\n", 400, 499),
    "a POST": Case(ELSEWHERE + length(5) + b"\r\nhello", 200, 404),
    "a POST in chunks": Case(ELSEWHERE + coding("chunked") + b"\r\nc\r\nHello, world\r\n0\r\n\r\n", 200, 404),
    "length and coding": Case(ELSEWHERE + b"content-LengtH: 5\r\nTransFer-Encoding: chunked\r\n\r\n5\r\n", 400, 499),
}


@on_uvloop
async def test_h1spec() -> None:
    """All 33 of h1spec's demands are met."""
    assert len(H1SPEC) == 33
    async with StrictEngine() as engine, running(engine.url) as app:
        for name, case in H1SPEC.items():
            client, went_on = await exchanged(app, engine, case.raw, 1)
            status = int(client.raw.split(b" ")[1]) if client.raw else 0
            assert case.low <= status <= case.high, name
            assert not went_on, name
            assert client.lost.is_set() <= (case.low >= 400), name


ODD_HOSTS = ("a b", "a/b", "a@b", "user:x@a", "a,b", "a\\b", "a#b", "a?b", "http://a", "[::1", "a:b:c", "a:", "")


@on_uvloop
async def test_hosts() -> None:
    """A Host that is no host and port is refused (RFC 9112 section 3.2), plain ones are served, and the engine hears
    its own name, whatever URL the client asks for."""
    async with StrictEngine() as engine, running(engine.url) as app:
        for host in ("a", "a:1", "[::1]", "[::1]:80", "127.0.0.1", "a-b.c_d", "xn--bcher-kva.example:443"):
            raw = LINE + f"Host: {host}\r\n".encode() + WHOLE
            _, went_on = await exchanged(app, engine, raw, 1)
            assert [each.body for each in went_on] == [BODY], host
            assert dict(went_on[0].headers)[b"host"] == engine.url.removeprefix("http://").encode()
        for host in ODD_HOSTS[:-2]:
            client, went_on = await exchanged(app, engine, LINE + f"Host: {host}\r\n".encode() + WHOLE, 1)
            assert ([answer.status for answer in client.answers], went_on) == ([400], []), host
        absolute = LINE.replace(b" /", b" http://inner.example:1/") + b"Host: outer\r\n" + WHOLE
        _, went_on = await exchanged(app, engine, absolute, 1)
        assert went_on[0].target == PATH.encode()


async def test_no_other_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin listener does not start on aiohttp's parser in Python, unless that was asked for; the main listener
    has no other than llhttp."""
    from aiohttp import http_parser

    monkeypatch.setattr(http_parser, "HttpRequestParser", http_parser.HttpRequestParserPy)
    with pytest.raises(OSError, match=r"admin\.allow_python_parser"):
        async with running():
            raise AssertionError("it started")
    async with running(admin__allow_python_parser=True) as app:
        assert app.admin_url


def test_the_command_says_why_it_does_not_start() -> None:
    """Started without the compiled parser, the command says what is missing and ends with 1."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "router", "serve", "--port", "0", "--admin-port", "0"]
    environment = {**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "admin.allow_python_parser" in ended.stderr
