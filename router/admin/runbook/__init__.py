"""The runbook, served by the router itself, so that it is available even if no other service is.

`runbook.html` is rendered from docs/operate/runbook.md by `python -m deploy.runbook`. Like the dashboard's files it
contains no secret and needs no token, and the same headers prevent scripts.
"""

from __future__ import annotations

from importlib import resources

from router.admin.dashboard import HEADERS
from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, get_route

PAGE, STYLE = "/runbook", "/runbook.css"
PATHS = frozenset({PAGE, STYLE})
_FOLDER = resources.files(__name__)
_PAGE, _STYLE = (_FOLDER.joinpath(name).read_bytes() for name in ("runbook.html", "runbook.css"))


def routes() -> list[AdminRoute]:
    """Return the routes for the admin listener."""
    return [get_route(PAGE, _page), get_route(STYLE, _style)]


async def _page(_: AdminRequest) -> AdminResponse:
    return AdminResponse(200, _PAGE, "text/html; charset=utf-8", HEADERS)


async def _style(_: AdminRequest) -> AdminResponse:
    return AdminResponse(200, _STYLE, "text/css; charset=utf-8", HEADERS)
