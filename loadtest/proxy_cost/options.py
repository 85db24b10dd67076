"""The flags of `python -m loadtest overhead`."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtest.common import flags, rivals
from loadtest.proxy_cost.report import CASES, EXTRAS
from loadtest.proxy_cost.upstream import RATE_PER_S


def parser() -> argparse.ArgumentParser:
    """Return the parser with all flags and their defaults."""
    made = argparse.ArgumentParser(prog="python -m loadtest overhead", description="What routers cost, side by side.")
    add, every = made.add_argument, (*CASES, *EXTRAS)
    add(
        "--cases",
        type=flags.make_choices_parser(every),
        default=every,
        metavar="NAMES",
        help=f"of {','.join(every)} (all)",
    )
    add("--routers", metavar="NAMES", help="only these, of warmroute, nginx and the rivals installed (all)")
    takes = "one more; CMD takes {port}, and {urls} or {replicas}"
    add("--router", action="append", default=[], metavar="NAME=CMD", help=takes)
    add("--rounds", type=flags.integer(1, 100), default=3, metavar="N", help="medians are of so many (3)")
    add("--replicas", type=flags.integer(1, 100), default=4, metavar="N", help="behind each router (4)")
    add("--seconds", type=flags.positive(1_000), default=2.0, metavar="S", help="length of a window (2)")
    add("--rate", type=flags.positive(1_000), default=RATE_PER_S, metavar="N", help="events a second of a stream (30)")
    add("--workers", type=flags.integer(1, 100), metavar="N", help="passed on to `warmroute serve`")
    add("--flag", action="append", default=[], metavar="WORD", help="one more word for `warmroute serve`")
    add("--rivals", type=Path, default=rivals.ENVIRONMENT, metavar="DIR", help="where they are (.venv-rivals)")
    add("--install-rivals", action="store_true", help="install those that are missing there, from PyPI, first")
    add("--profile", choices=tuple(CASES), help="only run this case at warmroute under cProfile")
    add("--check", action="store_true", help="measure what misses its goal again, and exit 1 if it is missed")
    add(
        "--slack",
        type=flags.number(),
        default=0.0,
        metavar="F",
        help="what goals may be missed by, as a part of them (0)",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows")
    add("--chart", type=Path, metavar="FILE", help="write a picture (SVG)")
    return made
