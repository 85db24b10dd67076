"""Times and rates that tests come by. No test passes or fails by them, as they depend on what else the machine does;
`make evidence` runs the tests that have some, marked `figures`, and judges what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = "FIGURES_FILE"
"""The environment variable that names the file of JSON lines to write to; without it a figure is only printed."""


def figure(case: str, expected: float, got: float) -> None:
    """A figure that is as promised when it is at most what is expected; the unit is in the name of the case."""
    row = {"case": case, "expected": expected, "got": round(got, 3), "ok": got <= expected, "timed": True}
    print(f"\n{case}: {got:.3f} (at most {expected:g})")
    if path := os.environ.get(FILE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
