"""Fixtures of the tests of core/cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.cache.reporting import _Engine


@pytest.fixture
def engine() -> Iterator[_Engine]:
    """An engine of which nothing is known; whatever a test does, the map is empty once it is closed and swept."""
    fresh = _Engine()
    yield fresh
    fresh.ledger.close()
    while fresh.masks.dying:
        fresh.masks.sweep(100)
    assert not fresh.masks.of
    assert fresh.masks.held == 0
