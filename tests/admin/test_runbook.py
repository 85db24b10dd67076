"""What the router says of itself: the page at `/` of both listeners, and the runbook that it brings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp import ClientSession

from deploy.runbook import PAGE, SOURCE, rendered
from router.admin import runbook
from router.telemetry.build import build
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN, Keyring


@pytest.mark.parametrize("token", ["", ADMIN])
async def test_the_runbook_is_there_without_a_token(client: ClientSession, engine: FakeEngine, token: str) -> None:
    """Whoever was woken reads it before they find the token, and without the internet: nothing comes from elsewhere,
    and no script runs."""
    async with running(engine, admin__token=token) as app:
        async with client.get(app.admin_url + runbook.PAGE) as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            text = await response.text()
        async with client.get(app.admin_url + runbook.STYLE) as response:
            assert (response.status, response.content_type) == (200, "text/css")
    assert not re.search(r"<script|style=|(?:src|href)=\"(?!#|runbook\.css)", text)


def test_the_runbook_is_that_of_the_documents() -> None:
    """`python -m deploy.runbook` was run after the last change, every alert's anchor is there, and no link is dead."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == rendered(SOURCE.read_text(encoding="utf-8"))
    ids = set(re.findall(r' id="([^"]+)"', text))
    alerts = re.findall(r"^## (Warmroute\w+)$", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(alerts) > 10
    assert {name.lower() for name in alerts} <= ids
    assert "/metrics | grep token_hit</code>" in text  # a command that can be copied, without the table's backslash
    assert set(re.findall(r'href="#([^"]+)"', text)) <= ids


async def test_both_ports_say_where_one_is(client: ClientSession, engine: FakeEngine) -> None:
    """Every page that the admin listener lists is there, and the main port names the other. Which build runs stands
    first, and is in what the dashboard shows."""
    async with running(engine) as app:
        async with client.get(app.admin_url + "/") as response:
            said = await response.text()
        assert said.startswith(f"warmroute {build()}, admin listener.")
        async with client.get(app.admin_url + "/admin/observatory") as response:
            assert (await response.json())["build"] == str(build())
        listed = re.findall(r"^  (/\S*)$", said, re.MULTILINE)
        assert {"/dashboard", "/runbook", "/metrics", "/admin/replicas"} <= set(listed)
        for path in listed:
            async with client.get(app.admin_url + path) as response:
                assert response.status == 200, path
        async with client.get(app.url + "/") as response:
            assert response.status == 200
            assert "/v1/models" in await response.text()


async def test_the_first_page_needs_what_others_need(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """With keys or a token, `/` is for those who have them."""
    ring = Keyring(tmp_path, acme={})
    async with running(engine, admin__token=ADMIN, **ring.settings) as app:
        for url in (app.url, app.admin_url):
            async with client.get(url + "/") as response:
                assert response.status == 401
        async with client.get(app.url + "/", headers=ring.of("acme")) as response:
            assert response.status == 200
