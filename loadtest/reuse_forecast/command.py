"""`python -m loadtest forecasts`: quality of forecasts of a prompt's next use, on the recorded sessions.

    forecasts                                  both recordings, each half judged by forecasts from the other one
    forecasts --recording mooncake             one of them
    forecasts --json forecasts.json            for `loadtest pages --forecasts`

docs/evidence/reuse-prediction.md has the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rich.console import Console

from loadtest.common.report import Row, build_table, progress_bar, report_console, write_json
from loadtest.common.traces import TraceError
from loadtest.reuse_forecast.recordings import HALVES, RECORDINGS
from loadtest.reuse_forecast.scoring import heads, lines, rows_of_all

WIDTH = 180  # width of tables without a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if the recordings cannot be read."""
    arguments = list(argv if argv is not None else sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m loadtest forecasts",
        description="Measure the loss of forecasts of prompt reuse.",
    )
    parser.add_argument("--recording", nargs="+", choices=list(RECORDINGS), default=list(RECORDINGS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args(arguments)
    rows = list[Row]()
    done = count(1)
    try:
        with progress_bar(Console(stderr=True), "halves", len(options.recording) * len(HALVES)) as progress:
            for each in rows_of_all(options.recording):
                rows += each
                progress(next(done))
        if options.json is not None:
            write_json(options.json, "forecasts " + " ".join(arguments), rows)
    except (TraceError, OSError) as error:
        print(f"forecasts: {error}", file=sys.stderr)
        return 2
    console = report_console(WIDTH)
    for name in options.recording:
        console.print(
            build_table(heads(rows), lines(rows, name), f"{name}: log-loss in nats", left={"judged on", "forecast"})
        )
    return 0
