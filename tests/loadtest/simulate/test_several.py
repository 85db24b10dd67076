"""Several routers beside one: what is compared, and what counts as worse."""

from __future__ import annotations

import pytest

from loadtest.common.report import Row
from loadtest.simulate.results import multi_router
from loadtest.simulate.results.race import Changes, RaceJob


def _row(label: str, seed: int, *, hits: float, ttft_s: float) -> Row:
    return Row(
        workload="mooncake",
        load_name="at",
        policy="warm",
        case=label,
        seed=seed,
        token_hit_rate=hits,
        ttft_p90_s=ttft_s,
        e2e_p90_s=10.0,
        goodput=2.0,
    )


def _rows(ttft_s: float) -> list[Row]:
    alone = [
        _row(variant.label, seed, hits=0.5, ttft_s=value)
        for variant, value in zip(multi_router.ALONE, (1.0, 1.02, 0.98), strict=True)
        for seed in (1, 2)
    ]
    return [*alone, _row("4", 1, hits=0.6, ttft_s=ttft_s), _row("4", 2, hits=0.6, ttft_s=ttft_s)]


@pytest.mark.parametrize(("ttft_s", "beyond"), [(1.02, []), (1.05, ["TTFT p90"]), (0.5, [])])
def test_only_what_is_worse_by_more_than_the_limit_counts(ttft_s: float, beyond: list[str]) -> None:
    """Better is never beyond it, and worse is where it is more than 3 % and more than the names of replicas change."""
    (found,) = multi_router.compare_variants(_rows(ttft_s)).values()
    (four,) = [each for each in found if each.variant.label == "4"]
    assert four.off["hits"] == pytest.approx(0.2)
    assert four.apart["TTFT p90"] == pytest.approx(0.02)
    assert four.beyond == beyond
    (said,) = multi_router.verdicts(_rows(ttft_s))
    assert said == (
        f"4 routers: {1 - len(beyond)} of 1 workloads within 3 %. Geometric means: hits +20.0 %,"
        f" TTFT p90 {100 * (ttft_s - 1):+.1f} %, end-to-end p90 +0.0 %, goodput +0.0 %"
    )
    assert [cells[3] for cells in multi_router.lines_beyond(_rows(ttft_s))] == [", ".join(beyond)] * len(beyond)


def test_seeds_that_one_router_did_not_run_are_left_out() -> None:
    """Figures are of the same workloads."""
    rows = [row for row in _rows(2.0) if row.case == "4" or row.seed == 1]
    rows.append(_row("4", 3, hits=0.0, ttft_s=99.0))
    (found,) = multi_router.compare_variants(rows).values()
    assert [each.off["TTFT p90"] for each in found if each.variant.label == "4"] == pytest.approx([1.0])


def test_all_variants_run_the_same_requests() -> None:
    """One job has a row for each variant, and the routers of one that shares hear each other."""
    job = RaceJob("one_group", "below", 1, (), Changes((), 40))
    one, two = multi_router.run_several(multi_router.SeveralJob(job, ("1", "2")))
    assert (one.case, two.case) == ("1", "2")
    assert one.requests == two.requests == 40
    assert two.token_hit_rate == pytest.approx(one.token_hit_rate or 0.0, abs=0.1)
