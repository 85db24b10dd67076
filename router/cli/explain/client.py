"""`warmroute explain ID`: asks the admin listener for a request's decision, and prints it in words.

Exit status as that of grep: 0 if it was found, 1 if it was not, 2 if the router could not be asked.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from router.cli.explain.prose import explain_row, plain, span
from router.config import secrets
from router.engines import http_client

ANSWER_S = 10.0
PAGE_BYTES_MAX = 4 << 20
SHOWN_MAX = 5  # requests of one id that are explained: clients may use an id again
FOUND, NOT_FOUND, NOT_ASKED = 0, 1, 2


class RouterUnreachable(Exception):
    """Raised if the router could not be asked; the message gives the reason, and a possible remedy."""


def main(id_: str, url: str, token_file: Path | None) -> int:
    """Run the command. Returns the exit status."""
    try:
        token = secrets.read("", str(token_file)) if token_file else ""
    except (OSError, UnicodeDecodeError) as error:
        return _complain(f"{token_file}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}", NOT_ASKED)
    try:
        page = asyncio.run(fetch_decision(id_, url, token))
    except RouterUnreachable as error:
        return _complain(str(error), NOT_ASKED)
    except KeyboardInterrupt:
        return NOT_ASKED
    rows = page["decisions"]
    if not rows:
        return _complain(f"unknown request '{plain(id_)}'. {_reach(page.get('kept') or {})}", NOT_FOUND)
    if len(rows) > 1:
        more = "or more " if page.get("more") else ""
        print(f"{len(rows)} {more}requests have this id, newest first.\n")
    print("\n\n".join("\n".join(explain_row(row)) for row in rows))
    return FOUND


def _complain(problem: str, status: int) -> int:
    print(f"warmroute: {problem}", file=sys.stderr)
    return status


def _reach(kept: dict[str, Any]) -> str:
    """Describe the time range of the stored decisions, and how to extend it."""
    since_s = kept.get("decisions_since_s")
    if since_s is None:
        said = "No request has ended since the router started."
    else:
        said = f"Decisions of the last {span(max(0.0, time.time() - since_s))}"
        said += f" ({kept.get('decisions_in_memory', 0)} in memory)."
    if kept.get("state") == "failing":
        return f"{said} The history file is unavailable: {plain(kept.get('why') or '')}."
    if not kept.get("path"):
        return f"{said} Set admin.history_path to keep decisions longer, and across restarts."
    return said


async def fetch_decision(id_: str, url: str, token: str) -> dict[str, Any]:
    """Return the page of the decisions of this id. Raises RouterUnreachable."""
    try:
        async with http_client.session(token, ANSWER_S) as session:
            address, params = f"{url.rstrip('/')}/admin/decisions", {"id": id_, "limit": str(SHOWN_MAX)}
            async with session.get(address, params=params, allow_redirects=False) as response:
                body = await http_client.read_body(response, PAGE_BYTES_MAX)
    except aiohttp.InvalidURL as error:
        raise RouterUnreachable(f"{url} is not a URL such as http://127.0.0.1:8001") from error
    except (aiohttp.ClientError, OSError, ssl.SSLError) as error:  # TimeoutError is an OSError
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise RouterUnreachable(
            f"cannot reach {url}: {why}; check that this is the address of the admin listener"
        ) from error
    if response.status == 401:
        raise RouterUnreachable(f"{url} requires the admin token: set --token-file to a file with the valid token")
    if response.status == 404:
        raise RouterUnreachable(
            f"{url} has no decisions: it is not an admin listener (tenants use /v1/warmroute/requests/ID)"
        )
    try:
        page = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise RouterUnreachable(
            f"{url} did not answer with JSON: check that this is the address of the admin listener"
        ) from error
    if response.status != 200:
        said = page.get("error", {}).get("message", "") if isinstance(page, dict) else ""
        raise RouterUnreachable(f"{url} answered {response.status}{': ' if said else ''}{plain(said)}")
    if not isinstance(page, dict) or not isinstance(page.get("decisions"), list):
        raise RouterUnreachable(f"{url} answered without decisions")
    return page
