"""Fixtures of the tests of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engines.event_world import World, _world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """An engine's HTTP side; publishers are started by the test."""
    async with _world() as made:
        yield made
