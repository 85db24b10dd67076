"""Time of moving KV blocks on a real GPU, on the page of tiers."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest.docgen.markdown import PageError, table
from loadtest.kernels.command import KernelFile, read_file
from loadtest.kernels.transfers_command import (
    KERNELS,
    TRANSFERS,
    TransferFile,
    TransferFit,
    even_tokens,
    loads_beside_prefills,
    read_transfers,
)
from router.core.estimators.tier_load import FLOOR_MS
from router.core.types.tiers import CPU

CALLS_TOKENS = 16_384  # tokens of the load for the column of calls
PREFILL_TOKENS = (512, 8_192)
PREFILL_PRIORS = (0, 32_768)
TRAFFIC = (
    "load whole", "load blocks", "load batch", "load kernel", "load wide",
    "store batch", "store kernel", "load and store blocks", "load and store batch",
)  # fmt: skip


def transfers_block() -> str:
    """Return the tables of `loadtest transfers` on the stored results of an H100. Raises PageError."""
    try:
        found, kernels = read_transfers(TRANSFERS), read_file(KERNELS)
    except ValueError as error:
        raise PageError(str(error)) from error
    dates = " and ".join(sorted({date[:10] for date in found.dates.values()}))
    gpu, torch = found.machine.gpu, found.machine.torch.partition("+")[0]
    said = f"Measured on {dates} on {gpu}, PyTorch {torch}, CUDA {found.machine.cuda}, one GPU's share of each model."
    floor_ms = FLOOR_MS[CPU]
    tokens = ", ".join(f"{n:.0f} ({name})" for name, n in even_tokens(found, kernels, floor_ms).items())
    begin = f"If an engine's steps add {floor_ms:g} ms to a load"
    even = f"{begin}, computing is faster below these numbers of tokens: {tokens}."
    loads = (ways_table(found), prefills_table(found, kernels), even)
    return "\n\n".join((said, *loads, contention_table(found), files_table(found)))


def ways_table(found: TransferFile) -> str:
    """Return the speeds of every way, and the time of the calls of a load."""
    heads, fits = ["way"], {(fit.shape, fit.way, fit.load): fit for fit in found.fits}
    for name, shape in found.shapes.items():
        what = f"{name}, {shape.piece_bytes >> 10} KiB"
        heads += [f"{what}: load, GB/s", "store, GB/s", "calls, ms"]
    rows = []
    for way in dict.fromkeys(fit.way for fit in found.fits):
        row = [way]
        for name in found.shapes:
            calls = [
                f"{point.calls_ms:.1f}"
                for point in found.transfers
                if (point.shape, point.way, point.load, point.tokens) == (name, way, True, CALLS_TOKENS)
            ]
            row += [*(speed(fits.get((name, way, load))) for load in (True, False)), *calls]
        rows.append(row)
    return table(heads, rows)


def speed(fit: TransferFit | None) -> str:
    """Return the GB/s of a fit, or `-` without one."""
    return "-" if fit is None else f"{fit.gb_per_s:.1f}"


def prefills_table(found: TransferFile, kernels: KernelFile) -> str:
    """Return a table of loading beside computing."""
    rows = []
    for name, way, point, load_ms in loads_beside_prefills(found, kernels.points):
        if point.tokens in PREFILL_TOKENS and point.prior in PREFILL_PRIORS:
            even = point.tokens * found.shapes[name].token_bytes / point.ms / 1e6
            times = (f"{load_ms:.1f}", f"{point.ms:.0f}", f"1/{point.ms / load_ms:.0f}", f"{even:.1f}")
            rows.append((name, way, f"{point.tokens:,}", f"{point.prior:,}", *times))
    heads = ("shape", "way", "tokens", "after", "load, ms", "prefill, ms", "load / prefill", "even at, GB/s")
    return table(heads, rows)


def contention_table(found: TransferFile) -> str:
    """Return a table of the slowdown of each step beside transfers, and of their speeds."""
    columns = list(dict.fromkeys((row.shape, row.step) for row in found.contention))
    rows = [[traffic, *cells_beside(found, traffic, columns)] for traffic in TRAFFIC]
    return table(["transfers", *(f"{shape}, {step}" for shape, step in columns)], rows)


def cells_beside(found: TransferFile, traffic: str, columns: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the cells of one row of that table."""
    for shape, step in columns:
        of = (r for r in found.contention if (r.shape, r.step, r.traffic) == (shape, step, traffic))
        row = next(of, None)
        speeds = "" if row is None else " + ".join(f"{each:.0f}" for each in row.gb_per_s)
        yield "-" if row is None else f"{row.ratio:.2f} at {speeds} GB/s"


def files_table(found: TransferFile) -> str:
    """Return the best speed of reading a file in each way."""
    best: dict[tuple[str, str], float] = {}
    for file in found.files:
        key = (file.how, "GPU" if file.to_gpu else "memory")
        best[key] = max(best.get(key, 0.0), file.gb_per_s)
    return table(("file", "into", "GB/s"), [(*key, f"{value:.1f}") for key, value in best.items()])
