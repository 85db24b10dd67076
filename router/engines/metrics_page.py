"""Shared reader of engines' `/metrics`, for probes and for ranks.

Rendering the page takes the engine's scheduling thread a few milliseconds, more with many adapters. A server therefore
gets at most one request for it at a time, for any number of waiting readers. After a late page there is a pause, twice
as long each time. `probe.metrics_interval_s` reduces the rate of all requests.

A page is read in slices, and only relevant lines are kept. A long page is read less often the longer it is, and a page
over the limit as rarely as a late one. An engine's output must not use the time that its requests need.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass

import aiohttp

from router.config.schema import ProbeSettings
from router.core.fleet.engine_metrics import engines
from router.core.fleet.metrics_lines import SLICE_BYTES, MetricsLines, PageTooLong
from router.engines import http_client

log = logging.getLogger(__name__)

PAUSE_S_MAX = 60.0  # maximum pause after pages that were late or too long
# A longer page is long; of a server's long pages, this many bytes are read per second.
LONG_BYTES = BYTES_PER_S = 1 << 20
SPREAD = 0.9  # rounds of probes are up to 10 % shorter than their interval


@dataclass(slots=True)
class _Server:
    """State of one server's page."""

    reading: asyncio.Task[str | None] | None = None
    due_s: float = 0.0  # earliest time of the next read
    read_s: float = float("-inf")  # time of the last page
    late: int = 0  # consecutive pages that were late or too long
    told_long: bool = False  # True if a warning about long pages was logged
    counts: bool = False  # True if engines on the page are counted
    engines: int | None = None  # number of engines on the last page, if they are counted
    kept: str | None = None  # a page that was read for ranks, kept for the first probe


class MetricsPages:
    """Reads metrics pages by the base URL of a server."""

    def __init__(self, settings: ProbeSettings, tls: ssl.SSLContext | None = None) -> None:
        self._enabled = settings.metrics
        self._interval_s = settings.metrics_interval_s * SPREAD
        self._fresh_s = 2 * settings.interval_s
        self._timeout_s = settings.timeout_s
        self._page_bytes_max = settings.page_bytes_max
        self._servers: dict[str, _Server] = {}
        self._session = http_client.session(settings.api_key, settings.timeout_s, tls)

    async def close(self) -> None:
        """Stop reading, and close all connections."""
        reading = [server.reading for server in self._servers.values() if server.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await self._session.close()

    def forget(self, url: str) -> None:
        """Forget a server that left. A running request stays its only one."""
        server = self._servers.get(url)
        if server is not None and server.reading is None:
            del self._servers[url]

    async def read(self, url: str) -> str | None:
        """Return the page; "" if it is disabled here or on the server, None if it is late, broken, or not due yet."""
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
        """Return the number of engines on the page, at least 1; None if no page was readable so far."""
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
            page, size = await self._page(f"{url}/metrics")
        except (TimeoutError, PageTooLong) as error:
            server.late = late + 1
            server.due_s = loop.time() + min(self._timeout_s * 2**server.late, PAUSE_S_MAX)
            if isinstance(error, PageTooLong):
                self._tell_long(url, server, 0, "is too long")
            return None
        except (aiohttp.ClientError, OSError):
            return None
        finally:
            server.reading = None
        if size > LONG_BYTES:
            server.due_s = max(server.due_s, loop.time() + size / BYTES_PER_S)
            self._tell_long(url, server, size, "is long and is read less often")
        if page is not None:
            server.read_s = loop.time()
            if server.counts:
                server.engines = max(1, len(engines(page)))
        return page

    def _tell_long(self, url: str, server: _Server, size: int, what: str) -> None:
        """Log a warning about a long page once. A `size` of 0 means that it is too long."""
        if not server.told_long:
            server.told_long = True
            fields = {"replica": url, "bytes": size, "bytes_max": self._page_bytes_max}
            log.warning("metrics page %s", what, extra={"event": "metrics_page_long", "fields": fields})

    async def _page(self, url: str) -> tuple[str | None, int]:
        """Return the relevant lines of the page, and its size in bytes. Raises PageTooLong."""
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return ("" if response.status == 404 else None), 0
            lines, size = MetricsLines(), 0
            async for piece in http_client.pieces(response, SLICE_BYTES):
                size += len(piece)
                if size > self._page_bytes_max:
                    raise PageTooLong
                lines.feed(piece)
        return lines.close(), size
