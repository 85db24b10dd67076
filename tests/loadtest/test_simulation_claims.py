"""Promises of the race's judge: what must be seen of `warm` is computed from rows, passes where it holds, and says what
is missed."""

from __future__ import annotations

from random import Random
from statistics import NormalDist

import pytest

from loadtest.report import Row
from loadtest.simulation.claims import GOODPUT, MEAN, P90, P90_NEVER, ClaimsError, beaten_bounds, judge, missed, paired

SEEDS = range(6, 16)


def rows(
    policy: str, p90_s: float, share: float = 0.9, workload: str = "w", swing: float = 0.0, *, bound: bool = False
) -> list[Row]:
    """One a seed; every other seed is better by `swing`, and every other worse."""
    return [
        Row(
            workload=workload,
            load_name="at",
            policy=policy,
            seed=seed,
            bound=bound or None,
            ttft_p90_s=p90_s * (1 + (swing if seed % 2 else -swing)),
            goodput_share=share,
        )
        for seed in SEEDS
    ]


def verdicts(*groups: list[Row]) -> dict[str, Row]:
    """By goal, of one workload and load."""
    return {row.goal or "": row for row in judge([row for group in groups for row in group])}


def test_all_holds() -> None:
    """Better than all rivals by a tenth and more: nothing is missed."""
    judged = judge([*rows("warm", 1.0), *rows("round_robin", 5.0, 0.5), *rows("other", 1.2)])

    assert [row.ok for row in judged] == [True, True, True]
    assert missed(judged) == []


@pytest.mark.parametrize(("ratio", "ok"), [(1.02, True), (1.04, False)])
def test_p90_within_three_percent_of_the_best(ratio: float, ok: bool) -> None:
    """It counts who is best there, not who is best on the mean."""
    claim = verdicts(rows("warm", ratio), rows("round_robin", 5.0), rows("best", 1.0))[P90]

    assert (claim.policy, claim.ok) == ("best", ok)
    assert claim.got == pytest.approx(ratio)


def test_inside_the_paired_interval_is_no_loss() -> None:
    """A tenth worse with a swing of a half over seeds is chance; the same tenth on every seed is not."""
    swinging = verdicts(rows("warm", 1.1, swing=0.5), rows("other", 1.0))[P90]
    steady = verdicts(rows("warm", 1.1, swing=0.5), rows("other", 1.0, swing=0.5))[P90]

    assert (swinging.got or 0) > 0.9
    assert swinging.ok
    assert not steady.ok, "pairs swing together"


@pytest.mark.parametrize(("share", "ok"), [(0.88, True), (0.86, False), (0.95, True)])
def test_goodput_in_points(share: float, ok: bool) -> None:
    """Three points of share below the best, not three percent of it."""
    judged = judge([*rows("warm", 1.0, share), *rows("other", 2.0, 0.9)])
    claim = next(row for row in judged if row.goal == GOODPUT)

    assert (claim.ok, claim.got) == (ok, pytest.approx(share - 0.9))
    assert len(missed(judged)) == (0 if ok else 1)


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


@pytest.mark.parametrize(("elsewhere", "ok"), [(2.0, True), (1.2, False)])
def test_mean_is_better_by_a_tenth(elsewhere: float, ok: bool) -> None:
    """The geometric mean over workloads against the one row that is best in it."""
    groups = [
        rows("warm", 1.0),
        rows("other", 1.0),
        rows("warm", 1.0, workload="v"),
        rows("other", elsewhere, workload="v"),
    ]
    claim = verdicts(*groups)[MEAN]

    assert (claim.policy, claim.ok, claim.got) == ("other", ok, pytest.approx(elsewhere**-0.5))


@pytest.mark.parametrize(("ratio", "ok"), [(1.01, True), (1.025, False)])
def test_adversarial_workloads_allow_less(ratio: float, ok: bool) -> None:
    """On one group and all unique, two percent over round robin or least loaded is missed, chance or not."""
    own = rows("warm", ratio, workload="one_group", swing=0.5)
    judged = judge(
        [
            *own,
            *rows("round_robin", 1.0, workload="one_group", swing=0.5),
            *rows("least_loaded", 9.0, workload="one_group"),
        ]
    )
    claims = {row.policy: row for row in judged if row.goal == P90_NEVER}

    assert (claims["round_robin"].ok, claims["least_loaded"].ok) == (ok, True)
    assert any("round_robin" in line and "one_group" in line for line in missed(judged) if P90_NEVER in line) is not ok


def test_rows_that_cannot_be_compared_are_refused() -> None:
    """A rival that lacks a seed, no rival at all, and no round robin where it is the yardstick: an error, not a win."""
    with pytest.raises(ClaimsError, match="seeds of other"):
        judge([*rows("warm", 1.0), *rows("other", 2.0)[1:]])
    with pytest.raises(ClaimsError, match="no rows of warm"):
        judge(rows("other", 2.0))
    with pytest.raises(ClaimsError, match="rivals"):
        judge(rows("warm", 1.0))
    with pytest.raises(ClaimsError, match="round_robin"):
        judge([*rows("warm", 1.0, workload="all_unique"), *rows("other", 2.0, workload="all_unique")])


def test_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Of samples of a normal distribution drawn by its quantiles, as many intervals hold the mean as should."""
    rng, normal, held = Random(7), NormalDist(0.0, 1.0), 0
    for _ in range(2_000):
        _, low, high = paired([normal.inv_cdf(rng.random()) for _ in range(5)])
        held += low <= 0 <= high

    assert 0.935 <= held / 2_000 <= 0.965
    assert paired([0.3]) == (0.3, 0.3, 0.3)
