"""The cases of h1spec, hosts, and the only parser of requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import router
from tests.http.strict_wire import WHOLE, StrictEngine, exchanged
from tests.http.test_server import BODY, LINE, PATH, coding, length
from tests.http.wire import connect, on_uvloop
from tests.support.fakes import running


@dataclass
class Case:
    """A request, and what a server must say to it: a status from and to, none, or 0 for waiting."""

    raw: bytes
    low: int = 0
    high: int = 0


PARSER = re.compile(r"aiohttp\.web|aiohttp import .*\bweb\b|http_parser")
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


@pytest.mark.promise("llhttp, which is compiled, parses all requests of both listeners.", "clients")
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


@pytest.mark.promise(
    "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
)
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


@pytest.mark.promise("A body goes on to an engine as it was read, whatever its Content-Type.", "tenants")
@on_uvloop
async def test_two_types() -> None:
    """Two types of one body are refused, since its reader and an engine may go by different ones; the same one said
    twice is not, as some clients do."""
    json, form = b"Content-Type: application/json\r\n", b"content-type: multipart/form-data; boundary=b\r\n"
    async with StrictEngine() as engine, running(engine.url) as app:
        for types, status, reached in ((json + json, 200, 1), (json + form, 400, 0), (form + json, 400, 0)):
            client, went_on = await exchanged(app, engine, LINE + b"Host: x\r\n" + types + WHOLE, 1)
            assert [answer.status for answer in client.answers] == [status]
            assert len(went_on) == reached


@pytest.mark.promise("llhttp, which is compiled, parses all requests of both listeners.", "clients")
@on_uvloop
async def test_h1spec_on_the_admin_listener() -> None:
    """Both listeners read HTTP with the same parser, so the admin listener meets h1spec's demands too."""
    cases = {name: case for name, case in H1SPEC.items() if case.low and not name.startswith("a POST")}
    assert len(cases) == 16
    async with running() as app:
        for name, case in cases.items():
            client = await connect(app.admin_url)
            client.ask(case.raw, "GET")
            await client.answer()
            assert case.low <= int(client.raw.split(b" ")[1]) <= case.high, name
            client.transport.close()


@pytest.mark.promise("llhttp, which is compiled, parses all requests of both listeners.", "clients")
def test_no_other_parser() -> None:
    """Nothing of the router imports aiohttp's server, so the router starts where aiohttp has no compiled parser."""
    modules = list(Path(router.__file__).parent.rglob("*.py"))
    assert len(modules) > 200
    assert not [path for path in modules if PARSER.search(path.read_text(encoding="utf-8"))]
    command = [sys.executable, "-m", "router", "serve", "--port", "0", "--admin-port", "0"]
    environment = {**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as run:
        assert run.stdout is not None
        said = run.stdout.readline().split()
        run.terminate()
        run.communicate()
    assert said[:1] == ["listening"]
