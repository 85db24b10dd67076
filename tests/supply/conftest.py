"""Tests of the supply chain need the tools of .venv-supply."""

from __future__ import annotations

import pytest

from tests.supply import install


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Without the tools nothing here says anything: a failure, never a skip."""
    if not install.installed():
        pytest.fail("tools are not installed: python -m tests.supply.install", pytrace=False)
