"""A tab of Debian's chromium, driven by Selenium: the router is on the test's event loop, so calls wait in a thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains

T = TypeVar("T")
CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
WAIT_S = 120.0  # for what must come: a limit, and nothing that is measured
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--host-resolver-rules=MAP evil.example 127.0.0.1 , MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


def start(profile: Path) -> webdriver.Chrome:
    """A browser of its own, with its own profile, that can reach nothing but this machine."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={mkdtemp(dir=profile)}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


class Tab:
    """What tests do with a page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    async def call(self, work: Callable[[], T]) -> T:
        """In a thread, so that the router can answer meanwhile."""
        return await asyncio.to_thread(work)

    async def look(self, width: int, height: int, theme: str) -> None:
        """The size of the window and what the system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        await self.call(lambda: self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size))
        await self.call(lambda: self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media))

    async def open(self, url: str) -> None:
        """As typed; what was logged before is forgotten."""
        for kind in ("browser", "performance"):
            await self.call(lambda kind=kind: self.driver.get_log(kind))  # type: ignore[misc]
        await self.call(lambda: self.driver.get(url))

    async def js(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns."""
        return await self.call(lambda: self.driver.execute_script(script, *arguments))

    async def text(self, selector: str) -> str:
        """Of the first element, as it is shown."""
        return str(await self.js("return document.querySelector(arguments[0]).innerText", selector))

    async def until(self, script: str, *arguments: Any) -> Any:
        """Wait until it returns something true, and return that."""
        deadline = time.monotonic() + WAIT_S
        while not (found := await self.js(script, *arguments)):
            assert time.monotonic() < deadline, f"never: {script} {arguments}"
            await asyncio.sleep(0.05)
        return found

    async def says(self, selector: str, words: str) -> None:
        """Wait until the element says that."""
        await self.until(
            "return document.querySelector(arguments[0]).innerText.includes(arguments[1])", selector, words
        )

    async def press(self, *keys: str) -> None:
        """One key after the other, on whatever has the focus."""
        await self.call(lambda: ActionChains(self.driver).send_keys(*keys).perform())

    async def complaints(self) -> list[str]:
        """What the console says, violations of the Content-Security-Policy included."""
        return [
            f"{entry['level']} {entry['message']}" for entry in await self.call(lambda: self.driver.get_log("browser"))
        ]

    async def asked(self) -> list[str]:
        """The URL of every request since the page was opened."""
        log = await self.call(lambda: self.driver.get_log("performance"))
        messages = [json.loads(entry["message"])["message"] for entry in log]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    async def screenshot(self, file: Path, width: int, theme: str) -> None:
        """All of the page, however long it is."""
        height = await self.js("return document.documentElement.scrollHeight")
        await self.look(width, height, theme)
        await self.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert await self.call(lambda: self.driver.save_screenshot(str(file)))

    async def axe(self, source: str) -> list[dict[str, Any]]:
        """What axe finds that is serious or worse: which rule, and where."""
        await self.js(source)
        found = await self.call(
            lambda: self.driver.execute_async_script("axe.run(document).then(arguments[arguments.length - 1])")
        )
        assert "color-contrast" in {each["id"] for each in found["passes"]}, "axe did not look"
        return [
            {"rule": each["id"], "help": each["help"], "where": [node["html"] for node in each["nodes"]][:5]}
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
