"""How many data-parallel ranks a server has: each is a replica of its own, since each has its own cache.

vLLM 0.32 names the source of KV events of every rank on `/kv_event_sources`; with events off, its metrics still name
every engine. SGLang 0.5.23 says `dp_size` on `/server_info`. A server that answers none of them has one rank. One that
does not answer at all keeps the number that was known of it, and is asked again soon.

In vLLM's hybrid and external modes a server answers for a part of the ranks only, which it counts from 0
(v1/engine/input_processor.py): so do we.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from router import pages
from router.core.facts import Replica
from router.core.stats import engines

log = logging.getLogger(__name__)
_T = TypeVar("_T")

RANKS_MAX = 1_024  # a server that claims more is not believed
SETTLE_S = 1.0  # a set waits so long for its servers' first answers
ASKED_AT_ONCE_MAX = 32


class _ServerInfo(msgspec.Struct):
    dp_size: int | None = None


_decode_sources = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_info = msgspec.json.Decoder(_ServerInfo).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class _Silent(Exception):
    """The server did not answer, so nothing is learned."""


def expand(replicas: Iterable[Replica], counts: Mapping[str, int]) -> frozenset[Replica]:
    """The same set with every server of several ranks replaced by its ranks; `counts` by base URL."""
    return frozenset(
        rank
        for replica in replicas
        for rank in (
            map(replica.of_rank, range(counts[replica.url]))
            if replica.rank is None and counts.get(replica.url, 1) > 1
            else (replica,)
        )
    )


class Ranks:
    """Asks servers, remembers, and asks again: soon where there was no answer, else every `again_s`."""

    def __init__(
        self,
        *,
        interval_s: float,
        again_s: float,
        timeout_s: float,
        api_key: str,
        page_bytes_max: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._again_s = again_s
        self._page_bytes_max = page_bytes_max
        self._counts: dict[str, int] = {}
        self._asked_s: dict[str, float] = {}  # of the last answer
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
        self._session = pages.session(api_key, timeout_s, tls)

    async def close(self) -> None:
        """Stop asking, and close all connections."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._session.close()

    async def count(self, base_url: str) -> int:
        """Ranks of one server, at least 1; the last known number when it does not answer."""
        try:
            count = await self._ask(base_url)
        except _Silent:
            return self._counts.get(base_url, 1)
        if not 1 <= count <= RANKS_MAX:
            count = 1
        if count != self._counts.get(base_url, 1):
            log.info("replica has ranks", extra={"fields": {"replica": base_url, "ranks": count}})
        self._counts[base_url] = count
        self._asked_s[base_url] = asyncio.get_running_loop().time()
        return count

    def doubt(self, replica: str) -> None:
        """The server behind this id was lost: it may come back with another number of ranks, so ask it again soon."""
        self._asked_s.pop(Replica(replica).url, None)

    async def follow(self, sets: AsyncIterator[frozenset[Replica]]) -> AsyncIterator[frozenset[Replica]]:
        """Discovery's complete sets with ranks in the place of their servers, and again when a number changes."""
        replicas: frozenset[Replica] | None = None
        given: frozenset[Replica] | None = None
        following: asyncio.Future[frozenset[Replica] | None] | None = asyncio.ensure_future(anext(sets, None))
        try:
            while following is not None or replicas is not None:
                if following is None:
                    await asyncio.sleep(self._interval_s)
                else:
                    await asyncio.wait({following}, timeout=None if replicas is None else self._interval_s)
                    if following.done():
                        found = following.result()
                        following = None if found is None else asyncio.ensure_future(anext(sets, None))
                        replicas = replicas if found is None else found
                if replicas is None:
                    continue
                await self._refresh({replica.url for replica in replicas})
                expanded = expand(replicas, self._counts)
                if expanded != given:
                    given = expanded
                    yield expanded
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _refresh(self, servers: set[str]) -> None:
        """Ask those that are due; come back when all have answered, at the latest after SETTLE_S."""
        for known in (self._counts, self._asked_s):
            for gone in known.keys() - servers:
                del known[gone]
        now_s = asyncio.get_running_loop().time()
        for server in servers - self._asking.keys():
            if now_s - self._asked_s.get(server, -self._again_s) >= self._again_s:
                self._asking[server] = asyncio.create_task(self._ask_once(server))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=SETTLE_S)

    async def _ask_once(self, server: str) -> None:
        try:
            async with self._slots:
                await self.count(server)
        finally:
            del self._asking[server]

    async def _ask(self, base_url: str) -> int:
        if sources := await self._page(f"{base_url}/kv_event_sources", _decode_sources):
            return len(sources)
        info = await self._page(f"{base_url}/server_info", _decode_info)
        if info is not None and info.dp_size is not None:
            return info.dp_size
        page = await self._page(f"{base_url}/metrics", bytes)
        return max(1, len(engines(page.decode(errors="replace")))) if page else 1

    async def _page(self, url: str, decode: Callable[[bytes], _T]) -> _T | None:
        """One page; None where there is none that can be read. Raises _Silent when the server fails to answer."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status >= 500:
                    raise _Silent
                if response.status != 200:
                    return None
                page = await pages.read(response, self._page_bytes_max)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _Silent from error
        try:
            return decode(page) if len(page) <= self._page_bytes_max else None
        except _UNREADABLE:
            return None
