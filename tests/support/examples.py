"""How many examples a test draws, or cases it tries: all of them, or a part where the same tests run in full elsewhere.

EXAMPLES_PART says which part. `make test` has a fifth, so that it ends within minutes on two cores, and
`.ci/run` all: once, though it runs the core's tests twice, in Python to count the lines that they reach and on native
code as it ships. Of the core, what runs in Python alone (`inside`, `interpreted`) does not ask this module.

The name does not begin with WARMROUTE_, as the tests' routers inherit it, and refuse what they do not know.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from math import ceil
from typing import TypeVar

T = TypeVar("T")
PART = float(os.environ.get("EXAMPLES_PART", "1"))


def examples(full: int) -> int:
    """As many of `full` as are drawn here, at least one."""
    return max(1, ceil(full * PART))


def some(cases: Sequence[T]) -> Sequence[T]:
    """Of cases that differ by where something happens, all, or each n-th from another one in every run."""
    step = max(1, round(1 / PART))
    return cases[random.randrange(step) :: step]
