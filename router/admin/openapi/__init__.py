"""Description of both listeners' APIs in OpenAPI 3.1, served at `/admin/openapi.json`.

`openapi.json` is rendered by `python -m deploy.openapi`. It does not depend on this router's settings. Like all data it
needs the admin token: a client without access to the pages need not know of them.
"""

from __future__ import annotations

from importlib import resources

from router.admin.page_table import JSON, AdminRequest, AdminResponse, AdminRoute, get_route

PATH = "/admin/openapi.json"
_DOCUMENT = resources.files(__name__).joinpath("openapi.json").read_bytes()


def routes() -> list[AdminRoute]:
    """Return the routes for the admin listener."""
    return [get_route(PATH, _document)]


async def _document(_: AdminRequest) -> AdminResponse:
    return AdminResponse(200, _DOCUMENT, JSON)
