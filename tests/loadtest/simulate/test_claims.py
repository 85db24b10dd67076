"""Promises of the race's judge: what must be seen of `warm` is computed from rows, passes where it holds, and says what
is missed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import NormalDist

import pytest

from loadtest.common.report import Row
from loadtest.simulate.results import baseline
from loadtest.simulate.results.claims import (
    BASELINE,
    E2E,
    FAILED,
    FIGURES,
    GOODPUT,
    HELD,
    MEAN,
    OUTPUT,
    P90,
    P99,
    TTFT,
    ClaimsError,
    Figure,
    beaten_bounds,
    compute_mean_interval,
    judge,
    list_missed,
)

SEEDS = range(6, 16)


def rows(
    policy: str,
    p90_s: float,
    workload: str = "w",
    swing: float = 0.0,
    *,
    load: str = "at",
    bound: bool = False,
    **more: float,
) -> list[Row]:
    """One a seed; every other seed is better by `swing`, and every other worse, in each figure that is not given."""
    made = []
    for seed in SEEDS:
        ratio = p90_s * (1 + (swing if seed % 2 else -swing))
        row = Row(workload=workload, load_name=load, policy=policy, seed=seed, bound=bound or None)
        row.ttft_p90_s, row.e2e_p90_s, row.output_tokens_per_s = ratio, 10 * ratio, 1_000 / ratio
        row.ttft_p99_s, row.goodput_share = 2 * ratio, 0.9
        for name, value in more.items():
            setattr(row, name, value)
        made.append(row)
    return made


def yardsticks(factor: float = 5.0, workload: str = "w", load: str = "at") -> list[Row]:
    """Those that nobody is to be worse than, far behind."""
    return [row for name in ("round_robin", "least_loaded") for row in rows(name, factor, workload, load=load)]


def verdicts(*groups: list[Row]) -> dict[str, Row]:
    """By goal, of one workload and load; yardsticks are added."""
    judged = judge([*(row for group in groups for row in group), *yardsticks()])
    return {row.goal or "": row for row in judged}


def test_all_holds() -> None:
    """Better than all rivals: nothing is missed, each figure is held against each yardstick, and what is only told is
    not judged."""
    judged = judge([*rows("warm", 1.0), *yardsticks(), *rows("other", 1.2)])
    told = {row.goal for row in judged if row.ok is None}

    assert list_missed(judged) == []
    assert told == {GOODPUT, MEAN}
    assert {(row.goal, row.policy) for row in judged if row.ok and "never" in (row.goal or "")} == {
        (figure.never, name) for figure in FIGURES for name in ("round_robin", "least_loaded")
    }


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(("ratio", "ok"), [(1.04, True), (1.06, False), (0.5, True)])
def test_within_five_percent_of_the_best_in_each_figure(figure: Figure, ratio: float, ok: bool) -> None:
    """It counts who is best there in that figure, not who is best on the mean or in another one."""
    ours = 100 / ratio if figure.more_is_better else 100 * ratio
    judged = verdicts(
        rows("warm", 0.01, **{figure.field: ours}), rows("best", 9.0, **{figure.field: 100.0}), rows("other", 0.02)
    )
    claim = judged[figure.name]
    if claim.policy == "best":
        assert (claim.ok, claim.got) == (ok, pytest.approx(ours / 100))
    else:
        assert (figure, claim.policy) in {(TTFT, "other"), (E2E, "other"), (OUTPUT, "other")}
        assert not claim.ok


def test_inside_the_paired_interval_is_no_loss() -> None:
    """A tenth worse with a swing of a half over seeds is chance; the same tenth on every seed is not."""
    swinging = verdicts(rows("warm", 1.1, swing=0.5), rows("other", 1.0))
    steady = verdicts(rows("warm", 1.1, swing=0.5), rows("other", 1.0, swing=0.5))

    assert all(swinging[figure.name].ok for figure in FIGURES)
    assert not any(steady[figure.name].ok for figure in FIGURES), "pairs swing together"
    few = [
        row for row in [*rows("warm", 1.3, swing=0.5), *rows("other", 1.0), *yardsticks()] if row.seed in range(6, 10)
    ]
    assert not next(row for row in judge(few) if row.goal == P90).ok, "four pairs forgive nothing"


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_goodput_is_told_in_points_and_not_judged(share: float) -> None:
    """Points of share to the best, whatever they are."""
    judged = judge([*rows("warm", 1.0, goodput_share=share), *yardsticks()])
    claim = next(row for row in judged if row.goal == GOODPUT)

    assert (claim.ok, claim.got) == (None, pytest.approx(share - 0.9))
    assert list_missed(judged) == []


def test_bounds_and_own_variants_are_no_rivals() -> None:
    """Who cannot be built, and ourselves under another name, decide nothing."""
    claim = verdicts(rows("warm", 1.0), rows("ideal", 0.1, bound=True), rows("warm_hint", 0.2), rows("other", 2.0))[P90]

    assert claim.policy == "other"


@pytest.mark.parametrize(("ideal_s", "said"), [(0.5, 0), (1.02, 0), (1.2, 1)])
def test_a_bound_that_is_beaten_is_said(ideal_s: float, said: int) -> None:
    """What somebody is better than bounds nothing."""
    lines = beaten_bounds([*rows("warm", 1.0), *rows("other", 2.0), *rows("ideal", ideal_s, bound=True)])

    assert len(lines) == said
    assert all("ideal" in line and "1.20 x" in line and "warm" in line for line in lines)


def test_the_mean_is_told_against_the_best_single_rival() -> None:
    """The geometric mean over workloads against the one row that is best in it."""
    groups = [
        *rows("warm", 1.0),
        *rows("other", 1.0),
        *yardsticks(),
        *rows("warm", 1.0, "v"),
        *rows("other", 2.0, "v"),
        *yardsticks(workload="v"),
    ]
    claim = next(row for row in judge(groups) if row.goal == MEAN)

    assert (claim.policy, claim.ok, claim.got) == ("other", None, pytest.approx(2.0**-0.5))


@pytest.mark.parametrize(("ratio", "ok"), [(1.02, True), (1.035, False)])
def test_an_earlier_warm_is_the_measure_of_the_mean(ratio: float, ok: bool, tmp_path: Path) -> None:
    """Three percent over what a baseline has, of the workloads, loads and seeds that it has; others do not count, and
    without any there is no claim."""
    path = tmp_path / "baseline.json"
    baseline.write(path, [*rows("warm", 1.0)[:4], *rows("other", 9.0)])
    now = [*rows("warm", ratio), *yardsticks(), *rows("warm", 3.0, "new"), *yardsticks(workload="new")]
    claim = next(row for row in judge(now, baseline.read(path)) if row.goal == BASELINE)

    assert (claim.ok, claim.got) == (ok, pytest.approx(ratio))
    assert any(BASELINE in line for line in list_missed([claim])) is not ok
    assert not any(row.goal == BASELINE for row in judge(now, {("x", "at"): {6: (1.0, 1.0)}}))
    path.write_text("{}")
    with pytest.raises(baseline.BaselineError, match="not a baseline"):
        baseline.read(path)
    with pytest.raises(baseline.BaselineError, match="no rows of warm"):
        baseline.write(path, rows("other", 1.0))


@pytest.mark.parametrize(("ratio", "ok"), [(1.02, True), (1.035, False)])
def test_never_worse_than_the_yardsticks(ratio: float, ok: bool) -> None:
    """On every workload, three percent over round robin or least loaded is missed in each figure, chance or not."""
    own = rows("warm", ratio, swing=0.5)
    judged = judge([*own, *rows("round_robin", 1.0, swing=0.5), *rows("least_loaded", 9.0)])
    claims = {(row.goal, row.policy): row for row in judged}

    for figure in FIGURES:
        assert claims[figure.never, "round_robin"].ok is ok
        assert claims[figure.never, "least_loaded"].ok
    assert sum("round_robin" in line and "never" in line for line in list_missed(judged)) == (0 if ok else 3)


def test_whoever_is_held_while_the_fleet_is_idle_is_a_miss() -> None:
    """One request on one seed is enough."""
    held = rows("warm", 1.0, held_while_idle=0)
    assert verdicts(held)[HELD].ok
    held[3].held_while_idle = 1
    claim = verdicts(held)[HELD]
    assert (claim.ok, claim.got) == (False, 1)
    assert "1, 0 allowed" in list_missed([claim])[0]


@pytest.mark.parametrize(("load", "p99_s", "ok"), [("above", 60.0, True), ("twice", 61.0, False), ("at", 99.0, None)])
def test_p99_has_an_end_above_saturation(load: str, p99_s: float, ok: bool | None) -> None:
    """At most a minute, and the best of the others is told beside it."""
    judged = judge([*rows("warm", 1.0, load=load, ttft_p99_s=p99_s), *yardsticks(load=load)])
    claims = [row for row in judged if row.goal == P99]

    assert [row.ok for row in claims] == ([] if ok is None else [ok])
    assert all("with 10.0 s" in (row.note or "") for row in claims)


@pytest.mark.parametrize(("errors", "ok"), [(2, True), (3, False)])
def test_impatient_clients_fail_no_more_often_than_with_the_best(errors: int, ok: bool) -> None:
    """Only where clients give up: elsewhere failures are a fault's doing."""
    ours = rows("warm", 1.0, patience_s=60.0, errors=errors)
    rival = rows("other", 2.0, patience_s=60.0, errors=1, rejected=1)
    others = [row for name in ("round_robin", "least_loaded") for row in rows(name, 5.0, patience_s=60.0, errors=9)]
    claim = next(row for row in judge([*ours, *rival, *others]) if row.goal == FAILED)

    assert (claim.ok, claim.policy, claim.got, claim.expected) == (ok, "other", 10 * errors, 20)
    assert FAILED not in verdicts(rows("warm", 1.0, errors=errors))


def test_rows_that_cannot_be_compared_are_refused() -> None:
    """A rival that lacks a seed, no rival at all, and no yardstick: an error, not a win."""
    with pytest.raises(ClaimsError, match="seeds of other"):
        judge([*rows("warm", 1.0), *yardsticks(), *rows("other", 2.0)[1:]])
    with pytest.raises(ClaimsError, match="no rows of warm"):
        judge(rows("other", 2.0))
    with pytest.raises(ClaimsError, match="rivals"):
        judge(rows("warm", 1.0))
    with pytest.raises(ClaimsError, match="least_loaded"):
        judge([*rows("warm", 1.0), *rows("round_robin", 2.0)])


def test_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Of samples of a normal distribution drawn by its quantiles, as many intervals hold the mean as should."""
    rng, normal, held = Random(7), NormalDist(0.0, 1.0), 0
    for _ in range(2_000):
        _, low, high = compute_mean_interval([normal.inv_cdf(rng.random()) for _ in range(5)])
        held += low <= 0 <= high

    assert 0.935 <= held / 2_000 <= 0.965
    assert compute_mean_interval([0.3]) == (0.3, 0.3, 0.3)
