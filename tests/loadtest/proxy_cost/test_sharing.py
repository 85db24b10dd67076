"""What sharing costs, between real routers and a store that also fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.common.report import Row, envelope
from loadtest.docgen.markdown import PageError
from loadtest.docgen.overhead import shared_block
from loadtest.proxy_cost import command as overhead
from loadtest.proxy_cost import load, sharing
from loadtest.proxy_cost.report import SHARING
from tests.loadtest.proxy_cost.routers import run


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
    failing = rows[-1]
    assert isinstance(failing["got"], float)
    assert int(str(failing["requests"])) > 0


def test_the_page_has_all_rows_of_sharing() -> None:
    """The block says what was measured of each case, and whether its goal is met; with a case missing it is refused."""
    rows = [Row(workload=name, goal="a goal", expected=1.05, got=1.5, ok=False) for name in SHARING]
    text = shared_block(envelope("overhead --cases sharing", rows))
    assert [line for line in text.splitlines() if line.startswith("| sharing")] == [
        f"| {name} | a goal | 1.05 | 1.50 | missed |" for name in SHARING
    ]
    with pytest.raises(PageError):
        shared_block(envelope("overhead --cases sharing", rows[1:]))
