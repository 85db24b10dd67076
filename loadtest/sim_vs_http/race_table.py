"""`loadtest agree --table`: five workloads with scarce decode capacity or KV headroom, raced over HTTP.

They are scenarios of the simulation (simulate/scenarios/registry.py), with one seed on which nothing was tuned. They
are sent unchanged, with the same prompts, answers and moments, in front of eight replicas of Qwen3-32B on two H100.

A time scale is the lowest at which a run lasts about 60 to 90 s of wall-clock time. Real time counts times the scale,
and a time to first token of 0.2 s is the first figure to be affected. So if that is the figure, the scale is 1 to 3. If
first tokens take many seconds, the scale is higher. Between its first and its last token an answer has one event per
TICK_S of wall-clock time: with an event for each token, a thousand streams would keep client, router and engines busy
with events alone.

Times to first token are reported as measured, and judged as they would be at a time scale of 1 (`Row.ttft_life_p90_s`).
That value is the sum of the engine's own time, the time that the router deferred the request, and the real-time delay
counted once. The value without the real-time delay is reported beside it. It shows the effect of the placement even on
a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from loadtest.common.report import Row, merge_rows
from loadtest.common.rivals import OURS
from loadtest.common.traces import Request, Session, Trace
from loadtest.replay.run import ReplaySettings
from loadtest.simulate.engine.workload import SimRequest, Workload
from loadtest.simulate.results.claims import FIGURES, TTFT, WARM, WITHIN, Figure
from loadtest.simulate.scenarios import contention, generated, recorded
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, Make, Scenario

SEED = CLAIM_SEEDS[0]
TICK_S = 0.5
LADDER_GAP_S = 70.0
"""Time from the last arrival of the ladder's warm-up to its stage.

The published 330 s are for its slowest answers. With eight replicas and any router, all have ended after 60 s.
"""
FAILED, AT_ENGINES = "failed requests", "p90 TTFT at the engines"
REAL_SHARE_MAX = 0.25
"""Limit of mean time on the way over p90 TTFT for a row to count in a comparison of TTFT."""
JUDGED = "within 5 % of the best"
"""`case` of a verdict's row."""


@dataclass(frozen=True, slots=True)
class TableSlice:
    """A scenario at a load, and its parameters over HTTP."""

    make: Make
    load: str
    time_scale: float
    rate: float | None = None
    """Requests per second; arrivals and waits are stretched to it. None: the scenario's own."""
    requests: int | None = None
    """The limit of requests, the warm-up included. None: all."""
    think_max_s: float | None = None
    """The longest wait between turns, so that a run does not end with minutes of waiting for one session."""


TABLE = {
    "hot_prefix_long": TableSlice(contention.hot_prefix_long, "at", 2.0, rate=10.0, requests=900),
    "hot_prefix_short": TableSlice(contention.hot_prefix_short, "below", 1.0, rate=28.0),
    "ladder_honest": TableSlice(generated.ladder_honest, "at", 2.0),
    "overfull_chats": TableSlice(contention.overfull_chats, "below", 6.0, rate=1.68, requests=571, think_max_s=322.0),
    "claude_code": TableSlice(recorded.claude_code, "twice", 10.0, requests=600),
}
"""Workloads by name, in order:

- one prefix of 20,000 tokens with answers of 400 to 800
- one prefix of 6,000 tokens with answers of 200
- llm-d's ladder, a fresh question each time, answers of 1,000
- chats with contexts of one and a half times all caches together, replicas busy 40 % of the time
- twice as many coding sessions as fit into the caches
"""


@lru_cache(maxsize=1)
def scenario_of(name: str) -> Scenario:
    """Return the scenario as it is sent; its turns have the times of a replay."""
    slice_ = TABLE[name]
    made = slice_.make(slice_.load, SEED)
    if name == "ladder_honest":
        return replace(made, workload=_shorten_gap(made.workload))
    stretch = made.load / slice_.rate if slice_.rate else 1.0
    return replace(made, workload=_stretch_times(made.workload, stretch), load=slice_.rate or made.load)


def _shorten_gap(workload: Workload) -> Workload:
    """Return the ladder with less time between its warm-up and its stage."""
    earlier_s = generated.STAGE_GAP_S - LADDER_GAP_S
    sessions = [
        (turn if turn.number < workload.warm_up else replace(turn, at_s=turn.at_s - earlier_s),)
        for (turn,) in workload.sessions
    ]
    return replace(workload, sessions=tuple(sessions))


def _stretch_times(workload: Workload, by: float) -> Workload:
    sessions = tuple(
        tuple(replace(turn, at_s=turn.at_s * by, think_s=turn.think_s * by) for turn in session)
        for session in workload.sessions
    )
    return replace(workload, sessions=sessions, ramp_s=workload.ramp_s * by, think_max_s=workload.think_max_s * by)


def trace_of(name: str) -> Trace:
    """Return the scenario's requests as a trace."""
    workload = scenario_of(name).workload
    sessions = tuple(
        Session(session[0].session, tuple(_request(turn) for turn in session)) for session in workload.sessions
    )
    return Trace(name, "open" if workload.open else "sessions", sessions, 0)


def _request(turn: SimRequest) -> Request:
    """Return a turn's request, at the turn's own time."""
    return replace(turn.request, at_s=turn.at_s, think_s=turn.think_s, output_tokens=turn.output_tokens)


def settings_of(name: str, requests: int | None, time_scale: float | None) -> ReplaySettings:
    """Return the replay settings of a slice; `requests` and `time_scale` replace its own."""
    slice_, scenario = TABLE[name], scenario_of(name)
    workload, setting = scenario.workload, scenario.setting
    return ReplaySettings(
        url="",
        time_scale=time_scale or slice_.time_scale,
        requests_max=min(requests or slice_.requests or workload.request_count, workload.request_count),
        warm_up=workload.warm_up,
        sessions_active=workload.active,
        think_max_s=slice_.think_max_s or workload.think_max_s,
        ramp_s=workload.ramp_s,
        timeout_s=setting.timeout_s,
        ttft_limit_s=scenario.ttft_limit_s,
        seed=setting.seed,
        workload=name,
    )


# Results


MEDIANS = (
    *("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_engine_p90_s", "ttft_life_p90_s", "wire_s"),
    *("e2e_p50_s", "e2e_p90_s", "e2e_p99_s", "output_tokens_per_s", "goodput", "token_hit_rate", "duration_s"),
)
SUMS = ("requests", "errors", "rejected")


def median_row(rows: Sequence[Row]) -> Row:
    """Merge several runs into one row: the median of each figure, and the sum of counts."""
    p90s = [row.ttft_p90_s or 0.0 for row in rows]
    note = f"medians of {len(rows)} runs"
    return merge_rows(rows, MEDIANS, SUMS, ttft_p90_least_s=min(p90s), ttft_p90_most_s=max(p90s), note=note)


def judge_rows(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each figure and each workload that warm ran: warm beside the best of all others."""
    verdicts = []
    for name in dict.fromkeys(row.workload for row in rows):
        same = [row for row in rows if row.workload == name]
        ours = [row for row in same if row.router == OURS and row.policy == WARM]
        others = [row for row in same if row not in ours]
        if ours and others:
            clear = [row for row in others if is_clear(row)]
            verdicts += [_verdict(ours[0], clear if figure is TTFT else others, figure) for figure in FIGURES]
            verdicts.append(_judge_failures(ours[0], others))
            verdicts += _compare_engine_ttft(ours[0], clear)
    return verdicts


def is_clear(row: Row) -> bool:
    """Return True if the times to first token of a row reflect the placement.

    If requests queue for the CPU in front of the router or within it, replicas see few of them at a time and look fast.
    """
    return (row.wire_s or 0.0) <= REAL_SHARE_MAX * (row.ttft_p90_s or 0.0)


def _verdict(ours: Row, others: Sequence[Row], figure: Figure) -> Row:
    if figure is TTFT and not (others and is_clear(ours)):
        base = Row(workload=ours.workload, case=JUDGED, goal=figure.name, expected=1 + WITHIN, ok=False)
        return replace(base, note="hidden by real time")
    best = (max if figure.more_is_better else min)(others, key=lambda row: _figure(row, figure))
    ratio = _figure(ours, figure) / _figure(best, figure)
    allowed = 1 - WITHIN if figure.more_is_better else 1 + WITHIN
    ok = ratio >= allowed if figure.more_is_better else ratio <= allowed
    base = Row(workload=ours.workload, router=best.router, policy=best.policy, case=JUDGED)
    return replace(base, goal=figure.name, expected=allowed, got=ratio, ok=ok)


def _judge_failures(ours: Row, others: Sequence[Row]) -> Row:
    best = min(others, key=lambda row: row.failed)
    base = Row(workload=ours.workload, router=best.router, policy=best.policy, case=JUDGED, goal=FAILED)
    most, got = best.failed, ours.failed
    return replace(base, expected=most, got=got, ok=got <= most)


def _compare_engine_ttft(ours: Row, others: Sequence[Row]) -> list[Row]:
    """Return the effect of placement alone on p90 TTFT, independent of the machine: reported, not judged."""
    known = [row for row in others if row.ttft_engine_p90_s]
    if not known or not ours.ttft_engine_p90_s:
        return []
    best = min(known, key=lambda row: row.ttft_engine_p90_s or 0.0)
    base = Row(workload=ours.workload, router=best.router, policy=best.policy, case=JUDGED, goal=AT_ENGINES)
    return [replace(base, expected=1 + WITHIN, got=ours.ttft_engine_p90_s / (best.ttft_engine_p90_s or 1.0))]


def _figure(row: Row, figure: Figure) -> float:
    """Return a figure of a row; times to first token are those at a time scale of 1."""
    if figure is TTFT and row.ttft_life_p90_s:
        return row.ttft_life_p90_s
    return figure.get_value(row)


def _seconds(value: float | None) -> str:
    return f"{value or 0:.2f} s"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "workload": lambda row: row.workload or "",
    "router": lambda row: row.router or "",
    "policy": lambda row: row.policy or "",
    "token hits": lambda row: f"{100 * (row.token_hit_rate or 0):.1f} %",
    "TTFT p50": lambda row: _seconds(row.ttft_p50_s),
    "p90": lambda row: _seconds(row.ttft_p90_s),
    "p99": lambda row: _seconds(row.ttft_p99_s),
    "p90 at engines": lambda row: _seconds(row.ttft_engine_p90_s),
    "p90 at life's speed": lambda row: _seconds(row.ttft_life_p90_s),
    "on the way": lambda row: _seconds(row.wire_s),
    "e2e p90": lambda row: f"{row.e2e_p90_s or 0:.1f} s",
    "output tokens/s": lambda row: f"{row.output_tokens_per_s or 0:,.0f}",
    "errors": lambda row: str(row.failed),
}


def table_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the race's heads, and a line for each row."""
    measured = [row for row in rows if row.goal is None]
    return [tuple(COLUMNS), *(tuple(cell(row) for cell in COLUMNS.values()) for row in measured)]


KEPT = {True: "holds", False: "missed", None: "not judged"}


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each verdict."""
    lines = []
    for row in rows:
        if row.case == JUDGED:
            if row.note:
                lines.append(f"{row.workload}: {row.goal} {row.note}: {KEPT[row.ok]}")
                continue
            got, wanted = row.got or 0.0, row.expected or 0.0
            seen = f"{got:.0f}, {wanted:.0f}" if row.goal == FAILED else f"{got:.3f} x, {wanted:.2f} x"
            of = f"{row.router} {row.policy}"
            lines.append(f"{row.workload}: {row.goal} {seen} of {of} allowed: {KEPT[row.ok]}")
    return lines
