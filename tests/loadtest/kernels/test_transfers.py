"""The parts of the scripts of transfers that need no GPU: layouts, fits, what is kept; and all of it on the CPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.fake_engine.host_tier import TierLimits
from loadtest.kernels import copies, measure, transfer_bench, transfer_rows, transfers
from router.core.estimators.tier_load import KV_BYTES_PER_TOKEN

SCRIPTS = ("copies", "measure", "transfer_bench", "transfer_files", "transfer_rows", "transfers")
LAYOUT = copies.KvLayout(layers=4, kv_heads=2, head_dim=32)


def points(floor_ms: float, token_ms: float, more: float = 0.0) -> list[dict[str, Any]]:
    """Transfers of a machine with such a floor and such a time of a token, that of long ones more by a part."""
    tokens = transfer_bench.WHOLE.tokens
    return [{"tokens": n, "ms": floor_ms + token_ms * n * (1 + more * (n > 5_000))} for n in tokens]


def test_layouts_are_those_that_priors_reckon_with() -> None:
    """All GPUs of Qwen3-32B have together the bytes of a token that the first guess has, and the pieces of a block and
    layer are those that vLLM's rule of 28 KiB is about: one shape above it, one below."""
    layouts = {shape.name: (shape.gpus, transfer_bench.layout_of(shape)) for shape in measure.SHAPES}
    gpus, qwen = layouts["qwen3-32b-tp2"]
    assert gpus * qwen.token_bytes == KV_BYTES_PER_TOKEN
    assert TierLimits(0).token_s * 50e9 == pytest.approx(KV_BYTES_PER_TOKEN, rel=1e-3)
    pieces = {name: layout.piece_bytes >> 10 for name, (_, layout) in layouts.items()}
    assert pieces == {"qwen3-32b-tp2": 32, "qwen3-8b-tp1": 64, "llama-3.1-70b-tp4": 16}


def test_everything_fits_into_the_buffers() -> None:
    """The longest transfer of each shape, and the file, have room on the host and on the GPU."""
    sweep = transfer_bench.WHOLE
    for shape in measure.SHAPES:
        longest = max(sweep.tokens) * transfer_bench.layout_of(shape).token_bytes
        assert longest <= min(sweep.host_bytes, sweep.gpu_bytes)
    assert sweep.file_bytes <= min(sweep.host_bytes, sweep.gpu_bytes)


def test_every_way_beside_steps_is_one_that_is_measured_alone() -> None:
    """No traffic has a way of its own, and one has none at all: what the others are held against."""
    ways = {way for rows in transfer_rows.TRAFFIC.values() for _, way in rows}
    assert ways < set(copies.WAYS)
    assert transfer_rows.TRAFFIC["none"] == ()


def test_a_fit_finds_floor_and_slope() -> None:
    """Exact points give back what they were made with, and the speed that follows from the bytes of a token."""
    found = transfers.fit_line(points(0.5, 2e-3), LAYOUT)
    assert (found["floor_ms"], found["token_us"]) == (pytest.approx(0.5), pytest.approx(2.0))
    assert found["gb_per_s"] == pytest.approx(LAYOUT.token_bytes / 2e-6 / 1e9)
    assert found["most_error"] < 1e-9


def test_no_transfer_takes_less_than_nothing() -> None:
    """Where long transfers are slower by the token, the floor is zero instead of negative, and the error is told."""
    found = transfers.fit_line(points(0.0, 2e-3, more=0.3), LAYOUT)
    assert found["floor_ms"] == 0.0
    assert 2.0 < found["token_us"] < 2.6
    assert 0.05 < found["most_error"] < 0.3


def test_numbers_are_kept_with_five_digits() -> None:
    """Floats are rounded wherever they are, and nothing else is changed."""
    assert transfer_bench.round_numbers({"a": [1.23456789, 7], "b": (True, "x", 1e-9 / 3)}) == {
        "a": [1.2346, 7],
        "b": [True, "x", 3.3333e-10],
    }


def test_the_parts_that_are_not_measured_again_are_kept(tmp_path: Path) -> None:
    """A run of one part takes the others, and their dates, from the file; without a file there is nothing to take."""
    bench = transfer_bench.TransferBench.__new__(transfer_bench.TransferBench)
    bench.out, bench.found = tmp_path / "out.json", {"dates": {}, "contention": []}
    bench.keep(["contention"])
    assert bench.found == {"dates": {}, "contention": []}
    lists = {name: [name] for names in transfer_bench.PARTS.values() for name in names}
    bench.out.write_text(json.dumps(lists | {"dates": {"files": "then", "contention": "then"}}))
    bench.keep(["contention"])
    assert bench.found["dates"] == {"files": "then"}
    assert bench.found["contention"] == []
    assert (bench.found["transfers"], bench.found["files"]) == (["transfers"], ["files"])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_call_for_each_piece_stops_at_the_first_error() -> None:
    """The loop in C hands every piece to the driver in order, and returns the error of the first that fails."""
    word, seen = ctypes.c_uint64, list[tuple[int, int, int]]()

    def copy(to: int, source: int, size: int, _stream: int | None) -> int:
        seen.append((to, source, size))
        return 7 if to == 3 else 0

    called = ctypes.CFUNCTYPE(ctypes.c_int, word, word, ctypes.c_ulong, ctypes.c_void_p)(copy)
    to, source = (word * 4)(1, 2, 3, 4), (word * 4)(5, 6, 7, 8)
    each = copies.each_in_c()
    where = (ctypes.addressof(to), ctypes.addressof(source))
    assert each(ctypes.cast(called, ctypes.c_void_p), *where, 16, 4, None) == 7
    assert seen == [(1, 5, 16), (2, 6, 16), (3, 7, 16)]


def test_a_row_tells_its_speed_between_ends() -> None:
    """Transfers that end at 1, 2 and 3 s, each of 2 GB, are 2 GB/s from any moment before the first; a row that failed
    raises what it failed with."""
    row = transfer_rows.Row(None, None, 2_000_000_000)  # type: ignore[arg-type] - not started
    row._ends += [1.0, 2.0, 3.0, 9.0]
    assert row.gb_per_s(0.2, 3.5) == pytest.approx(2.0)
    assert row.gb_per_s(2.5, 4.5) == pytest.approx(1.0)
    row.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        row.gb_per_s(0.0, 4.0)


def test_the_scripts_know_nothing_of_this_project(tmp_path: Path) -> None:
    """Copies of them elsewhere run with the standard library alone, as far as that goes without PyTorch."""
    for name in SCRIPTS:
        shutil.copy(Path(transfers.__file__).with_name(f"{name}.py"), tmp_path)
    command = [sys.executable, "-S", str(tmp_path / "transfers.py"), "--out", str(tmp_path / "out.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "--device cpu --tiny" in ran.stderr


def test_on_a_cpu_the_tiny_sweep_is_measured_whole(tmp_path: Path) -> None:
    """Where PyTorch is, a run on the CPU measures every way, step and read, and brings the right bytes."""
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    arguments = ["--out", str(out), "--device", "cpu", "--tiny", "--seconds", "60", "--disk", str(tmp_path)]
    assert transfers.main(arguments) == 0
    found = json.loads(out.read_text())
    assert (found["failed"], found["complete"]) == ([], True)
    assert {fit["way"] for fit in found["fits"]} == {*copies.WAYS, "pageable"} - set(copies.KERNELS)
    assert {row["step"] for row in found["contention"]} == {"decode", "prefill"}
    assert {file["how"] for file in found["files"]} >= {"direct", "dropped", "page cache"}
