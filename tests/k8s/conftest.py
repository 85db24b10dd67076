"""Tests of what runs on Kubernetes need the tools of .venv-k8s."""

from __future__ import annotations

import pytest

from tests.k8s import install


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Without the tools nothing here says anything: a failure, never a skip."""
    if not install.installed():
        pytest.fail("tools are not installed: python -m tests.k8s.install", pytrace=False)
