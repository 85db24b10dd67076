"""The runbook, served by the router itself, so that it is there when nothing else is.

`runbook.html` is rendered from docs/operate/runbook.md by `python -m deploy.runbook`. Like the dashboard's files it
holds no secret and needs no token, and the same headers keep scripts out.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from router.admin.dashboard import HEADERS

PAGE, STYLE = "/runbook", "/runbook.css"
PATHS = frozenset({PAGE, STYLE})
_FOLDER = resources.files(__name__)
_PAGE, _STYLE = (_FOLDER.joinpath(name).read_bytes() for name in ("runbook.html", "runbook.css"))


def routes() -> list[web.RouteDef]:
    """Routes for the admin listener."""
    return [web.get(PAGE, _page), web.get(STYLE, _style)]


async def _page(_: web.Request) -> web.Response:
    return web.Response(body=_PAGE, headers={**HEADERS, "Content-Type": "text/html; charset=utf-8"})


async def _style(_: web.Request) -> web.Response:
    return web.Response(body=_STYLE, headers={**HEADERS, "Content-Type": "text/css; charset=utf-8"})
