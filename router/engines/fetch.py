"""Asking engines for pages of their own: health, models, load, sources of events, tokens.

One way to set a session up, and one to read a page: never more of it than its reader can use.
"""

from __future__ import annotations

import ssl

import aiohttp

KEEPALIVE_S = 3.0  # less than uvicorn's 5, so that we close first


def session(api_key: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """For engines' own pages: `timeout_s` is for a whole answer; with the key that engines were given, if any. Without
    `tls` engines that speak it must be known to the machine. Nothing is asked for compressed, and nothing unpacked."""
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls or True),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        auto_decompress=False,
    )


async def read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The page; one byte more than `bytes_max` where it is longer."""
    pieces, left = list[bytes](), bytes_max + 1
    while left > 0 and not response.content.at_eof():
        piece = await response.content.read(left)
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
