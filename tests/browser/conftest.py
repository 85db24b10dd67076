from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser.tab import Tab, start

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One for all tests; it and its driver are ended."""
    driver = start(tmp_path_factory.mktemp("profile"))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
async def tab(browser: webdriver.Chrome) -> Tab:
    """A desktop's, in light, with nothing kept from an earlier test."""
    tab = Tab(browser)
    await tab.look(1280, 800, "light")
    await tab.call(
        lambda: browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    )
    return tab


@pytest.fixture(scope="session")
def axe() -> str:
    """axe's source, to be run in a page."""
    return AXE.read_text(encoding="utf-8")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: WARMROUTE_SCREENSHOTS keeps them."""
    folder = Path(os.environ.get("WARMROUTE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
