"""Promises of the measure of sharing: messages go between the routers, and each figure is of what it says."""

from __future__ import annotations

import pytest

from loadtest.core_cost import sharing
from loadtest.docgen.markdown import PageError
from loadtest.docgen.sharing import cost_block


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that take no time."""
    monkeypatch.setattr(sharing, "WARM_S", 0.5)
    monkeypatch.setattr(sharing, "LASTS_S", 1.5)


@pytest.mark.usefixtures("short")
def test_routers_hear_each_other_and_it_is_counted() -> None:
    """Requests come to all routers, each hears of the others' and knows what they have open, and a figure for one
    request is the sum of what all did for it."""
    fleet = sharing.SharedFleet(4, 3, 1)
    fleet.run(2.0)
    assert fleet.requests > 0
    assert fleet.said_bytes > 100 * fleet.requests
    assert fleet.hearing.calls >= 2 * fleet.requests
    found = sharing.figures(4, 3, 1)
    assert found.share_us == pytest.approx(found.share_say_us + 2 * found.share_hear_us)
    assert 0 < found.share_slice_ms < 1e3


@pytest.mark.usefixtures("short")
def test_the_page_has_a_line_for_each_fleet() -> None:
    """Rows of all sizes and numbers of routers become lines of the page, and rows of anything else none."""
    done = list[int]()
    rows = sharing.sharing_rows((2, 3), (2,), 1, done.append)
    assert done == [1, 2]
    document = {
        "date": "2026-11-26T11:00:00Z",
        "machine": {"cpu": "a processor", "cores": 2, "memory_gb": 8, "python": "3.11.7"},
        "rows": [{"case": row.case, "replicas": row.replicas, "router": row.router, "got": row.got} for row in rows],
    }
    lines = cost_block(document).splitlines()
    assert [line.split(" | ")[:2] for line in lines if line.startswith(("| 2", "| 3"))] == [["| 2", "2"], ["| 3", "2"]]
    with pytest.raises(PageError):
        cost_block(document | {"rows": []})
