"""The admin listener: the hub's pages and the dashboard behind a guard, on aiohttp's server, which is fast enough."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import http_parser, web
from aiohttp.http_exceptions import HttpProcessingError

from router import __version__
from router.admin import dashboard, runbook
from router.admin.guard import BODY_BYTES_MAX, guarding
from router.admin.parameters import checked_names
from router.http.accepting import cannot_listen, url_of
from router.settings.schema import Settings

CLOSE_S = 0.1  # time for connections to close

log = logging.getLogger(__name__)


def _quotes_nobody(record: logging.LogRecord) -> bool:
    """Filter a log record: aiohttp quotes a header line that it cannot read, which may have the token."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log.addFilter(_quotes_nobody)  # only aiohttp's server logs with this logger


async def listen(
    stack: AsyncExitStack,
    routes: Iterable[web.RouteDef],
    settings: Settings,
    *,
    token: Callable[[], str],
    sock: socket.socket | None,
) -> str:
    """Serve until the stack is closed, on a bound socket or where the settings say; `token()` gives the token now.
    Returns the URL. Raises OSError."""
    s = settings.listen
    if not settings.admin.allow_python_parser:
        _refuse_python_parser()
    app = web.Application(middlewares=[guarding(token, s.admin_host), checked_names], client_max_size=BODY_BYTES_MAX)
    pages = [*routes, *dashboard.routes(), *runbook.routes()]
    app.add_routes([*pages, web.get("/", partial(_root, _list_of(pages)))])
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=log,
        shutdown_timeout=CLOSE_S,
        keepalive_timeout=s.keepalive_s,
        auto_decompress=False,  # off: a compressed megabyte may be a gigabyte
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site: web.BaseSite = (
        web.SockSite(runner, sock) if sock is not None else web.TCPSite(runner, s.admin_host, s.admin_port)
    )
    try:
        await site.start()
    except OSError as error:
        raise cannot_listen(error, s.admin_host, s.admin_port, admin=True) from error
    return url_of(*runner.addresses[0][:2])


def _list_of(pages: Iterable[web.RouteDef]) -> str:
    """Where one is, and every page that can be read here but for the files of pages."""
    paths = sorted({page.path for page in pages if page.method == "GET" and "." not in page.path})
    shown = "\n".join(f"  {path}" for path in paths if path == "/" or not path.endswith("/"))
    return f"warmroute {__version__}, admin listener. Clients are served on the main port. Pages:\n\n{shown}\n"


async def _root(text: str, _: web.Request) -> web.Response:
    return web.Response(text=text)


def _refuse_python_parser() -> None:
    """Raise OSError where aiohttp has only its parser in Python: no wheel, or AIOHTTP_NO_EXTENSIONS is set."""
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        why = "aiohttp has no compiled HTTP parser here (AIOHTTP_NO_EXTENSIONS, or no wheel for this machine)"
        raise OSError(f"{why}; admin.allow_python_parser=true lets the admin listener do without")
