"""Fixtures of several tests of the links between routers."""

from __future__ import annotations

import pytest

from router.peering import peer_link, peers


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not run the store, or a reader of a huge value, for a second leaves no router alone. A link
    that was alone skips messages, which a test may count."""
    monkeypatch.setattr(peer_link, "ECHO_TIMEOUT_S", 60.0)
    monkeypatch.setattr(peers, "SILENT_S", 60.0)
