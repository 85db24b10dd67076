"""A router with keys as a real process, two engines, and everything that may be asked of them set up once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.away.cells import SERVED, Cell
from tests.away.engines import DOOR, STORED, StoringEngine
from tests.away.questions import (
    ANSWER_S_MAX,
    CHAT,
    Ask,
    Question,
    admin_pages,
    chat,
    handed_on,
    of_edge,
    opened,
    served,
)
from tests.support.command import Command, command
from tests.support.keyring import ADMIN, SECRET, Keyring
from tests.support.waiting import until

RELOADED, REFUSED = "configuration reloaded", "new configuration is invalid: the old one remains active"
# `acme` has stored responses and is isolated; `rival` wants them; `spent` has used up its tokens for two hours, as an
# answer has a hundred and more; `gone` is in the keys file of yesterday only.
TENANTS = {
    "acme": {"isolate": True, "models": ["m"]},
    "rival": {},
    "spent": {"tokens_per_min": 1},
    "gone": {},
}
SETTINGS = {
    "auth__secret": SECRET,
    "admin__token": ADMIN,
    "routing__policy": "round_robin",  # each engine gets every other request
    "listen__file_watch_interval_s": "0",  # files are read again when the test says so
    "upstream__stall_timeout_s": "300",
}


async def eventually(true: Callable[[], Awaitable[bool]]) -> None:
    """Return when it is true; TimeoutError if that takes a minute."""
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.02)


class World:
    """Routers of one fleet, their keys, and the engines in this process."""

    def __init__(
        self,
        routers: Sequence[Command],
        ring: Keyring,
        engines: Sequence[StoringEngine],
        session: aiohttp.ClientSession,
        start: Callable[[dict[str, str]], AbstractAsyncContextManager[Command]],
        settings: dict[str, str],
    ) -> None:
        """`start(settings)` starts another router before the same engines, and `settings` are those of the first."""
        self.routers, self.ring, self.engines, self._session = routers, ring, engines, session
        self.start, self.settings = start, settings
        self.router = routers[0]
        self.ids: list[str] = []  # Ids of the responses that acme has stored.
        self.answer_s_max = ANSWER_S_MAX
        self.yesterday = ring.file.read_text(encoding="utf-8")  # the keys file with the key that is revoked today

    def asks(self) -> list[Ask]:
        """Ways to ask each router."""
        return [of_edge(self._session, each.url) for each in self.routers]

    async def post(self, path: str, tenant: str, body: dict[str, object], router: Command | None = None) -> int:
        """Ask for something. Returns the status."""
        url = (router or self.router).url + path
        async with self._session.post(url, json=body, headers={**self.ring.of(tenant), DOOR: "none"}) as answer:
            await answer.read()
            return answer.status

    async def page(self, path: str, router: Command | None = None) -> bytes:
        """A page of the admin listener, with its token."""
        url = (router or self.router).admin_url + path
        async with self._session.get(url, headers={"authorization": f"Bearer {ADMIN}"}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def reload(self, message: str = RELOADED) -> None:
        """Have every router read its files again, and wait for this line of its log."""
        before = [each.said(message) for each in self.routers]
        for each in self.routers:
            each.process.send_signal(signal.SIGHUP)
        await until(lambda: all(each.said(message) > n for each, n in zip(self.routers, before, strict=True)))

    async def set_up(self) -> None:
        """Store responses at every engine, use up a rate, and revoke a key."""
        while len({each.split("_")[1] for each in self.ids}) < max(len(self.engines), 1):
            before = {id_ for engine in self.engines for id_ in engine.made}
            assert await self.post(STORED, "acme", {"model": "m", "input": "x"}) == 200
            self.ids += {id_ for engine in self.engines for id_ in engine.made} - before
        for each in self.routers:
            await self._until(each, CHAT, "spent", 429, chat(tenant="spent"))
            for id_ in self.ids:
                await self._until(each, f"{STORED}/{id_}", "acme", 200)
        assert await self.post(CHAT, "gone", chat(tenant="gone")) == 200
        entries = self.yesterday.split("- name")
        assert "gone" in entries[-1]
        self.ring.file.write_text("- name".join(entries[:-1]), encoding="utf-8")
        await self.reload()
        for each in self.routers:
            assert await self.post(CHAT, "gone", chat(), each) == 401

    async def _until(self, router: Command, path: str, tenant: str, status: int, body: Any = None) -> None:
        """Ask until this is the answer: another router has heard of it by then."""
        question = Question("none", "GET" if body is None else "POST", path, self.ring.of(tenant), body)
        async with asyncio.timeout(ANSWER_S_MAX):
            while await of_edge(self._session, router.url)(question) != status:
                await asyncio.sleep(0.01)

    async def state(self, asks: Sequence[Ask] = ()) -> tuple[set[str], set[str]]:
        """(open doors, what is served) by every router."""
        open_, whole = set[str](), {*SERVED}
        for ask in asks or self.asks():
            open_ |= await opened(ask, self.ring, self.ids, self.engines)
            whole &= await served(ask, self.ring, self.ids)
            open_ |= handed_on(self.ring, self.engines)
            open_ |= {"sent elsewhere" for engine in self.engines if engine.strays}
        for each in self.routers:
            open_ |= await admin_pages(self._session, each.admin_url, self.ring, self.answer_s_max)
        return open_, whole

    async def closed(self) -> None:
        """Fail unless nothing is open and everything is served, as while all parts are there."""
        assert await self.state() == (set(), {*SERVED})

    async def holds(self, cell: Cell, asks: Sequence[Ask] = ()) -> None:
        """Fail unless exactly what the cell says is open, and is served."""
        open_, served_ = await self.state(asks)
        assert open_ == {*cell.opens}
        assert served_ == {*cell.serves}


@asynccontextmanager
async def world(
    folder: Path,
    *more_urls: str,
    engines: int = 2,
    routers: int = 1,
    module: str = "router",
    named: bool = True,
    started: Callable[[World], Awaitable[None]] | None = None,
    **settings: str,
) -> AsyncIterator[World]:
    """Routers in front of so many engines, with everything set up. With `named` they have the engines from flags;
    `started` is called before anything is set up."""
    async with AsyncExitStack() as stack:
        there = [await stack.enter_async_context(StoringEngine()) for _ in range(engines)]
        async with before(
            folder, there, *more_urls, routers=routers, module=module, named=named, started=started, **settings
        ) as it:
            yield it


@asynccontextmanager
async def before(
    folder: Path,
    engines: Sequence[StoringEngine],
    *more_urls: str,
    routers: int = 1,
    module: str = "router",
    named: bool = True,
    started: Callable[[World], Awaitable[None]] | None = None,
    **settings: str,
) -> AsyncIterator[World]:
    """The same before these engines, and those at more URLs."""
    ring = Keyring(folder, **TENANTS)
    urls = [*(each.url for each in engines if named), *more_urls]
    given = SETTINGS | {"auth__keys_file": str(ring.file)} | settings
    async with AsyncExitStack() as stack:

        def start(settings: dict[str, str]) -> AbstractAsyncContextManager[Command]:
            return command(*urls, module=module, **settings)

        there = [await stack.enter_async_context(start(given)) for _ in range(routers)]
        # A connection for each request: none is left over of before the state.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        it = World(there, ring, engines, session, start, given)
        await until(lambda: all(each.probes["models"] for each in engines))
        if started is not None:
            await started(it)
        await it.set_up()
        await it.closed()
        yield it
