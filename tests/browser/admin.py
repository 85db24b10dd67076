"""An admin listener with made-up figures behind the router's own guard, on a port of its own, for tests of the page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from router.admin.history.query_filters import PARAMETERS
from router.admin.listener import AdminListener
from router.admin.page_table import (
    TEXT,
    AdminRequest,
    AdminResponse,
    PageHandler,
    get_route,
    json_answer,
    make_error_response,
)
from tests.browser.tab import Tab
from tests.http.clients import LIMITS
from tests.support import series_page
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
        routes = [
            get_route("/admin/observatory", self._answer),
            get_route("/admin/series", self._found(self._series), "from_s", "to_s", "step_s"),
            get_route("/admin/decisions", self._found(series_page.decisions), *PARAMETERS, "before", "limit"),
            get_route("/metrics", self._metrics),
        ]
        self._listener = AdminListener(routes, LIMITS, token=lambda: self.token, host="127.0.0.1")
        self.port = int((await self._listener.listen(self.port)).rpartition(":")[2])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    async def _answer(self, _: AdminRequest) -> AdminResponse:
        self.asked += 1
        return json_answer(self.page(self.clock()), self.status)

    async def _metrics(self, _: AdminRequest) -> AdminResponse:
        return AdminResponse(200, b"warmroute_requests_total 4\n", TEXT)

    def _series(self, now_s: float, query: Mapping[str, str]) -> Any:
        return series_page.series(now_s, query, self.page(now_s))

    def _found(self, made: Answer) -> PageHandler:
        async def answer(call: AdminRequest) -> AdminResponse:
            self.queries.setdefault(call.path, []).append(dict(call.query))
            try:
                return json_answer(made(self.clock(), call.query))
            except ValueError as error:
                return make_error_response(400, "bad_parameter", str(error))

        return answer

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/dashboard"


@asynccontextmanager
async def opened(
    tab: Tab, page: Callable[[float], Any] = observatory, at: str = "", clock: Callable[[], float] = time.time
) -> AsyncIterator[Admin]:
    """The page, with its first figures on it; `at` is what stands behind its address."""
    async with Admin(page, clock=clock) as admin:
        await tab.open(admin.url + at)
        await tab.until(LIVE)
        yield admin
        await tab.call(lambda: tab.driver.get("about:blank"))
