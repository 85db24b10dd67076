"""Access control of the admin listener, by a request's head, before its body is read.

With a token every page needs it, with three exceptions. `/healthz` and `/readyz` are requested by kubelets. The files
of the dashboard contain no secret, and the dashboard itself prompts for the token. The runbook contains no secret
either.

Without a token the listener is on loopback (cli/config_loader.py). Other programs of the machine are trusted there, but
browsers are not. A browser's request for a web page names that page's host (`Host`, even if its name was made to
resolve to 127.0.0.1) or has an `Origin`. So a request must name this machine by address, by `localhost` or by the
configured name. A request that changes anything must have no `Origin`, and its body must be JSON, which no form can
send. A request that the browser marks as coming from another site's page, as with `<script src>`, is refused (Fetch
Metadata: `Sec-Fetch-Site`). That page could not read the answer, but the router would do the work.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from router.admin import dashboard, runbook
from router.admin.page_table import JSON, READS, admin_refusal
from router.config.api_keys import UNAUTHENTICATED_PATHS, is_admin
from router.http.request import Request

PUBLIC_PATHS = {*UNAUTHENTICATED_PATHS, *dashboard.PATHS, *runbook.PATHS}

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]+)?")


class AdminAuth:
    """Checks every request, also for pages that do not exist."""

    def __init__(self, token: Callable[[], str], host: str) -> None:
        """`token()`: the current token, "" for none. `host`: the address of the admin listener."""
        self._token = token
        self._host = host.lower()

    def check(self, request: Request) -> None:
        """Check a request by its head. Raises Refusal."""
        secret, fields, reads = self._token(), request.fields, request.method in READS
        if reads and request.path in PUBLIC_PATHS:
            return
        if secret and not is_admin(fields.get(b"authorization", b""), secret):
            raise admin_refusal(401, "admin_token_needed", "This page requires the admin token.")
        if (not secret or not reads) and not self._is_ours(request.header(b"host")):
            raise admin_refusal(
                421,
                "wrong_host",
                "Use the router's IP address or localhost as host; other names are refused (DNS rebinding).",
            )
        if fields.get(b"sec-fetch-site", b"").strip().lower() == b"cross-site":
            raise admin_refusal(403, "no_browsers", "Requests from web pages of other sites are refused.")
        if not reads:
            if b"origin" in fields:
                raise admin_refusal(403, "no_browsers", "Changes requested by web pages are refused.")
            if _has_body(request) and _media_type(request) != JSON:
                raise admin_refusal(415, "json_only", "The content-type must be application/json.")

    def _is_ours(self, given: str) -> bool:
        """True if a Host header names this machine in a way that no other site can use."""
        found = _HOST.fullmatch(given.lower())
        if found is None:
            return False
        name = found[1] or found[2]
        if name in ("localhost", self._host):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _has_body(request: Request) -> bool:
    length = request.fields.get(b"content-length", b"0")
    return b"transfer-encoding" in request.fields or length.strip(b"0") != b""


def _media_type(request: Request) -> str:
    return request.header(b"content-type").partition(";")[0].strip().lower()
