"""Figures in the documents come from instruments, and what is promised of the demo is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.common.report import Row, envelope
from loadtest.docgen import command as pages
from loadtest.docgen.demo import broken_promises, median_rows
from loadtest.replay import demo
from tests.house.documents import block, page


def rows(hits: float, ttft_s: float) -> list[Row]:
    """A demo in which round robin has a hit rate of 0.2 and a p90 TTFT of 10 s, and warm these, everywhere."""
    figures = {"round_robin": (0.2, 10.0), "warm": (hits, ttft_s)}
    runs = [workload.replay for workload in demo.WORKLOADS]
    return [
        Row(workload=r.workload, policy=policy, requests=r.requests_max, errors=0, token_hit_rate=rate, ttft_p90_s=ttft)
        for r in runs
        for policy, (rate, ttft) in figures.items()
    ]


@pytest.mark.parametrize(
    ("hits", "ttft_s", "broken"),
    [
        (0.6, 5.0, 0),
        (0.59, 5.0, 1),
        (0.6, 5.1, 1),
        (0.2, 10.0, 4),
    ],
)
def test_promise_of_the_demo(hits: float, ttft_s: float, broken: int, tmp_path: Path) -> None:
    """`--check` fails unless agents see 3 times the hits at half the p90 TTFT, and conversations better of both."""
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(envelope("warmroute demo --exit", rows(hits, ttft_s))))
    assert len(broken_promises([json.loads(file.read_text())])) == broken
    assert pages.main(["--check", str(file)]) == (1 if broken else 0)


def test_several_runs_are_a_median() -> None:
    """Of three runs each figure is the median of its own, and errors of all runs count."""
    runs = [{"rows": rows(hits, ttft_s)} for hits, ttft_s in ((0.6, 9.0), (0.9, 5.0), (0.7, 1.0))]
    warm = next(row for row in median_rows(runs) if (row.workload, row.policy) == ("agent", "warm"))
    assert (warm.token_hit_rate, warm.ttft_p90_s) == (0.7, 5.0)


def test_demo_figures_are_rendered(tmp_path: Path) -> None:
    """The demo's block is made from its JSON, can be made again, and is refused for a run of another length."""
    target, file = tmp_path / pages.BLOCKS["demo"], tmp_path / "demo.json"
    target.parent.mkdir(parents=True)
    target.write_text(page(pages.BLOCKS["demo"]))
    file.write_text(json.dumps(envelope("warmroute demo --exit", rows(0.6, 5.0))))
    for _ in range(2):
        assert pages.main([str(file), "--root", str(tmp_path)]) == 0
        assert target.read_text().count("| agent | warm | ") == 1
    file.write_text(file.read_text().replace(f'"requests": {demo.AGENT.replay.requests_max}', '"requests": 7'))

    assert pages.main([str(file), "--root", str(tmp_path)]) == 1


def test_demo_figures_are_of_this_demo() -> None:
    """The demo's figures were measured with the parameters that the demo has now."""
    shown = block(page(pages.BLOCKS["demo"]), "demo")
    for note in (demo.FIXED, *(workload.describe() for workload in demo.WORKLOADS)):
        assert note in shown, "run the demo and render its page again, as docs/reference/benchmarks.md says"


@pytest.mark.parametrize("name", pages.DIGESTS)
def test_short_tables_are_rows_of_the_whole_ones(name: str) -> None:
    """Short tables and README's claims are what `python -m loadtest pages` takes from the pages of evidence."""
    whole, digest = pages.DIGESTS[name]
    assert block(page(pages.BLOCKS[name]), name).strip() == digest(page(pages.BLOCKS[whole])), (
        "run: python -m loadtest pages"
    )
