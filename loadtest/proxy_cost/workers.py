"""Effect of a second worker in warmroute: CPU per streamed chunk, and cache hits of a trace.

workers_chunk: in every round warmroute runs with one worker and with two, alternately, in front of the same upstream
and with the same streams. The figure is the median of the rounds' ratios.

workers_hits: the same sessions of the agent trace are replayed through one worker and through two: 300 requests and
eight sessions at a time. Each replay has new simulated engines, and their counters have the number of cached prompt
tokens. Every request has its own connection, so both workers serve every conversation. Only their common knowledge can
place the next turn. The timing differs between runs, with one worker too. So each figure is the mean of two runs, and
the difference between the runs of one worker is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import mean

from loadtest.common.client import ReplayError
from loadtest.common.processes import ProcessError
from loadtest.common.report import Row
from loadtest.common.traces import shipped_trace
from loadtest.proxy_cost.load import CpuSample
from loadtest.proxy_cost.report import ratio_row
from loadtest.replay.demo import AGENT, REPLICAS, run_cluster
from loadtest.replay.run import run_replay

NUMBERS = (1, 2)  # numbers of workers that are compared
CASE = "stream300"
CHUNK_RATIO_MAX = 1.1
HITS_POINTS_MAX = 1.0

# Whole sessions, so that all runs send the same requests. Eight, so that they fit the caches and a misplaced turn is
# visible. Runs of one worker then differ by at most 0.3 points, those of 300 requests of the conversation trace by 1
# point. A run mostly waits, and a faster clock shortens that: the rates are those of the demo's 40.
WORKLOAD = AGENT.replace_replay(requests_max=300, time_scale=100.0)
RUNS = 2
ON_ITS_OWN = {"Connection": "close"}
TIMEOUT_WALL_S = 60.0  # long enough for any request: a slow machine is not judged

TEXT = {
    "workers_chunk": f"{CASE} once more, with one worker and with two",
    "workers_hits": (
        f"the sessions of the first {WORKLOAD.replay.requests_max} requests of {WORKLOAD.trace}, all at a time, think"
        f" time up to {WORKLOAD.replay.think_max_s:g} s, clock x{WORKLOAD.replay.time_scale:g}, {REPLICAS} simulated"
        f" replicas, every request on a connection of its own; means of {RUNS} runs each"
    ),
}


def steps(rounds: int) -> int:
    """Return the number of runs of warmroute that `rows` needs."""
    return len(NUMBERS) * (rounds + RUNS)


async def rows(
    streamed: Callable[[int], Awaitable[CpuSample]],
    replayed: Callable[[int], Awaitable[Row]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
    *,
    again: bool = False,
) -> list[Row]:
    """Return both rows.

    - `streamed`, `measure_replay`: measure streams and replay the trace with the given number of workers.
    - The progress callback is called after each measurement.
    - `again`: measure streams again in the same number of rounds if their goal is missed.
    """
    measured: dict[int, list[CpuSample]] = {number: [] for number in NUMBERS}
    found: dict[int, list[Row]] = {number: [] for number in NUMBERS}
    one, two = NUMBERS
    for turn in range(2 * rounds if again else rounds):
        if turn == rounds and chunk_row(measured[one], measured[two], slack).ok:
            break
        for number in _order(turn):
            measured[number].append(await streamed(number))
            if turn < rounds:
                told()
    for turn in range(RUNS):
        for number in _order(turn):
            found[number].append(await replayed(number))
            told()
    return [chunk_row(measured[one], measured[two], slack), hits_row(found[one], found[two])]


def _order(turn: int) -> Sequence[int]:
    """Return the order in a round, which alternates because it affects the figures."""
    return NUMBERS[::-1] if turn % 2 else NUMBERS


# The rows


def chunk_row(one: Sequence[CpuSample], two: Sequence[CpuSample], slack: float) -> Row:
    """Return the ratio of CPU per chunk, two workers over one, round by round; `slack` is a part of the goal."""
    goal = f"CPU per chunk with --workers 2 at most {CHUNK_RATIO_MAX:g} x that with 1 worker"
    pairs = list(zip(one, two, strict=True))
    return ratio_row("workers_chunk", pairs, goal, CHUNK_RATIO_MAX, slack, chunks=True)


def hits_row(one: Sequence[Row], two: Sequence[Row]) -> Row:
    """Return the token hit rate with two workers compared with one; `expected` and `got` are points."""
    errors: Counter[str] = Counter()
    for run in (*one, *two):
        errors.update(run.errors_by_kind)
    goal = f"token hit rate with --workers 2 under {HITS_POINTS_MAX:g} point from that with 1 worker"
    row = Row(
        workload="workers_hits",
        replicas=REPLICAS,
        load=max((run.load or 0.0 for run in (*one, *two)), default=None),
        load_unit="sessions",
        requests=sum(run.requests or 0 for run in (*one, *two)),
        errors=errors.total(),
        errors_by_kind=dict(errors),
        goal=goal,
        expected=HITS_POINTS_MAX,
        ok=False,
    )
    own, theirs = ([run.token_hit_rate for run in runs if run.token_hit_rate is not None] for runs in (one, two))
    if own and theirs:
        row.token_hit_rate = mean(theirs)
        apart = f"whose own runs lie {100 * (max(own) - min(own)):.1f} apart"
        row.goal = f"{goal} ({100 * mean(own):.1f} %, {apart})"
        row.got = round(100 * abs(mean(theirs) - mean(own)), 2)
        row.ok = not errors and row.got < HITS_POINTS_MAX
    return row


# The trace


async def measure_replay(workers: int, flags: Sequence[str]) -> Row:
    """Replay the trace through `workers` workers, on new engines; a failed measurement is an error of the row."""
    trace = shipped_trace(WORKLOAD.trace, WORKLOAD.replay.requests_max)
    settings = replace(WORKLOAD.replay, timeout_s=TIMEOUT_WALL_S * WORKLOAD.replay.time_scale, headers=ON_ITS_OWN)
    fresh = run_cluster(
        "warm", WORKLOAD.kv_tokens, WORKLOAD.replay.time_scale, flags=("--workers", str(workers), *flags)
    )
    try:
        async with fresh as (urls, url, _):
            return await run_replay(trace, replace(settings, url=url, replicas=tuple(urls)))
    except (ProcessError, ReplayError) as error:
        return Row(errors=1, errors_by_kind={str(error): 1})
