"""Command of `python -m loadtest steps`: bursts over HTTP, and their comparison with the engine model (steps.py)."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

import aiohttp
from rich.console import Console

from loadtest.common.flags import integer, number
from loadtest.common.report import build_table, envelope, report_console
from loadtest.fake_engine.step import Limits
from loadtest.kernels.steps import (
    ANSWER_TOKENS,
    GOAL,
    PROMPTS,
    STREAMS,
    Cell,
    CellTimes,
    Foretold,
    cells_of,
    hold,
    summary,
    token_ids,
)

WIDTH = 110
"""Columns of a table without a terminal."""
TIMEOUT_S = 600.0
"""Timeout of a request that hangs."""


class StepsError(Exception):
    """Reason in one line why nothing was measured."""


Clock = Callable[[], float]
"""Elapsed seconds."""


def cpu_clock(pid: int) -> Clock:
    """Return a clock of a process's CPU seconds in all threads (Linux). Raises StepsError without such a process."""
    tasks = Path(f"/proc/{pid}/task")

    def now_s() -> float:
        try:
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        except (OSError, ValueError, IndexError) as error:
            raise StepsError(f"no CPU time of process {pid}: {error}") from None

    now_s()
    return now_s


async def stream(
    client: aiohttp.ClientSession, url: str, body: dict[str, object], clock: Clock, lag_s: float
) -> tuple[float, float]:
    """Send a request `lag_s` from now, and return seconds to its first event and to its last with a choice.

    The seconds are counted by the clock from now. Raises StepsError.
    """
    began_s, times = clock(), []
    await asyncio.sleep(lag_s)
    async with client.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise StepsError(f"{url}: status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {") and b'"choices":[{' in line.replace(b" ", b""):
                times.append(clock() - began_s)
    if len(times) < 2:
        raise StepsError(f"{url}: a stream had {len(times)} events")
    return times[0], times[-1]


async def burst(
    client: aiohttp.ClientSession, options: argparse.Namespace, cell: Cell, rng: random.Random, clock: Clock
) -> CellTimes:
    """Send one burst. Raises StepsError, aiohttp.ClientError."""
    bodies: list[dict[str, object]] = [
        {
            "model": options.model,
            "prompt": token_ids(rng, cell.prompt, options.vocabulary),
            "max_tokens": cell.answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        for _ in range(cell.streams)
    ]
    lags_s = (options.lag_ms / 1e3 if index else 0.0 for index in range(cell.streams))
    took = await asyncio.gather(
        *(stream(client, options.url, body, clock, lag_s) for body, lag_s in zip(bodies, lags_s, strict=True))
    )
    return CellTimes(
        fmean(first_s for first_s, _ in took), fmean((last_s - first_s) / (cell.answer - 1) for first_s, last_s in took)
    )


async def measure_cells(options: argparse.Namespace, console: Console) -> list[tuple[Cell, bool, CellTimes]]:
    """Measure every cell of the grid, in random order, several times. Raises StepsError, aiohttp.ClientError."""
    cells = cells_of(options.prompts, options.streams, options.answer)
    rng = random.Random(options.seed)
    clock = time.perf_counter if options.pid is None else cpu_clock(options.pid)
    took: dict[Cell, list[CellTimes]] = {cell: [] for cell, _ in cells}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        for run in range(options.repeats + 1):  # the first is a warm-up
            for cell, _ in rng.sample(cells, len(cells)):
                times = await burst(client, options, cell, rng, clock)
                if run:
                    took[cell].append(times)
            console.print(f"{'warm-up' if not run else f'{run} of {options.repeats}'} done")
    return [
        (cell, fits, CellTimes(median(t.ttft_s for t in took[cell]), median(t.tpot_s for t in took[cell])))
        for cell, fits in cells
    ]


def show(console: Console, coefficients: dict[str, float], cells: Sequence[Foretold]) -> None:
    """Print the coefficients, every cell, and the errors of the model on the half that was not fitted."""
    console.print("us: " + ", ".join(f"{name} {value * 1e6:.4g}" for name, value in coefficients.items()))
    lines = []
    for each in cells:
        ttft, tpot = each.errors
        lines.append(
            [
                f"{each.cell.prompt:,}",
                str(each.cell.streams),
                "fitted" if each.fitted else "foretold",
                f"{each.measured.ttft_s * 1e3:,.0f}",
                f"{ttft:+.1%}",
                f"{each.measured.tpot_s * 1e3:.1f}",
                f"{tpot:+.1%}",
            ]
        )
    heads = ["prompt", "streams", "half", "TTFT, ms", "model", "per token, ms", "model"]
    console.print(build_table(heads, lines, left={"half"}))
    for name, fits in (("fitted", True), ("foretold", False)):
        said = summary(cells, is_fitted=fits)
        console.print(
            f"{name}: TTFT is off by {said['ttft_median']:.1%} in the median and {said['ttft_most']:.1%} at most, "
            f"the time per output token by {said['tpot_median']:.1%} and {said['tpot_most']:.1%}"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    about = "Fit step times of the engine model on one half of a grid of bursts, and compare them with the other half."
    made = argparse.ArgumentParser(prog="python -m loadtest steps", description=about)
    add = made.add_argument
    add("url", metavar="URL", help="URL of an engine with vLLM's /v1/completions, such as http://127.0.0.1:8000")
    add("--model", required=True, help="served model name")
    add("--prompts", type=integer(1), nargs="+", default=list(PROMPTS), metavar="N", help="tokens of a prompt")
    add("--streams", type=integer(1), nargs="+", default=list(STREAMS), metavar="N", help="prompts of a burst")
    add("--answer", type=integer(1), default=ANSWER_TOKENS, metavar="N", help="tokens of an answer")
    add("--repeats", type=integer(1), default=3, metavar="N", help="bursts of each cell, after one warm-up burst")
    text = "milliseconds from the first request of a burst to the others; must be less than its prefill time"
    add("--lag-ms", type=number(), default=5.0, metavar="MS", help=text)
    add("--vocabulary", type=integer(1), default=4_000, metavar="N", help="upper limit of drawn token ids")
    add(
        "--batched-tokens",
        type=integer(1),
        default=8_192,
        metavar="N",
        help="the engine's max_num_batched_tokens",
    )
    add("--sequences", type=integer(1), default=256, metavar="N", help="the engine's max_num_seqs")
    add("--block-tokens", type=integer(1), default=16, metavar="N", help="the engine's block size")
    text = "process id of the engine: count its CPU time instead of wall time, for a CPU with other load"
    add("--pid", type=integer(1), help=text)
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="write measured and predicted times as JSON")
    add("--check", action="store_true", help=f"exit with 1 if the error of a predicted time exceeds {GOAL:.0%}%")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if nothing could be measured."""
    options = parser().parse_args(argv)
    console = report_console(WIDTH)
    limits = Limits(options.block_tokens, options.batched_tokens, options.sequences)
    try:
        coefficients, cells = hold(asyncio.run(measure_cells(options, Console(stderr=True))), limits)
    except (StepsError, aiohttp.ClientError, TimeoutError, ValueError) as error:
        print(f"steps: {error}", file=sys.stderr)
        return 2
    show(console, coefficients, cells)
    said = summary(cells, is_fitted=False)
    if options.json:
        rows = [
            {
                "prompt": each.cell.prompt,
                "streams": each.cell.streams,
                "fitted": each.fitted,
                "ttft_s": each.measured.ttft_s,
                "tpot_s": each.measured.tpot_s,
                "model_ttft_s": each.model.ttft_s,
                "model_tpot_s": each.model.tpot_s,
            }
            for each in cells
        ]
        made = envelope("steps", ()) | {"coefficients_s": coefficients, "foretold": said, "cells": rows}
        options.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and said["all_most"] > GOAL else 0
