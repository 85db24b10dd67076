"""How much work a call is, counted and not timed: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import router.core
from tests.compiled import COMPILED

CORE = str(Path(router.core.__file__).parent)
interpreted = pytest.mark.skipif(COMPILED, reason="native code has no bytecodes to count")


def steps(call: Callable[[], object]) -> int:
    """Bytecodes of the core that a call executes. What the interpreter does in one of them, such as to copy a list, is
    not seen."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
