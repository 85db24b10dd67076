"""Promises of the measure of memory: every row is of what it says, and the sums are of the rows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.core_cost import decision as cost
from loadtest.core_cost import memory, sizing
from tests.loadtest.rendering import Page


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    sizes = {"BLOCKS": 2_048, "PROMPTS": 20, "CONNECTIONS": 40, "STARTS": 1, "STREAMS_OPEN": (2, 4)}
    for name, value in {**sizes, "REPLICAS": 4, "LONG_TOKENS": 20_000}.items():
        monkeypatch.setattr(memory, name, value)
    for name in ("SHORT_WARM_S", "FILL_ROUND_S", "STARTING_S"):
        monkeypatch.setattr(sizing, name, 0.1)


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_every_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all that is kept, each with its words; a start that judges nothing of the suite's clock."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    steps = list[int]()
    rows = {row.case: row for row in memory.memory_rows(lambda _: 170.0, steps.append)}
    assert steps == list(range(1, memory.STEPS - 4 + 1 + 1))
    got = {case: row.got or 0.0 for case, row in rows.items()}
    assert 50 < got["estimate_block_bytes"] < 1_000
    assert 0 < got["conversation_bytes"] < 100_000
    assert 1 < got["kept_message_bytes_per_token"] < 100
    assert got["start_mb"] > 10
    assert got["start_cpu_s"] > 0
    assert rows["start_cpu_s"].timed
    assert {case.removeprefix("4_") for case in got} == {case.removeprefix("256_") for case in memory.WORDS}
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


def made() -> list[Row]:
    """Rows with round figures."""
    cases = ["estimate_block_bytes", "events_block_bytes", "conversation_bytes", "replica_bytes", "stream_bytes"]
    rest = ["open_request_bytes", "kept_message_bytes_per_token", "start_cpu_s", "start_mb", "idle_connection_bytes"]
    return [Row(case=case, got=100.0) for case in (*cases, *rest)]


def test_sums_are_of_the_rows() -> None:
    """Replicas and streams by their bytes, conversations by their blocks: 31.25 of ours, 250 of an engine's."""
    sums = {row.case: row.got for row in memory.sums(made())}
    assert sums["256_replicas_mb"] == pytest.approx(0.0256)
    assert sums["10000_streams_mb"] == pytest.approx(1.0)
    assert sums["1000000_conversations_estimated_mb"] == pytest.approx(3_225.0)
    assert sums["1000000_conversations_by_events_mb"] == pytest.approx(25_000.0)


def test_goals_are_judged() -> None:
    """A row with a goal says whether it is met, and the command's status follows from that (test_decision.py)."""
    assert memory.judge_case("start_cpu_s", 0.5).ok
    assert memory.judge_case("start_cpu_s", 0.51).ok is False
    assert memory.judge_case("replica_bytes", 1e9).ok is None
    assert memory.GOALS.keys() <= memory.WORDS.keys()


def test_the_page_is_rendered(tmp_path: Path) -> None:
    """A line for each case, in words; half a run changes nothing."""
    page, rows = Page(tmp_path, "memory"), [*made(), *memory.sums(made())]
    page.refuse("cost --memory", rows[:-1])
    text = page.render("cost --memory", [replace(row, got=1_234.0) for row in rows])
    assert all(f"| {words} | 1,234 |" in text for words in memory.WORDS.values())


def test_the_command_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--memory` measures that instead, and `--check` fails on a missed goal."""
    monkeypatch.setattr(cost, "memory_rows", lambda *_: [memory.judge_case("stream_bytes", 1e9)])
    file = tmp_path / "memory.json"
    assert cost.main(["--memory", "--json", str(file)]) == 0
    assert cost.main(["--memory", "--check"]) == 1
    assert file.exists()
