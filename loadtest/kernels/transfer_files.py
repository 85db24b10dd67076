"""A file on a local disk, read into the host's pinned memory and from there into the GPU; see transfers.py."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import torch
except ImportError:  # `main` reports the missing package
    torch = None

if TYPE_CHECKING or __package__:
    from loadtest.kernels import copies
    from loadtest.kernels.transfer_bench import MIB, TransferBench
else:  # run as a script, from a copy of this folder
    import copies
    from transfer_bench import MIB, TransferBench

DISK_SECONDS = 3.0  # a read of a file ends then


def mount_of(folder: Path) -> dict[str, str]:
    """Return the device and the type of the file system that a folder is on."""
    best = ("", "", "")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            device, point, kind = line.split()[:3]
            if len(point) >= len(best[1]) and folder.resolve().is_relative_to(point):
                best = (device, point, kind)
    return {"device": best[0], "file_system": best[2]}


class FileBench:
    """A file on a local disk, limited to the size of the buffers, read into the host's buffer and the GPU."""

    def __init__(self, bench: TransferBench, mover: copies.Mover, folder: Path) -> None:
        self._bench, self._mover = bench, mover
        self._path = folder / f"transfers-{os.getpid()}.bin"
        self._memory = mover.memory
        self._bytes = min(bench.whole.file_bytes, mover.host.numel(), mover.gpu.numel())
        self._where = mount_of(folder)

    def measure(self) -> None:
        """Write the file, and read it in every way."""
        try:
            with self._bench.part("writing a file"):
                self._write()
            reads = self._bench.whole.reads
            wanted = [("direct", *read, True) for read in reads]
            wanted += [(how, *reads[-1], to_gpu) for how in ("dropped", "page cache") for to_gpu in (False, True)]
            for how, size, readers, to_gpu in [*wanted, ("direct", *reads[-1], False)]:
                what = f"reading a file, {how}, {readers} x {size}, {to_gpu}"
                with self._bench.part(what):
                    if not self._bench.late(what):
                        self._read(how, size, readers, to_gpu=to_gpu)
        finally:
            self._path.unlink(missing_ok=True)

    def _keep(self, how: str, size: int, readers: int, done: int, seconds: float, *, to_gpu: bool) -> None:
        one = {"how": how, "read_bytes": size, "readers": readers, "to_gpu": to_gpu, "bytes": done}
        self._bench.found["files"].append(self._where | one | {"gb_per_s": done / seconds / 1e9})

    def _write(self) -> None:
        size, done = min(64 * MIB, self._bytes), 0
        self._mover.host[: self._bytes].view(torch.int64).random_()
        start = time.perf_counter()
        with self._path.open("wb", buffering=0) as file:
            while done < self._bytes and time.perf_counter() < start + 3 * DISK_SECONDS:
                done += file.write(self._memory[done : done + size])
            os.fsync(file.fileno())
        self._bytes = done
        self._keep("write and fsync", size, 1, done, time.perf_counter() - start, to_gpu=False)

    def _read(self, how: str, size: int, readers: int, *, to_gpu: bool) -> None:
        mover, stream = self._mover, self._mover.stream()
        direct = os.O_DIRECT if how == "direct" else 0
        file = os.open(self._path, os.O_RDONLY | direct)
        host, gpu = mover.host.data_ptr(), mover.gpu.data_ptr()
        try:
            if how == "dropped":
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            end = time.perf_counter() + DISK_SECONDS

            def read(at: int) -> int:
                if time.perf_counter() > end:
                    return 0
                got = os.preadv(file, [self._memory[at : at + size]], at)
                if to_gpu:
                    mover.calls.bind_thread()
                    mover.calls.one(gpu + at, host + at, got, stream)
                return got

            start = time.perf_counter()
            with ThreadPoolExecutor(readers) as pool:
                done = sum(pool.map(read, range(0, self._bytes - size + 1, size)))
            mover.wait()
            self._keep(how, size, readers, done, time.perf_counter() - start, to_gpu=to_gpu)
        finally:
            os.close(file)
