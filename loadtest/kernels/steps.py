"""`python -m loadtest steps URL`: the engine model's step times compared with an engine at URL.

Each cell of a grid is a burst: `streams` prompts of `prompt` tokens, which no cache holds, at one moment. The results
are the mean time to first token and the mean time per output token of its streams, as the median of several bursts.
Cells are divided like the fields of a chessboard: coefficients are fitted on one half, and the engine model predicts
the other.

Both times are linear in the coefficients for a known schedule, and the schedule of a burst does not depend on the
duration of steps. So the model runs once for each coefficient, with this one at 1 and the others at 0, and the times of
that run are the factors of the coefficient. The first prompt has a separate step, and the others are sent during it, so
that the set of prompts in each step is not random. All times count from the first prompt's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from loadtest.fake_engine.calibration import SharedTimes
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from loadtest.kernels.measure import least_squares

PROMPTS = (64, 192, 448, 960, 1_900)
STREAMS = (1, 2, 4, 8, 16)
BURST_TOKENS_MAX = 8_000
"""Limit of the prompt tokens of a burst, so that a run on a CPU ends."""
ANSWER_TOKENS = 32
GOAL = 0.15
"""Limit of the relative error of a time."""
COEFFICIENTS = ("floor", "token", "pair", "stream", "read", "request")
"""As in `SharedTimes`; `request` is the time of a first token outside of steps."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A burst; lengths in tokens."""

    prompt: int
    streams: int
    answer: int = ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class CellTimes:
    """Times of one cell, means over its streams, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Foretold:
    """A cell, its measured times, and the times that the model predicts."""

    cell: Cell
    fitted: bool
    measured: CellTimes
    model: CellTimes

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of TTFT and of the time per output token; above 0 if the model is slower."""
        return self.model.ttft_s / self.measured.ttft_s - 1, self.model.tpot_s / self.measured.tpot_s - 1


def cells_of(prompts: Sequence[int], streams: Sequence[int], answer: int) -> list[tuple[Cell, bool]]:
    """Return the cells of the grid, each with True if it is in the half for the fit."""
    return [
        (Cell(prompt, count, answer), (row + column) % 2 == 0)
        for row, prompt in enumerate(prompts)
        for column, count in enumerate(streams)
        if prompt * count <= BURST_TOKENS_MAX
    ]


def times_of(cell: Cell, times: SharedTimes, limits: Limits) -> CellTimes:
    """Return the engine model's times of a burst, without the requests' own time outside of steps."""
    model = EngineModel(times, 2 * cell.streams * (cell.prompt + cell.answer + limits.block_tokens), limits)
    waiting = [EngineRequest(n, cell.prompt, cell.answer, [], n) for n in range(cell.streams)]
    first_s: dict[int, float] = {}
    finished_s: dict[int, float] = {}
    now_s = 0.0
    model.submit(waiting[0])
    while (step := model.begin()) is not None:
        for request in waiting[1:]:
            model.submit(request)
        waiting = []
        now_s += step.duration_s
        outcome = model.complete(step)
        first_s |= {number: now_s for number, _ in outcome.first}
        finished_s |= dict.fromkeys(outcome.finished, now_s)
    return CellTimes(
        fmean(first_s.values()),
        fmean((finished_s[n] - at_s) / (cell.answer - 1) for n, at_s in first_s.items()),
    )


def terms(cell: Cell, limits: Limits) -> tuple[list[float], list[float]]:
    """Return the factor of each coefficient, in the TTFT and in the time per output token."""
    zero = SharedTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    units = [replace(zero, **{f"{name}_s": 1.0}) for name in COEFFICIENTS[:-1]]
    units[-1] = replace(units[-1], again_s=1.0)
    told = [times_of(cell, unit, limits) for unit in units]
    return [*(each.ttft_s for each in told), 1.0], [*(each.tpot_s for each in told), 0.0]


def fit_coefficients(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return coefficients of least squares of relative errors, none below 0.

    The most negative one is left out until no negative one remains. Raises ValueError if rows do not distinguish the
    rest.
    """
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows)]
    while True:
        found = least_squares([[row[i] for i in kept] for row in rows], wanted)
        worst = min(range(len(kept)), key=lambda at: found[at] * max(row[kept[at]] for row in rows))
        if found[worst] >= 0:
            return [dict(zip(kept, found, strict=True)).get(i, 0.0) for i in range(len(rows[0]))]
        del kept[worst]


def hold(measured: Iterable[tuple[Cell, bool, CellTimes]], limits: Limits) -> tuple[dict[str, float], list[Foretold]]:
    """Fit the coefficients on the fitted half, and compare every cell with the model.

    Returns the coefficients in seconds by name, and the cells.
    """
    found = list(measured)
    told = {cell: terms(cell, limits) for cell, _, _ in found}
    rows: list[list[float]] = []
    wanted: list[float] = []
    for cell, is_fitted, took in found:
        if is_fitted:
            rows += told[cell]
            wanted += [took.ttft_s, took.tpot_s]
    values = fit_coefficients(rows, wanted)
    cells = []
    for cell, is_fitted, took in found:
        ttft_s, tpot_s = (sum(a * b for a, b in zip(values, row, strict=True)) for row in told[cell])
        cells.append(Foretold(cell, is_fitted, took, CellTimes(ttft_s, tpot_s)))
    return dict(zip(COEFFICIENTS, values, strict=True)), cells


def summary(cells: Sequence[Foretold], *, is_fitted: bool) -> dict[str, float]:
    """Return the median and greatest absolute relative error of one half, of either time and of both."""
    errors = [each.errors for each in cells if each.fitted is is_fitted]
    both = {
        "ttft": [abs(error) for error, _ in errors],
        "tpot": [abs(error) for _, error in errors],
    }
    both["all"] = both["ttft"] + both["tpot"]
    return {
        f"{name}_{what}": of(values)
        for name, values in both.items()
        for what, of in (("median", median), ("most", max))
    }


def token_ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return a random prompt without a common prefix with earlier ones; ids below 16 are special tokens."""
    return [rng.randrange(16, vocabulary) for _ in range(count)]
