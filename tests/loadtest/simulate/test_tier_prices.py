"""Prices of a load from a tier beside each other: who runs them, and what the table says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.docgen.markdown import PageError
from loadtest.docgen.tiers import tiers_block
from loadtest.simulate.command import main
from loadtest.simulate.policies.tier_credit import TierCredit
from loadtest.simulate.results import tiers
from router.core.estimators.model_speeds import BACKLOG_TOKENS
from router.core.types.placements import Candidate, FirstTokenExtras, PlacementContext


def _row(price: str, seed: int, ttft_s: float) -> Row:
    row = Row(workload="tier_churn", policy=price, case="1/13", replicas=4, load_name="at", seed=seed, got=ttft_s)
    row.ttft_p90_s = row.e2e_p90_s = 2 * ttft_s
    return row


def test_a_hit_in_a_tier_counts_as_a_part_of_one_on_the_gpu() -> None:
    """A fixed part of the prefill that it saves is lost, whatever the router believes of the load: with a credit of 1
    nothing is, so the replica that has all of a prompt in a tier is as good as the one that has it on its GPU. Without
    a credit the load costs what the router believes that it takes."""
    market = PlacementContext("key", 5.0, 1_600.0, 0.0)

    def chosen(credit: float | None, loading_ms: float) -> tuple[str, float]:
        gpu = Candidate("gpu", 16_000, 0, 300.0, 0.0, 0.0, 0.0, 0)
        tier = Candidate("tier", 16_000, 0, 0.0, 0.0, 0.0, 0.0, 0)
        tier.extras = FirstTokenExtras(16_000, loading_ms)
        return TierCredit(credit).choose(market, [gpu, tier]).id, tier.price_ms

    assert BACKLOG_TOKENS == 16_000
    assert chosen(1.0, 9_999.0) == ("tier", 0.0)
    assert chosen(0.75, 0.0) == ("gpu", 400.0)
    assert chosen(None, 200.0) == ("tier", 200.0)
    assert chosen(None, 400.0) == ("gpu", 400.0)


def test_the_table_has_means_over_the_seeds_that_all_ran() -> None:
    """The least is bold where it is 3 % or more below a free hit."""
    rows = [_row("free", 1, 1.0), _row("free", 2, 3.0), _row("price", 1, 1.0), _row("price", 2, 2.8)]
    rows += [_row("free", 3, 99.0), _row("0.4", 1, 2.0), _row("0.4", 2, 2.0)]
    first, *_ = tiers.lines(rows)
    assert first == ("1/13", "4", "at", "TTFT mean", "2.00", "**1.90**", "-", "-", "2.00", "-")


def test_the_page_names_the_commands_of_its_rows() -> None:
    """Links that ran at the same loads, sizes and seeds share one; a file of something else is an error."""
    machine = {"cpu": "a CPU", "cores": 2, "memory_gb": 8.0, "python": "3.11"}
    rows = [asdict(_row(price, seed, 1.0)) for price in ("price", "free") for seed in (1, 2)]
    document = {"date": "2026-11-26T00:00:00", "machine": machine, "rows": rows}
    block = tiers_block(document)
    assert "- `python -m loadtest simulate --tiers 1/13 --replicas 4 --load at --seed 1-2`" in block.splitlines()
    assert "| 1/13 | 4 | at | TTFT mean | 1.00 | 1.00 | - | - | - | - |" in block.splitlines()
    with pytest.raises(PageError):
        tiers_block({**document, "rows": []})


@pytest.mark.long
def test_all_prices_run_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs them and prints the table; who knows nothing of tiers comes later than who does."""
    file = tmp_path / "tiers.json"
    arguments = ["--tiers", "1/13", "--replicas", "2", "--load", "at", "--policy", "free", "no tiers"]
    assert main([*arguments, "--requests", "60", "--jobs", "1", "--json", str(file)]) == 0
    assert "TTFT mean" in capsys.readouterr().out
    job = tiers.TierJob("1/13", 2, "at", 1, ("free", tiers.UNTOLD), 60)
    told, untold = tiers.run_tiers(job)
    assert told.requests == untold.requests == 120
    assert (told.got or 0.0) < (untold.got or 0.0)
    assert main(["--tiers", "--policy", "warm"]) == 2
