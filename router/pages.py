"""Asking engines for pages of their own: health, models, load, sources of events, tokens.

One way to set a session up, and one to read a page: never more of it than its reader can use.
"""

from __future__ import annotations

import aiohttp

KEEPALIVE_S = 3.0  # less than uvicorn's 5, so that we close first


def session(api_key: str, timeout_s: float) -> aiohttp.ClientSession:
    """For engines' own pages: `timeout_s` is for a whole answer; with the key that engines were given, if any."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


async def read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The page; one byte more than `bytes_max` where it is longer."""
    pieces, left = list[bytes](), bytes_max + 1
    while left > 0 and not response.content.at_eof():
        piece = await response.content.read(left)
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
