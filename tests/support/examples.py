"""How many examples a test draws, or histories it makes: all of them, or a part where the same tests run again.

`.ci/run` runs the core's tests twice, in Python to count the lines that they reach and on native code as it ships. What
is drawn at random is drawn in full there, and here WARMROUTE_EXAMPLES_PART says which part of it. What runs in Python
alone (`inside`, `interpreted`) does not ask this module.
"""

from __future__ import annotations

import os
from math import ceil

PART = float(os.environ.get("WARMROUTE_EXAMPLES_PART", "1"))


def examples(full: int) -> int:
    """As many of `full` as are drawn here, at least one."""
    return max(1, ceil(full * PART))
