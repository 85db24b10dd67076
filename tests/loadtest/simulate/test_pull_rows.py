"""Pulls between replicas beside each other: who runs them, and what the table and its page say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.docgen.linked_replicas import pulls_block
from loadtest.docgen.markdown import PageError
from loadtest.simulate.command import main
from loadtest.simulate.policies.pull_threshold import PullThreshold
from loadtest.simulate.results import pulls
from router.core.types.placements import Candidate, PlacementContext, Pull


def _row(policy: str, seed: int, ttft_s: float) -> Row:
    row = Row(workload="pool", policy=policy, case="rdma", replicas=4, load_name="at", seed=seed, requests=300)
    row.ttft_p50_s = row.ttft_p90_s = row.e2e_p90_s = ttft_s
    row.output_tokens_per_s, row.got = 1_000.0, 12.5
    return row


def test_a_threshold_pulls_what_is_long_enough() -> None:
    """llm-d's rule counts tokens, whatever the fetch takes."""
    market, chosen = PlacementContext("key", 5.0, 1_600.0, 0.0), Candidate("r", 0, 16_000, 0.0, 800.0, 0.0, 0.0, 0)
    rule = PullThreshold()
    assert rule.pulls(market, chosen, Pull("s", "s:1", 1_024, 9_999.0, 0.0, 0.0))
    assert not rule.pulls(market, chosen, Pull("s", "s:1", 1_008, 0.0, 0.0, 0.0))


def test_the_table_has_means_over_the_seeds_that_all_ran() -> None:
    """A row that was not run has no figure."""
    rows = [_row("affinity", 1, 1.0), _row("affinity", 2, 3.0), _row("ours", 1, 2.0), _row("ours", 2, 2.5)]
    first, *_, last = pulls.lines([*rows, _row("ours", 3, 99.0)])
    assert first == ("pool", "rdma", "at", "TTFT p50, s", "2.00", "-", "-", "-", "2.25")
    assert last == ("pool", "rdma", "at", "pulled of prompts, %", "12.50", "-", "-", "-", "12.50")


def test_the_page_names_the_commands_of_its_rows() -> None:
    """A file of something else is an error."""
    machine = {"cpu": "a CPU", "cores": 2, "memory_gb": 8.0, "python": "3.11"}
    rows = [asdict(_row(policy, seed, 1.0)) for policy in ("affinity", "ours") for seed in (1, 2)]
    document = {"date": "2026-11-26T00:00:00", "machine": machine, "rows": rows}
    command = "python -m loadtest simulate --pulls rdma --scenario pool --load at --replicas 4 --requests 75 --seed 1-2"
    assert f"- `{command}`" in pulls_block(document).splitlines()
    with pytest.raises(PageError):
        pulls_block({**document, "rows": []})


def test_rows_differ_in_who_places_and_in_pulls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs them and prints the table; who may order no pulls has none, and who may has some."""
    file = tmp_path / "pulls.json"
    arguments = ["--pulls", "rdma", "--scenario", "pool", "--load", "at", "--replicas", "2", "--requests", "20"]
    assert main([*arguments, "--policy", "ours", "--jobs", "1", "--json", str(file)]) == 0
    assert "TTFT p50, s" in capsys.readouterr().out
    job = pulls.PullJob("pool", "rdma", "at", 1, ("load", "load + pulls"), 2, 20)
    without, pulling = pulls.run_pulls(job)
    assert without.requests == pulling.requests == 40
    assert without.got == 0.0 < (pulling.got or 0.0)
    assert main(["--pulls", "--policy", "warm"]) == 2


@pytest.mark.long
def test_nothing_changes_where_nothing_is_pulled() -> None:
    """Replicas that could send each other what they hold, before a router that may not say so, are as replicas that
    cannot: every figure to the digit."""
    job = pulls.PullJob("sessions", "rdma", "at", 2, ("ours, no pulls",), 2, 15)
    before = pulls.LINKS["rdma"]
    (able,) = pulls.run_pulls(job)
    pulls.LINKS["rdma"] = None  # type: ignore[assignment]  # a fleet without links
    try:
        (unable,) = pulls.run_pulls(job)
    finally:
        pulls.LINKS["rdma"] = before
    assert asdict(able) == asdict(unable)
