"""Promises of the race's figures, tables and pictures: they say what happened, also of what went wrong."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from loadtest.common.report import Row
from loadtest.common.traces import Request
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import SimRequest, open_workload, prepare
from loadtest.simulate.engine.world import Result, SimulatedRequest
from loadtest.simulate.results.charts import svg
from loadtest.simulate.results.metrics import over_seeds, row_of
from loadtest.simulate.results.tables import grids, markdown, print_grids, standing_lines, standings
from loadtest.simulate.scenarios.registry import Scenario
from router.core.fleet.lease import Lease, LeaseMeasurements, LeasePrompt
from router.core.types.placements import Confidence, PlacementReason, Receipt

BLOCK = 16
TIMEOUT_S = 100.0


def turns(count: int) -> list[SimRequest]:
    """Requests of 1,000 prompt tokens and 10 of answer."""
    requests = [Request(float(i), 0.0, 1_000, 10, "test", 1_000, ((i, 1),)) for i in range(count)]
    return prepare([(str(i), request) for i, request in enumerate(requests)], BLOCK, output_tokens_max=100)


def sent(
    turn: SimRequest, replica: str, ttft_s: float | None, cached: int = 0, failure: str = "", *, replay: bool = False
) -> SimulatedRequest:
    """What became of a turn; its answer takes a second more."""
    receipt = Receipt(replica, "made_up", PlacementReason.POLICY, Confidence.ESTIMATED, turn.prompt_tokens, cached)
    prompt, measurements = LeasePrompt([], 1_010), LeaseMeasurements()
    lease = Lease(turn.number, replica, receipt, turn.at_s, "sim", True, prompt, 1_000, cached, 1.0, measurements, 10)
    e2e_s = TIMEOUT_S if ttft_s is None else ttft_s + 1
    return SimulatedRequest(turn, turn.at_s, 0, None, replay, lease, ttft_s, e2e_s, cached, failure=failure)


def scenario(made: list[SimRequest], warm_up: int = 0) -> Scenario:
    """Whose clients want their first token within 2 s."""
    workload = open_workload("made_up", made, BLOCK, warm_up=warm_up)
    return Scenario(workload, ClusterSpec(replicas=2, timeout_s=TIMEOUT_S), 1.0, "requests/s", 2.0)


def test_figures_are_those_of_the_requests() -> None:
    """Percentiles, goodput, hit rates split by replays, imbalance and tokens a second, computed by hand."""
    made = turns(4)
    result = Result(
        [
            sent(made[0], "a", 1.0),
            sent(made[1], "a", 2.0, cached=500),
            sent(made[2], "b", 3.0, cached=900, replay=True),
            sent(made[3], "b", 0.5, cached=100),
        ],
        20.0,
        {"a": 1_500, "b": 1_000},
        preemptions=3,
    )
    row = row_of(scenario(made), result)

    assert (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s) == (1.0, 3.0, 3.0)
    assert (row.e2e_p50_s, row.e2e_p90_s, row.e2e_p99_s) == (2.0, 4.0, 4.0)
    assert (row.tpot_p50_ms, row.tpot_p90_ms) == (pytest.approx(1e3 / 9), pytest.approx(1e3 / 9))  # 9 after the first
    assert row.goodput_share == 0.75  # 2.0 s is within 2 s
    assert row.goodput == pytest.approx(3 / 20)
    assert row.output_tokens_per_s == pytest.approx(40 / 20)
    assert row.token_hit_rate == pytest.approx(0.375)
    assert row.replay_hit_rate == pytest.approx(0.225)
    assert row.genuine_hit_rate == pytest.approx(0.15)
    assert row.imbalance == pytest.approx(1_500 / 1_250)
    assert (row.requests, row.errors, row.rejected, row.preemptions) == (4, 0, 0, 3)


def test_whatever_fails_took_the_whole_timeout() -> None:
    """Rejected, given up or broken after its first token: the timeout in every percentile, and never in time; a refusal
    for load is a rejection, all else an error."""
    made = turns(4)
    result = Result(
        [
            sent(made[0], "a", 0.1),
            sent(made[1], "a", None, failure="rejected"),
            sent(made[2], "a", None, failure="timeout"),
            sent(made[3], "b", 0.2, failure="broken"),
        ],
        TIMEOUT_S,
        {"a": 0, "b": 0},
    )
    row = row_of(scenario(made), result)

    assert (row.ttft_p50_s, row.ttft_p90_s, row.e2e_p99_s) == (TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
    assert row.goodput_share == 0.25
    assert (row.errors, row.rejected) == (2, 1)
    assert row.errors_by_kind == {"rejected": 1, "timeout": 1, "broken": 1}
    assert row.output_tokens_per_s == pytest.approx(10 / TIMEOUT_S)


def test_warm_up_is_not_counted() -> None:
    """The first requests are in no figure, and neither is the time before the first that counts."""
    made = turns(3)
    outcomes = [sent(made[0], "a", 50.0), sent(made[1], "a", 1.0, cached=800), sent(made[2], "b", 1.0, cached=800)]
    row = row_of(scenario(made, warm_up=1), Result(outcomes, 11.0, {"a": 0, "b": 0}))

    assert (row.requests, row.ttft_p99_s, row.token_hit_rate) == (2, 1.0, pytest.approx(0.8))
    assert row.duration_s == pytest.approx(10.0)


def test_nothing_sent_has_no_figures() -> None:
    """Without requests there are no shares and percentiles, not zeros."""
    row = row_of(scenario(turns(1), warm_up=1), Result([sent(turns(1)[0], "a", 1.0)], 1.0, {"a": 1, "b": 0}))

    assert (row.requests, row.ttft_p90_s, row.goodput_share, row.token_hit_rate) == (0, None, None, None)


def runs(policy: str, p90s: list[float], load: str = "at", *, bound: bool = False) -> list[Row]:
    """One row a seed."""
    return [
        Row(
            workload="w",
            policy=policy,
            load_name=load,
            seed=seed,
            bound=bound or None,
            requests=10,
            ttft_p90_s=p90,
            e2e_p90_s=10 * p90,
            tpot_p90_ms=25.0,
            output_tokens_per_s=1_000 / p90,
            goodput_share=0.9,
            token_hit_rate=0.5,
        )
        for seed, p90 in enumerate(p90s, 1)
    ]


def test_over_seeds_is_the_median_and_its_spread() -> None:
    """One row a policy and load: the middle of the seeds with the least and the most, and all requests of them."""
    (merged,) = over_seeds(runs("warm", [3.0, 1.0, 2.0]))

    assert (merged.seed, merged.seeds, merged.requests) == (None, 3, 30)
    assert (merged.ttft_p90_least_s, merged.ttft_p90_s, merged.ttft_p90_most_s) == (1.0, 2.0, 3.0)


def test_table_orders_by_the_mean_and_marks_the_best() -> None:
    """Bounds stand above and are never the best; a policy that ran on part of the workloads has no mean."""
    rows = [*runs("ideal", [0.1], bound=True), *runs("slow", [8.0]), *runs("warm", [2.0]), *runs("late", [4.0])]
    rows += [replace(row, workload="v") for row in rows if row.policy != "late"]
    grid, e2e, output = grids(over_seeds(rows))

    assert grid.heads == ("w", "v", "mean, warm = 1")
    assert [name for name, _ in grid.lines] == ["ideal (bound)", "warm", "late", "slow"]
    assert [cells[2].text for _, cells in grid.lines] == ["0.05 x", "1.00 x", "-", "4.00 x"]
    assert [cells[0].best for _, cells in grid.lines] == [False, True, False, False]
    assert grid.lines[3][1][0].text == "8.00 s, 90 %"
    assert (e2e.shows, e2e.lines[1][1][0].text) == ("p90 end-to-end, p90 time per output token", "20.0 s, 25 ms")
    assert [name for name, _ in output.lines] == ["ideal (bound)", "warm", "late", "slow"]
    assert [(cells[0].text, cells[0].best) for _, cells in output.lines][:2] == [("10,000", False), ("500", True)]
    assert "| `warm` | **2.00 s, 90 %** | **2.00 s, 90 %** | 1.00 x |" in markdown(over_seeds(rows))
    assert "| `ideal` (bound) | 0.10 s, 90 % |" in markdown(over_seeds(rows))


def test_standings_are_over_everything() -> None:
    """The geometric mean over workloads, loads and seeds, of the policies that ran in all of them, and in how many
    workloads and loads each is near the best that can be built."""
    rows = [*runs("ideal", [0.5, 0.5], bound=True), *runs("warm", [1.0, 4.0]), *runs("best", [1.0, 1.0])]
    found = standings([*rows, *runs("late", [0.1]), *over_seeds(rows)])

    assert [(each.policy, each.p90_s) for each in found] == [
        ("ideal", 0.5),
        ("best", 1.0),
        ("warm", pytest.approx(2.0)),
    ]
    elsewhere = [replace(row, workload="v", ttft_p90_s=1.02 if row.policy == "warm" else 1.0) for row in rows]
    ideal, warm = standing_lines(rows)[0], standing_lines(rows)[2]
    assert ideal == ("ideal (bound)", "0.50 s", "0.25 x", "5.00 s", "0.25 x", "4.00 x", "90.0 %", "-")
    assert warm == ("warm", "2.00 s", "1.00 x", "20.0 s", "1.00 x", "1.00 x", "90.0 %", "0 of 1")
    assert [line[-1] for line in standing_lines([*rows, *elsewhere])] == ["-", "2 of 2", "1 of 2"]


def test_a_narrow_terminal_gets_every_column() -> None:
    """Columns that do not fit go into a further table, none is lost."""
    rows = [replace(row, workload=f"workload_{i}") for i in range(6) for row in runs("warm", [1.0 + i])]
    text = io.StringIO()
    print_grids(Console(file=text, width=60), over_seeds(rows))

    assert all(f"workload_{i}" in text.getvalue() and f"{1.0 + i:.2f} s" in text.getvalue() for i in range(6))
    assert max(map(len, text.getvalue().splitlines())) <= 60


def test_pictures_are_svg_with_every_policy() -> None:
    """A point for each policy at the middle load, a line over all loads, and no two names on top of each other."""
    rows = [
        row
        for i, load in enumerate(("below", "at", "above"))
        for name in ("warm", "round_robin", "<odd>")
        for row in runs(name, [1.0 + i], load)
    ]
    root = ET.fromstring(svg(over_seeds(rows), "A & B"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [(each.text or "", each.get("y")) for each in root.iter(f"{space}text")]

    assert len(list(root.iter(f"{space}circle"))) == 3 + 9
    assert len(list(root.iter(f"{space}polyline"))) == 3
    for label in ("warm, 2.00 s", "round_robin, 2.00 s", "<odd>, 2.00 s", "warm, 3.00 s"):
        assert label in [text for text, _ in texts]
    places = [y for text, y in texts if text.endswith(", 2.00 s")]
    assert len(set(places)) == len(places) == 3
