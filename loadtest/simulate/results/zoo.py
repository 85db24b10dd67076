"""Engines of the zoo in virtual time: `python -m loadtest simulate --zoo`.

Hits: a fleet of each kind runs the same requests twice. One run has its own metrics pages; the other has those of the
dense engine, in which series have their plain meaning. Receipts predicted a share of the prompt tokens that its engines
found cached, and some tokens that receipts predicted were not found. Both shares with its own pages must be within
POINTS_MAX of those with a right page, in percentage points.

Near saturation a run depends on chance: one other first placement changes all that follow. So tokens are summed over
several seeds.

Shares: one replica of each kind runs beside dense ones, behind the product's own admission. No replica may get less
than SHARE_MIN of its equal part of the requests, for any count of waiting requests on its page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.fake_engine.zoo.member import Member
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.simulate.engine.with_admission import SimulationWithAdmission
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios import zoo
from loadtest.simulate.scenarios.scenario import Scenario
from router.core.placement.policies import POLICIES

REQUESTS, LOADS, SEEDS = 800, ("below", "at"), (1, 2, 3, 4, 5)
POINTS_MAX, SHARE_MIN = 3.0, 0.5
PREDICTED, UNFOUND, SHARE = "predicted hits", "predicted but not found", "least share"
BY_EVENTS = ", by events"


@dataclass(frozen=True, slots=True)
class ZooJob:
    """One member at one load, on several seeds."""

    name: str
    load: str
    seeds: tuple[int, ...] = SEEDS
    requests: int = REQUESTS


def run_zoo(job: ZooJob) -> list[Row]:
    """Return the member's rows: predicted hits, tokens predicted and not found (`expected`: with a right page), and the
    least share of a replica."""
    return rows_of_member(MEMBERS[job.name], job)


def rows_of_member(member: Member, job: ZooJob) -> list[Row]:
    """Return the rows of `run_zoo` for any member."""
    with freeze_objects():
        shown = dict[str, tuple[float, float]]()
        for events in (False, True):
            right, own = (
                measure_predictions(
                    zoo.alike(member, job.load, seed, job.requests, right_page=page, events=events)
                    for seed in job.seeds
                )
                for page in (True, False)
            )
            more = BY_EVENTS if events else ""
            shown |= {PREDICTED + more: (right[0], own[0]), UNFOUND + more: (right[1], own[1])}
        among = (zoo.one_among(member, job.load, seed, job.requests) for seed in job.seeds)
        shown[SHARE] = SHARE_MIN, min(map(least_share, among))
    return [
        Row(
            workload=member.name,
            policy="warm",
            case=case,
            load_name=job.load,
            seeds=len(job.seeds),
            replicas=zoo.REPLICAS,
            requests=job.requests,
            expected=expected,
            got=got,
            ok=got >= expected if case == SHARE else abs(got - expected) <= POINTS_MAX / 100,
        )
        for case, (expected, got) in shown.items()
    ]


def measure_predictions(scenarios: Iterable[Scenario]) -> tuple[float, float]:
    """Return two parts of all prompt tokens that engines found cached: the correctly predicted tokens, and the tokens
    that were predicted and not found."""
    runs = (Simulation(each.workload, each.setting, POLICIES["warm"]).run() for each in scenarios)
    found = predicted = unfound = 0
    for sent in chain.from_iterable(run.sent for run in runs):
        if sent.lease is None or sent.failure:
            continue
        said, cached = sent.lease.receipt.predicted_cached_tokens, sent.cached_tokens
        found += cached
        predicted += min(said, cached)
        unfound += max(0, said - cached)
    if not found:
        raise ValueError("engines found no cached tokens, so there are no predictions to check")
    return predicted / found, unfound / found


def least_share(scenario: Scenario) -> float:
    """Return the requests of the replica with the fewest, as a part of an equal share."""
    result = SimulationWithAdmission(scenario.workload, scenario.setting, POLICIES["warm"], {}).run()
    counts = Counter(sent.lease.replica for sent in result.sent if sent.lease is not None)
    names = [scenario.setting.name(number) for number in range(scenario.setting.replicas)]
    return min(counts[name] for name in names) * len(names) / len(result.sent)


PAIRS = (PREDICTED, UNFOUND, PREDICTED + BY_EVENTS, UNFOUND + BY_EVENTS)
HEADS = ("engine", "load", *(f"{case}, %" for case in PAIRS), f"{SHARE}, %", "verdict")


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line of the table for each member and load, under HEADS; the figure with a right page is in brackets."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.workload or "", row.load_name or ""), {})[row.case or ""] = row
    return [
        (
            *(name, load),
            *(f"{_percent(cases[case].got)} ({_percent(cases[case].expected)})" for case in PAIRS),
            _percent(cases[SHARE].got),
            "ok" if all(row.ok for row in cases.values()) else "missed",
        )
        for (name, load), cases in found.items()
    ]


def _percent(part: float | None) -> str:
    return f"{100 * (part or 0.0):.1f}"


def print_zoo(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    console.print(
        build_table(HEADS, lines(rows), "engines of the zoo", left={"engine", "load", "verdict"}, no_wrap=False)
    )
