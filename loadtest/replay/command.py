"""`python -m loadtest replay`: send a trace to any OpenAI-compatible URL and measure the answers (run.py)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest.common import flags
from loadtest.common.answer_limits import FLAG, HELP, LimitsAction
from loadtest.common.client import ReplayError
from loadtest.common.report import Row, print_report, progress_bar, write_json
from loadtest.common.traces import REQUESTS_MAX, TraceError, read_trace
from loadtest.replay.run import ReplaySettings, run_replay


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if every request was answered (or refused because of load) and every check passed."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        trace = read_trace(options.trace, input_tokens_max=options.input_tokens_max)
        settings = _settings(options)
        total = min(options.requests_max, trace.request_count)
        with progress_bar(console, settings.workload or trace.name, total) as progress:
            row = uvloop.run(run_replay(trace, settings, progress))
    except (TraceError, ReplayError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    failed = [check for check in options.check if not _holds(row, check)]
    if options.check:
        row.goal, row.ok = ", ".join("".join(map(str, check)) for check in options.check), not failed
    print_report(Console(), [row])
    if row.hit_rate_source == "usage":
        console.print("the token hit rate comes from usage in answers: set --replica to use the engines' counters")
    for kind, count in row.errors_by_kind.items():
        console.print(f"{count} x {kind}", highlight=False)
    for name, operator, bound in failed:
        console.print(f"missed: {name} {operator} {bound}, got {getattr(row, name)}", highlight=False)
    if options.json:
        write_json(options.json, "replay " + " ".join(argv if argv is not None else sys.argv[1:]), [row])
    return 1 if row.errors or failed else 0


def _settings(options: argparse.Namespace) -> ReplaySettings:
    given = {name: value for name, value in vars(options).items() if name in ReplaySettings.__dataclass_fields__}
    return ReplaySettings(**given | {"replicas": tuple(options.replicas), "headers": dict(options.headers)})


CHECK = re.compile(r"([a-z0-9_]+)(<=|>=)([-+.0-9e]+)")
Check = tuple[str, str, float]


def _check(text: str) -> Check:
    match = CHECK.fullmatch(text.replace(" ", ""))
    if not match or match[1] not in Row.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD<=VALUE or FIELD>=VALUE for a field of a row")
    return match[1], match[2], float(match[3])


def _holds(row: Row, check: Check) -> bool:
    name, operator, bound = check
    value = getattr(row, name)
    if not isinstance(value, int | float):
        return False
    return value <= bound if operator == "<=" else value >= bound


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    defaults = ReplaySettings(url="")
    parser = argparse.ArgumentParser(
        prog="python -m loadtest replay",
        description="Send a trace to an OpenAI-compatible URL and measure the answers.",
        epilog="All times, in flags and in results, are simulated seconds.",
    )
    add = parser.add_argument
    add("--url", required=True, help="URL of the router or engine")
    add("--trace", required=True, type=Path, help="trace file: JSON lines, plain, .gz or .zst")
    add("--model", help="default: the first of /v1/models")
    add("--endpoint", choices=("chat", "completions"), default=defaults.endpoint)
    add("--mode", choices=("auto", "open", "closed"), default="auto", help="auto: as recorded")
    add("--speed", type=flags.positive(), default=defaults.speed, help="open loop: speed-up of arrivals")
    spread_help = "open loop: maximum random delay of each arrival, for traces with a coarse clock (Mooncake: 3)"
    add("--spread-s", type=flags.number(), default=defaults.spread_s, metavar="S", help=spread_help)
    text = "simulated seconds per wall second of the engines"
    add("--time-scale", type=flags.positive(), default=defaults.time_scale, help=text)
    text = "stop after N requests"
    add("--requests", dest="requests_max", type=flags.integer(1), default=REQUESTS_MAX, metavar="N", help=text)
    sessions = defaults.sessions_active
    text = "concurrent sessions"
    add("--sessions", dest="sessions_active", type=flags.integer(1), default=sessions, metavar="N", help=text)
    add("--think-max-s", type=flags.number(), default=defaults.think_max_s, help="maximum think time between turns")
    add("--ramp-s", type=flags.number(), default=defaults.ramp_s, help="duration over which the first sessions start")
    add("--input-tokens-max", type=flags.integer(1), help="omit longer prompts; a session ends there")
    text = "maximum length of answers"
    add("--output-tokens-max", type=flags.integer(1), default=defaults.output_tokens_max, help=text)
    add(FLAG, nargs="+", action=LimitsAction, default=defaults.answer_limits, metavar="N", help=HELP)
    text = "set `max_tokens` to the recorded length of each answer: an upper bound"
    add("--foreknowledge", action="store_true", help=text)
    add("--timeout-s", type=flags.positive(), default=defaults.timeout_s, help="timeout of a request")
    add("--ttft-limit-s", type=flags.positive(), help="deadline of the first token for goodput")
    add("--ignore-eos", action="store_true", help="ask vLLM or SGLang for exactly the recorded length")
    text = "engine with counters to read; repeat for each"
    add("--replica", dest="replicas", action="append", default=[], metavar="URL", help=text)
    text = "header of each request"
    add("--header", dest="headers", action="append", default=[], type=_header, metavar="K=V", help=text)
    add("--session-header", metavar="NAME", help="header for the name of the session")
    add("--seed", type=int, default=defaults.seed, help="seed of the starts within --ramp-s, and of --spread-s")
    add("--workload", help="label in the row; default: the trace's name")
    add("--policy", help="label in the row")
    add("--router", help="label in the row")
    text = "condition (<= or >=); exit with 1 if it is false"
    add("--check", action="append", default=[], type=_check, metavar="FIELD<=X", help=text)
    add("--json", type=Path, metavar="FILE", help="write the row as JSON")
    return parser
