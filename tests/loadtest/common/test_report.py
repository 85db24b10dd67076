"""Promises of the report: the row, the envelope, the table and the picture."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.common.report import Row, percentile, print_report, progress_bar, write_json
from loadtest.common.svg import svg_chart
from router.telemetry.report_header import commit

ROWS = [
    Row(workload="agent", policy="round_robin", requests=1200, token_hit_rate=0.25, ttft_p90_s=6.5),
    Row(workload="agent", policy="warm", requests=1200, token_hit_rate=0.85, ttft_p90_s=2.0),
    Row(workload="<other>", policy="warm", requests=10, ttft_p90_s=0.0),
]


@given(st.lists(st.integers(0, 1000), min_size=1), st.sampled_from([50, 90, 99, 100]))
def test_percentile_is_nearest_rank(values: list[int], percent: int) -> None:
    """At least that share of the values is at most the percentile, and it is one of them."""
    found = percentile(values, percent)

    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values)


def test_percentile_of_nothing() -> None:
    """Without values there is no percentile, not a zero."""
    assert percentile([], 90) is None


def test_row_leaves_out_what_does_not_apply() -> None:
    """Unmeasured fields are absent from the JSON, measured zeros are there."""
    assert Row(workload="w", errors=0, ttft_p50_s=0.1234567891).to_dict() == {
        "workload": "w",
        "errors": 0,
        "ttft_p50_s": 0.123457,
    }


def test_json_has_the_envelope(tmp_path: Path) -> None:
    """Every instrument's file says what ran, from which commit, where and when."""
    path = tmp_path / "out.json"
    write_json(path, "replay --url u", ROWS)
    document = json.loads(path.read_text())

    assert set(document) == {"command", "commit", "machine", "date", "rows"}
    assert document["command"] == "replay --url u"
    assert {"cpu", "cores", "memory_gb", "python"} <= set(document["machine"])
    assert [row["policy"] for row in document["rows"]] == ["round_robin", "warm", "warm"]


def test_no_commit_outside_a_repository(tmp_path: Path) -> None:
    """A copy that is not a checkout has no commit."""
    assert commit(tmp_path) is None


def test_report_shows_rows_and_bars() -> None:
    """The table has the rows' figures; bars show shares of all tokens, and times against the longest."""
    text = io.StringIO()
    print_report(Console(file=text, width=160), ROWS)
    lines = text.getvalue().splitlines()

    assert any("1,200" in line and "85.0 %" in line and "2.00 s" in line for line in lines)
    bars = [line.count("█") for line in lines if "█" in line]
    assert bars == [10, 34, 40, 12]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_table_fits_its_terminal(width: int) -> None:
    """On a narrow terminal whole columns are left out rather than figures cut."""
    text = io.StringIO()
    rows = [replace(row, errors=0, rejected=0, ttft_p50_s=1.0, e2e_p50_s=99.9, imbalance=1.5) for row in ROWS]
    print_report(Console(file=text, width=width), rows)

    assert "…" not in text.getvalue()
    assert "85.0 %" in text.getvalue()
    assert max(len(line) for line in text.getvalue().splitlines() if "│" in line) <= width


def test_chart_is_well_formed_svg() -> None:
    """The picture is XML with a bar for every row and field, and nothing fetched from elsewhere."""
    picture = svg_chart(ROWS, "a & b", ["note <1>"])
    root = ET.fromstring(picture)
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]

    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 * len(ROWS)
    assert {"a & b", "note <1>", "<other>", "85.0 %", "6.50 s"} <= set(texts)
    assert "href" not in picture


@pytest.mark.parametrize("total", [1, 7, 40])
def test_progress_off_a_terminal_is_a_few_lines(total: int) -> None:
    """Off a terminal the progress is at most a dozen lines, the last one complete."""
    text = io.StringIO()
    with progress_bar(Console(file=text), "run", total) as tell:
        for done in range(1, total + 1):
            tell(done)
    lines = text.getvalue().splitlines()

    assert len(lines) <= 14
    assert lines[-1] == f"run: {total} of {total}"
