"""HTTP requests for engines' own pages, such as health, models, load and event sources.

There is one way to open a session, and one to read a page. A reader never gets more of a page than it can use.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import ssl
from collections.abc import AsyncIterator

import aiohttp
from aiohttp.tracing import Trace

KEEPALIVE_S = 3.0  # less than uvicorn's 5, so that the router closes first
HOSTS_MAX = 4_096  # maximum number of hosts with a remembered address


class _Connector(aiohttp.TCPConnector):
    """Connector that records the address of each connection under the requested host."""

    def __init__(self, addresses: dict[str, str], tls: ssl.SSLContext | None) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls or True)
        self._addresses = addresses

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own signature
    ) -> aiohttp.connector.Connection:
        connection = await super().connect(req, traces, timeout)
        transport, host = connection.transport, req.url.host
        peer = transport.get_extra_info("peername") if transport is not None else None
        if host and peer:
            self._addresses.pop(host, None)
            self._addresses[host] = str(peer[0])
            if len(self._addresses) > HOSTS_MAX:
                del self._addresses[next(iter(self._addresses))]
        return connection


def session(
    api_key: str, timeout_s: float, tls: ssl.SSLContext | None = None, addresses: dict[str, str] | None = None
) -> aiohttp.ClientSession:
    """Open a session for engines' own pages. It neither requests nor decodes compression.

    - `api_key`: sent unless it is "".
    - `timeout_s`: limit of a whole answer; 0 for no limit.
    - `tls`: without it, certificates are checked against the machine's.
    - `addresses`: receives the address of the last connection to each host.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=_Connector({} if addresses is None else addresses, tls),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        auto_decompress=False,
    )


def describe_error(error: BaseException) -> str:
    """Describe in words, without addresses, why a page of an engine or another server could not be read."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "name does not resolve"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        return "its certificate is not trusted"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "TLS handshake failed"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "connection closed without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "answer is incomplete"
    if isinstance(error, aiohttp.ClientResponseError):
        return "answer is not HTTP"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = getattr(getattr(error, "os_error", error), "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return os.strerror(number).lower()
    if type(error) in (OSError, aiohttp.ClientOSError):
        return "network error"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()


async def pieces(response: aiohttp.ClientResponse, piece_bytes_max: int) -> AsyncIterator[bytes]:
    """Yield a page in pieces, each in a separate turn of the event loop."""
    while not response.content.at_eof():
        yield await response.content.read(piece_bytes_max)
        await asyncio.sleep(0)


async def read_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a page, at most `bytes_max` + 1 bytes of it."""
    pieces, left = list[bytes](), bytes_max + 1
    while left > 0 and not response.content.at_eof():
        piece = await response.content.read(left)
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
