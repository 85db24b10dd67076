"""`loadtest kernels`: calibrations beside what a GPU took."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.kernels import command, measure


def document(factor: float, calibration: str = "qwen3-32b-2xh100") -> dict[str, Any]:
    """A file as measure.py writes it, of a GPU that takes 1 / `factor` of what a calibration says."""
    times, shape = CALIBRATIONS[calibration].times, command.SHAPE_OF[calibration]
    points = []
    for point in measure.WHOLE_SWEEP.points():
        context = point.sequences * point.context
        ms = times.mixed_s(point.tokens, point.pairs, point.sequences, context) * 1e3 / factor
        points.append({"shape": shape, **asdict(point), "ms": ms, "least_ms": ms, "most_ms": ms})
    fits = {shape: {kind: measure.fit(points, kind) for kind in measure.COEFFICIENTS}}
    return {
        "what": "kernels", "date": "2026-01-01T00:00:00+00:00", "points": points, "fits": fits,
        "machine": {"gpu": "a made-up GPU", "torch": "2.0", "cuda": "13.0"},
        "left_out": ["all-reduce"], "failed": [], "skipped": [],
    }  # fmt: skip


def shown(path: Path, found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints of such a file."""
    path.write_text(json.dumps(found))
    assert command.main([str(path)]) == 0
    return capsys.readouterr().out


def test_a_calibration_is_set_beside_the_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU that is twice as fast as the calibration gives 2.00 for every constant and every kind of step."""
    text = shown(tmp_path / "kernels.json", document(2.0), capsys)
    assert "a made-up GPU" in text
    assert "all-reduce" in text
    rows = [line for line in text.splitlines() if "2.00" in line]
    assert len(rows) == 9 + 3
    assert any("a context token" in row and "0.045" in row and "0.0225" in row for row in rows)


def test_a_calibration_of_another_form_is_compared_by_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mocker's formula has other constants, so only its steps are compared; what was not measured is told."""
    found = document(1.0)
    for point in found["points"]:
        point["shape"] = "qwen3-8b-tp1"
    text = shown(tmp_path / "kernels.json", found, capsys)
    assert "mocker-8b: calibration / measured, step by step" in text
    assert "mocker-8b: constants" not in text
    assert "llama-3.1-8b-a100: not measured" in text


def test_partial_results_are_compared_as_far_as_they_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a fit of prefill its constants are left out, and decodes are still compared."""
    found = document(1.0)
    found["points"] = [point for point in found["points"] if point["kind"] == "decode"]
    (fits,) = found["fits"].values()
    del fits["prefill"], fits["step"]
    text = shown(tmp_path / "kernels.json", found, capsys)
    assert "a pair" not in text
    assert "a context token" in text


EMPTY = json.dumps(document(1.0) | {"points": []})


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not a result of"), ('{"rows": []}', "is not a result of"), (EMPTY, "no points")]
)
def test_another_file_is_told_from_one_of_kernels(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no such file ends with 2 and says so; so does one that is not there."""
    path = tmp_path / "kernels.json"
    assert command.main([str(path)]) == 2
    path.write_text(text)
    capsys.readouterr()
    assert command.main([str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_what_is_kept_can_be_compared(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured steps that the documents speak of are there, whole, and no calibration decodes faster than
    a GPU's kernels alone, which leave out a part of a step."""
    file = Path(command.__file__).parents[1] / "data" / f"kernels_{gpu}.json"
    found = json.loads(file.read_text())
    assert (found["failed"], found["skipped"]) == ([], [])
    assert command.main([str(file)]) == 0
    out = capsys.readouterr().out
    assert gpu.upper() in out
    rows = [line for line in out.splitlines() if line.startswith("│ decode") and len(line.split("│")) == 7]
    assert len(rows) == len(command.SHAPE_OF)
    assert all(float(row.split("│")[4]) > 1.0 for row in rows)
