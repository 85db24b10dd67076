"""What a second worker changes at warmroute: CPU per streamed chunk, and what of a trace is found in caches.

workers_chunk: in every round warmroute runs with one worker and with two, in turn, in front of the same upstream and
under the same streams; the figure is the median of the rounds' ratios.

workers_hits: the same sessions of the agent trace, 300 requests and eight sessions at a time, are replayed through one
worker and through two, each time on fresh simulated engines, whose counters say how many prompt tokens they found.
Every request comes on a connection of its own, so that both workers serve every conversation, and only what they know
together can place its next turn. What happens at the same time differs from run to run, with one worker too, so each
figure is the mean of two runs, and how far those of one worker lie apart is said.
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
from loadtest.overhead.load import Measured
from loadtest.overhead.report import ratio_row
from loadtest.replay.demo import AGENT, REPLICAS, serving
from loadtest.replay.run import run_replay

NUMBERS = (1, 2)  # numbers of workers that are compared
CASE = "stream300"
CHUNK_RATIO_MAX = 1.1
HITS_POINTS_MAX = 1.0

# Whole sessions, so that all runs ask the same; eight, so that caches hold them and a turn in the wrong place is seen.
# One worker's own runs then lie within 0.3 points, those of 300 requests of the conversation trace 1 point apart. Most
# of a run is waiting, which a faster clock shortens: the rates are those of the demo's 40.
WORKLOAD = AGENT.replayed(requests_max=300, time_scale=100.0)
RUNS = 2
ON_ITS_OWN = {"Connection": "close"}
TIMEOUT_WALL_S = 60.0  # long enough for any request: a slow machine is not what is judged

TEXT = {
    "workers_chunk": f"{CASE} once more, with one worker and with two",
    "workers_hits": (
        f"the sessions of the first {WORKLOAD.replay.requests_max} requests of {WORKLOAD.trace}, all at a time, think"
        f" time up to {WORKLOAD.replay.think_max_s:g} s, clock x{WORKLOAD.replay.time_scale:g}, {REPLICAS} simulated"
        f" replicas, every request on a connection of its own; means of {RUNS} runs each"
    ),
}


def steps(rounds: int) -> int:
    """The number of runs of warmroute that `rows` needs."""
    return len(NUMBERS) * (rounds + RUNS)


async def rows(
    streamed: Callable[[int], Awaitable[Measured]],
    replayed: Callable[[int], Awaitable[Row]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
    *,
    again: bool = False,
) -> list[Row]:
    """Both rows; the functions measure streams and replay the trace with so many workers. `told` after each. `again`:
    streams in as many rounds again, if their goal is missed."""
    measured: dict[int, list[Measured]] = {number: [] for number in NUMBERS}
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
    """The order in a round: the first has an advantage or a disadvantage, so they take turns."""
    return NUMBERS[::-1] if turn % 2 else NUMBERS


# The rows


def chunk_row(one: Sequence[Measured], two: Sequence[Measured], slack: float) -> Row:
    """CPU per chunk with two workers over that with one, round by round; `slack` as a part of the goal."""
    goal = f"CPU per chunk with --workers 2 at most {CHUNK_RATIO_MAX:g} x that with 1 worker"
    pairs = list(zip(one, two, strict=True))
    return ratio_row("workers_chunk", pairs, goal, CHUNK_RATIO_MAX, slack, chunks=True)


def hits_row(one: Sequence[Row], two: Sequence[Row]) -> Row:
    """The token hit rate with two workers against that with one; `expected` and `got` are points."""
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


async def replayed(workers: int, flags: Sequence[str]) -> Row:
    """The trace through so many workers, on fresh engines; what cannot be measured is an error of the row."""
    trace = shipped_trace(WORKLOAD.trace, WORKLOAD.replay.requests_max)
    settings = replace(WORKLOAD.replay, timeout_s=TIMEOUT_WALL_S * WORKLOAD.replay.time_scale, headers=ON_ITS_OWN)
    fresh = serving("warm", WORKLOAD.kv_tokens, WORKLOAD.replay.time_scale, flags=("--workers", str(workers), *flags))
    try:
        async with fresh as (urls, url, _):
            return await run_replay(trace, replace(settings, url=url, replicas=tuple(urls)))
    except (ProcessError, ReplayError) as error:
        return Row(errors=1, errors_by_kind={str(error): 1})
