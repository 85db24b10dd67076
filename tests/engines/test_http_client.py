"""Pages of engines that cannot be had: why, in words that need no source code to be understood."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import pytest
import trustme

from router.engines import http_client


@pytest.fixture
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """A server that reads a little, writes these bytes, and closes; with TLS if they are None."""
    said: bytes | None = request.param
    tls = None
    if said is None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said or b"")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def why(url: str) -> str:
    """Why this page cannot be had."""
    async with http_client.session("", 5.0) as session:
        try:
            async with session.get(url) as response:
                await http_client.read_body(response, 100)
        except Exception as error:
            return http_client.describe_error(error)
    return ""


@pytest.mark.parametrize(
    ("port", "scheme", "said"),
    [
        (b"", "http", "connection closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "http", "answer is incomplete"),
        (b"220 mail ready\r\n\r\n", "http", "answer is not HTTP"),
        (b"plain", "https", "TLS handshake failed"),
        (None, "https", "its certificate is not trusted"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "http", ""),
    ],
    indirect=["port"],
)
async def test_what_a_server_does_wrong_is_told_in_words(port: int, scheme: str, said: str) -> None:
    """Each way in which an engine fails to answer has its own words."""
    assert await why(f"{scheme}://127.0.0.1:{port}/") == said


async def test_an_address_that_leads_nowhere_is_told_in_words() -> None:
    """A name without an address, and an address where nobody listens."""
    free = await asyncio.start_server(lambda _, __: None, "127.0.0.1", 0)
    port = free.sockets[0].getsockname()[1]
    free.close()
    assert await why(f"http://127.0.0.1:{port}/") == "connection refused"
    assert await why("http://engine.invalid:1/") == "name does not resolve"


def test_what_has_no_words_yet_is_spelled_out() -> None:
    """Silence has words, an error of the system has its own, and any other the name of its kind, spelled out."""
    assert http_client.describe_error(TimeoutError()) == "no answer in time"
    assert http_client.describe_error(ConnectionResetError(104, "x")) == "connection reset by peer"
    assert http_client.describe_error(OSError()) == "network error"
    assert http_client.describe_error(UnicodeError("secret")) == "unicode error"
