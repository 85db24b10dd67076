"""The cases of h1spec, hosts, and the parser that the admin listener needs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from tests.http.strict_wire import WHOLE, StrictEngine, exchanged
from tests.http.test_server import BODY, LINE, PATH, coding, length
from tests.http.wire import on_uvloop
from tests.support.fakes import running


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
