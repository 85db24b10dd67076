import os
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.fakes import FakeEngine


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
