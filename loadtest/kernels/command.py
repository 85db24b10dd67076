"""`python -m loadtest kernels FILE`: the simulated engine's step times beside those of a GPU's kernels.

FILE is the output of measure.py on a machine with a GPU. Kernels are a lower bound: an engine adds all-reduces,
sampling and its own work between two steps, and a calibration includes those.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from loadtest.common.report import build_table, percentile, report_console
from loadtest.fake_engine.calibration import CALIBRATIONS, LinearTimes, SharedTimes, StepTimes

# By calibration: the shape in measure.py of the same model on the same GPUs. The missing one is of a GPU of an earlier
# kind.
SHAPE_OF = {
    "qwen3-32b-2xh100": "qwen3-32b-tp2",
    "qwen3-32b-2xh100-2026": "qwen3-32b-tp2",
    "llama-3.1-70b-4xh100": "llama-3.1-70b-tp4",
    "mocker-8b": "qwen3-8b-tp1",
}
KINDS = ("decode", "prefill", "mixed")
PAGE_WIDTH = 110  # columns of a table without a terminal


class StepMeasured(msgspec.Struct):
    """One point: the work of the step, in tokens and sequences, and its duration."""

    shape: str
    kind: str
    sequences: int
    context: int
    tokens: int
    prior: int
    ms: float
    least_ms: float
    most_ms: float

    def model_ms(self, times: StepTimes) -> float:
        """Return the milliseconds of the same step by a calibration."""
        pairs = self.tokens * (self.prior + self.tokens / 2)
        return times.mixed_s(self.tokens, pairs, self.sequences, self.sequences * self.context) * 1e3


class KernelMachine(msgspec.Struct):
    """The machine of the measurement."""

    torch: str
    gpu: str | None = None
    cuda: str | None = None


class KernelFile(msgspec.Struct):
    """The part of measure.py's output that is compared here."""

    date: str
    machine: KernelMachine
    points: list[StepMeasured]
    left_out: list[str]
    skipped: list[object]
    failed: list[object]
    fits: dict[str, dict[str, dict[str, float]]]


def read_file(path: Path) -> KernelFile:
    """Read a file. Raises OSError, and ValueError if measure.py did not write it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KernelFile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a result of loadtest/kernels/measure.py: {error}") from None
    if not found.points:
        raise ValueError(f"{path} has no points: measure again, and check `failed` in the file")
    return found


def coefficients(
    times: LinearTimes | SharedTimes, fits: dict[str, dict[str, float]]
) -> Iterator[tuple[str, float, str, float]]:
    """Yield each constant of a calibration in microseconds, the name of the matching fit, and the value of the fit."""
    stream_s = times.stream_s if isinstance(times, SharedTimes) else times.token_s
    compared = (
        ("floor", times.floor_s, "decode", "floor_ms"),
        ("floor", times.floor_s, "step", "floor_ms"),
        ("a decode", stream_s, "decode", "sequence_ms"),
        ("a token", times.token_s, "prefill", "token_ms"),
        ("a token", times.token_s, "step", "token_ms"),
        ("a pair", times.pair_s, "prefill", "pair_ms"),
        ("a pair", times.pair_s, "step", "pair_ms"),
        ("a context token", times.read_s, "decode", "context_token_ms"),
        ("a context token", times.read_s, "step", "context_token_ms"),
    )
    for name, value_s, kind, key in compared:
        if (measured := fits.get(kind, {}).get(key)) is not None:
            yield name, value_s * 1e6, kind, measured * 1e3


def show_coefficients(
    console: Console, name: str, times: LinearTimes | SharedTimes, fits: dict[str, dict[str, float]]
) -> None:
    """Print the constants of one calibration beside the fits, and the errors of the fits."""
    lines = [
        (
            what,
            f"{model_us:.4g}",
            f"{measured_us:.4g}",
            kind,
            f"{model_us / measured_us:.2f}" if measured_us > 0 else "-",
        )
        for what, model_us, kind, measured_us in coefficients(times, fits)
    ]
    heads = ("us for", "calibration", "measured", "fit of", "calibration / measured")
    console.print(f"{name}: constants")
    console.print(build_table(heads, lines, left={"us for", "fit of"}))
    for kind, fit in fits.items():
        errors = f"relative error {fit['median_error']:.1%} in the median, {fit['p90_error']:.1%} at p90"
        console.print(f"fit of {kind}: {fit['points']:.0f} points, {errors}")


def show_steps(console: Console, name: str, times: StepTimes, points: Sequence[StepMeasured]) -> None:
    """Print the ratio of a calibration's step times to the measured ones, by kind."""
    lines = []
    for kind in KINDS:
        ratios = [point.model_ms(times) / point.ms for point in points if point.kind == kind]
        if ratios:
            shown = (percentile(ratios, 10) or 0.0, median(ratios), percentile(ratios, 90) or 0.0)
            lines.append((kind, str(len(ratios)), *(f"{ratio:.2f}" for ratio in shown)))
    heads = ("step", "points", "p10", "median", "p90")
    console.print(f"{name}: calibration / measured, step by step")
    console.print(build_table(heads, lines, left={"step"}))


def show(console: Console, found: KernelFile) -> None:
    """Print every calibration beside the measurements of its model."""
    where = found.machine
    console.print(f"{where.gpu or 'a CPU'}, PyTorch {where.torch}, CUDA {where.cuda or '-'}, {found.date}")
    console.print(f"{len(found.points)} points, {len(found.failed)} failures, {len(found.skipped)} skipped")
    console.print(f"Not measured: {'; '.join(found.left_out)}.\n")
    for name, calibration in CALIBRATIONS.items():
        shape = SHAPE_OF.get(name)
        points = [point for point in found.points if point.shape == shape]
        if not points:
            console.print(f"{name}: not measured\n")
            continue
        if isinstance(calibration.times, LinearTimes | SharedTimes):
            show_coefficients(console, name, calibration.times, found.fits.get(str(shape), {}))
        show_steps(console, name, calibration.times, points)
        console.print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if the file cannot be compared."""
    about = "Compare step times of the simulated engine with those of GPU kernels (measure.py)."
    parser = argparse.ArgumentParser(prog="python -m loadtest kernels", description=about)
    parser.add_argument("file", type=Path, metavar="FILE", help="result of loadtest/kernels/measure.py")
    options = parser.parse_args(argv)
    try:
        found = read_file(options.file)
    except (OSError, ValueError) as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    show(report_console(PAGE_WIDTH), found)
    return 0
