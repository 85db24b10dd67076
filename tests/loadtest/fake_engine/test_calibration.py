"""Promises of the calibration that is simulated unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.kernels.command import read_file

KERNELS = Path(__file__).resolve().parents[3] / "loadtest" / "data" / "kernels_h100.json"


def test_qwen3_32b_of_2026_follows_its_sources() -> None:
    """15,926 tok/s in an 8,192-token chunk; decode steps of 26 shapes are slower than their kernels alone, by 1.3 x at
    most in the median; a prefix that several sequences share is read from memory once."""
    times = CALIBRATIONS[CALIBRATION].times
    assert 8192 / times.mixed_s(8192, 8192 * 8193 / 2, 0, 0) == pytest.approx(15_926, rel=0.01)
    kernels = [
        point.model_ms(times) / point.ms
        for point in read_file(KERNELS).points
        if point.shape == "qwen3-32b-tp2" and point.kind == "decode"
    ]
    assert len(kernels) == 26
    assert min(kernels) > 1
    assert median(kernels) < 1.3
    alone, shared = times.decodes_s(90, 693_000, 1), times.decodes_s(90, 693_000, 1, 250_000)
    assert alone - shared == pytest.approx(443_000 * (44e-9 - 23e-9))
    assert times.mixed_s(0, 0, 90, 693_000, 250_000) == pytest.approx(shared)
