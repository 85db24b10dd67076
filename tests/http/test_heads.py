"""Heads of requests and answers: what belongs to one connection, what is no plain target, what is too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http.clients import play
from tests.http.wire import CHAT, RawEngine, Wire, connect, fields, on_uvloop, post, proxied
from tests.support.keyring import Keyring

pytestmark = pytest.mark.inside

ASKED = b'{"model":"m","messages":[]}'
WHOLE = b"content-length: 2\r\n\r\n{}"


def saying(raw: bytes) -> RawEngine:
    """An engine that answers with these bytes."""

    async def say(wire: Wire) -> None:
        wire.transport.write(raw)

    return RawEngine(say)


@pytest.mark.promise(
    "Headers of one connection are not forwarded in either direction, however many lines name them.", "clients"
)
@on_uvloop
async def test_several_connection_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What any line of Connection names stays here, and `close` in any of them is obeyed (RFC 9110 section 7.6.1)."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        lines = ("Connection: x-first", "X-First: 1", "connection: X-Hop , close", "X-Hop: 1", "X-Kept: 1")
        client.ask(post(CHAT, ASKED, *lines))
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
        await client.lost.wait()
        names = {name for name, _ in fields(engine.seen[0][0])}
        assert b"x-kept" in names
        assert not names & {b"x-first", b"x-hop", b"connection"}


@pytest.mark.promise(
    "Headers of one connection are not forwarded in either direction, however many lines name them.", "clients"
)
@pytest.mark.promise(
    "Tenants see neither replicas nor their caches, and receipts come from this router alone.", "tenants"
)
@on_uvloop
async def test_headers_that_engines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine's Connection names is of its connection with us, and not passed on; what it says of our own
    headers is not either, so that clients read ours alone."""
    raw = b"HTTP/1.1 200 OK\r\nconnection: X-Foo\r\nx-foo: 1\r\nX-Bar: 1\r\nConnection: x-bar, keep-alive\r\n"
    raw += b"x-kept: 1\r\n"
    forged = b"X-Warmroute-Replica: http://10.0.0.7:8000\r\nx-warmroute-reason: warm\r\nx-warmroute-anything: 1\r\n"
    async with saying(raw + forged + WHOLE) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, ASKED))
        headers = (await client.answer()).headers
        assert headers[b"x-kept"] == b"1"
        assert not {b"x-foo", b"x-bar", b"connection", b"x-warmroute-anything"} & set(headers)
        assert headers[b"x-warmroute-replica"] == engine.url.encode()
        assert bytes(client.raw).lower().count(b"x-warmroute-replica:") == 1
        client.transport.close()


@pytest.mark.promise(
    "Tenants see neither replicas nor their caches, and receipts come from this router alone.", "tenants"
)
@pytest.mark.parametrize("status", [200, 201, 307])
@on_uvloop
async def test_headers_that_tell_addresses(status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tenant without receipts sees no header in which an engine, or another router, names an address; whoever may see
    receipts does."""
    names = ("Location", "Content-Location", "Refresh", "Link", "Alt-Svc")
    lines = "".join(f"{name}: http://10.0.0.7:8000\r\n" for name in (*names, "x-warmroute-replica"))
    engine, ring = saying(f"HTTP/1.1 {status} X\r\n{lines}x-kept: 1\r\n".encode() + WHOLE), Keyring(tmp_path, acme={})
    for settings, seen in ((ring.settings, set()), ({}, {name.lower().encode() for name in names})):
        async with engine, proxied(engine, monkeypatch, **settings) as app:
            client = await connect(app.url)
            client.ask(post(CHAT, ASKED, f"x-api-key: {ring.keys['acme']}"))
            answer = await client.answer()
            assert (answer.status, answer.headers[b"x-kept"]) == (status, b"1")
            assert {name for name, value in answer.headers.items() if b"10.0.0.7" in value} == seen
            client.transport.close()


BROKEN = {
    "a coding besides chunks": b"200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a coding in a line of its own": (
        b"200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "a long header in one read": b"200 OK\r\nx-long: " + b"x" * 100_000 + b"\r\n" + WHOLE,
    "many lines in one read": b"200 OK\r\n" + b"a: b\r\n" * 300 + WHOLE,
    "very many lines": b"200 OK\r\n" + b"a: b\r\n" * 20_000 + WHOLE,
    "a status of 600": b"600 Odd\r\n" + WHOLE,
    "a status of 999": b"999 Odd\r\n" + WHOLE,
}


@pytest.mark.promise(
    "An answer with an invalid head or framing is its engine's failure, and no byte passes.", "engines"
)
@pytest.mark.parametrize("name", BROKEN)
@on_uvloop
async def test_heads_that_are_not_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that its head does not describe, or whose head is over a limit though it came in one read, is a failure
    of its engine, and nothing of it is passed on."""
    async with saying(b"HTTP/1.1 " + BROKEN[name]) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, ASKED))
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "engine_failed")
        client.transport.close()


PATHS = {
    "http://h?x=/v1/chat/completions": 404,  # the path is "/", which is a page of ours and takes no POST
    "ftp://h/v1/chat/completions": 400,
    "http://user@h/v1/chat/completions": 400,
    "http://h/v1/chat/completions#x": 400,
    "http://h:x/v1/chat/completions": 400,
    "HTTP://h/v1/chat/completions?a=b": 200,
    "https://h:8443/v1/chat/completions": 200,
}


@pytest.mark.promise(
    "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
)
@on_uvloop
async def test_targets_that_are_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is a whole URL is read by the grammar of URLs, as by whoever stands before us; other schemes than
    http and https are refused, and so is what a target may not have."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        for target, status in PATHS.items():
            client = await connect(app.url)
            client.ask(post(target, ASKED))
            assert (await client.answer()).status == status, target
            client.transport.close()
        assert [head.split(b" ")[1] for head, _ in engine.seen] == [CHAT.encode() + b"?a=b", CHAT.encode()]
