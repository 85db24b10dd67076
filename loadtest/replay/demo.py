"""`warmroute demo`: the router against round robin, on real traces, on this machine.

Each run starts four simulated replicas and a router fresh, replays one workload through it, and stops both, so that no
run inherits a warm cache. The simulated replicas run many times faster than real ones, and results are in their time.
The real CPU time of router and client is multiplied too, and weighs most on short times: a cached prompt's first token
looks slower here than it is. So the time scales below are no higher than needed.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from loadtest.common.client import ReplayError
from loadtest.common.flags import integer
from loadtest.common.processes import ProcessError, engines, router, run_until_signal
from loadtest.common.report import Row, print_report, progress_bar, write_json
from loadtest.common.svg import svg_chart
from loadtest.common.traces import TraceError, shipped_trace
from loadtest.replay.run import ReplaySettings, run_replay

HOST = "127.0.0.1"
REPLICAS = 4
SESSIONS_PER_REPLICA = 4
CALIBRATION = "qwen3-32b-2xh100"
KV_TOKENS = 307_328
"""The number of KV tokens that vLLM reports for Qwen3-32B on 2 x H100 (llm-d's guide_optimized-baseline_1)."""
POLICIES = ("round_robin", "warm")
MODEL = "sim"
PLAYED_SCALE = 5.0
"""Simulated seconds per second after the table: a few requests per second, at little CPU."""
PLAYED_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """One workload of the demo: a shipped trace, replay settings without the URLs, and each replica's KV cache size."""

    trace: str
    replay: ReplaySettings
    kv_tokens: int = KV_TOKENS

    def replace_replay(self, **changes: Any) -> DemoWorkload:  # noqa: ANN401 - fields of ReplaySettings
        """Return the same trace with changed replay settings."""
        return replace(self, replay=replace(self.replay, **changes))

    def describe(self) -> str:
        """Return all fixed parameters of the workload, in one line."""
        replay = self.replay
        later = f", each up to {replay.spread_s:g} s later" if replay.spread_s else ""
        pace = (
            f"Sessions: {replay.sessions_active} at a time, started over {replay.ramp_s:g} s,"
            f" think time up to {replay.think_max_s:g} s"
            if replay.think_max_s
            else f"Arrivals: x{replay.speed:g}{later}"
        )
        return (
            f"{replay.workload}: first {replay.requests_max:,} requests of {self.trace}. {pace}."
            f" Answers: at most {replay.output_tokens_max} tokens. KV cache: {self.kv_tokens:,} tokens a replica."
            f" Clock: x{replay.time_scale:g}"
        )


_ALIKE = ReplaySettings(url="", model=MODEL, sessions_active=REPLICAS * SESSIONS_PER_REPLICA, output_tokens_max=512)
AGENT = DemoWorkload(
    "claude_code_sessions",
    replace(_ALIKE, workload="agent", requests_max=300, time_scale=40, think_max_s=10, ramp_s=60),
)
WORKLOADS = (
    AGENT,
    DemoWorkload(
        "mooncake_conversation",
        replace(_ALIKE, workload="conversation", requests_max=450, time_scale=25, think_max_s=0.0, speed=2.4),
    ),
    replace(AGENT.replace_replay(workload="agent-ample", requests_max=240), kv_tokens=4 * KV_TOKENS),
)
FIXED = (
    f"{REPLICAS} simulated replicas of Qwen3-32B on 2 x H100 (calibration {CALIBRATION}),"
    f" {KV_TOKENS:,} KV tokens each, {SESSIONS_PER_REPLICA} sessions a replica at a time;"
    " times are simulated seconds"
)


async def run_all(workloads: Sequence[DemoWorkload], console: Console, page_port: int | None) -> list[Row]:
    """Run every workload under every policy, one after the other.

    `page_port` is the port of the dashboard of warm routers, 0 for a free one. Without it (None) its URL is not
    printed.
    """
    ports = {"warm": page_port}
    return [
        await run_one(workload, policy, console, ports.get(policy)) for workload in workloads for policy in POLICIES
    ]


async def run_one(workload: DemoWorkload, policy: str, console: Console, page_port: int | None = None) -> Row:
    """Run one workload under one policy, on its own replicas and router."""
    trace, settings = shipped_trace(workload.trace), replace(workload.replay, policy=policy, router="warmroute")
    total = min(settings.requests_max, trace.request_count)
    served = run_cluster(policy, workload.kv_tokens, settings.time_scale, admin_port=page_port or 0)
    async with served as (replicas, url, admin_url):
        if page_port is not None:
            shown = f"Live dashboard: {admin_url}/dashboard, {wall_time(settings.time_scale)}"
            console.print(shown, highlight=False, soft_wrap=True)
        with progress_bar(console, f"{settings.workload}, {policy}", total) as progress:
            return await run_replay(trace, replace(settings, url=url, replicas=tuple(replicas)), progress)


def wall_time(time_scale: float) -> str:
    """Describe the times on the page of a router with replicas that simulate `time_scale` seconds in a second."""
    return f"with wall time: a second there is {time_scale:g} simulated seconds of the table"


@asynccontextmanager
async def run_cluster(
    policy: str, kv_tokens: int, time_scale: float, port: int = 0, admin_port: int = 0, flags: Sequence[str] = ()
) -> AsyncIterator[tuple[list[str], str, str]]:
    """Run fresh replicas and a router; yields the replicas' URLs, the router's URL and its admin URL."""
    async with (
        engines(REPLICAS, MODEL, CALIBRATION, kv_tokens, time_scale) as urls,
        router(urls, policy=policy, port=port, admin_port=admin_port, flags=flags) as (url, admin_url),
    ):
        yield urls, url, admin_url


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a sentence per workload that compares warm with round robin."""
    by_name = {(row.workload, row.policy): row for row in rows}
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        before, after = (by_name[workload, policy] for policy in POLICIES)
        if before.token_hit_rate and after.token_hit_rate and before.ttft_p90_s and after.ttft_p90_s:
            lines.append(
                f"{workload}: {after.token_hit_rate / before.token_hit_rate:.1f} x round robin's token hit"
                f" rate, {after.ttft_p90_s / before.ttft_p90_s:.2f} x its p90 time to first token"
            )
    return lines


# The command


async def demo(options: argparse.Namespace, command: str) -> int:
    """Run the demo, print its table and chart, and then keep a router running for the user, unless `exit` is set."""
    console, errors = Console(), Console(stderr=True)
    workloads = [w.replace_replay(requests_max=options.requests or w.replay.requests_max) for w in WORKLOADS]
    notes = [FIXED, *(workload.describe() for workload in workloads)]
    errors.print("\n".join(notes), highlight=False, soft_wrap=True)
    rows = await run_all(workloads, errors, None if options.exit else free_or_any(options.admin_port, errors))
    console.print()
    console.print("\n".join(notes), highlight=False, soft_wrap=True)
    print_report(console, rows)
    console.print("\n" + "\n".join(verdicts(rows)), highlight=False, soft_wrap=True)
    options.chart.write_text(svg_chart(rows, "warmroute against round robin", notes), encoding="utf-8")
    console.print(f"chart: {options.chart}", highlight=False, soft_wrap=True)
    if options.json:
        write_json(options.json, command, rows)
    if not options.exit:
        await stay(options, console)
    return 1 if any(row.errors or row.rejected for row in rows) else 0


async def stay(options: argparse.Namespace, console: Console) -> None:
    """Run a warm router under continuous load, so that its page changes, until cancelled."""
    port = free_or_any(options.port, console)
    admin_port = free_or_any(options.admin_port, console)
    async with run_cluster("warm", KV_TOKENS, PLAYED_SCALE, port, admin_port) as (replicas, url, admin_url):
        body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 16}}'
        console.print(
            f"\nA router with policy warm keeps running at {url} with workload {AGENT.replay.workload} "
            "until Ctrl-C. Try:\n\n"
            f"  curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
            f"Dashboard: {admin_url}/dashboard, {wall_time(PLAYED_SCALE)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        try:
            await play(url, replicas)
        except asyncio.CancelledError:
            console.print("stopping")


async def play(url: str, replicas: Sequence[str]) -> None:
    """Replay the agent sessions again and again, slowly enough to read the page, until cancelled."""
    trace = shipped_trace(AGENT.trace)
    settings = replace(AGENT.replay, url=url, replicas=tuple(replicas), time_scale=PLAYED_SCALE)
    for seed in count(1):
        await run_replay(trace, replace(settings, policy="warm", router="warmroute", seed=seed))
        await asyncio.sleep(PLAYED_PAUSE_S)


def free_or_any(port: int, console: Console) -> int:
    """Return the port if it is free, otherwise 0 (any free one) after a message."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            console.print(f"port {port} is in use: using a free port instead", highlight=False, soft_wrap=True)
            return 0
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all requests of all runs were answered."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        return uvloop.run(run_until_signal(demo(options, " ".join(["warmroute demo", *arguments]))))
    except (ProcessError, ReplayError, TraceError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute demo",
        description="Compare round robin with warm on this machine, with four simulated replicas.",
    )
    parser.add_argument(
        "--requests", type=integer(1), metavar="N", help="requests of each run (default: see the first lines)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="FILE",
        default=Path("warmroute-demo.svg"),
        help="file of the chart (warmroute-demo.svg)",
    )
    parser.add_argument(
        "--exit",
        action="store_true",
        help="exit after the table; otherwise a router with policy warm keeps running under load until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="PORT", help="port of the router that keeps running (8000)"
    )
    parser.add_argument(
        "--admin-port", type=int, default=8001, metavar="PORT", help="port of its admin listener (8001)"
    )
    return parser
