"""The dashboard of a real router in front of simulated engines: what it shows is what was measured, as it happens."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from loadtest.common.processes import engines
from router.router_server import RouterServer
from tests.browser.tab import Tab
from tests.support.fakes import running

MODEL = "m"
SYSTEM = "You are an agent that works in small steps and says what it did. " * 12
LIVE = "return document.querySelector('#status').dataset.state === 'live'"
REASONS = """
    return Object.fromEntries([...document.querySelectorAll('#reasons-table tbody tr')].map(({cells}) =>
        [cells[0].children[1].textContent.replace(' ', '_'), Number(cells[3].textContent.replaceAll(',', ''))]))"""


async def converse(client: ClientSession, app: RouterServer, name: str, turns: int, *, replayed: bool = False) -> None:
    """A conversation that grows, on a system prompt that all of them share; `replayed`: its last turn twice."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name} wants {turn} done. " * 8})
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        for _ in range(2 if replayed and turn == turns - 1 else 1):
            async with client.post(f"{app.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
                answer = (await response.json())["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})


async def measured(client: ClientSession, app: RouterServer) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Tokens by reason, by kind of hit and by place, as `/metrics` has them."""
    async with client.get(f"{app.admin_url}/metrics") as response:
        text = await response.text()
    misses, hits, places = Counter[str](), Counter[str](), Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "warmroute_miss_tokens_total":
                misses[sample.labels["reason"]] += int(sample.value)
            if sample.name == "warmroute_hit_tokens_total":
                hits[sample.labels["kind"]] += int(sample.value)
            if sample.name == "warmroute_token_fate_total":
                places[sample.labels["fate"]] += int(sample.value)
    return misses, hits, places


async def shown(tab: Tab, app: RouterServer, client: ClientSession, requests: int) -> None:
    """The page comes to say what `/metrics` and `/admin/observatory` do."""
    await tab.says("#tile-requests", f"{requests} since start")
    misses, hits, places = await measured(client, app)
    async with client.get(f"{app.admin_url}/admin/observatory") as response:
        totals = (await response.json())["totals"]
    assert totals["requests"] == requests
    assert {reason: tokens for reason, tokens in totals["misses"].items() if tokens} == +misses
    assert (totals["genuine_tokens"], totals["replay_tokens"]) == (hits["genuine"], hits["replay"])
    assert totals["prompt_tokens"] == misses.total() + hits.total()
    assert await tab.js(REASONS) == +misses
    assert places.total() == misses.total() + hits.total()
    funnel = await tab.text("#funnel")
    for place, tokens in places.items():
        if tokens >= 0.0005 * places.total():
            words = f"{100 * tokens / places.total():.1f} %"
            assert re.search(rf"{place.replace('_', ' ')} \u2212?{re.escape(words)}", funnel), (place, words, funnel)
    rate = f"{100 * hits.total() / totals['prompt_tokens']:.1f} %"
    tile = await tab.text("#tile-hit")
    assert f"{rate} since start" in tile
    kinds = [f"{100 * hits[kind] / totals['prompt_tokens']:.1f} %" for kind in ("genuine", "replay")]
    assert re.findall(r"genuine (.+) · replay (.+)", tile) == [tuple(kinds)], (
        "all of it was within the last ten minutes"
    )


async def test_figures_agree_and_move(tab: Tab, client: ClientSession) -> None:
    """Hits, replays and reasons on the page are those of `/metrics` and of `/admin/observatory`, before and after
    further requests, and without loading it again; each request is listed with who could have taken it."""
    fleet = engines(
        replicas=2, host="127.0.0.1", model=MODEL, calibration="qwen3-32b-2xh100", kv_tokens=100_000, time_scale=50
    )
    async with fleet as urls, running(*urls) as app:
        await converse(client, app, "Ann", 3)
        await tab.open(f"{app.admin_url}/dashboard")
        await tab.until(LIVE)
        await tab.js("window.loaded = 'once'")
        await shown(tab, app, client, 3)
        await converse(client, app, "Bob", 2, replayed=True)
        await shown(tab, app, client, 6)
        assert await tab.js("return window.loaded") == "once"
        assert await tab.js("return document.querySelectorAll('#decisions > details').length") == 6
        assert await tab.js("return document.querySelectorAll('#replicas tbody tr').length") == 2
        await tab.js("document.querySelector('#decisions details').open = true")
        await tab.until("return document.querySelectorAll('#decisions table tbody tr').length === 2")
        assert await tab.complaints() == []
        await tab.call(lambda: tab.driver.get("about:blank"))
