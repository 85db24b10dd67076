"""Promises of the sizing instrument: its rows are of what they say, and its rule gives back what it was made from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.common.report import Row, write_json
from loadtest.core_cost import sizing
from loadtest.core_cost.sizing_report import FULL, IDLE, SHORT, STREAMS, SizingError, cells, rule, rule_lines
from tests.loadtest.rendering import Page

REPLICAS, NUMBERS = (4, 32, 128), (100, 300, 1_000)


def made() -> list[Row]:
    """Rows of a router that costs exactly 0.01 cores, 1 more per 1,000 replicas, and so on."""
    rows = []
    for replicas in REPLICAS:
        idle_cores, idle_mb = 0.01 + 0.001 * replicas, 50.0 + 0.1 * replicas
        rows.append(Row(case=IDLE, replicas=replicas, cpu_cores=idle_cores, rss_mb=idle_mb))
        rows.append(Row(case=SHORT, replicas=replicas, cpu_us_per_request=100.0 + 2.0 * replicas, rss_mb=idle_mb))
        for number in NUMBERS:
            cores = idle_cores + number * 30 * 20e-6
            rows.append(
                Row(
                    case=STREAMS,
                    replicas=replicas,
                    load=float(number),
                    cpu_cores=cores,
                    cpu_us_per_chunk=cores * 1e6 / (30 * number),
                    rss_mb=idle_mb + 5.0 + 0.02 * number,
                )
            )
    full = Row(case=FULL, replicas=128, cpu_us_per_request=400.0, rss_mb=400.0, index_mb=250.0, expected=268.4)
    return [*rows, replace(full, got=300.0)]


def test_the_rule_gives_back_what_it_was_made_from() -> None:
    """Each part of the sum is found in the rows, with what an idle router costs taken out of what chunks cost."""
    found = rule(made())
    assert found.base_cores == pytest.approx(0.01)
    assert found.replica_cores == pytest.approx(0.001)
    assert found.chunk_us == pytest.approx(20.0)
    assert (found.request_us, found.replica_request_us) == pytest.approx((100.0, 2.0))
    assert (found.base_mb, found.replica_mb, found.stream_mb) == pytest.approx((50.0, 0.1, 0.02))
    assert found.index_factor == pytest.approx(1.2)
    assert found.cores(32, 1_000, 100) == pytest.approx(0.042 + 0.02 + 0.0164)
    assert found.memory_mb(32, 100, 10.0) == pytest.approx(53.2 + 2.0 + 12.0)


def test_the_rule_never_promises_less_than_the_index_may_take() -> None:
    """An index that counts more than the process grew by may still grow to what it counts."""
    rows = made()
    rows[-1].got = 100.0
    assert rule(rows).index_factor == 1.0


def test_noise_takes_no_part_below_zero() -> None:
    """Where more replicas happened to cost less, the dearest counts and replicas cost nothing."""
    rows = made()
    for row in rows:
        if row.case == IDLE:
            row.cpu_cores = 0.5 - 0.001 * (row.replicas or 0)
    found = rule(rows)
    assert (found.base_cores, found.replica_cores) == pytest.approx((0.496, 0.0))
    assert found.chunk_us >= 0.0


@pytest.mark.parametrize("case", [IDLE, SHORT, STREAMS, FULL])
def test_no_rule_of_half_a_run(case: str) -> None:
    """Rows without one of the cases are refused, as are those whose index stayed empty."""
    with pytest.raises(SizingError, match="missing"):
        rule([row for row in made() if row.case != case])
    with pytest.raises(SizingError, match="never filled"):
        rule([replace(row, index_mb=0.0) if row.case == FULL else row for row in made()])


def test_figures_are_rendered(tmp_path: Path) -> None:
    """The table has a line a row and the rule under it; half a run, or one with errors, changes nothing."""
    page = Page(tmp_path, "sizing")
    for rows in (made()[:-1], [replace(made()[0], errors=1), *made()[1:]]):
        page.refuse("sizing", rows)
    text = page.render("sizing", made())
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(made()) + 2
    assert all(f"- {line}." in text for line in rule_lines(made()))


@pytest.mark.long
async def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases of a real router: no error, events of all streams, an index that is full, and rows for a rule."""
    limit = 1 << 20
    for name in ("SHORT_WARM_S", "FILL_ROUND_S"):
        monkeypatch.setattr(sizing, name, 0.1)
    monkeypatch.setattr(sizing, "STARTING_S", 2.0)  # streams outlast their window on a busy machine, too
    sizes = sizing.Sizes((1, 2), (2, 4), window_s=0.2, rate_per_s=50.0, index_bytes_max=limit)
    rows = await sizing.measure(sizes, Console(file=io.StringIO()))
    assert [(row.case, row.replicas, row.load) for row in rows] == [
        *((case, n, load) for n in (1, 2) for case, load in ((IDLE, None), (SHORT, None), (STREAMS, 2), (STREAMS, 4))),
        (FULL, 2, None),
    ]
    assert len(rows) == sizes.steps
    assert not [row.errors_by_kind for row in rows if row.errors]
    assert all((row.rss_mb or 0.0) > 10 and row.cpu_cores is not None for row in rows)
    assert all((row.cpu_us_per_chunk or 0.0) > 0 for row in rows if row.case == STREAMS)
    assert all((row.cpu_us_per_request or 0.0) > 0 for row in rows if row.case in (SHORT, FULL))
    assert 0.9 * limit < 1e6 * (rows[-1].index_mb or 0.0) <= limit
    assert len(rule_lines(rows)) == 3
    assert all(len(cells(row)) == 5 for row in rows)


async def test_what_cannot_be_measured_is_said() -> None:
    """A router that does not start ends the run with what it said."""
    sizes = sizing.Sizes((1,), (1,), 0.2, flags=("--no-such-flag",))
    with pytest.raises(sizing.ProcessError, match="no-such-flag"):
        await sizing.measure(sizes, Console(file=io.StringIO()))


def test_numbers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of replicas and streams are sorted, each once, and none out of bounds."""
    assert sizing.parser().parse_args(["--replicas", "8,2,8"]).replicas == (2, 8)
    for wrong in ("0", "9999", "a"):
        with pytest.raises(SystemExit):
            sizing.parser().parse_args(["--streams", wrong])
    assert "from 1 to 4096" in capsys.readouterr().err


def test_json_has_the_rows(tmp_path: Path) -> None:
    """Cores, chunks and memory are in the JSON under the names that every instrument uses."""
    write_json(tmp_path / "it.json", "sizing", made())
    row = json.loads((tmp_path / "it.json").read_text())["rows"][2]
    assert row.keys() >= {"case", "replicas", "load", "cpu_cores", "cpu_us_per_chunk", "rss_mb"}
