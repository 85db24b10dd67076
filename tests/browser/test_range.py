"""The dashboard's charts over time, in a real browser: how far back they reach, zoom, pause, and export."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from tests.browser.admin import LIVE, Admin, opened
from tests.browser.tab import Tab
from tests.support.observatory_page import observatory
from tests.support.series_page import DOWN_S

SERIES = "/admin/series"
CHARTS = ("rate", "ttft", "traffic", "load", "reasons")
CLICK = "[...document.querySelectorAll('button')].find((each) => each.textContent === arguments[0]).click()"
NAMED = 'document.querySelector(`[aria-label="${arguments[0]}"]`).click()'
HASH = "return location.hash"
SHOWN = "return document.querySelector('#stretch').textContent"
ROWS = """
    const rows = [...document.querySelectorAll('#rate tbody tr')].map((each) => each.innerText);
    return rows.length > 50 && rows"""
PAINTED = """
    const canvas = document.querySelector(`#${arguments[0]} canvas`), {width, height} = canvas;
    const {data} = canvas.getContext('2d').getImageData(0, 0, width, height);
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 250) colours.add(data.slice(at, at + 3).join());
    return [...colours]"""


async def dragged(tab: Tab, chart: str, first: float, last: float) -> None:
    """The pointer, pressed, goes from one part of a chart's width to another."""
    over = tab.driver.find_element(By.CSS_SELECTOR, f"#{chart} .u-over")
    await tab.js("arguments[0].scrollIntoView({block: 'center'})", over)
    half = over.size["width"] / 2
    at, to = int(half * (2 * first - 1)), int(half * (2 * last - 1))
    moves = ActionChains(tab.driver, duration=20).move_to_element_with_offset(over, at, 0).click_and_hold()
    await tab.call(lambda: moves.move_by_offset(to - at, 4).release().perform())


def asked_for(admin: Admin, span_s: float) -> bool:
    """Whether the last stretch that was asked for, other than the last minutes, is so long."""
    wanted = [query for query in admin.queries[SERIES] if "from_s" in query][-2:]
    return any(abs(float(query["to_s"]) - float(query["from_s"]) - span_s) < 5 for query in wanted)


async def test_ranges_reach_as_far_as_is_kept(tab: Tab) -> None:
    """Each range asks for its stretch of time, and for no more than is kept; the range is in the address, and somebody
    who opens that address sees the same. Figures above the charts say what time they are of."""
    async with opened(tab) as admin:
        for range_, hours in (("1 h", 1.0), ("6 h", 20_000 / 3_600), ("All", 20_000 / 3_600)):
            await tab.js(CLICK, range_)
            await tab.until("return document.querySelector('#tile-hit dt').textContent.includes(arguments[0])",
                            {"All": "all data"}.get(range_, range_))  # fmt: skip
            while not asked_for(admin, 3_600 * hours):
                await tab.js("return 0")
        assert "older data is not kept" not in await tab.js(SHOWN)
        await tab.js(CLICK, "24 h")
        await tab.says("#stretch", "older data is not kept")
        assert await tab.js(HASH) == "#range=24h"
    async with opened(tab, at="#range=6h"):
        assert "6 h" in await tab.text("#tile-hit")
        assert await tab.js("return document.querySelector('.choice [aria-pressed=true]').textContent") == "6 h"
        await tab.js("document.querySelector('#attention a').click()")
        await tab.until("return location.hash === '#range=6h' && scrollY > 500")


async def test_dragging_zooms_all_charts(tab: Tab) -> None:
    """What is dragged over on one chart is what all of them show, the address has it, figures and requests are of that
    time; a double click, or a button, goes back to now."""
    async with opened(tab) as admin:
        await dragged(tab, "ttft", 0.25, 0.75)
        await tab.until("return location.hash.includes('from=')")
        labels = """
            const label = (id) => document.querySelector(`#${id} .plot`).ariaLabel;
            return arguments[0].map((id) => label(id).match(/[0-9:]{8} to [0-9:]{8}/)[0])"""
        assert len(set(await tab.js(labels, CHARTS))) == 1
        assert "zoomed" in await tab.text("#tile-hit")
        zoomed = dict(part.split("=") for part in (await tab.js(HASH)).lstrip("#").split("&"))
        assert 290 <= int(zoomed["to"]) - int(zoomed["from"]) <= 310
        await tab.says("#found", "All")
        assert {key: admin.queries["/admin/decisions"][-1][f"{key}_s"] for key in zoomed} == zoomed
        over = tab.driver.find_element(By.CSS_SELECTOR, "#rate .u-over")
        await tab.js("arguments[0].scrollIntoView({block: 'center'})", over)
        await tab.call(lambda: ActionChains(tab.driver).double_click(over).perform())
        await tab.until("return location.hash === ''")
        assert await tab.complaints() == []


async def test_moving_without_a_mouse(tab: Tab) -> None:
    """Buttons go earlier and later, closer and back out, and never past now."""
    async with opened(tab):
        spans = []
        for name in ("Zoom in", "Zoom in", "Earlier", "Zoom out", "Later", "Later", "Later"):
            await tab.js(NAMED, name)
            found = dict(part.split("=") for part in (await tab.js(HASH)).lstrip("#").split("&"))
            spans.append((int(found["from"]), int(found["to"])))
        lengths = [last - first for first, last in spans]
        assert lengths[0] == pytest.approx(300, abs=2)
        assert lengths[1] == pytest.approx(150, abs=3)
        assert spans[2][0] == pytest.approx(spans[1][0] - 75, abs=3)
        assert lengths[3] == pytest.approx(300, abs=6)
        now_s = await tab.js("return Date.now() / 1000")
        assert spans[-1][1] <= now_s + 1
        await tab.js(CLICK, "Back to now")
        assert await tab.js(HASH) == ""


async def test_nobody_counted_is_a_gap(tab: Tab) -> None:
    """Where the router was down there is no line, no bar and no row, not a zero."""
    async with opened(tab, at="#range=6h"):
        await tab.says("#stretch", "older data is not kept")
        await tab.js("document.querySelector('#rate .figures').open = true")
        rows = await tab.until(ROWS)
        assert not [row for row in rows if "\u2013" in row]
        began_s = [60 * int(row[:2]) * 60 + 60 * int(row[3:5]) for row in rows]
        apart_s = [(newer - older) % 86_400 for newer, older in pairwise(began_s)]
        usual_s = min(apart_s)
        (gap_s,) = [each for each in apart_s if each != usual_s]
        assert abs(gap_s - (DOWN_S[0] - DOWN_S[1])) <= 2 * usual_s


async def test_charts_are_in_the_page_s_colours(tab: Tab) -> None:
    """Each chart is painted, in colours that follow the theme at once."""
    async with opened(tab):
        for chart in CHARTS:
            light = await tab.js(PAINTED, chart)
            assert len(light) > 3, chart
        await tab.js("document.querySelector('#theme').click(); document.querySelector('#theme').click()")
        assert await tab.text("#theme") == "Theme: dark"
        assert "11,98,184" in light or "203,78,23" in light
        await tab.until(f"const dark = (() => {{ {PAINTED} }})(); return dark.includes('240,120,60')", "reasons")


async def test_pause(tab: Tab) -> None:
    """A paused page asks for nothing until it goes on, and says of what time its figures are."""
    async with opened(tab) as admin:
        await tab.js("document.querySelector('#pause').click()")
        await tab.says("#status", "Paused")
        await tab.says("#age", "data of")
        asked = admin.asked
        async with Admin() as other:  # as long as a page takes to ask four times
            await tab.call(lambda: tab.driver.switch_to.new_window("window"))
            second = tab.driver.current_window_handle
            try:
                await tab.open(other.url)
                while other.asked < 4:
                    await tab.js("return 0")
            finally:
                await tab.call(tab.driver.close)
                tab.driver.switch_to.window(next(each for each in tab.driver.window_handles if each != second))
        assert admin.asked <= asked + 1, "one may have been under way"
        await tab.js("document.querySelector('#pause').click()")
        await tab.until(LIVE)


def saved(folder: Path) -> dict[str, str]:
    """What the browser has saved, by what it is of."""
    found = (each for each in folder.glob("warmroute-*") if each.suffix in (".csv", ".json"))
    return {each.name.split("-")[1]: each.read_text(encoding="utf-8") for each in found}


@pytest.mark.promise("A file exported from the dashboard runs nothing in a spreadsheet.", "records")
async def test_series_and_requests_can_be_taken_away(tab: Tab, tmp_path: Path) -> None:
    """Charts and requests as CSV, all as JSON: what is shown is in the files, and a client's word that a spreadsheet
    would take for a formula is marked as text."""

    def formula(now_s: float) -> Any:
        page = observatory(now_s)
        page["decisions"][0]["tenant"] = '=cmd|"/c calc"!A1'
        return page

    allowed = {"behavior": "allow", "downloadPath": str(tmp_path)}
    async with opened(tab, formula):
        await tab.call(lambda: tab.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed))
        for number, name in enumerate(("Charts as CSV", "Requests as CSV", "All as JSON"), 1):
            await tab.js(CLICK, name)
            while len(saved(tmp_path)) < number:
                await tab.js("return 0")
        files = saved(tmp_path)
        series, requests = ([*csv.DictReader(files[what].splitlines())] for what in ("series", "requests"))
        everything = json.loads(files["page"])
        assert len(series) == 120
        assert int(series[-1]["at_s"]) == int(series[0]["at_s"]) + 119 * 5
        assert {"requests", "errors_5xx", "ttft_p99_s", "verified_tokens", "missed_diverged"} <= set(series[0])
        assert len(requests) == 20
        assert requests[0]["tenant"] == '\'=cmd|"/c calc"!A1'
        assert len(everything["series"]["points"]) == 120
        assert everything["observatory"]["version"] == "0.8.0"
        assert await tab.complaints() == []


async def test_models_and_groups_are_of_the_range(tab: Tab) -> None:
    """Requests of models and groups are those of the time that the charts show; a model without requests then or now is
    left out. A router without series shows those since its start, and says so."""
    figures = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((row) => row.innerText)"
    async with opened(tab):
        short = [await tab.js(figures, table) for table in ("models", "groups")]
        assert "In the time range of the charts" in await tab.text("#models-note")
        await tab.js(CLICK, "1 h")
        await tab.until("return document.querySelector('#tile-hit dt').textContent.includes('1 h')")
        await tab.until(f"return (() => {{ {figures} }})().join() !== arguments[1]", "models", ",".join(short[0]))
        long = [await tab.js(figures, table) for table in ("models", "groups")]
        assert [len(rows) for rows in long] == [len(rows) for rows in short]
        assert all(a != b for rows in zip(short, long, strict=True) for a, b in zip(*rows, strict=True))

    def gone(now_s: float) -> Any:
        page = observatory(now_s)
        old = {**dict.fromkeys(page["models"][0], 0), "model": "old"}
        page["models"].append(old)
        return page

    async with opened(tab, gone):
        assert "old" not in await tab.text("#models")
    async with opened(tab, lambda now_s: gone(now_s) | {"pages": []}):
        assert "old" in await tab.text("#models")
        assert "Since the router started" in await tab.text("#groups-note")
