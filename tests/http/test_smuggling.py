"""Requests that two servers could read in two ways: none goes on to an engine.

The engine here is h11, which is strict, and so is the second reader of what the client sent: every message that the
router passes on must be one that h11 finds in the client's bytes too, at the same place, with the same body, and must
itself be clear to h11, with one length. Behind each request comes another, which is only served if the first was.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.http.strict_wire import WHOLE, Read, Said, StrictEngine, exchanged
from tests.http.test_server import BODY, CHUNKED, HOST, LINE, coding, length
from tests.http.wire import Client, on_uvloop
from tests.support.examples import examples
from tests.support.fakes import running

pytestmark = [
    pytest.mark.promise(
        "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
    ),
    pytest.mark.promise("Nothing pipelined after an ambiguous request reaches an engine.", "clients"),
]

MUTATED = examples(int(os.environ.get("WARMROUTE_SMUGGLING_RUNS", "600")))


SEED = 20_260


MARKER = b'{"model":"m","input":"behind"}'


BEHIND = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(MARKER) + MARKER


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
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"0", b"1", b"a", b"-", b"+", b"\x80", b"\xff",
    b"/",
]  # fmt: skip


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
