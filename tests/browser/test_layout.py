"""Every state of the page, measured in the browser: no text overlaps another, and none is cut without a way to read
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.admin import opened
from tests.browser.tab import Tab
from tests.support.observatory_page import empty, observatory

MEASURE = """
    const texts = [], cut = [];
    const seen = (each) => each.checkVisibility({opacityProperty: true, visibilityProperty: true});
    const clip = (each) => {  // the part of the window in which an element may be seen
      let box = {left: -1e9, top: -1e9, right: 1e9, bottom: 1e9};
      for (let up = each; up; up = up.parentElement) {
        const style = getComputedStyle(up);
        if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
        const at = up.getBoundingClientRect();
        box = {left: Math.max(box.left, at.left), top: Math.max(box.top, at.top),
               right: Math.min(box.right, at.right), bottom: Math.min(box.bottom, at.bottom)};
      }
      return box;
    };
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
      const parent = node.parentElement;
      if (!node.data.trim() || parent.closest('script, style, option, svg') || !seen(parent)) continue;
      const range = document.createRange(), within = clip(parent);
      range.selectNodeContents(node);
      for (const at of range.getClientRects()) {
        const box = {left: Math.max(at.left, within.left), right: Math.min(at.right, within.right),
                     top: Math.max(at.top, within.top), bottom: Math.min(at.bottom, within.bottom)};
        if (box.right - box.left <= 1 || box.bottom - box.top <= 1) continue;
        texts.push({box, node, words: node.data.trim().slice(0, 40)});
      }
    }
    for (const each of document.querySelectorAll('body *')) {
      if (!seen(each) || each.closest('svg') || each.clientWidth < 2) continue;
      if (!['hidden', 'clip'].includes(getComputedStyle(each).overflowX)) continue;
      const shown = each.closest('[title], button, summary, a') || each.querySelector('[title]');
      const words = each.innerText.trim().slice(0, 40);
      if (each.scrollWidth > each.clientWidth + 1 && words && !shown) cut.push(words);
    }
    const overlaps = [];
    texts.sort((one, two) => one.box.top - two.box.top);
    for (let n = 0; n < texts.length; n++) {
      const one = texts[n].box;
      for (let m = n + 1; m < texts.length && texts[m].box.top < one.bottom - 2; m++) {
        const two = texts[m].box;
        const width = Math.min(one.right, two.right) - Math.max(one.left, two.left);
        const height = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
        if (texts[n].node !== texts[m].node && width > 1 && height > 3) overlaps.push([texts[n].words, texts[m].words]);
      }
    }
    return {overlaps, cut, texts: texts.length}"""
"""Pairs of overlapping texts, and texts that an element cuts off without showing them in another way."""


def broken(now_s: float) -> Any:
    """One replica of each kind of trouble, with the longest reasons."""
    page = observatory(now_s)
    reasons = (
        {"slow": "prefill takes 5.8 times as long as on its peers", "request_share": 0.01},
        {"idle": "it got 0 requests in the last minutes"},
        {"grade_falls": 5},
        {"ready": True, "state": "open", "why": "3 failures in a row; for another 2.0 s"},
    )
    for row, more in zip(page["replicas"], reasons, strict=False):
        row |= more
    return page


def flood(now_s: float) -> Any:
    """Names as long as clients can make them."""
    page = observatory(now_s, label="A" * 120)
    page["replicas"] = [row | {"id": "http://a-replica-with-a-very-long-name-" + str(n) + ".example:8000"}
                        for n, row in enumerate(page["replicas"] * 6)]  # fmt: skip
    return page


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
@pytest.mark.parametrize("page", [observatory, empty, broken, flood])
async def test_no_text_overlaps_or_is_cut(
    tab: Tab, pictures: Path, page: Callable[[float], Any], width: int, height: int
) -> None:
    """Live, empty, with broken replicas, and with long names: at a desk and on a phone."""
    await tab.look(width, height, "light")
    async with opened(tab, page):
        found = await tab.js(MEASURE)
        await tab.screenshot(pictures / f"layout-{page.__name__}-{width}.png", width, "light")
    assert found["texts"] > 20
    assert found["overlaps"] == []
    assert found["cut"] == []


async def test_what_the_measure_finds(tab: Tab) -> None:
    """A badge that is wider than its column lies over the text beside it."""
    await tab.look(1440, 900, "light")
    async with opened(tab):
        await tab.js("document.querySelector('.attention li').style.gridTemplateColumns = '20px 1fr auto'")
        assert "critical" in (await tab.js(MEASURE))["overlaps"][0]
