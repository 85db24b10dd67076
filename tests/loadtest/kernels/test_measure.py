"""The part of the measuring script that needs no GPU: which points, and fits."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.kernels import measure
from loadtest.kernels.command import SHAPE_OF

FLOOR_MS, TOKEN_MS, PAIR_MS, READ_MS = 12.0, 0.05, 2e-6, 4e-5


def measured(noise: float = 0.0) -> list[dict[str, object]]:
    """The whole sweep's points as a machine of known coefficients would take them, each second one slower."""
    points: list[dict[str, object]] = []
    for number, point in enumerate(measure.WHOLE_SWEEP.points()):
        tokens, context = point.tokens + point.sequences, point.sequences * point.context
        ms = FLOOR_MS + TOKEN_MS * tokens + PAIR_MS * point.pairs + READ_MS * context
        points.append({"shape": "made-up", **asdict(point), "ms": ms * (1 + noise * (number % 2))})
    return points


@pytest.mark.parametrize("kind", measure.COEFFICIENTS)
def test_a_fit_finds_the_coefficients_that_points_were_made_with(kind: str) -> None:
    """Decode, prefill and the formula of both come back whole, and without an error, from exact points."""
    found = measure.fit(measured(), kind)
    expected = {
        "floor_ms": FLOOR_MS, "sequence_ms": TOKEN_MS, "token_ms": TOKEN_MS,
        "pair_ms": PAIR_MS, "context_token_ms": READ_MS,
    }  # fmt: skip
    for name in measure.COEFFICIENTS[kind]:
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    assert found["p90_error"] < 1e-9


def test_a_fit_tells_how_far_it_is_off() -> None:
    """Points that are 10 % apart leave errors of about half of that on both sides."""
    found = measure.fit(measured(noise=0.1), "step")
    assert 0.02 < found["median_error"] <= found["p90_error"] < 0.1


def test_points_that_tell_nothing_apart_are_no_fit() -> None:
    """Too few points, and points that are all alike, raise instead of giving any coefficients."""
    points = [point for point in measured() if point["kind"] == "decode"]
    with pytest.raises(ValueError, match="only 2 points"):
        measure.fit(points[:2], "decode")
    with pytest.raises(ValueError, match="too few different points"):
        measure.fit([points[0]] * 8, "decode")


def test_no_decode_point_has_more_tokens_than_the_pool() -> None:
    """Every point's KV cache fits in the pool, in whole pages, and all three kinds of step are there."""
    for sweep in (measure.WHOLE_SWEEP, measure.TINY_SWEEP):
        points = list(sweep.points())
        assert {point.kind for point in points} == {"decode", "prefill", "mixed"}
        for point in points:
            chunk_pages = -(-(point.prior + point.tokens) // sweep.page)
            pages = point.sequences * point.context // sweep.page
            assert point.context % sweep.page == 0
            assert chunk_pages + pages <= sweep.pool_tokens // sweep.page


def test_shapes_are_those_of_the_calibrations() -> None:
    """Each calibration's shape is measured, and a token takes as much of all GPUs' KV caches as was reckoned with."""
    shapes = {shape.name: shape for shape in measure.SHAPES}
    assert set(SHAPE_OF) <= set(CALIBRATIONS)
    assert set(SHAPE_OF.values()) == set(shapes)
    kv_bytes = {name: 2 * 2 * s.layers * s.kv_heads * s.head_dim * s.gpus for name, s in shapes.items()}
    assert kv_bytes["qwen3-32b-tp2"] == 262_144
    assert kv_bytes["llama-3.1-70b-tp4"] == 327_680


def test_without_a_gpu_the_script_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with 2 and a way to try it, and writes nothing."""
    monkeypatch.setattr(measure, "torch", None)
    assert measure.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_script_is_one_file_that_knows_nothing_of_this_project(tmp_path: Path) -> None:
    """A copy of it elsewhere loads by itself."""
    copy = tmp_path / "measure.py"
    copy.write_bytes(Path(measure.__file__).read_bytes())
    assert "loadtest" not in {
        line.split()[1].split(".")[0] for line in copy.read_text().splitlines() if line[:5] == "from "
    }
    assert callable(runpy.run_path(str(copy))["main"])


def test_on_a_cpu_the_tiny_sweep_is_measured_whole(tmp_path: Path) -> None:
    """Where PyTorch is, a run on the CPU measures every point, and the rest of its file is as on a GPU."""
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    assert measure.main(["--out", str(out), "--device", "cpu", "--tiny", "--seconds", "60"]) == 0
    found = json.loads(out.read_text())
    assert len(found["points"]) == len(list(measure.TINY_SWEEP.points()))
    assert found["complete"]
    assert not found["failed"]
