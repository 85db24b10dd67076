"""Deadlines of first tokens: `python -m loadtest simulate --deadlines`.

The same requests of several classes (scenarios/mixed.py) are run in some mixes. `warm` runs them behind the product's
own admission, once with their deadlines and once without, which is first come, first served. They are also run with
llm-d's choice by deadlines (rules/llmd_slo.py), and with every other rule as in the race. A run makes a row for each
class: `goodput_share` of the interactive class is the share of its requests that were in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.simulate.engine.with_admission import SimulationWithAdmission
from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.policies.llmd_slo import LlmdSlo
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios.priority_mix import LOAD, MIXES, REQUESTS, mixed_classes
from loadtest.simulate.scenarios.scenario import Scenario

WARM, LLMD_SLO = "warm", LlmdSlo.name
TOLD, UNTOLD, PLAIN = "deadlines", "first come", "no queue"
INTERACTIVE, BATCH = "interactive", "batch"
TIMES_MIN = 1.25  # least ratio of requests in time, with deadlines over first come, first served
TOKENS_MIN = 0.9  # least ratio of output tokens a second, with deadlines over first come, first served


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """The requests of one mix, load and seed, and their entrants: (policy, case) each."""

    mix: str
    seed: int
    entrants: tuple[tuple[str, str], ...]
    requests: int = REQUESTS
    load: str = LOAD


def entrants_of(policies: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return `warm` with deadlines and without, and these policies. The default is all policies except bounds, which no
    router can reach."""
    names = policies or [LLMD_SLO, *(name for name, row in ROWS.items() if not row.bound)]
    return ((WARM, TOLD), (WARM, UNTOLD), *((name, PLAIN) for name in names if name != WARM))


def run_deadlines(job: DeadlineJob) -> list[Row]:
    """Return two rows for each entrant, in their order: one for each class."""
    scenario, within_s = mixed_classes(job.mix, job.seed, job.requests, job.load)
    rows = list[Row]()
    with freeze_objects():
        for policy, case in job.entrants:
            result = _run(scenario, within_s, policy, case)
            for name in (INTERACTIVE, BATCH):
                sent = [each for each in result.sent if (each.turn.number in within_s) is (name == INTERACTIVE)]
                row = row_of(scenario, Result(sent, result.duration_s, result.computed_tokens))
                row.policy, row.case, row.seed = policy, f"{case}, {name}, {job.mix}", job.seed
                row.load_name = job.load
                if name == INTERACTIVE:  # each request by its own deadline
                    times = [(each.ttft_s, within_s[each.turn.number]) for each in sent if not each.failure]
                    in_time = sum(ttft_s is not None and ttft_s <= limit_s for ttft_s, limit_s in times)
                    row.goodput_share = in_time / max(1, len(sent))
                rows.append(row)
    return rows


def _run(scenario: Scenario, within_s: Mapping[int, float], policy: str, case: str) -> Result:
    workload, setting = scenario.workload, scenario.setting
    if policy == LLMD_SLO:
        return Simulation(workload, setting, lambda: LlmdSlo(within_s)).run()
    make = ROWS[policy].make
    if case == PLAIN:
        return Simulation(workload, replace(setting, foreknowledge=ROWS[policy].foreknowledge), make).run()
    return SimulationWithAdmission(workload, setting, make, within_s if case == TOLD else {}).run()


def judge(rows: Sequence[Row]) -> list[Row]:
    """Judge the rows at LOAD against these claims.

    - Each mix has more requests in time than first come, first served, and about the same output tokens a second.
    - No request waits while a replica is idle.
    - Over all mixes, more requests are in time than with any other rule.
    """
    grouped = _group_rows([row for row in rows if row.load_name == LOAD])
    mixes = [mix for mix in MIXES if (WARM, TOLD, mix) in grouped and (WARM, UNTOLD, mix) in grouped]
    judged = []
    for mix in mixes:
        told, untold = (grouped[WARM, case, mix] for case in (TOLD, UNTOLD))
        times = _share(told[INTERACTIVE]) / max(1e-9, _share(untold[INTERACTIVE]))
        goal = f"{mix}: in time, over first come, first served: at least"
        judged.append(_make_goal_row(goal, TIMES_MIN, times, ok=times >= TIMES_MIN))
        tokens = _tokens_per_s(told) / max(1e-9, _tokens_per_s(untold))
        goal = f"{mix}: output tokens a second, over the same: at least"
        judged.append(_make_goal_row(goal, TOKENS_MIN, tokens, ok=tokens >= TOKENS_MIN))
        idle = sum(row.held_while_idle or 0 for row in told[INTERACTIVE] + told[BATCH])
        goal = f"{mix}: requests that waited beside an idle replica, the mean backlog below 1: at most"
        judged.append(_make_goal_row(goal, 0, idle, ok=not idle))
    others = {policy: _over_mixes(grouped, policy, PLAIN, mixes) for policy, case, _ in grouped if case == PLAIN}
    if mixes and others:
        best, ours = max(others, key=others.__getitem__), _over_mixes(grouped, WARM, TOLD, mixes)
        goal = f"in time, mean of all mixes: above {best}, the best other"
        judged.append(_make_goal_row(goal, others[best], ours, ok=ours > others[best]))
    return judged


def _make_goal_row(goal: str, expected: float, got: float, *, ok: bool) -> Row:
    return Row(workload="mixed_classes", policy=WARM, goal=goal, expected=expected, got=got, ok=ok)


_Groups = dict[tuple[str, str, str], dict[str, list[Row]]]
"""(policy, case, mix) -> class -> rows of all seeds."""


def _group_rows(rows: Sequence[Row]) -> _Groups:
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


def _tokens_per_s(group: dict[str, list[Row]]) -> float:
    return _mean(group[INTERACTIVE], "output_tokens_per_s") + _mean(group[BATCH], "output_tokens_per_s")


HEADS = ("policy", "in time %", "TTFT p90 s", "batch: answered %", "TTFT p90 s", "e2e p90 s", "tokens/s")


def lines(rows: Sequence[Row], mix: str) -> list[tuple[str, ...]]:
    """Return the table of one load and mix under HEADS: a line for each policy, most requests in time first. Figures
    are means over seeds."""
    made = []
    grouped = {key: group for key, group in _group_rows(rows).items() if key[2] == mix}
    for (policy, case, _), group in sorted(grouped.items(), key=lambda each: -_share(each[1][INTERACTIVE])):
        people, batch = group[INTERACTIVE], group[BATCH]
        answered = 1 - (_mean(batch, "errors") + _mean(batch, "rejected")) / _mean(batch, "requests")
        figures = [100 * _share(people), _mean(people, "ttft_p90_s"), 100 * answered]
        figures += [_mean(batch, "ttft_p90_s"), _mean(batch, "e2e_p90_s"), _tokens_per_s(group)]
        forms = ("{:.1f}", "{:.2f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.0f}")
        cells = [form.format(figure) for form, figure in zip(forms, figures, strict=True)]
        made.append((policy if case == PLAIN else f"{policy}, {case}", *cells))
    return made


def print_deadlines(console: Console, rows: Sequence[Row]) -> None:
    """Print the tables and the claims."""
    for load in dict.fromkeys(row.load_name or "" for row in rows):
        for mix in MIXES:
            title = f"{mix}: first tokens by their deadlines, at {load} times what is sustained"
            found = lines([row for row in rows if row.load_name == load], mix)
            console.print(build_table(HEADS, found, title, left={"policy"}))
    for row in judge(rows):
        said = f"{row.goal} {row.expected:.3g}: got {row.got:.3g}, {'seen' if row.ok else 'missed'}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
