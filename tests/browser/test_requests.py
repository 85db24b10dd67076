"""The dashboard's requests, in a real browser: found by id, narrowed by filters, and sent to others as an address."""

from __future__ import annotations

import time
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.admin import LIVE, OPENED, opened
from tests.browser.tab import Tab
from tests.support import series_page
from tests.support.observatory_page import MODELS, observatory

FOUND = "/admin/decisions"
IDS = "return [...document.querySelectorAll('#decisions > details')].map((each) => each.dataset.id)"
CHOOSE = """
    const field = document.querySelector(`#search [name=${arguments[0]}]`);
    field.value = arguments[1];
    field.dispatchEvent(new Event('change', {bubbles: true}))"""
HASH = "return location.hash"


def some_id(admin: Any) -> str:
    """The id of a request that is kept, and not among the newest."""
    rows = series_page.decisions(admin.clock(), {"limit": "60"})["decisions"]
    return str(rows[40]["id"])


async def test_an_id_leads_to_its_reason(tab: Tab) -> None:
    """Somebody types an id: the request opens, with who could have taken it, and the address can be sent on; whoever
    opens that address sees the same request open."""
    async with opened(tab) as admin:
        wanted = some_id(admin)
        await tab.js("document.querySelector('#search [name=id]').focus()")
        await tab.press(wanted, Keys.ENTER)
        await tab.until(OPENED)
        assert await tab.js(IDS) == [wanted]
        opened_one = await tab.text("#decisions details[open]")
        assert "Candidates" in opened_one
        assert wanted in opened_one
        address = await tab.js(HASH)
        assert address == f"#id={wanted}"
        await tab.open("about:blank")
        await tab.open(admin.url + address)
        await tab.until(OPENED)
        assert await tab.js(IDS) == [wanted]
        assert admin.queries[FOUND][-1]["id"] == wanted
        links = await tab.js("return [...document.querySelectorAll('.opened .links a')].map((each) => each.hash)")
        assert links[0] == address
        assert links[1].startswith("#session=s-")


async def test_an_unknown_id_is_said_to_be_unknown(tab: Tab) -> None:
    """No request, and since when requests are kept."""
    async with opened(tab, at="#id=nobody-sent-this"):
        await tab.says("#decisions", "No matching requests")
        await tab.says("#found", "Requests are available since")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", MODELS[1]),
        ("tenant", "bank"),
        ("reason", "diverged"),
        ("status", "5xx"),
        ("replica", "http://10.0.0.2:8000"),
    ],
)
async def test_filters_narrow_the_list(tab: Tab, name: str, value: str) -> None:
    """Each filter is asked of the router, stands in the address, and shows only requests that fit; clearing it shows
    all again."""
    began_s = time.time()  # the router's clock stands, so that no request is dropped between the page and this test
    async with opened(tab, clock=lambda: began_s) as admin:
        await tab.js(CHOOSE, name, value)
        await tab.says("#found", "match")
        assert admin.queries[FOUND][-1] == {name: value, "limit": "20"}
        fitting = [row["id"] for row in series_page.decisions(began_s, {name: value})["decisions"]]
        assert fitting
        assert await tab.js(IDS) == fitting
        await tab.js("document.querySelector('#clear').click()")
        await tab.says("#found", "The latest requests")
        assert await tab.js(HASH) == ""


async def test_tables_lead_to_their_requests(tab: Tab) -> None:
    """A model, a replica and a tenant in their tables are buttons that narrow the list of requests to theirs."""
    async with opened(tab) as admin:
        for table, name, value in (("models", "model", MODELS[0]), ("replicas", "replica", "http://10.0.0.4:8000"),
                                   ("groups", "tenant", "acme")):  # fmt: skip
            await tab.js("document.querySelector(`#${arguments[0]} button.link`).click()", table)
            await tab.says("#found", "match")
            assert admin.queries[FOUND][-1][name] == value
            await tab.js("document.querySelector('#clear').click()")
            await tab.says("#found", "The latest requests")


async def test_older_ones_come_in_pages(tab: Tab) -> None:
    """Older requests are added below without a gap and without a repetition, the list then stands still; the newest
    are a button away."""
    async with opened(tab) as admin:
        await tab.js(CHOOSE, "status", "200")
        await tab.says("#found", "The last 20")
        await tab.js("document.querySelector('#older').click()")
        await tab.until("return document.querySelectorAll('#decisions > details').length === 40")
        ids = await tab.js(IDS)
        numbers = [int(each.removeprefix("req-")) for each in ids]
        assert numbers == sorted(set(numbers), reverse=True)
        asked = admin.asked
        while admin.asked < asked + 2:
            await tab.js("return 0")
        assert await tab.js(IDS) == ids
        await tab.js("document.querySelector('#newest').click()")
        await tab.until("return document.querySelectorAll('#decisions > details').length === 20")


async def test_a_wrong_address_breaks_nothing(tab: Tab) -> None:
    """A filter that the router does not take is told in its words, where the requests would be; times and ranges that
    are none are as if they were not given."""
    async with opened(tab, at="#status=teapot"):
        await tab.says("#found", "'status' must be a status, or 4xx, 5xx")
        assert "%" in await tab.text("#tile-hit .value")
    async with opened(tab, at="#from=99&to=abc&range=never&nonsense=1"):
        assert "10 min" in await tab.text("#tile-hit")
        assert await tab.complaints() == []


async def test_a_router_without_history(tab: Tab) -> None:
    """Where the router keeps no series and cannot search, the page has its ten minutes, says what it cannot tell, and
    asks for nothing that is not there."""

    def plain(now_s: float) -> Any:
        page = {**observatory(now_s), "pages": ["/admin/decisions", "/metrics"]}
        return {name: value for name, value in page.items() if name != "models"}

    async with opened(tab, plain) as admin:
        assert "has no time series" in await tab.text("#tile-output")
        assert "has no time series" in await tab.text("#tile-errors")
        assert "187 ms" in await tab.text("#tile-ttft")
        assert await tab.js("return document.querySelector('#toolbar .choice').hidden")
        assert "Runbook" not in await tab.text("#links")
        assert "/admin/series" not in admin.queries
        words = await tab.text("#page")
        assert not [word for word in ("NaN", "undefined", "Infinity") if word in words]
        assert await tab.complaints() == []
        await tab.until(LIVE)
