"""p90 TTFT and p90 end-to-end of an earlier `warm`, by cell and seed. A later `warm` is compared with them.

simulate --race --seeds 6-8 --policy warm --json rows.json
simulate --race --no-run --rows rows.json --save-baseline FILE
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.common.report import Row, envelope
from loadtest.simulate.results.claims import WARM, Baseline

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "race_baseline.json"


class BaselineError(ValueError):
    """A file that is not a baseline; the message is one line."""


class _Document(msgspec.Struct):
    p90_s: dict[str, dict[str, dict[int, tuple[float, float]]]]
    """(p90 TTFT, p90 end-to-end) by workload, load and seed."""


def read(path: Path) -> Baseline:
    """Read a file written by `write`. Raises BaselineError, OSError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Document).p90_s
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BaselineError(f"{path}: not a baseline: {error}") from error
    return {(workload, load): seeds for workload, loads in found.items() for load, seeds in loads.items()}


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of single runs, with the commit of the code. Raises BaselineError, OSError."""
    found: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for row in rows:
        if row.policy == WARM and row.seed is not None and row.case is None and row.ttft_p90_s is not None:
            cell = found.setdefault(row.workload or "", {}).setdefault(row.load_name or "", {})
            cell[str(row.seed)] = round(row.ttft_p90_s, 6), round(row.e2e_p90_s or 0.0, 6)
    if not found:
        raise BaselineError(f"no rows of {WARM} to make a baseline of")
    made = envelope("", ())
    cells = [
        f"  {json.dumps(workload)}: {{\n"
        + ",\n".join(f"   {json.dumps(load)}: {json.dumps(seeds)}" for load, seeds in loads.items())
        + "\n  }"
        for workload, loads in found.items()
    ]
    head = "".join(f" {json.dumps(name)}: {json.dumps(made[name])},\n" for name in ("commit", "date"))
    path.write_text(f'{{\n{head} "p90_s": {{\n' + ",\n".join(cells) + "\n }\n}\n", encoding="utf-8")
