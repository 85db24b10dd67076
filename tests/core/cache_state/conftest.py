"""Fixtures of the tests of core/cache_state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.cache_state.reporting import _Engine


@pytest.fixture
def engine() -> Iterator[_Engine]:
    """An engine of which nothing is known; whatever a test does, the map is empty once it is closed and swept."""
    fresh = _Engine()
    yield fresh
    fresh.ledger.close()
    while fresh.masks.pending_sweep:
        fresh.masks.sweep(100)
    assert not fresh.masks.of
    assert fresh.masks.held == 0
