"""What one attack costs: lines of Python that ran, and bytes that were held at once. Both are counted, not timed."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Lines of Python, and the most bytes that were held by what ran."""

    steps: int
    held_bytes: int


class _Steps:
    def __init__(self) -> None:
        self.count = 0

    def called(self, _: FrameType, __: str, ___: object) -> Callable[..., Any]:
        """A function begins: its lines are counted."""
        return self.line

    def line(self, _: FrameType, event: str, __: object) -> Callable[..., Any]:
        """A line runs."""
        self.count += event == "line"
        return self.line


def metered(work: Callable[[], object]) -> Cost:
    """Run it and say what it cost. Whatever it raises is raised. Code that is not Python's own costs no steps."""
    steps, before = _Steps(), sys.gettrace()
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        sys.settrace(steps.called)
        try:
            work()
        finally:
            sys.settrace(before)
        return Cost(steps.count, tracemalloc.get_traced_memory()[1] - base)
    finally:
        if not tracing:
            tracemalloc.stop()
