"""Time of KV blocks between a GPU, its host's memory and a local disk, and the slowdown of decoding by them.

    python3 transfers.py --out FILE [--seconds 360] [--shapes NAME,NAME] [--disk DIR] [--device cpu --tiny]

It runs from a copy of this folder on a machine with PyTorch, and better with Triton and a C compiler. One GPU's share
of a model's KV cache is moved in blocks of 16 tokens at random places on both sides:

- alone (`transfers`, with fits of a floor and a token's time)
- in an endless row while steps of measure.py's layers run (`contention`)
- from a file (`files`)

The time of a transfer is that from the first call to the end of the last copy, on the host's clock. Every way is
checked to bring the right bytes before it is timed. Failures are recorded and left out. Results are written after every
part, and at the deadline at the latest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError:  # `main` reports the missing package
    torch = None

if TYPE_CHECKING or __package__:
    from loadtest.kernels import copies, measure
    from loadtest.kernels.transfer_bench import GIB, PARTS, TINY, WHOLE, K, TransferBench, layout_of, round_numbers
    from loadtest.kernels.transfer_files import FileBench
    from loadtest.kernels.transfer_rows import measure_contention
else:  # run as a script, from a copy of this folder
    import copies
    import measure
    from transfer_bench import GIB, PARTS, TINY, WHOLE, K, TransferBench, layout_of, round_numbers
    from transfer_files import FileBench
    from transfer_rows import measure_contention

# runs of a point, the minimum, and seconds of runs beyond the minimum
REPEATS, REPEATS_LEAST, POINT_SECONDS = 9, 3, 0.5
PAGEABLE_TOKENS_MAX = 16 * K


def time_transfer(mover: copies.Mover, submit: copies.Submit) -> dict[str, Any]:
    """Return the milliseconds of a transfer, and of its calls alone."""
    stream = mover.stream()
    submit(stream)
    mover.wait()
    began, whole, calls = time.monotonic(), list[float](), list[float]()
    while len(whole) < REPEATS_LEAST or (len(whole) < REPEATS and time.monotonic() < began + POINT_SECONDS):
        start = time.perf_counter()
        submit(stream)
        called = time.perf_counter()
        mover.wait(stream)
        whole.append((time.perf_counter() - start) * 1e3)
        calls.append((called - start) * 1e3)
    found = {"ms": median(whole), "least_ms": min(whole), "most_ms": max(whole), "calls_ms": median(calls)}
    return found | {"repeats": len(whole)}


def measure_way(bench: TransferBench, mover: copies.Mover, shape: measure.LayerShape, way: str, *, load: bool) -> None:
    """Measure all points of one way in one direction, and fit them."""
    layout, what = layout_of(shape), {"shape": shape.name, "load": load, "way": way}
    submit, moved = mover.submit(way, layout, bench.whole.tokens[0], load=load)
    if not mover.check_copy(moved, submit, load=load):
        raise ValueError("other bytes came than were sent")
    points = []
    for tokens in bench.whole.tokens:
        if bench.late(f"{what} {tokens}") or (way == "pageable" and tokens > PAGEABLE_TOKENS_MAX):
            break
        submit, moved = mover.submit(way, layout, tokens, load=load)
        found = time_transfer(mover, submit)
        speed = {"gb_per_s": tokens * layout.token_bytes / found["ms"] / 1e6}
        points.append(what | {"tokens": tokens, "pieces": len(moved.host)} | found | speed)
    bench.found["transfers"] += points
    bench.found["fits"].append(what | fit_line(points, layout))


def fit_line(points: Sequence[dict[str, Any]], layout: copies.KvLayout) -> dict[str, float]:
    """Fit a line through points: the minimum milliseconds of a transfer, and microseconds for each token."""
    rows, wanted = [(1.0, point["tokens"]) for point in points], [point["ms"] for point in points]
    floor_ms, token_ms = measure.least_squares(rows, wanted)
    if floor_ms < 0:  # longer transfers are slower by the token
        floor_ms, (token_ms,) = 0.0, measure.least_squares([row[1:] for row in rows], wanted)
    errors = [abs((floor_ms + token_ms * n) / ms - 1) for (_, n), ms in zip(rows, wanted, strict=True)]
    speed = layout.token_bytes / token_ms / 1e6
    return {"floor_ms": floor_ms, "token_us": token_ms * 1e3, "gb_per_s": speed, "most_error": max(errors)}


def measure_pageable(bench: TransferBench, mover: copies.Mover, shapes: Sequence[measure.LayerShape]) -> None:
    """Measure every shape in both directions, before the host's memory is pinned."""
    for shape in shapes:
        for load in (True, False):
            with bench.part(f"{shape.name} pageable"):
                measure_way(bench, mover, shape, "pageable", load=load)


def measure_transfers(bench: TransferBench, mover: copies.Mover, shapes: Sequence[measure.LayerShape]) -> None:
    """Measure every way of every shape in both directions."""
    for shape in shapes:
        for way in mover.ways:
            for load in (True,) if way == "ordered" else (True, False):
                with bench.part(f"{shape.name} {way} {'load' if load else 'store'}"):
                    measure_way(bench, mover, shape, way, load=load)


def measure_all(bench: TransferBench, shapes: Sequence[measure.LayerShape], parts: Sequence[str], disk: Path) -> None:
    """Measure the requested parts, one after the other."""
    torch.manual_seed(1)
    mover = copies.Mover(bench.whole.host_bytes, bench.whole.gpu_bytes, cuda=bench.cuda)
    for shape in shapes:
        layout = layout_of(shape)
        bench.found["shapes"][shape.name] = {
            "gpus": shape.gpus, "piece_bytes": layout.piece_bytes, "token_bytes": layout.token_bytes,
        }  # fmt: skip
    if "transfers" in parts:
        with bench.part("transfers"):
            measure_pageable(bench, mover, shapes)
    start = time.perf_counter()
    mover.pin()
    bench.found["machine"]["pin_ms_per_gib"] = (time.perf_counter() - start) * 1e3 / (mover.host.numel() / GIB)
    for part in parts:
        bench.found["dates"][part] = datetime.now(UTC).isoformat(timespec="seconds")
        with bench.part(part):
            if part == "transfers":
                measure_transfers(bench, mover, shapes)
            elif part == "files":
                FileBench(bench, mover, disk).measure()
            else:
                for shape in shapes:
                    with bench.part(f"{shape.name} contention"):
                        measure_contention(bench, mover, shape)
                    if bench.cuda:
                        torch.cuda.empty_cache()
    bench.found["complete"] = not bench.found["skipped"]
    del bench.found["kernels"]


def show(found: dict[str, Any]) -> None:
    """Print a short table of the results."""
    print(found["machine"])
    for fit in found["fits"]:
        head = f"{fit['shape']:18} {'load ' if fit['load'] else 'store'} {fit['way']:9}"
        line = f"{fit['floor_ms']:8.3f} ms + {fit['token_us']:7.3f} us/token {fit['gb_per_s']:6.1f} GB/s"
        print(f"{head} {line} +-{fit['most_error']:.0%}")
    for row in found["traffic"]:
        print(f"{row['shape']:18} alone    {row['traffic']:22} {row['gb_per_s']}")
    for row in found["contention"]:
        ratio = row["ms"] / row["alone_ms"]
        print(f"{row['shape']:18} {row['step']:8} {row['traffic']:22} x {ratio:.3f} {row['gb_per_s']}")
    for row in found["files"]:
        print({key: value for key, value in row.items() if key not in ("device", "bytes")})
    print(f"{len(found['failed'])} failures, {len(found['skipped'])} skipped")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if PyTorch or the device is missing."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description="Measure transfer times of KV blocks between a GPU, its host and a disk."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--seconds", type=float, default=360.0, metavar="S", help="time of the whole run in seconds (360)"
    )
    parser.add_argument(
        "--shapes", metavar="NAME,NAME", help="only these: " + ", ".join(s.name for s in measure.SHAPES)
    )
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="folder of the test file (.)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shape and sweep for a test on a CPU")
    parser.add_argument("--quick", action="store_true", help="one shape, fewer sizes and fewer reads")
    told = "only these, of " + ", ".join(PARTS) + "; other parts in the file are kept"
    parser.add_argument("--parts", default=",".join(PARTS), metavar="PART,PART", help=told)
    options = parser.parse_args(argv)
    if torch is None or (options.device == "cuda" and not torch.cuda.is_available()):
        print("PyTorch with a GPU is required; use --device cpu --tiny for a test without one", file=sys.stderr)
        return 2
    known = measure.TINY if options.tiny else measure.SHAPES
    shapes = [s for s in known if not options.shapes or s.name in options.shapes.split(",")]
    if not shapes:
        parser.error(f"--shapes: must be one of {', '.join(s.name for s in known)}")
    parts = [part for part in PARTS if part in options.parts.split(",")]
    sweep = TINY if options.tiny else WHOLE
    if options.quick:
        sweep, shapes = replace(sweep, tokens=sweep.tokens[1:-1], reads=sweep.reads[-1:]), shapes[:1]
    bench = TransferBench(options.device, sweep, options.out, began + options.seconds)
    bench.keep(parts)
    bench.write()
    try:
        with torch.inference_mode():
            measure_all(bench, shapes, parts, options.disk)
    finally:
        bench.found["seconds"] = time.monotonic() - began
        bench.write()
        show(round_numbers(bench.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
