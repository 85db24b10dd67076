"""`python -m loadtest transfers FILE`: cost of moving KV blocks, beside computing them and the router's assumptions.

FILE is the output of transfers.py on a machine with a GPU. A replica of several GPUs loads over as many links in
parallel. So one GPU's share is compared with a prefill that all of them compute together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from loadtest.common.report import build_table, report_console
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.kernels.command import PAGE_WIDTH, KernelFile, KernelMachine, StepMeasured, read_file
from router.core.estimators.tier_load import FLOOR_MS, GB_PER_S
from router.core.types.tiers import CPU, STORAGE

DATA = Path(__file__).parents[1] / "data"
KERNELS, TRANSFERS = DATA / "kernels_h100.json", DATA / "transfers_h100.json"
PRIORS = (0, 8_192, 32_768)  # tokens before those that are computed or loaded
DMA_PIECE_BYTES_MIN = 28_672  # vLLM loads smaller pieces by a kernel


class TransferFit(msgspec.Struct):
    """The line through one way's points in one direction."""

    shape: str
    load: bool
    way: str
    floor_ms: float
    token_us: float
    gb_per_s: float
    most_error: float

    def ms(self, tokens: float) -> float:
        """Return the milliseconds of `tokens` tokens."""
        return self.floor_ms + self.token_us * tokens / 1e3


class TransferPoint(msgspec.Struct):
    """One transfer; `calls_ms` of its `ms` are the calls that begin it."""

    shape: str
    load: bool
    way: str
    tokens: int
    pieces: int
    ms: float
    calls_ms: float
    gb_per_s: float


class TransferShape(msgspec.Struct):
    """The KV cache of one GPU: bytes of a block in one layer, and of a token in all."""

    gpus: int
    piece_bytes: int
    token_bytes: int

    @property
    def way(self) -> str:
        """The way by which vLLM loads such blocks."""
        return "batch" if self.piece_bytes >= DMA_PIECE_BYTES_MIN else "kernel"


class TrafficAlone(msgspec.Struct):
    """Endless transfers alone, and the speed of each row of them."""

    shape: str
    traffic: str
    gb_per_s: list[float]


class StepBeside(TrafficAlone):
    """Some layers of a step beside endless transfers, and alone."""

    step: str
    alone_ms: float
    ms: float

    @property
    def ratio(self) -> float:
        """Ratio of the step's time to its time alone."""
        return self.ms / self.alone_ms


class FileRead(msgspec.Struct):
    """A file that was read, or written."""

    how: str
    file_system: str
    read_bytes: int
    readers: int
    to_gpu: bool
    gb_per_s: float


class TransferFile(msgspec.Struct):
    """The part of transfers.py's output that is shown here."""

    dates: dict[str, str]
    """By part: transfers, contention, files."""
    machine: KernelMachine
    shapes: dict[str, TransferShape]
    transfers: list[TransferPoint]
    fits: list[TransferFit]
    traffic: list[TrafficAlone]
    contention: list[StepBeside]
    files: list[FileRead]
    left_out: list[str]
    skipped: list[object]
    failed: list[object]


def read_transfers(path: Path) -> TransferFile:
    """Read a file. Raises OSError, and ValueError if transfers.py did not write it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TransferFile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a result of loadtest/kernels/transfers.py: {error}") from None
    if not found.fits:
        raise ValueError(f"{path} has no fits: measure again, and check `failed` in the file")
    return found


def show_fits(console: Console, found: TransferFile) -> None:
    """Print the fit of each way, and the share of the calls in the longest transfer."""
    lines = []
    for fit in found.fits:
        points = [p for p in found.transfers if (p.shape, p.load, p.way) == (fit.shape, fit.load, fit.way)]
        longest = max(points, key=lambda point: point.tokens)
        figures = (f"{fit.floor_ms:.3f}", f"{fit.token_us:.2f}", f"{fit.gb_per_s:.1f}", f"{fit.most_error:.0%}")
        what = (fit.shape, "load" if fit.load else "store", fit.way)
        lines.append((*what, *figures, f"{longest.gb_per_s:.1f}", f"{longest.calls_ms / longest.ms:.0%}"))
    heads = ("shape", "", "way", "floor, ms", "us a token", "GB/s", "error", "GB/s, longest", "calls")
    console.print("Transfers by themselves: a floor, and a time for each token")
    console.print(build_table(heads, lines, left={"shape", "", "way"}))


def loads_beside_prefills(
    found: TransferFile, points: Sequence[StepMeasured]
) -> Iterator[tuple[str, str, StepMeasured, float]]:
    """Yield the shape, the way, a prefill, and the milliseconds of loading its tokens as vLLM does."""
    for name, shape in found.shapes.items():
        fit = next((f for f in found.fits if (f.shape, f.load, f.way) == (name, True, shape.way)), None)
        for point in points:
            if fit is not None and point.kind == "prefill" and point.shape == name and point.prior in PRIORS:
                yield name, fit.way, point, fit.ms(point.tokens)


def show_prefills(console: Console, found: TransferFile, kernels: KernelFile) -> None:
    """Print loading beside computing, and the speed of a link below which computing is quicker."""
    lines = []
    for name, way, point, load_ms in loads_beside_prefills(found, kernels.points):
        link = point.tokens * found.shapes[name].token_bytes / point.ms / 1e6
        times = (f"{load_ms:.2f}", f"{point.ms:.1f}", f"1/{point.ms / load_ms:.0f}", f"{link:.2f}")
        lines.append((name, way, f"{point.tokens:,}", f"{point.prior:,}", *times))
    heads = ("shape", "way", "tokens", "after", "load, ms", "prefill, ms", "load / prefill", "even at, GB/s")
    console.print(f"Loading beside computing on {kernels.machine.gpu}, and the link on which both take as long")
    console.print(build_table(heads, lines, left={"shape", "way"}))


def even_tokens(found: TransferFile, kernels: KernelFile, floor_ms: float) -> dict[str, float]:
    """Return the number of tokens of each shape for which computing takes as long as loading.

    They are computed in a step that runs anyway, and `floor_ms` is the engine's extra time for a load. Computing fewer
    tokens is quicker.
    """
    loads = {(fit.shape, fit.way): fit for fit in found.fits if fit.load}
    even = {}
    for name, shape in found.shapes.items():
        fit, computed = loads.get((name, shape.way)), kernels.fits.get(name, {}).get("prefill")
        if fit is not None and computed is not None:
            even[name] = (floor_ms + fit.floor_ms) / (computed["token_ms"] - fit.token_us / 1e3)
    return even


def show_contention(console: Console, found: TransferFile) -> None:
    """Print the slowdown of steps and transfers beside each other."""
    alone = {(row.shape, row.traffic): row.gb_per_s for row in found.traffic}
    lines = []
    for row in found.contention:
        before = alone.get((row.shape, row.traffic), [])
        kept = [f"{now / then:.2f}" for now, then in zip(row.gb_per_s, before, strict=False)]
        speeds = " + ".join(f"{speed:.1f}" for speed in row.gb_per_s)
        lines.append((row.shape, row.step, row.traffic, f"{row.ratio:.3f}", speeds or "-", " + ".join(kept) or "-"))
    heads = ("shape", "step", "transfers", "step / alone", "GB/s", "of alone")
    console.print("Steps and transfers beside each other")
    console.print(build_table(heads, lines, left={"shape", "step", "transfers"}))


def show_files(console: Console, found: TransferFile) -> None:
    """Print the speeds of reading a file."""
    lines = [
        (file.how, file.file_system, f"{file.read_bytes:,}", str(file.readers), "GPU" if file.to_gpu else "memory",
         f"{file.gb_per_s:.2f}")
        for file in found.files
    ]  # fmt: skip
    heads = ("file", "on", "bytes", "at a time", "into", "GB/s")
    console.print("A file")
    console.print(build_table(heads, lines, left={"file", "on", "into"}))


def show_priors(console: Console, found: TransferFile, kernels: KernelFile) -> None:
    """Print the assumptions of the router and the simulated engine, beside the measurements."""
    loads = [f for f in found.fits if f.load and f.shape in found.shapes and f.way == found.shapes[f.shape].way]
    speeds = ", ".join(f"{fit.gb_per_s:.1f} ({fit.shape}, {fit.way})" for fit in loads)
    floors = ", ".join(f"{fit.floor_ms:.2f}" for fit in loads)
    engine = TierLimits(tokens=0)
    console.print(f"Loads from memory as vLLM does them: {speeds} GB/s, and {floors} ms at least.")
    console.print(
        f"First guess of the router: {GB_PER_S[CPU]:g} GB/s and {FLOOR_MS[CPU]:g} ms, files {GB_PER_S[STORAGE]:g} GB/s."
    )
    even = ", ".join(f"{n:.0f} ({name})" for name, n in even_tokens(found, kernels, FLOOR_MS[CPU]).items())
    console.print(f"With that floor computing is faster than loading below these numbers of tokens: {even}.")
    console.print(f"Simulated engine: {engine.token_s * 1e6:g} us a token and {engine.floor_s * 1e3:g} ms.")


def show(console: Console, found: TransferFile, kernels: KernelFile) -> None:
    """Print all tables."""
    where = found.machine
    dates = ", ".join(f"{part} {date[:10]}" for part, date in found.dates.items())
    console.print(f"{where.gpu or 'a CPU'}, PyTorch {where.torch}, CUDA {where.cuda or '-'}: {dates}")
    console.print(f"{len(found.transfers)} points, {len(found.failed)} failures, {len(found.skipped)} skipped")
    console.print(f"Not measured: {'; '.join(found.left_out)}.\n")
    show_fits(console, found)
    show_prefills(console, found, kernels)
    show_contention(console, found)
    show_files(console, found)
    show_priors(console, found, kernels)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if the files cannot be compared."""
    about = "Compare transfer times of KV blocks (transfers.py) with computation."
    parser = argparse.ArgumentParser(prog="python -m loadtest transfers", description=about)
    parser.add_argument("file", type=Path, metavar="FILE", help="result of loadtest/kernels/transfers.py")
    helped = "result of loadtest/kernels/measure.py on the same kind of GPU (an H100's)"
    parser.add_argument("--kernels", type=Path, default=KERNELS, metavar="FILE", help=helped)
    options = parser.parse_args(argv)
    try:
        found, kernels = read_transfers(options.file), read_file(options.kernels)
    except (OSError, ValueError) as error:
        print(f"transfers: {error}", file=sys.stderr)
        return 2
    show(report_console(PAGE_WIDTH), found, kernels)
    return 0
