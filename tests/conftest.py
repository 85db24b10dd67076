import gc
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import hypothesis  # here, as below no later import may ask the collector who holds an object (it does)
import pytest

from tests.compiled import COMPILED
from tests.support.examples import examples
from tests.support.fakes import FakeEngine

# How long an example takes, or its making, says what else the machine does; how many are made is set by each test.
hypothesis.settings.register_profile(
    "untimed",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")


def pytest_configure() -> None:
    """SIGTERM ends tests as Ctrl-C does: what they started is stopped, real engines too, which have groups of their
    own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """For `.ci/run`: rooms whose other tests run on native code."""
    parser.addoption("--only-inside", action="append", default=[], help="of tests in this folder only those so marked")


def only_inside(config: pytest.Config, path: Path) -> bool:
    """Whether of this file's tests only those that are marked `inside` are wanted."""
    return any(path.is_relative_to(config.rootpath / folder) for folder in config.getoption("only_inside"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has none of the tests that are wanted of it is not imported."""
    named = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if named and only_inside(config, collection_path):
        return True if "mark.inside" not in collection_path.read_text("utf-8") else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of compiled code only the outside can be tested, and of some folders only the inside is wanted."""
    unwanted = [item for item in items if only_inside(config, item.path) and not item.get_closest_marker("inside")]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in set(unwanted)]
    for item in items:
        if COMPILED and item.get_closest_marker("inside"):
            item.add_marker(pytest.mark.skip(reason="compiled code calls what it was compiled with"))


def pytest_collection_finish() -> None:
    """What four thousand tests are made of stays until the end: the collector need not look through it again and
    again, which took a fifth of the time.

    What is frozen it no longer names as a holder either: hypothesis, first imported after this, took the generator
    of trio, which selenium brings, for one that nobody holds, and warned; so it is imported above."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What pytest keeps of ended tests grows by some hundred objects a test, and the collector need not look through
    that again and again either: in tests that collect it took most of the time. Cycles are freed file by file."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """A healthy engine."""
    async with FakeEngine() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeEngine]:
    """Another one."""
    async with FakeEngine() as fake:
        yield fake


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that leaves bodies as they come."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment without the sizes of tests, which commands would take for settings."""
    for key in [key for key in os.environ if key.startswith("WARMROUTE_")]:
        monkeypatch.delenv(key)
