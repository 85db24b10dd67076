"""The one reader of engines' `/metrics`, for probes and for ranks.

Rendering the page costs an engine some milliseconds of the thread that schedules, more with many adapters. So a server
has at most one request for it at a time, whoever waits for the page. After one that was late there is a pause, twice as
long each time, and `probe.metrics_interval_s` makes all of them rarer.

A page is read in slices, of which only the lines that matter are kept. A long one is read the less often the longer it
is, and one that is too long as seldom as one that is late: what an engine sends must not cost what its requests need.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass

import aiohttp

from router.core.fleet.engine_metrics import engines
from router.core.fleet.metrics_lines import SLICE_BYTES, MetricsLines, PageTooLong
from router.engines import fetch
from router.settings.schema import ProbeSettings

log = logging.getLogger(__name__)

PAUSE_S_MAX = 60.0  # longest pause after pages that were late or too long
LONG_BYTES = BYTES_PER_S = 1 << 20  # a longer page is long; of a server's long ones so many bytes a second are read
SPREAD = 0.9  # rounds of probes are up to 10 % shorter than their interval


@dataclass(slots=True)
class _Server:
    """What is known of one server's page."""

    reading: asyncio.Task[str | None] | None = None
    due_s: float = 0.0  # not read before
    read_s: float = float("-inf")  # time of the last page
    late: int = 0  # pages in a row that did not come in time, or were too long
    told_long: bool = False  # a warning says that its pages are long
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
            self._tell_long(url, server, size, "is long, and read less often")
        if page is not None:
            server.read_s = loop.time()
            if server.counts:
                server.engines = max(1, len(engines(page)))
        return page

    def _tell_long(self, url: str, server: _Server, size: int, what: str) -> None:
        """Warn of a long page once. A `size` of 0: too long."""
        if not server.told_long:
            server.told_long = True
            fields = {"replica": url, "bytes": size, "bytes_max": self._page_bytes_max}
            log.warning("metrics page %s", what, extra={"event": "metrics_page_long", "fields": fields})

    async def _page(self, url: str) -> tuple[str | None, int]:
        """The lines of the page that matter, and the bytes of all of it. Raises PageTooLong."""
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return ("" if response.status == 404 else None), 0
            lines, size = MetricsLines(), 0
            async for piece in fetch.pieces(response, SLICE_BYTES):
                size += len(piece)
                if size > self._page_bytes_max:
                    raise PageTooLong
                lines.feed(piece)
        return lines.close(), size
