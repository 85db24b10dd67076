"""The admin listener: the control plane's pages and the dashboard behind a guard. It uses the same server as the main
listener, so that the same limits and deadlines apply to heads, bodies, connections and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from router.admin import dashboard, openapi, runbook
from router.admin.access_control import AdminAuth
from router.admin.page_table import (
    AdminRequest,
    AdminResponse,
    AdminRoute,
    RouteTable,
    admin_refusal,
    get_route,
    make_error_response,
)
from router.admin.query_params import BadParameter, check_names, refusal_of
from router.http.acceptor import cannot_listen, url_of
from router.http.client_connection import ClientDisconnected
from router.http.client_timeouts import ClientLimits
from router.http.request import Refusal, Request, date_line
from router.http.server import Server
from router.telemetry.build import build

BODY_BYTES_MAX = 4 << 20  # bytes of the longest body of any page
BODIES_MAX = 4  # maximum of such bodies of all clients together at a time
CLOSE_S = 0.1  # time in which current answers may end
TEXT = "text/plain; charset=utf-8"
# Headers of every answer: browsers do not guess another content type, and give the answer to no other site's page.
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
_TOO_LARGE = "body_too_large"  # the receiver's code; pages have another one

log = logging.getLogger(__name__)


class AdminListener:
    """Server of pages, from `listen` to `close`."""

    def __init__(
        self, routes: Iterable[AdminRoute], limits: ClientLimits, *, token: Callable[[], str], host: str
    ) -> None:
        """`token()`: the current token, "" for none. `host`: the configured address. `limits`: must allow the longest
        body of any page."""
        pages = [*routes, *dashboard.routes(), *runbook.routes(), *openapi.routes()]
        self.table = RouteTable([*pages, get_route("/", partial(_root, _list_of(pages)))])
        self._guard = AdminAuth(token, host)
        self._host = host
        self.server = Server(self.handle, self.refuse, limits, admit=self.admit)

    async def listen(self, port: int) -> str:
        """Serve on this port. Returns the URL. Raises OSError."""
        try:
            bound = await self.server.listen(self._host, port)
        except OSError as error:
            raise cannot_listen(error, self._host, port, admin=True) from error
        return url_of(*bound)

    async def close(self) -> None:
        """Let current answers end within CLOSE_S, and close all connections."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.server.drain()
        await self.server.cancel_all()
        await self.server.close()

    # -- called by the server ----------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """True if the body of a request must be read. At this point only its head has arrived. Raises Refusal."""
        self._guard.check(request)
        route = self.table.find(request)
        if route is None or route.method == "GET":
            return False
        if int(request.fields.get(b"content-length", b"0")) > route.body_bytes_max:
            raise _too_long(route)
        return True

    async def handle(self, request: Request) -> None:
        """Answer a request."""
        try:
            answer = await self._answer(request)
        except Refusal as refusal:
            answer = _answer_of(refusal)
        except ClientDisconnected:
            raise
        except Exception:
            fields = {"method": request.method, "path": request.path[:200]}
            log.exception("bug: an admin page failed", extra={"event": "bug", "fields": fields})
            answer = make_error_response(500, "internal_error", "The page failed; see the router's log.")
        _send(request, answer)

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Answer a request that cannot be read to its end. If its head is known, a refusal by the guard takes
        precedence."""
        if request.method:
            try:
                self._guard.check(request)
            except Refusal as error:
                refusal = error
            route = self.table.find(request)
            if refusal.code == _TOO_LARGE and route is not None:
                refusal = _too_long(route)
        _send(request, _answer_of(refusal))

    async def _answer(self, request: Request) -> AdminResponse:
        self._guard.check(request)
        route = self.table.find(request)
        if route is None:
            return self.table.make_not_found_response(request)
        if request.body_bytes > route.body_bytes_max and route.method != "GET":
            raise _too_long(route)
        call = AdminRequest(request, self.table.paths)
        check_names(call, route)
        try:
            return await route.page(call)
        except BadParameter as error:
            raise refusal_of(error, route) from error


def _too_long(route: AdminRoute) -> Refusal:
    most = route.body_bytes_max
    said = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return admin_refusal(413, "too_long", f"The body must have at most {said}.")


def _answer_of(refusal: Refusal) -> AdminResponse:
    answer = make_error_response(refusal.status, refusal.code, str(refusal))
    if refusal.status != 401:
        return answer
    return AdminResponse(
        answer.status, answer.body, answer.content_type, {"WWW-Authenticate": "Bearer"}
    )  # RFC 9110 11.6


def _send(request: Request, answer: AdminResponse) -> None:
    headers = {**HEADERS, **answer.headers}
    if answer.content_type:
        headers["Content-Type"] = answer.content_type
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    request.answer(answer.status, (date_line(), *lines), answer.body)


def _list_of(pages: Iterable[AdminRoute]) -> str:
    """Return the text of the root page: the version, and every page that can be read here except for the files of
    pages."""
    paths = sorted({page.path for page in pages if page.method == "GET"})
    paths = [path for path in paths if "." not in path or path == openapi.PATH]
    shown = "\n".join(f"  {path}" for path in paths if path == "/" or not path.endswith("/"))
    return f"warmroute {build()}, admin listener. Clients are served on the main port. Pages:\n\n{shown}\n"


async def _root(text: str, _: AdminRequest) -> AdminResponse:
    return AdminResponse(200, text.encode(), TEXT)
