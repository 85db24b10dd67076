"""The one reader of engines' `/metrics`, for probes and for ranks.

Rendering the page costs an engine some milliseconds of the thread that schedules, more with many adapters. So a server
has at most one request for it at a time, whoever waits for the page. After one that was late there is a pause, twice as
long each time, and `probe.metrics_interval_s` makes all of them rarer.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

import aiohttp

from router.core.fleet.engine_metrics import engines
from router.engines import fetch
from router.settings.schema import ProbeSettings

PAUSE_S_MAX = 60.0  # longest pause after pages that were late
SPREAD = 0.9  # rounds of probes are up to 10 % shorter than their interval


@dataclass(slots=True)
class _Server:
    """What is known of one server's page."""

    reading: asyncio.Task[str | None] | None = None
    due_s: float = 0.0  # not read before
    read_s: float = float("-inf")  # time of the last page
    late: int = 0  # pages in a row that did not come in time
    counts: bool = False  # engines on the page are counted
    engines: int | None = None  # as of the last page, if they are counted
    kept: str | None = None  # a page that was read for ranks, for the first probe


class MetricsPages:
    """Reads pages by base URL of a server."""

    def __init__(self, settings: ProbeSettings, tls: ssl.SSLContext | None = None) -> None:
        self._enabled = settings.metrics
        self._interval_s = settings.metrics_interval_s * SPREAD
        self._fresh_s = 2 * settings.interval_s
        self._timeout_s = settings.timeout_s
        self._page_bytes_max = settings.page_bytes_max
        self._servers: dict[str, _Server] = {}
        self._session = fetch.session(settings.api_key, settings.timeout_s, tls)

    async def close(self) -> None:
        """Stop reading, and close all connections."""
        reading = [server.reading for server in self._servers.values() if server.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await self._session.close()

    def left(self, url: str) -> None:
        """Forget a server that left; the request under way, if any, is still its only one."""
        server = self._servers.get(url)
        if server is not None and server.reading is None:
            del self._servers[url]

    async def read(self, url: str) -> str | None:
        """The page; "" if it is switched off here or there, None if it is late, broken, or not due yet."""
        if not self._enabled:
            return ""
        now_s, server = asyncio.get_running_loop().time(), self._servers.setdefault(url, _Server())
        kept, server.kept = server.kept, None
        if kept is not None and now_s - server.read_s <= self._fresh_s:
            return kept
        if server.reading is None:
            if now_s < server.due_s:
                return None
            server.reading = asyncio.create_task(self._read(url, server))
        return await asyncio.shield(server.reading)

    async def engines(self, url: str) -> int | None:
        """Number of engines that the page names, at least 1; None if no page could be read so far."""
        server = self._servers.setdefault(url, _Server())
        first, server.counts = not server.counts, True
        if asyncio.get_running_loop().time() - server.read_s > self._fresh_s or server.engines is None:
            page = await self.read(url)
            if page == "":
                server.engines = 1
            if first:
                server.kept = page
        return server.engines

    async def _read(self, url: str, server: _Server) -> str | None:
        loop = asyncio.get_running_loop()
        began_s, late = loop.time(), server.late
        server.late = 0
        server.due_s = began_s + self._interval_s
        try:
            page = await self._page(f"{url}/metrics")
        except TimeoutError:
            server.late = late + 1
            server.due_s = loop.time() + min(self._timeout_s * 2**server.late, PAUSE_S_MAX)
            return None
        except (aiohttp.ClientError, OSError):
            return None
        finally:
            server.reading = None
        if page is not None:
            server.read_s = loop.time()
            if server.counts:
                server.engines = max(1, len(engines(page)))
        return page

    async def _page(self, url: str) -> str | None:
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status == 404:
                return ""
            if response.status != 200:
                return None
            page = await fetch.read(response, self._page_bytes_max)
        return page.decode(errors="replace") if len(page) <= self._page_bytes_max else None
