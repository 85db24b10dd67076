"""Fixtures of the tests of engines/discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.apiserver import ApiServer
from tests.support.podstore import pod


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    """A well one, with one pod."""
    async with ApiServer() as server:
        server.store.create(pod("a"))
        yield server
