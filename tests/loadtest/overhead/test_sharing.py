"""What sharing costs, between real routers and a store that also fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.overhead import command as overhead
from loadtest.overhead import load, sharing
from loadtest.overhead.report import SHARING
from tests.loadtest.overhead.routers import run


@pytest.mark.long
def test_command_measures_what_sharing_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is a row for each number of routers, and one of a store that fails; no request is lost to that."""
    monkeypatch.setattr(overhead, "IDLE_S", 0.1)
    monkeypatch.setattr(load, "SETTLE_S", 0.05)
    for name, value in (("LANES", 8), ("EVENTS", 8), ("SETTLE_S", 0.2), ("PAIRS", 1)):
        monkeypatch.setattr(sharing, name, value)
    monkeypatch.setattr(sharing, "DOWN_S", 0.2)
    monkeypatch.setattr(sharing, "BETWEEN_S", 0.2)

    status, rows = run(["--routers", "warmroute", "--cases", "sharing"], tmp_path)

    assert status == 0
    assert [(row["workload"], row["errors"]) for row in rows] == [(name, 0) for name in SHARING]
    assert all(isinstance(row["got"], float) and int(str(row["requests"])) > 20 for row in rows)
