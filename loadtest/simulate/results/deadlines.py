"""Deadlines of first tokens: `python -m loadtest simulate --deadlines`.

The same requests of two classes (scenarios/mixed.py), in two mixes, are asked of `warm` behind the product's own
admission, once with their deadlines and once without, which is first come, first served; and of every other rule as the
race has it. A run makes a row for each class: `goodput_share` of the interactive one is the share of its requests that
were in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console

from loadtest.common.report import Row, drawn
from loadtest.simulate.results.figures import row_of
from loadtest.simulate.results.race import settled
from loadtest.simulate.rules import ROWS
from loadtest.simulate.scenarios.mixed import LOAD, MIXES, REQUESTS, mixed_classes
from loadtest.simulate.world.admitted import AdmittedWorld
from loadtest.simulate.world.world import Result, World

WARM = "warm"
TOLD, UNTOLD, PLAIN = "deadlines", "first come", "no queue"
INTERACTIVE, BATCH = "interactive", "batch"
TIMES_MIN = 1.25  # requests in time with deadlines, over those of first come, first served: at least


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """The requests of one mix and seed, and who is asked them: (policy, case) each."""

    mix: str
    seed: int
    entrants: tuple[tuple[str, str], ...]
    requests: int = REQUESTS


def entrants_of(policies: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`warm` with deadlines and without, and these policies; bounds are left out, which no router can reach."""
    names = policies or [name for name, row in ROWS.items() if not row.bound]
    return ((WARM, TOLD), (WARM, UNTOLD), *((name, PLAIN) for name in names if name != WARM))


def run_deadlines(job: DeadlineJob) -> list[Row]:
    """Two rows for each entrant, in their order: one for each class."""
    scenario, within_s = mixed_classes(job.mix, job.seed, job.requests)
    rows = list[Row]()
    with settled():
        for policy, case in job.entrants:
            make, workload, setting = ROWS[policy].make, scenario.workload, scenario.setting
            if case == PLAIN:
                result = World(workload, setting, make).run()
            else:
                result = AdmittedWorld(workload, setting, make, within_s if case == TOLD else {}).run()
            for name in (INTERACTIVE, BATCH):
                sent = [each for each in result.sent if (each.turn.number in within_s) is (name == INTERACTIVE)]
                part = Result(sent, result.duration_s, result.computed_tokens)
                row = row_of(scenario, part)
                row.policy, row.case, row.seed, row.load_name = policy, f"{case}, {name}, {job.mix}", job.seed, LOAD
                rows.append(row)
    return rows


def judge(rows: Sequence[Row]) -> list[Row]:
    """What must be seen: in each mix more requests in time than first come, first served has, and over all mixes more
    than any other rule has."""
    grouped = _grouped(rows)
    mixes = [mix for mix in MIXES if (WARM, TOLD, mix) in grouped and (WARM, UNTOLD, mix) in grouped]
    judged = []
    for mix in mixes:
        ours, untold = (_share(grouped[WARM, case, mix][INTERACTIVE]) for case in (TOLD, UNTOLD))
        times = ours / untold if untold else float("inf")
        goal = f"{mix}: in time, over first come, first served: at least"
        judged.append(_judged(goal, TIMES_MIN, times, ok=times >= TIMES_MIN))
    others = {policy: _over_mixes(grouped, policy, PLAIN, mixes) for policy, case, _ in grouped if case == PLAIN}
    if mixes and others:
        best, ours = max(others, key=others.__getitem__), _over_mixes(grouped, WARM, TOLD, mixes)
        goal = f"in time, mean of all mixes: above {best}, the best other"
        judged.append(_judged(goal, others[best], ours, ok=ours > others[best]))
    return judged


def _judged(goal: str, expected: float, got: float, *, ok: bool) -> Row:
    return Row(workload="mixed_classes", policy=WARM, goal=goal, expected=expected, got=got, ok=ok)


_Groups = dict[tuple[str, str, str], dict[str, list[Row]]]
"""(policy, case, mix) -> class -> rows of all seeds."""


def _grouped(rows: Sequence[Row]) -> _Groups:
    found: _Groups = {}
    for row in rows:
        if row.case is not None and row.goal is None:
            case, name, mix = row.case.split(", ")
            found.setdefault((row.policy or "", case, mix), {}).setdefault(name, []).append(row)
    return found


def _over_mixes(grouped: _Groups, policy: str, case: str, mixes: Sequence[str]) -> float:
    return fmean(_share(grouped[policy, case, mix][INTERACTIVE]) for mix in mixes)


def _share(rows: Sequence[Row]) -> float:
    return fmean(row.goodput_share or 0.0 for row in rows)


def _mean(rows: Sequence[Row], field: str) -> float:
    return fmean(getattr(row, field) or 0.0 for row in rows)


def _cells(people: Sequence[Row], batch: Sequence[Row]) -> list[str]:
    """In time in %, TTFT p90 in s; of batches answered in %, TTFT p90 in s; output tokens a second."""
    failed = _mean(batch, "errors") + _mean(batch, "rejected")
    tokens = _mean(people, "output_tokens_per_s") + _mean(batch, "output_tokens_per_s")
    answered = 1 - failed / _mean(batch, "requests")
    times = (_mean(people, "ttft_p90_s"), _mean(batch, "ttft_p90_s"))
    shares = 100 * _share(people), 100 * answered
    return [f"{shares[0]:.1f}", f"{times[0]:.2f}", f"{shares[1]:.1f}", f"{times[1]:.1f}", f"{tokens:.0f}"]


OF_MIX = ("in time %", "p90 s", "batch %", "p90 s", "tokens/s")
HEADS = ("policy", *(f"{mix}: {head}" for mix in MIXES for head in OF_MIX))


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line of the table for each policy, most requests in time first, under HEADS: means over seeds."""
    grouped = _grouped(rows)
    mixes = [mix for mix in MIXES if any(each == mix for _, _, each in grouped)]
    who = dict.fromkeys((policy, case) for policy, case, _ in grouped)
    made = []
    for policy, case in sorted(who, key=lambda each: -_over_mixes(grouped, each[0], each[1], mixes)):
        groups = [grouped[policy, case, mix] for mix in mixes]
        cells = [cell for group in groups for cell in _cells(group[INTERACTIVE], group[BATCH])]
        made.append((policy if case == PLAIN else f"{policy}, {case}", *cells))
    return made


def print_deadlines(console: Console, rows: Sequence[Row]) -> None:
    """The table, and what must be seen."""
    made = drawn(
        HEADS, (), f"first tokens within 1 s, at {LOAD} times what is sustained", left={"policy"}, no_wrap=False
    )
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
    for row in judge(rows):
        said = f"{row.goal} {row.expected:.3g}: got {row.got:.3g}, {'seen' if row.ok else 'missed'}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
