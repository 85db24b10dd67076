"""Who may use the admin listener, and for what: checked before any page is served.

With a token every page needs it, except `/healthz` and `/readyz`, which kubelets ask, and the files of the dashboard,
which hold no secret and ask for the token themselves, and the runbook. Without one the listener is on
loopback (commands/loading.py), where other programs of the machine are trusted, but browsers are not: a request for a
web page names that page's host (`Host`, even if its name was made to resolve to 127.0.0.1) or has an `Origin`. So a
request must name this machine by address, `localhost` or the configured name; one that changes something must have no
`Origin`, and be JSON, which no form can send.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from router.admin import dashboard, runbook
from router.settings.keys import OPEN, is_admin

BODY_BYTES_MAX = 4 << 10
READS = ("GET", "HEAD")
FREE = {*OPEN, *dashboard.PATHS, *runbook.PATHS}

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]+)?")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarding(token: Callable[[], str], host: str) -> Middleware:
    """Middleware that checks every request, also for pages that do not exist. `token()` gives the token now, "" for
    none; `host` is where the admin listener listens."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        secret = token()
        if request.path in FREE and request.method in READS:
            return await handler(request)
        if secret and not is_admin(request.headers.get("Authorization", "").encode(errors="replace"), secret):
            response = refused(401, "admin_token_needed", "This page needs the admin token.")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if (not secret or request.method not in READS) and not _ours(request.headers.get("Host", ""), host):
            return refused(421, "wrong_host", "Name this router by its address or localhost (DNS rebinding).")
        if request.method not in READS:
            if "Origin" in request.headers:
                return refused(403, "no_browsers", "Web pages may change nothing here.")
            if request.body_exists and request.content_type != "application/json":
                return refused(415, "json_only", "The content-type must be application/json.")
        return await handler(request)

    return guard


def refused(status: int, code: str, message: str) -> web.Response:
    """An error answer of the admin listener."""
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(status=status, body=body, content_type="application/json")


def _ours(given: str, host: str) -> bool:
    """Whether a Host header names this machine in a way that no other site can use."""
    found = _HOST.fullmatch(given.lower())
    if found is None:
        return False
    name = found[1] or found[2]
    if name in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
