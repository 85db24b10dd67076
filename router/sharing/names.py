"""Asks for a store's name before a client of the store does, in a thread of its own.

A resolver that gets no answer holds its thread for as long as the machine's settings say, often half a minute, and
cannot be told to stop. Sessions are opened several times a second while the store is away: asked each time, the threads
that the event loop has for everything else would all be waiting for names. Here one question of each name is open at
most, and its thread keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address

_open: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[None]] = {}


async def found(host: str, within_s: float) -> None:
    """Return once the name has an address. Raises OSError, also where it takes longer."""
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
            asked.exception()  # told to whoever waits, if anybody still does

    with suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(tell)
