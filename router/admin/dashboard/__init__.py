"""The dashboard: one page on the admin listener that shows the data of the observatory.

The page consists of files of this package, served unchanged. There is no build step and no external file, so the
strictest Content-Security-Policy holds: no inline script or style, no connection except to the page's own origin. The
files contain no secret, so they need no token, like `/healthz` (access_control.py). All data comes from
`/admin/observatory`, `/admin/series` and `/admin/decisions`, which need the token. Text that clients chose (names,
labels) is put into the page as text only, in app.js and its modules.

uplot.js and uplot.css are uPlot 1.6.32 as npm has it (MIT, uplot.LICENSE). Its 51 KB draw 720 points in a few
milliseconds, with zoom, a cursor that all charts share, and axes of time. It makes no markup of text and sets styles
through the object model alone, so it needs no exception in the policy.
"""

from __future__ import annotations

import re
from functools import partial
from hashlib import sha256
from importlib import resources

from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, get_route

PAGE = "/dashboard"
_TAG = re.compile(r'"([^"]*)"')  # an entity tag, weak or not (RFC 9110 section 8.8.3)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # browsers revalidate each file, and download it again only from another version of the router
    "Cache-Control": "no-cache",
}


def _read() -> dict[str, tuple[str, bytes]]:
    """Return all files that are served: path -> (content type, bytes)."""
    found = {}
    for file in resources.files(__name__).iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in TYPES:
            path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
            found[path] = (TYPES[suffix], file.read_bytes())
    return found


_FILES = _read()
SLASHED = PAGE + "/"  # address as people type it; the page names its files relative to it, also below a proxy's prefix
PATHS = frozenset({*_FILES, SLASHED})
"""Files of the page. Every client that reaches the admin listener may read them."""


def routes() -> list[AdminRoute]:
    """Return the routes for the admin listener."""
    return [get_route(SLASHED, _redirect_to_page), *(get_route(path, partial(_file, path)) for path in sorted(_FILES))]


async def _redirect_to_page(_: AdminRequest) -> AdminResponse:
    return AdminResponse(308, headers={**HEADERS, "Location": f"..{PAGE}"})


async def _file(path: str, call: AdminRequest) -> AdminResponse:
    content_type, body = _FILES[path]
    tag = sha256(body).hexdigest()[:16]
    headers = {**HEADERS, "ETag": f'"{tag}"'}
    if tag in _TAG.findall(call.header("If-None-Match")):
        return AdminResponse(304, headers=headers)
    return AdminResponse(200, body, content_type, headers)
