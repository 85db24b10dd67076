"""The files of the dashboard as they are served; tests/browser has the page itself."""

from __future__ import annotations

import re

import pytest
from aiohttp import ClientSession

from router.admin import dashboard
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN

FILES = sorted(dashboard.PATHS - {dashboard.SLASHED})
ALLOWED = {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:",
           "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"}  # fmt: skip


@pytest.mark.parametrize("token", ["", ADMIN])
async def test_files_are_open_and_strict(client: ClientSession, engine: FakeEngine, token: str) -> None:
    """Each file is had without a token, under the strictest policy that lets the page work, and as what it is; asked
    for again it is not sent again."""
    async with running(engine, admin__token=token) as app:
        for path in FILES:
            async with client.get(app.admin_url + path) as response:
                assert response.status == 200
                assert set(response.headers["Content-Security-Policy"].split("; ")) == ALLOWED
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
                assert response.headers["Cache-Control"] == "no-cache"
                kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
                assert response.content_type == kind
                known = {"If-None-Match": response.headers["ETag"]}
            async with client.get(app.admin_url + path, headers=known) as response:
                assert (response.status, await response.read()) == (304, b"")
        async with client.get(app.admin_url + dashboard.SLASHED) as response:
            assert str(response.url) == app.admin_url + dashboard.PAGE
            assert response.status == 200
        async with client.get(app.admin_url + "/admin/replicas") as response:
            assert response.status == (401 if token else 200)
        async with client.get(app.url + dashboard.PAGE) as response:
            assert response.status == 404, "clients have no dashboard"


async def test_all_it_asks_for_is_there(client: ClientSession, engine: FakeEngine) -> None:
    """What the page and its modules load is among its own files, and the page has no script or style within."""
    async with running(engine) as app:
        texts = {}
        for path in FILES:
            async with client.get(app.admin_url + path) as response:
                texts[path] = await response.text()
    page = texts[dashboard.PAGE]
    asked = {f"/{name}" for name in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page)}
    asked |= {f"/dashboard/{name}" for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert asked == set(FILES) - {dashboard.PAGE}
    assert not re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|https?://(?!www\.w3\.org)", page)


def test_data_becomes_text_only() -> None:
    """No module has a way to make markup, or code, of a string."""
    for path, (kind, body) in dashboard._FILES.items():
        if kind.startswith("text/javascript"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", body.decode()
            )
            assert not found, path
