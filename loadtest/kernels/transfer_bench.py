"""Points, results and deadline of a benchmark of transfers; see transfers.py."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from loadtest.kernels import copies, measure
else:  # run as a script, from a copy of this folder
    import copies
    import measure


K, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LEFT_OUT = (
    "what an engine does before and after: finding blocks, their addresses, its scheduler's next step",
    "other GPUs of the host, which share its memory and perhaps a switch",
)


@dataclass(frozen=True)
class TransferSweep:
    """Measured points, and the size of the buffers."""

    tokens: tuple[int, ...]
    steps: tuple[measure.StepPoint, ...]
    row_tokens: int
    """Tokens of each transfer that runs beside steps."""
    host_bytes: int
    gpu_bytes: int
    file_bytes: int
    reads: tuple[tuple[int, int], ...]
    """(bytes of a read, concurrent reads)."""
    layers: measure.Sweep


WHOLE = TransferSweep(
    tokens=(256, K, 4 * K, 16 * K, 64 * K),
    steps=(measure.StepPoint("decode", 32, 8 * K), measure.StepPoint("prefill", tokens=2 * K, prior=8 * K)),
    row_tokens=4 * K,
    host_bytes=10 * GIB,
    gpu_bytes=14 * GIB,
    file_bytes=4 * GIB,
    reads=((2 * MIB, 1), (2 * MIB, 4), (2 * MIB, 16), (16 * MIB, 4), (16 * MIB, 16)),
    layers=measure.WHOLE_SWEEP,
)
TINY = TransferSweep(
    tokens=(16, 32, 64),
    steps=(measure.StepPoint("decode", 3, 32), measure.StepPoint("prefill", tokens=16, prior=64)),
    row_tokens=64,
    host_bytes=4 * MIB,
    gpu_bytes=4 * MIB,
    file_bytes=2 * MIB,
    reads=((64 * K, 1), (64 * K, 4)),
    layers=measure.TINY_SWEEP,
)


def layout_of(shape: measure.LayerShape) -> copies.KvLayout:
    """Return the KV cache of one GPU that has this shape."""
    return copies.KvLayout(shape.layers, shape.kv_heads, shape.head_dim)


def round_numbers(value: Any) -> Any:  # noqa: ANN401 - anything of JSON
    """Return the value with five digits of every number."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: round_numbers(each) for key, each in value.items()}
    return [round_numbers(each) for each in value] if isinstance(value, list | tuple) else value


# Parts, and the lists of each in the output.
PARTS = {"transfers": ("transfers", "fits"), "contention": ("traffic", "contention"), "files": ("files",)}


class TransferBench(measure.KernelBench):
    """Measures transfers until its deadline, and keeps the results."""

    def __init__(self, device: str, sweep: TransferSweep, out: Path, deadline: float) -> None:
        super().__init__(device, sweep.layers, out, deadline)
        self.whole = sweep
        self.found = {
            "what": "transfers", "dates": {},
            "machine": measure.machine(self.cuda) | host_machine(), "left_out": list(LEFT_OUT), "shapes": {},
            "transfers": [], "fits": [], "traffic": [], "contention": [], "files": [], "kernels": [],
            "failed": [], "skipped": [], "complete": False,
        }  # fmt: skip

    def keep(self, parts: Sequence[str]) -> None:
        """Take over from the file the results of parts other than these."""
        if not self.out.exists():
            return
        before = json.loads(self.out.read_text())
        for part in PARTS.keys() - set(parts):
            self.found |= {name: before[name] for name in PARTS[part]}
            self.found["dates"] |= {part: before["dates"][part]} if part in before["dates"] else {}

    def write(self) -> None:
        """Write the results so far, rounded."""
        kept, self.found = self.found, round_numbers(self.found)
        try:
            super().write()
        finally:
            self.found = kept

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Run a part that may fail without the others, and write the results."""
        try:
            yield
        except Exception as error:  # the other parts remain
            self.record_failure(what, error)
        self.write()

    def late(self, what: str) -> bool:
        """Return True if time is up, and record the skipped part."""
        if time.monotonic() < self.deadline:
            return False
        self.found["skipped"].append(what)
        return True


def host_machine() -> dict[str, Any]:
    """Describe the processor, its memory, and the link to the GPU as the driver reports it."""
    kept: dict[str, Any] = {"cpus": os.cpu_count()}
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kept["cpu"] = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    asked = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,driver_version"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        kept["link"] = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    return kept
