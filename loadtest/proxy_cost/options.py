"""The flags of `python -m loadtest overhead`."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtest.common import flags, rivals
from loadtest.proxy_cost.report import CASES, EXTRAS
from loadtest.proxy_cost.upstream import RATE_PER_S


def parser() -> argparse.ArgumentParser:
    """Return the parser with all flags and their defaults."""
    made = argparse.ArgumentParser(prog="python -m loadtest overhead", description="Compare the cost of routers.")
    add, every = made.add_argument, (*CASES, *EXTRAS)
    text = f"cases to run, of {','.join(every)} (all)"
    add("--cases", type=flags.make_choices_parser(every), default=every, metavar="NAMES", help=text)
    add("--routers", metavar="NAMES", help="routers to run, of warmroute, nginx and installed other routers (all)")
    takes = "additional router; CMD contains {port}, and {urls} or {replicas}"
    add("--router", action="append", default=[], metavar="NAME=CMD", help=takes)
    add("--rounds", type=flags.integer(1, 100), default=3, metavar="N", help="number of rounds per median (3)")
    text = "number of replicas behind each router (4)"
    add("--replicas", type=flags.integer(1, 100), default=4, metavar="N", help=text)
    text = "length of a measurement window in seconds (2)"
    add("--seconds", type=flags.positive(1_000), default=2.0, metavar="S", help=text)
    text = "events per second of a stream (30)"
    add("--rate", type=flags.positive(1_000), default=RATE_PER_S, metavar="N", help=text)
    text = "additional argument of `warmroute serve`; repeat for each"
    add("--flag", action="append", default=[], metavar="WORD", help=text)
    text = "environment of other routers (.venv-rivals)"
    add("--rivals", type=Path, default=rivals.ENVIRONMENT, metavar="DIR", help=text)
    add("--install-rivals", action="store_true", help="first install missing routers from PyPI")
    add("--profile", choices=tuple(CASES), help="only run this case with warmroute under cProfile")
    text = "repeat measurements that miss their goal, and exit with 1 if one still misses it"
    add("--check", action="store_true", help=text)
    add("--slack", type=flags.number(), default=0.0, metavar="F", help="tolerance of goals, as a fraction (0)")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--chart", type=Path, metavar="FILE", help="write a chart (SVG)")
    return made
