"""The files of the dashboard as they are served; tests/browser has the page itself."""

from __future__ import annotations

import re
from hashlib import sha256
from importlib import resources

import pytest
from aiohttp import ClientSession

from router.admin import dashboard
from router.admin.insights_pages import LINKED
from router.cli.config_loader import load
from router.config.schema import SettingsError
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN

# SHA-256 of what npm's uplot@1.6.32 has as dist/uPlot.iife.min.js and dist/uPlot.min.css.
VENDORED = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
FILES = sorted(dashboard.PATHS - {dashboard.SLASHED})
ALLOWED = {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:",
           "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"}  # fmt: skip


@pytest.mark.promise("The dashboard's files are open, and its data requires the admin token.", "records")
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


@pytest.mark.promise(
    "Text from clients runs nothing on the dashboard and moves no cursor in `warmroute top`.", "records"
)
def test_data_becomes_text_only() -> None:
    """No module has a way to make markup, or code, of a string."""
    for path, (kind, body) in dashboard._FILES.items():
        if kind.startswith("text/javascript"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", body.decode()
            )
            assert not found, path


async def test_it_names_the_pages_that_there_are(client: ClientSession, engine: FakeEngine) -> None:
    """`/admin/observatory` tells the page which other pages this router has, so that the page asks for nothing that is
    not there and links to nothing dead; and Grafana's address, where the settings have one."""
    address = "https://grafana.example/d/warmroute-overview"
    async with running(engine, insights__grafana_url=address) as app:
        async with client.get(f"{app.admin_url}/admin/observatory") as response:
            seen = await response.json()
        assert seen["links"] == {"grafana": address}
        assert {"/admin/decisions", "/metrics"} <= set(seen["pages"]) <= LINKED
        for path in seen["pages"]:
            async with client.get(app.admin_url + path) as response:
                assert response.status == 200, path
    async with running(engine) as app, client.get(f"{app.admin_url}/admin/observatory") as response:
        assert (await response.json())["links"] == {}


def test_a_web_address_is_one() -> None:
    """What a browser would run, or could not open, is no address of Grafana."""
    for wrong in ("javascript:alert(1)", "grafana.example", "https://", "https://a b"):
        with pytest.raises(SettingsError, match=r"insights\.grafana_url"):
            load(overrides={"insights.grafana_url": wrong})


def test_the_library_comes_with_its_licence() -> None:
    """uPlot is served as it was released, and its licence is in the package beside it."""
    folder = resources.files(dashboard)
    assert "Permission is hereby granted" in (folder / "uplot.LICENSE").read_text(encoding="utf-8")
    for name, digest in VENDORED.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == digest
