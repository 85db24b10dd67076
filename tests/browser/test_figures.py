"""Figures of the dashboard, in a real browser: what each is of, and that none says more than is known."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.admin import opened
from tests.browser.tab import Tab
from tests.support.observatory_page import STEP_S, observatory

VERIFIED = ("verified_tokens", "verified_hit_tokens", "verified_predicted_tokens")
LEGEND = "return [...document.querySelectorAll('#rate .legend li')].map((each) => each.textContent)"
POINT = """
    const found = [...document.querySelectorAll('.map > g')].find((each) => each.dataset.id.startsWith('others'));
    found.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"""


def verifying(now_s: float, share: float) -> Any:
    """The page of a router whose engines told of that share of prompt tokens: a tenth fewer hits than predicted."""
    page = observatory(now_s)
    for point in page["timeline"]["points"]:
        told = (share * point["prompt_tokens"], share * point["hit_tokens"] * 0.9, share * point["hit_tokens"])
        point.update(zip(VERIFIED, told, strict=True))
    return {**page, "pages": []}


@pytest.mark.parametrize(
    ("share", "says", "weak"),
    [
        (0.5, "engines verified 50 %: 7.", False),
        (0.1, "engines verified 10 %: 7.", True),
        (0.0, "no engine reported cached tokens", True),
    ],
)
async def test_only_what_engines_told_is_called_verified(tab: Tab, share: float, says: str, weak: bool) -> None:
    """One hit rate, whoever told; the line "verified by engines" and how far predictions were off come from answers
    that told alone, are grey below a fifth of all tokens, and are not there where none told."""
    async with opened(tab, lambda now_s: verifying(now_s, share)):
        assert says in await tab.text("#tile-hit")
        assert ("verified by engines" in await tab.js(LEGEND)) is (share > 0)
        assert (await tab.js("return document.querySelector('#tile-hit .weak') !== null")) is weak
        assert await tab.js("return document.querySelector('#rate').dataset.verified") == ("weak" if weak else "well")
        assert "actual" not in await tab.text("#page")


async def test_rates_of_a_router_that_is_seconds_old(tab: Tab) -> None:
    """Requests per second are over the time that the router was there, not over a minute of which it saw half."""

    def young(now_s: float) -> Any:
        page = {**observatory(now_s), "uptime_s": 20.0, "pages": []}
        for point in page["timeline"]["points"]:
            point["requests"] = 40 if point["at_s"] > now_s - 20 - STEP_S else 0
        return page

    async with opened(tab, young):
        tile = await tab.text("#tile-requests")
        assert "over 20 s" in tile
        assert tile.split("\n")[1] == "10", "five steps of 40 requests"


async def test_failures_come_first(tab: Tab) -> None:
    """Requests that failed or were turned away in the last minute are among the first lines, with how many."""
    async with opened(tab):
        attention = await tab.text("#attention")
        assert "of the last minute's requests failed" in attention
        assert "were rejected" in attention
        assert attention.index("failed") < attention.index("can be saved")
        assert "of 2," in await tab.text("#tile-errors")


@pytest.mark.parametrize(
    ("address", "shown"), [("https://grafana.example/d/warmroute", True), ("javascript:alert(1)", False), ("", False)]
)
async def test_links_to_other_pages(tab: Tab, address: str, shown: bool) -> None:
    """Metrics and the runbook where the router has them, Grafana where the settings name it by a web address."""

    def linked(now_s: float) -> Any:
        return {**observatory(now_s), "links": {"grafana": address}}

    async with opened(tab, linked) as admin:
        links = await tab.js("return [...document.querySelectorAll('#links a')].map((each) => [each.text, each.href])")
        host = admin.url.removesuffix("/dashboard")
        assert links[:2] == [["Metrics", f"{host}/metrics"], ["Runbook", f"{host}/runbook"]]
        assert links[2:] == ([["Grafana", address]] if shown else [])


async def test_slivers_are_folded(tab: Tab) -> None:
    """On a phone, prefixes too narrow to be told apart are one branch, "others"; the table has each of them."""
    await tab.look(390, 844, "light")

    def shuffled(now_s: float) -> Any:
        page = observatory(now_s)
        for row in page["map"]:
            if row["label"] == "":
                row["served_tokens"] *= 4
        return page

    async with opened(tab, shuffled):
        drawn = await tab.js("return document.querySelectorAll('.map > g').length")
        await tab.js("document.querySelector('#map .figures').open = true")
        listed = await tab.js("return document.querySelectorAll('#map tbody tr').length")
        assert drawn < listed
        await tab.js(POINT)
        assert "too narrow to draw" in await tab.text("#map")


async def test_tables_hint_that_they_scroll(tab: Tab) -> None:
    """On a phone a table that is cut at the edge says that there is more, until it has been scrolled to its end."""
    await tab.look(390, 844, "light")
    table = "document.querySelector('#groups').closest('.scroll')"
    async with opened(tab):
        assert await tab.js(f"return {table}.classList.contains('more') && {table}.nextSibling.checkVisibility()")
        await tab.js(f"{table}.scrollLeft = 9999")
        await tab.until(f"return !{table}.classList.contains('more') && !{table}.nextSibling.checkVisibility()")


STAGES = """
    return [...document.querySelectorAll('#funnel .stage')].map((each) => [each.dataset.stage,
        [...each.querySelectorAll('.strip span')].map((part) => [part.className, parseFloat(part.style.width)])])"""


async def test_the_funnel_drops_from_asked_to_hit(tab: Tab) -> None:
    """Each stage's bar is as long as what the one above has left, ends in what is lost there, and the last one is the
    hits by kind; words say each place's share, and why not where it was held."""
    async with opened(tab):
        stages = await tab.js(STAGES)
        assert [stage for stage, _ in stages] == ["asked", "seen", "unchanged", "kept", "reached", "hit"]
        left = 100.0
        for _, parts in stages[:-1]:
            assert sum(width for _, width in parts) == pytest.approx(left, abs=0.1)
            left = parts[0][1]
        hits = [width for kind, width in stages[-1][1] if kind in {"fill-tier", "fill-replay", "fill-gpu_hit"}]
        assert len(hits) == 3
        rate = (await tab.text("#tile-hit")).split("\n")[1]
        assert float(rate.removesuffix(" %")) == pytest.approx(sum(hits), abs=0.1)
        words = await tab.text("#funnel")
        assert "cached on other replica" in words
        assert "not placed there: queue 100 %" in words
        for place in ("rewritten", "evicted here", "evicted by others", "never seen", "tier", "replay", "gpu hit"):
            assert place in words, place


async def test_a_router_that_tells_no_places_has_no_funnel(tab: Tab) -> None:
    """Of a router without series, or of an earlier release, nothing is drawn, and nothing breaks."""

    def older(now_s: float) -> Any:
        page = {**observatory(now_s), "pages": []}
        del page["stages"]
        return page

    async with opened(tab, older):
        assert await tab.js("return document.querySelector('#funnel-card').hidden")
        assert await tab.complaints() == []
