"""Deadlines of first tokens: `python -m loadtest simulate --deadlines`.

The same requests of two classes (scenarios/mixed.py) are asked of `warm` behind the product's own admission, once with
their deadlines and once without, which is first come, first served; and of every other rule as the race has it. A run
makes a row for each class: `goodput_share` of the interactive one is the share of its requests that were in time.
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
from loadtest.simulate.scenarios.mixed import LOAD, REQUESTS, mixed_classes
from loadtest.simulate.world.admitted import AdmittedWorld
from loadtest.simulate.world.world import Result, World

WARM = "warm"
TOLD, UNTOLD, PLAIN = "deadlines", "first come", "no queue"
INTERACTIVE, BATCH = "interactive", "batch"
TIMES_MIN = 1.25  # requests in time with deadlines, over those of first come, first served: at least


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """The requests of one seed, and who is asked them: (policy, case) each."""

    seed: int
    entrants: tuple[tuple[str, str], ...]
    requests: int = REQUESTS


def entrants_of(policies: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`warm` with deadlines and without, and these policies; bounds are left out, which no router can reach."""
    names = policies or [name for name, row in ROWS.items() if not row.bound]
    return ((WARM, TOLD), (WARM, UNTOLD), *((name, PLAIN) for name in names if name != WARM))


def run_deadlines(job: DeadlineJob) -> list[Row]:
    """Two rows for each entrant, in their order: one for each class."""
    scenario, within_s = mixed_classes(job.seed, job.requests)
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
                row.policy, row.case, row.seed, row.load_name = policy, f"{case}, {name}", job.seed, LOAD
                rows.append(row)
    return rows


def judge(rows: Sequence[Row]) -> list[Row]:
    """What must be seen: more requests in time than first come, first served has, and more than any other rule."""
    shares = {(policy, case): of_class[INTERACTIVE] for (policy, case), of_class in _grouped(rows).items()}
    if (WARM, TOLD) not in shares or (WARM, UNTOLD) not in shares:
        return []
    ours, untold = _share(shares[WARM, TOLD]), _share(shares[WARM, UNTOLD])
    others = {policy: _share(group) for (policy, case), group in shares.items() if case == PLAIN}
    times = ours / untold if untold else float("inf")
    judged = [_judged("in time, over first come, first served: at least", TIMES_MIN, times, ok=times >= TIMES_MIN)]
    if others:
        best = max(others, key=others.__getitem__)
        judged.append(_judged(f"in time: above {best}, the best other", others[best], ours, ok=ours > others[best]))
    return judged


def _judged(goal: str, expected: float, got: float, *, ok: bool) -> Row:
    return Row(workload="mixed_classes", policy=WARM, goal=goal, expected=expected, got=got, ok=ok)


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """(policy, case) -> class -> rows of all seeds."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row.case is not None and row.goal is None:
            case, _, name = row.case.partition(", ")
            found.setdefault((row.policy or "", case), {}).setdefault(name, []).append(row)
    return found


def _share(rows: Sequence[Row]) -> float:
    return fmean(row.goodput_share or 0.0 for row in rows)


def _mean(rows: Sequence[Row], field: str) -> float:
    return fmean(getattr(row, field) or 0.0 for row in rows)


HEADS = (
    "policy",
    "requests",
    "in time %",
    "TTFT p50 s",
    "p90 s",
    "batch answered %",
    "TTFT p50 s",
    "p90 s",
    "tokens/s",
)


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line of the table for each policy, most requests in time first, under HEADS: means over seeds."""
    made = []
    for (policy, case), of_class in _grouped(rows).items():
        people, batch = of_class[INTERACTIVE], of_class[BATCH]
        asked, failed = _mean(batch, "requests"), _mean(batch, "errors") + _mean(batch, "rejected")
        tokens = _mean(people, "output_tokens_per_s") + _mean(batch, "output_tokens_per_s")
        times = [_mean(group, field) for group in (people, batch) for field in ("ttft_p50_s", "ttft_p90_s")]
        cells = [f"{100 * _share(people):.1f}", f"{times[0]:.2f}", f"{times[1]:.2f}"]
        cells += [f"{100 * (1 - failed / asked):.1f}", f"{times[2]:.1f}", f"{times[3]:.1f}", f"{tokens:.0f}"]
        name = policy if case == PLAIN else f"{policy}, {case}"
        made.append((name, f"{_mean(people, 'requests') + asked:.0f}", *cells))
    return sorted(made, key=lambda cells: -float(cells[2]))


def print_deadlines(console: Console, rows: Sequence[Row]) -> None:
    """The table, and what must be seen."""
    made = drawn(HEADS, (), f"first tokens within 1 s, at {LOAD} times what is sustained", left={"policy"})
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
    for row in judge(rows):
        said = f"{row.goal} {row.expected:.3g}: got {row.got:.3g}, {'seen' if row.ok else 'missed'}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
