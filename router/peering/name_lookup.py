"""Resolves a store's name before a client of the store does, in a separate thread.

A resolver without an answer blocks its thread for the time in the machine's settings, often half a minute, and cannot
be stopped. Sessions are opened several times a second while the store is away. With a lookup each time, all threads of
the event loop's pool would wait for names. Here each name has at most one open lookup, and its thread does not keep the
process from ending.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address

_open: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[None]] = {}


async def resolve_host(host: str, within_s: float) -> None:
    """Return once the name has an address. Raises OSError, also if it takes longer."""
    with suppress(ValueError):
        ip_address(host)
        return
    loop = asyncio.get_running_loop()
    asked = _open.get((loop, host))
    if asked is None:
        asked = _open[loop, host] = loop.create_future()
        threading.Thread(target=_ask, args=(loop, host, asked), name=f"name {host}", daemon=True).start()
    try:
        async with asyncio.timeout(within_s):
            await asyncio.shield(asked)
    except TimeoutError as error:
        raise OSError(f"the name {host} is not resolved in time") from error


def _ask(loop: asyncio.AbstractEventLoop, host: str, asked: asyncio.Future[None]) -> None:
    failed: OSError | None = None
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        failed = OSError(f"the name {host} does not resolve: {error}")

    def tell() -> None:
        _open.pop((loop, host), None)
        if failed is None:
            asked.set_result(None)
        else:
            asked.set_exception(failed)
            asked.exception()  # reported to each caller that still waits

    with suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(tell)
