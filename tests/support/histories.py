"""Histories for tests that need one and do not look at it."""

from __future__ import annotations

from router.admin.history.request_history import RouterHistory


def no_history() -> RouterHistory:
    """A history of one decision, in memory."""
    return RouterHistory(decisions_max=1, keeper=None, load=lambda: (0, 0))
