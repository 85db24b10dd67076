"""An admin listener with made-up figures behind the router's own guard, on a port of its own, for tests of the page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from router.admin import dashboard
from router.admin.guard import guarding, refused
from tests.browser.tab import Tab
from tests.support import series_page
from tests.support.fakes import listening
from tests.support.observatory_page import observatory

LIVE = "return document.querySelector('#status').dataset.state === 'live'"
OPENED = "return document.querySelector('#decisions details[open] table') !== null"

Answer = Callable[[float, Mapping[str, str]], Any]


@dataclass
class Admin:
    """A listener whose observatory answers what `page` makes of the time, or `status`; `asked` counts these, `queries`
    has what was asked of the pages of series and requests."""

    page: Callable[[float], Any] = observatory
    token: str = ""
    status: int = 200
    port: int = 0
    asked: int = 0
    queries: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    clock: Callable[[], float] = time.time

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[guarding(lambda: self.token, "127.0.0.1")])
        app.add_routes(
            [
                *dashboard.routes(),
                web.get("/admin/observatory", self._answer),
                web.get("/admin/series", self._found(series_page.series)),
                web.get("/admin/decisions", self._found(series_page.decisions)),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner, self.port = await listening(app, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(self.page(self.clock()), status=self.status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="warmroute_requests_total 4\n")

    def _found(self, made: Answer) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            self.queries.setdefault(request.path, []).append(dict(request.query))
            try:
                return web.json_response(made(self.clock(), request.query))
            except ValueError as error:
                return refused(400, "bad_parameter", str(error))

        return answer

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/dashboard"


@asynccontextmanager
async def opened(tab: Tab, page: Callable[[float], Any] = observatory, at: str = "") -> AsyncIterator[Admin]:
    """The page, with its first figures on it; `at` is what stands behind its address."""
    async with Admin(page) as admin:
        await tab.open(admin.url + at)
        await tab.until(LIVE)
        yield admin
        await tab.call(lambda: tab.driver.get("about:blank"))
