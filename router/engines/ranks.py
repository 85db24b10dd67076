"""Number of data-parallel ranks of each server, and the version of its engine.

Each rank is a separate replica, because each has its own cache. vLLM 0.32 names the KV event source of every rank on
`/kv_event_sources`; with events off, its metrics still name every engine. SGLang 0.5.23 reports `dp_size` on
`/server_info`. A server without any of these pages has one rank. A server that does not answer keeps its last known
number and is queried again soon, and so is another engine at a known address. SGLang reports its version on the same
page, vLLM on `/version`.

The router waits for a server that joins, SETTLE_S at most, so that it joins with all its ranks. A server that leaves is
removed at once, even if other queries are running.

In vLLM's hybrid and external modes, a server answers for only a part of the ranks and counts them from 0
(v1/engine/input_processor.py). The router does the same.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import msgspec

from router.config.schema import ProbeSettings
from router.core.types.replicas import Replica
from router.engines import http_client
from router.engines.metrics_page import MetricsPages

log = logging.getLogger(__name__)
_T = TypeVar("_T")

RANKS_MAX = 1_024  # a server that reports more is ignored
SETTLE_S = 1.0  # maximum wait for the answer of a server that joins
ASKED_AT_ONCE_MAX = 32
VERSION_CHARS_MAX = 64  # a longer version is rejected, because it becomes a label of a metric


class _ServerInfo(msgspec.Struct):
    dp_size: int | None = None
    version: msgspec.Raw = msgspec.Raw()


class _Version(msgspec.Struct):
    version: msgspec.Raw = msgspec.Raw()


class _EventSourceInfo(msgspec.Struct):
    publisher: str | msgspec.UnsetType | None = msgspec.UNSET
    endpoint: str | msgspec.UnsetType = msgspec.UNSET


_decode_said = msgspec.json.Decoder(dict[int, _EventSourceInfo]).decode
_decode_info = msgspec.json.Decoder(_ServerInfo).decode
_decode_version = msgspec.json.Decoder(_Version).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


def _decode_sources(page: bytes) -> dict[int, _EventSourceInfo] | None:
    """Return the event sources by rank; None if the values are not sources, for example on a server that answers every
    path. Raises msgspec.DecodeError if the page is unreadable, or if its names are not rank numbers."""
    said = _decode_said(page)
    sources = all(each.publisher is not msgspec.UNSET or each.endpoint is not msgspec.UNSET for each in said.values())
    return said if sources and all(rank >= 0 for rank in said) else None


class _Silent(Exception):
    """The server did not answer, so no number is known from this query."""


def expand(replicas: Iterable[Replica], counts: Mapping[str, int]) -> frozenset[Replica]:
    """Replace every server of several ranks by its ranks. `counts` is by base URL."""
    return frozenset(
        rank
        for replica in replicas
        for rank in (
            map(replica.select_rank, range(counts[replica.url]))
            if replica.rank is None and counts.get(replica.url, 1) > 1
            else (replica,)
        )
    )


class RankExpander:
    """Queries servers for their ranks, and again: soon after a missing answer, otherwise every `models_interval_s`."""

    def __init__(self, settings: ProbeSettings, pages: MetricsPages, tls: ssl.SSLContext | None = None) -> None:
        self._pages = pages
        self._interval_s = settings.interval_s
        self._again_s = settings.models_interval_s
        self._page_bytes_max = settings.page_bytes_max
        self._counts: dict[str, int] = {}
        self._versions: dict[str, str] = {}  # versions that engines reported, by base URL
        self._asked_s: dict[str, float] = {}  # time of the last answer, by base URL
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._instances: dict[str, str] = {}  # engines' instances, if discovery knows them, by base URL
        self._settled_s: dict[str, float] = {}  # end of the wait for a server that joins; 0: it was queried
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
        self._session = http_client.session(settings.api_key, settings.timeout_s, tls)

    async def close(self) -> None:
        """Stop all queries, and close all connections."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._session.close()

    def version(self, base_url: str) -> str:
        """Return the version of the engine behind a base URL, as the engine reports it; "" while unknown."""
        return self._versions.get(base_url, "")

    async def count(self, base_url: str) -> int:
        """Return the number of ranks of one server, at least 1; the last known number if it does not answer."""
        try:
            count, version = await self._ask(base_url)
        except _Silent:
            return self._counts.get(base_url, 1)
        if not 1 <= count <= RANKS_MAX:
            count = 1
        if count != self._counts.get(base_url, 1):
            log.info(
                "replica has data-parallel ranks",
                extra={"event": "ranks_found", "fields": {"replica": base_url, "ranks": count}},
            )
        self._counts[base_url] = count
        self._asked_s[base_url] = asyncio.get_running_loop().time()
        with suppress(_Silent):  # keep a known version
            self._versions[base_url] = version or await self._ask_version(base_url)
        return count

    def invalidate(self, replica: str) -> None:
        """Query the server behind this id again soon: it was lost, and may return with another number of ranks."""
        self._asked_s.pop(Replica(replica).url, None)

    async def follow(self, sets: AsyncIterator[frozenset[Replica]]) -> AsyncIterator[frozenset[Replica]]:
        """Yield discovery's complete sets with servers replaced by their ranks, and again when a number changes."""
        replicas: frozenset[Replica] | None = None
        given: frozenset[Replica] | None = None
        following: asyncio.Future[frozenset[Replica] | None] | None = asyncio.ensure_future(anext(sets, None))
        try:
            while following is not None or replicas is not None:
                await self._wait(following, first=replicas is None)
                if following is not None and following.done():
                    found = following.result()
                    following = None if found is None else asyncio.ensure_future(anext(sets, None))
                    replicas = replicas if found is None else found
                if replicas is None:
                    continue
                self._refresh(replicas)
                joining = self._list_joining()
                if joining and given is None:
                    continue
                expanded = expand((each for each in replicas if each.url not in joining), self._counts)
                if expanded != given:
                    given = expanded
                    yield expanded
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            if isinstance(sets, AsyncGenerator):
                await sets.aclose()

    async def _wait(self, following: asyncio.Future[Any] | None, *, first: bool) -> None:
        """Wait until there is another set, or joining servers have answered or had their time, or the next round is
        due."""
        now_s, joining = asyncio.get_running_loop().time(), self._list_joining()
        until_s = min((self._settled_s[server] for server in joining), default=now_s + self._interval_s)
        asked = [self._asking[server] for server in joining]
        answered = asyncio.ensure_future(asyncio.wait(asked)) if asked else None
        wakes: set[asyncio.Future[Any]] = {each for each in (answered, following) if each is not None}
        if not wakes:
            await asyncio.sleep(self._interval_s)
            return
        try:
            timeout_s = None if first else max(0.0, until_s - now_s)
            await asyncio.wait(wakes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if answered is not None:
                answered.cancel()

    def _list_joining(self) -> set[str]:
        """Return new servers that were queried and can still answer in time."""
        now_s = asyncio.get_running_loop().time()
        return {server for server in self._asking if self._settled_s.get(server, now_s) > now_s}

    def _refresh(self, replicas: frozenset[Replica]) -> None:
        """Query the servers that are due."""
        now_s = asyncio.get_running_loop().time()
        instances = {replica.url: replica.instance for replica in replicas}
        for server in [server for server in self._settled_s if server not in instances]:
            self._forget(server)
        for server, instance in instances.items():
            before = self._instances.get(server, "")
            if instance and before and instance != before:
                self._forget_answer(server)
            self._instances[server] = instance or before
            self._settled_s.setdefault(server, now_s + SETTLE_S)
        for server in instances.keys() - self._asking.keys():
            if now_s - self._asked_s.get(server, -self._again_s) >= self._again_s:
                self._asking[server] = asyncio.create_task(self._ask_once(server))

    def _forget(self, server: str) -> None:
        self._forget_answer(server)
        self._pages.forget(server)
        for known in (self._counts, self._instances):
            known.pop(server, None)

    def _forget_answer(self, server: str) -> None:
        """Cancel the running query, because another engine is at the address now. Its known number is the best estimate
        until it answers."""
        for known in (self._asked_s, self._settled_s, self._versions):
            known.pop(server, None)
        asking = self._asking.pop(server, None)
        if asking is not None:
            asking.cancel()

    async def _ask_once(self, server: str) -> None:
        me = asyncio.current_task()
        try:
            async with self._slots:
                await self.count(server)
        finally:
            if self._asking.get(server) is me:
                del self._asking[server]
                self._settled_s[server] = 0.0

    async def _ask(self, base_url: str) -> tuple[int, str]:
        """Return the number of ranks of one server, and its version if the same page has it, otherwise "". Raises
        _Silent."""
        if sources := await self._page(f"{base_url}/kv_event_sources", _decode_sources):
            return len(sources), ""
        info = await self._page(f"{base_url}/server_info", _decode_info)
        version = _version(info.version) if info is not None else ""
        if info is not None and info.dp_size is not None:
            return info.dp_size, version
        named = await self._pages.engines(base_url)
        if named is None:
            raise _Silent
        return named, version

    async def _ask_version(self, base_url: str) -> str:
        """Return the version that vLLM reports; "" without such a page. Raises _Silent."""
        told = await self._page(f"{base_url}/version", _decode_version)
        return _version(told.version) if told is not None else ""

    async def _page(self, url: str, decode: Callable[[bytes], _T | None]) -> _T | None:
        """Return one page; None if it is missing or unreadable. Raises _Silent if the server does not answer."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status >= 500:
                    raise _Silent
                if response.status != 200:
                    return None
                page = await http_client.read_body(response, self._page_bytes_max)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _Silent from error
        try:
            return decode(page) if len(page) <= self._page_bytes_max else None
        except _UNREADABLE:
            return None


def _version(raw: msgspec.Raw) -> str:
    """Return a version as an engine reports it; "" if it is not a short printable text."""
    try:
        told = msgspec.json.decode(raw, type=str)
    except _UNREADABLE:
        return ""
    return told if len(told) <= VERSION_CHARS_MAX and told.isprintable() else ""
