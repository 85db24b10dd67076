"""The dashboard in a real browser, in front of made-up data: what it says, who can use it, and what it lets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.admin import LIVE, OPENED, Admin, opened
from tests.browser.tab import Tab
from tests.support.observatory_page import HOSTILE, empty, observatory, split

INLINE = """
    const script = document.createElement('script');
    script.textContent = 'window.hurt = 1';
    document.body.append(script)"""
OPEN_ONES = """
    const [open] = document.querySelectorAll('#decisions details[open]');
    return [open.dataset.id, open === document.activeElement.parentElement]"""
HEIGHTS = """
    const parts = [...document.querySelectorAll('section, .tile, tr')];
    return parts.map((each) => Math.round(each.getBoundingClientRect().height))"""
FILL = """
    document.querySelector('#token').value = arguments[0];
    document.querySelector('#token-form button').click()"""
KEPT = """
    const local = JSON.stringify(localStorage);
    return [sessionStorage.length, local.includes('the-admin'), document.cookie, location.href]"""
SIZES = [(1440, 900), (390, 844)]


async def test_loads_without_a_word(tab: Tab) -> None:
    """Nothing is on the console, violations of the policy included, and no request goes anywhere else; the policy
    allows no more than the page needs."""
    async with opened(tab) as admin:
        host = admin.url.removesuffix("/dashboard")
        asked = await tab.asked()
        assert f"{host}/dashboard/app.js" in asked
        assert f"{host}/admin/observatory" in asked
        assert not [url for url in asked if not url.startswith((host, "data:"))]
        assert await tab.complaints() == []
        await tab.js(INLINE)
        assert await tab.js("return window.hurt === undefined")
        assert "Content Security Policy" in "".join(await tab.complaints())


async def test_says_what_is_wrong_since_when_and_what_to_do(tab: Tab) -> None:
    """A fleet with a lost replica and a template that began to hold the time: the first lines of the page say so."""
    async with opened(tab):
        attention = await tab.text("#attention")
        for words in ("1 of 4 replicas receive no requests: prod/vllm-3 (connection refused)", "it fell at",
                      "The 90th percentile",
                      "8.1M tokens an hour can be saved: message 0 holds a time of day"):  # fmt: skip
            assert words in attention
        advice = await tab.text("#advice")
        assert advice.index("8.1M tokens/h") < advice.index("1.9M tokens/h") < advice.index("240K tokens/h")
        reasons = await tab.text("#reasons-table")
        assert reasons.index("diverged") < reasons.index("evicted") < reasons.index("new")


async def test_what_was_mended_needs_no_attention(tab: Tab) -> None:
    """Advice that no request has borne out for minutes stays in its list, with how long ago it was, and no longer
    stands above everything."""

    def mended(now_s: float) -> Any:
        page = observatory(now_s)
        first, second, third = page["advice"]
        first |= {"last_at_s": now_s - 300, "recent": False, "tenants": ["bank", "acme"]}
        second |= {"last_at_s": now_s - 3}
        return page | {"advice": [second, third, first]}

    async with opened(tab, mended):
        assert "1.9M tokens an hour can be saved" in await tab.text("#attention")
        advice = await tab.text("#advice")
        assert advice.index("1.9M tokens/h") < advice.index("8.1M tokens/h") < advice.index("last 5 min ago")
        assert "tenants bank, acme" in advice
        past = await tab.js(
            "return [...document.querySelectorAll('#advice li')].map((row) => row.classList.contains('past'))"
        )
        assert past == [False, False, True]


async def test_the_page_is_of_one_router(tab: Tab) -> None:
    """Its header names the router whose requests it shows, and its peers; a router that shares nothing says what that
    costs."""
    why = "other senders account for 40% of the replicas' prompt tokens, and no router reports them"

    def shown(peers: list[str], unshared: str) -> Any:
        return lambda now_s: observatory(now_s) | {"router": {"name": "a:1", "peers": peers, "unshared": unshared}}

    async with opened(tab, shown(["b:1", "c:1"], "")):
        assert "requests of router a:1 only, beside b:1, c:1" in await tab.text("#about")
        assert "share no state" not in await tab.text("#attention")
    async with opened(tab, shown([], why)):
        assert "requests of router a:1 only" in await tab.text("#about")
        assert why in await tab.text("#attention")


async def test_a_hundred_replicas(tab: Tab) -> None:
    """All of them are in the table, first those that take no requests, and it scrolls; the map says that colours are
    shared instead of naming them all."""

    def many(now_s: float) -> Any:
        page = observatory(now_s)
        row = page["replicas"][0]
        page["replicas"] = [{**row, "id": f"http://10.1.0.{n}:8000", "name": ""} for n in range(100)]
        page["replicas"][77].update(ready=False, why="connection refused")
        return page

    async with opened(tab, many):
        names = await tab.js("return [...document.querySelectorAll('#replicas tbody th')].map((th) => th.textContent)")
        assert len(names) == 100
        assert names[:2] == ["10.1.0.77:8000", "10.1.0.0:8000"]
        assert await tab.js("return document.querySelector('#replicas').closest('.scroll').clientHeight < 600")
        assert "100 replicas share 8 colours" in await tab.text("#map")
        assert await tab.js("return document.querySelectorAll('#map .legend li').length") == 0


async def test_pairs_of_a_fleet_that_splits(tab: Tab) -> None:
    """Where one replica prefills what another one decodes, the page says who takes which legs, and of each pair whether
    it takes requests, how many it got, and what failed; those that rest come first. Elsewhere it says nothing of
    that."""
    cells = """
        return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(({cells}) =>
            [...cells].map((cell) => cell.textContent))"""
    async with opened(tab):
        assert await tab.js("return document.querySelector('#split-card').hidden")
    async with opened(tab, lambda now_s: {**observatory(now_s), "split": split()}):
        assert await tab.js("return document.querySelector('#split-card').checkVisibility()")
        assert await tab.js(cells, "split") == [
            ["prod/vllm-0", "prefills", "nixl", "1", "1", "0"],
            ["prod/vllm-1", "prefills", "nixl, silent", "1", "0", "1"],
            ["prod/vllm-2", "decodes", "nixl", "1", "0", "1"],
            ["prod/vllm-3", "decodes", "nixl", "1", "1", "0"],
        ]
        assert await tab.js(cells, "pairs") == [
            ["prod/vllm-1", "prod/vllm-2", "cooldown 1 min", "12", "2", "5"],
            ["prod/vllm-0", "prod/vllm-3", "warming up", "0", "0", "0"],
            ["prod/vllm-0", "prod/vllm-2", "ready", "12.3K", "3", "1"],
            ["prod/vllm-1", "prod/vllm-3", "ready", "1,234", "0", "0"],
        ]
        assert await tab.js("return document.querySelector('#split-note').hidden")
        assert await tab.complaints() == []


async def test_of_many_pairs_the_page_says_how_many_more(tab: Tab) -> None:
    """A large fleet has thousands, of which it shows the first; and a fleet without any says what they need."""

    def many(now_s: float) -> Any:
        return {**observatory(now_s), "split": {**split(), "pairs_in_all": 4_096}}

    async with opened(tab, many):
        assert "4,092 more pairs are not shown" in await tab.text("#split-note")
    async with opened(tab, lambda now_s: {**observatory(now_s), "split": {**split(), "pairs": [], "pairs_in_all": 0}}):
        assert "No pairs" in await tab.text("#pairs")


async def test_the_axis_fits_what_there_is(tab: Tab) -> None:
    """A router that began three minutes ago shows three minutes, not seven empty ones beside them."""

    def young(now_s: float) -> Any:
        page = observatory(now_s)
        return {**page, "uptime_s": 180.0, "pages": []}

    reach = """
        const [from, to] = document.querySelector('#rate .plot').ariaLabel.match(/\\d\\d:\\d\\d:\\d\\d/g).slice(-2);
        const seconds = (clock) => clock.split(':').reduce((sum, part) => 60 * sum + Number(part), 0);
        return (seconds(to) - seconds(from) + 86400) % 86400"""
    async with opened(tab, young):
        assert 180 <= await tab.js(reach) <= 190
    async with opened(tab):
        # The step under way is not drawn, so the axis has its ten minutes when the whole series has arrived.
        await tab.until(f"return (() => {{{reach}}})() === 600")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_readable_everywhere(tab: Tab, axe: str, pictures: Path, width: int, height: int, theme: str) -> None:
    """Both sizes in both themes: nothing is wider than the window, axe finds nothing serious, with all that can be
    opened open; pictures to look at."""
    await tab.look(width, height, theme)
    async with opened(tab):
        await tab.screenshot(pictures / f"dashboard-{width}-{theme}.png", width, theme)
        await tab.look(width, height, theme)
        assert await tab.js("return document.documentElement.scrollWidth") == width
        await tab.js(
            "for (const each of document.querySelectorAll('.menu, .figures, .decisions details:first-child')) "
            "each.open = true"
        )
        await tab.until(OPENED)
        assert await tab.js("return document.documentElement.scrollWidth") == width
        assert await tab.axe(axe) == []
        await tab.screenshot(pictures / f"dashboard-{width}-{theme}-opened.png", width, theme)


async def test_theme_can_be_chosen(tab: Tab) -> None:
    """The button goes through system, light and dark; the choice outlives the page."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    async with opened(tab) as admin:
        seen = {await tab.text("#theme"): await tab.js(ground)}
        for _ in range(2):
            await tab.js("document.querySelector('#theme').click()")
            seen[await tab.text("#theme")] = await tab.js(ground)
        assert list(seen) == ["Theme: system", "Theme: light", "Theme: dark"]
        assert seen["Theme: light"] == seen["Theme: system"] != seen["Theme: dark"]
        await tab.open(admin.url)
        await tab.until(LIVE)
        assert await tab.js(ground) == seen["Theme: dark"]
        await tab.js("document.querySelector('#theme').click()")


async def test_keyboard_reaches_everything(tab: Tab) -> None:
    """Tab comes to every control, each with a visible outline, and to every part that scrolls. Enter opens a decision,
    which stays open, and keeps the focus, while new ones come; another control then shows those."""
    async with opened(tab) as admin:
        wanted = await tab.js(
            "window.seen = new Set(); return [...document.querySelectorAll('a, button, summary, .scroll')]"
            ".filter((each) => each.checkVisibility()).length"
        )
        mark = """
            const at = document.activeElement;
            if (at !== document.body) seen.add(at);
            return [seen.size, at.tagName, getComputedStyle(at).outlineStyle]"""
        count, last = 0, ""
        for _ in range(3 * wanted):
            await tab.press(Keys.TAB)
            count, tag, outline = await tab.js(mark)
            assert tag == "BODY" or outline == "solid"
            last = tag
            if count >= wanted:
                break
        assert count >= wanted, last
        await tab.js("document.querySelector('#decisions summary').focus()")
        focused = await tab.js("return document.activeElement.parentElement.dataset.id")
        asked = admin.asked
        await tab.press(Keys.ENTER)
        await tab.until(OPENED)
        assert "Candidates" in await tab.text("#decisions details[open]")
        await tab.until("return !document.querySelector('#newer').hidden")
        assert admin.asked > asked
        assert await tab.js(OPEN_ONES) == [focused, True]
        await tab.js("document.querySelector('#newer').focus()")
        await tab.press(Keys.ENTER)
        await tab.until(
            "return !document.querySelector('#decisions details[open]') && document.activeElement.tagName === 'SUMMARY'"
        )


async def test_nothing_jumps(tab: Tab) -> None:
    """A new answer changes figures in their places: elements stay the same ones, parts keep their heights."""
    async with opened(tab) as admin:
        await tab.js("window.first = [...document.querySelectorAll('.tile, #replicas tr, .map > g, path')]")
        before, asked = await tab.js(HEIGHTS), admin.asked
        await tab.until("return document.querySelector('#age').textContent === '0 s ago'")
        while admin.asked < asked + 2:
            await tab.js("return 0")
        assert await tab.js("return first.every((each) => each.isConnected)")
        assert await tab.js(HEIGHTS) == before


@pytest.mark.promise(
    "Text from clients runs nothing on the dashboard and moves no cursor in `warmroute top`.", "records"
)
async def test_clients_words_stay_words(tab: Tab) -> None:
    """A label that is markup is shown as it is written, wherever it comes from, and runs nothing."""

    def hostile(now_s: float) -> Any:
        page = observatory(now_s, label=HOSTILE)
        for row in page["groups"]:
            row["tenant"] = HOSTILE
        for row in page["decisions"]:
            row["model"] = row["error"] = row["step"] = HOSTILE
            row["difference"] and row["difference"].update(before=HOSTILE, path=HOSTILE)
        for row in page["replicas"]:
            row["why"] = HOSTILE
        page["advice"][0].update(text=HOSTILE, before=HOSTILE, path=HOSTILE, tenants=[HOSTILE])
        page["tenants"][0]["tenant"] = HOSTILE
        page["unserved_models"] = [{"model": HOSTILE, "why": HOSTILE}]
        return page

    async with opened(tab, hostile):
        await tab.js("for (const each of document.querySelectorAll('details')) each.open = true")
        await tab.until(OPENED)
        for part in ("#map table", "#advice", "#groups", "#tenants", "#decisions", "#replicas", "#attention"):
            assert HOSTILE in await tab.js("return document.querySelector(arguments[0]).textContent", part), part
        assert await tab.js(
            "return window.hurt === undefined && document.querySelectorAll('img, main script').length === 0"
        )
        assert await tab.complaints() == []


async def opens_metrics(tab: Tab) -> None:
    """A link cannot send a token: the page has the metrics with it, and opens them in a tab of their own."""
    driver, first = tab.driver, tab.driver.current_window_handle
    link = driver.find_element(By.CSS_SELECTOR, "#links a")
    await tab.call(lambda: ActionChains(driver).click(link).perform())
    while len(driver.window_handles) < 2:
        await tab.js("return 0")
    driver.switch_to.window(next(each for each in driver.window_handles if each != first))
    await tab.says("body", "warmroute_requests_total 4")
    await tab.call(driver.close)
    driver.switch_to.window(first)


@pytest.mark.promise("The dashboard's files are open, and its data requires the admin token.", "records")
async def test_token(tab: Tab) -> None:
    """A router with an admin token: the page asks for it, says so where it is wrong, and keeps it for this tab only."""
    async with Admin(token="the-admin-token-of-tests") as admin:
        await tab.open(admin.url)
        await tab.says("#notice", "This router requires the admin token")
        assert await tab.js("return document.activeElement.id") == "token"
        assert await tab.js("return document.querySelector('#page').hidden")
        await tab.js(FILL, "a-wrong-one-of-tests")
        await tab.says("#notice", "Wrong token")
        assert admin.asked == 0
        await tab.js("document.querySelector('#token').focus()")
        await tab.press("the-admin-token-of-tests", Keys.ENTER)
        await tab.until(LIVE)
        assert await tab.js("return document.querySelector('#notice').hidden")
        await tab.open(admin.url)
        await tab.until(LIVE)
        assert await tab.js(KEPT) == [1, False, "", admin.url]
        await opens_metrics(tab)
        await tab.js("document.querySelector('#forget').click()")
        await tab.says("#notice", "This router requires the admin token")
        assert await tab.js("return sessionStorage.length") == 0


async def test_a_router_that_is_gone_and_comes_back(tab: Tab) -> None:
    """The page says that nobody answers and how old its figures are, and goes on by itself when there is an answer."""
    async with opened(tab) as admin:
        await admin.__aexit__()
        await tab.says("#status", "The router does not answer")
        await tab.says("#age", "data of")
        assert "%" in await tab.text("#tile-hit .value"), "what is known stays"
        await admin.__aenter__()
        await tab.until(LIVE)


@pytest.mark.parametrize(
    ("status", "words"), [(404, "This router has no observatory"), (503, "The router answered 503")]
)
async def test_what_else_may_be_wrong(tab: Tab, status: int, words: str) -> None:
    """A page that cannot be had is named, not waited for."""
    async with Admin(status=status) as admin:
        await tab.open(admin.url)
        await tab.says("#notice", words)
        admin.status = 200
        await tab.until(LIVE)
        assert await tab.js("return document.querySelector('#notice').hidden")


async def test_another_name_of_this_machine(tab: Tab) -> None:
    """Under a name that any site may have the files are served, but no data: the page says what to do."""
    async with Admin() as admin:
        await tab.open(admin.url.replace("127.0.0.1", "evil.example"))
        await tab.says("#notice", "Open this page by address")
        assert admin.asked == 0


async def test_looks_only_while_looked_at(tab: Tab) -> None:
    """A tab behind another one asks for nothing; when it is shown again it asks at once."""
    async with opened(tab) as admin:
        driver, first = tab.driver, tab.driver.current_window_handle
        await tab.call(lambda: driver.switch_to.new_window("tab"))
        second = driver.current_window_handle
        try:
            async with Admin() as other:  # as long as a visible one has asked three times, at the same pace
                asked = admin.asked
                await tab.open(other.url)
                while other.asked < 4:
                    await tab.js("return 0")
                assert admin.asked <= asked + 1, "one may have been under way"
        finally:
            await tab.call(driver.close)
            driver.switch_to.window(first)
        assert second != first
        await tab.until(LIVE)


async def test_a_router_that_has_just_begun(tab: Tab, axe: str) -> None:
    """No requests, no replicas: every part says so, nothing is NaN, and nothing breaks."""
    async with opened(tab, empty):
        page = await tab.text("#page")
        assert "No replicas" in page
        assert "No requests yet" in page
        assert not [word for word in ("NaN", "undefined", "null", "Infinity") if word in page]
        assert await tab.axe(axe) == []
        assert await tab.complaints() == []
