"""Promises of `loadtest steps`: coefficients are found again, half of a grid is foretold, failures are one line."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path

import pytest

from loadtest.fake_engine.calibration import SharedTimes
from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.step import Limits
from loadtest.kernels import steps, steps_command

LIMITS = Limits(32, 2048, 16)
TIMES = SharedTimes(20e-3, 3e-4, 2e-8, 1e-3, 5e-7, 5e-7)
REQUEST_S = 4e-3


def measured(noise: float = 0.0) -> list[tuple[steps.Cell, bool, steps.CellTimes]]:
    """The whole grid as an engine with `TIMES` would take it, each time off by up to `noise`."""
    rng = random.Random(1)
    found = []
    for cell, fits in steps.cells_of(steps.PROMPTS, steps.STREAMS, steps.ANSWER_TOKENS):
        took = steps.times_of(cell, TIMES, LIMITS)
        ttft, tpot = (1 + rng.uniform(-noise, noise) for _ in range(2))
        found.append((cell, fits, steps.CellTimes((took.ttft_s + REQUEST_S) * ttft, took.tpot_s * tpot)))
    return found


def test_coefficients_are_found_again() -> None:
    """Without noise all six come out as they went in, and both halves are foretold exactly."""
    values, cells = steps.hold(measured(), LIMITS)
    went_in = [TIMES.floor_s, TIMES.token_s, TIMES.pair_s, TIMES.stream_s, TIMES.read_s, REQUEST_S]
    assert list(values) == list(steps.COEFFICIENTS)
    assert list(values.values()) == pytest.approx(went_in, rel=1e-4)
    assert steps.summary(cells, is_fitted=False)["all_most"] < 1e-6
    halves = [each.fitted for each in cells]
    assert abs(halves.count(True) - halves.count(False)) <= 2


def test_noise_of_cells_is_seen_as_error() -> None:
    """Cells that are off by up to a tenth are foretold within about that; no coefficient is below 0."""
    values, cells = steps.hold(measured(0.1), LIMITS)
    assert min(values.values()) >= 0
    said = steps.summary(cells, is_fitted=False)
    assert 0.01 < said["all_median"] < said["all_most"] < 0.25


def test_a_coefficient_is_never_negative() -> None:
    """What a fit would put below 0 is left out, and the rest is fitted again."""
    found = steps.fit_coefficients([[1.0, 2.0], [1.0, 4.0], [1.0, 8.0]], [10.0, 9.9, 9.8])
    assert found[1] == 0
    assert found[0] == pytest.approx(9.9, rel=0.01)


def test_a_burst_has_a_first_step_of_its_own() -> None:
    """Of two prompts that come at once the first has a step alone: its token and a floor less than the other one."""
    times = SharedTimes(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert steps.times_of(steps.Cell(64, 2), times, LIMITS).ttft_s == pytest.approx(1.5)
    assert steps.times_of(steps.Cell(64, 1), times, LIMITS).ttft_s == pytest.approx(1.0)


async def test_an_engine_is_measured_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells of a simulated engine: what was measured is in the JSON, beside what the model says."""

    def as_measured(
        found: list[tuple[steps.Cell, bool, steps.CellTimes]], _: Limits
    ) -> tuple[dict[str, float], list[steps.Foretold]]:
        return {}, [steps.Foretold(cell, fits, took, took) for cell, fits, took in found]

    monkeypatch.setattr(steps_command, "hold", as_measured)
    file = tmp_path / "steps.json"
    async with Engines(EngineSettings(replicas=1, port=0, model="sim", time_scale=1.0)) as engines:
        words = [engines.urls[0], "--model", "sim", "--prompts", "32", "64", "--streams", "2", "--answer", "3"]
        status = await asyncio.to_thread(steps_command.main, [*words, "--repeats", "1", "--json", str(file)])
    cells = json.loads(file.read_text())["cells"]
    assert status == 0
    assert [(cell["prompt"], cell["streams"]) for cell in cells] == [(32, 2), (64, 2)]
    assert all(cell["ttft_s"] > 0 and cell["tpot_s"] > 0 for cell in cells)


def test_cpu_seconds_are_those_of_a_process() -> None:
    """They grow while it computes, by no more than all of its threads had; without the process it is an error."""
    clock, began_s = steps_command.cpu_clock(os.getpid()), time.process_time()
    before_s = clock()
    sum(range(3_000_000))
    assert 0 < clock() - before_s <= time.process_time() - began_s + 0.05
    with pytest.raises(steps_command.StepsError, match="no CPU time of process 4194305"):
        steps_command.cpu_clock(4_194_305)


def test_no_engine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing answers, a line says so, and the status is 2."""
    assert steps_command.main(["http://127.0.0.1:9", "--model", "sim", "--prompts", "8", "--streams", "1"]) == 2
    assert capsys.readouterr().err.count("steps: ") == 1
