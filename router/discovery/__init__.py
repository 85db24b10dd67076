"""Where replicas come from. A discovery yields *complete sets*; one place (Fleet.replace) does the only diff.

To add one: a file here with a class that has `watch`, a line in app.py (see CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from router.core.facts import Replica


class Discovery(Protocol):
    """A source of replicas."""

    def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """The complete set now, and again at every change."""
