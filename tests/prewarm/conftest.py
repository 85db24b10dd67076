"""Fixtures of the tests of prewarm."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loadtest.fake_engine.command import Engines, EngineSettings
from tests.support.discovered import told

__all__ = ["told"]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Two of them, quick."""
    async with Engines(EngineSettings(replicas=2, port=0, time_scale=500.0)) as both:
        yield both
