"""Ways to move KV blocks between a GPU and its host's memory: the calls that engines make, without the engines.

    each     a copy for each block and layer: cuMemcpyAsync in a loop
    batch    the same pieces in one call: cuMemcpyBatchAsync, which may read the host's memory at any time
    ordered  that call for loads, if it may read the host's memory only in the stream's order
    halves   `batch` with keys and values apart, as in a layer's cache of two tensors
    blocks   `batch` with a piece for each block, which has all its layers
    kernel   a kernel of 12 programs that reads or writes the host's memory by its address
    wide     that kernel with a program for each of the GPU's processors
    whole    one piece
    pageable one piece, the host's memory not pinned

vLLM stores by `blocks`, `batch` or `halves`, depending on the layout of the attention. It loads in the same way, except
for pieces of less than 28 KiB, which it loads by `kernel` (v1/kv_offload/cpu: gpu_worker.py, swap_blocks_triton.py).
The GPU may write its blocks until a store begins, so stores are in the stream's order. transfers.py measures all of
them.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

try:
    import torch
except ImportError:  # layouts and addresses of pieces work without it
    torch = None
try:
    import triton
    import triton.language as tl
except ImportError:  # no kernels, copies only
    triton = tl = None

Tensor: TypeAlias = Any  # PyTorch may be missing during type checks
Stream: TypeAlias = Any
Submit: TypeAlias = Callable[[Stream], None]

WAYS = ("whole", "blocks", "batch", "ordered", "halves", "each", "kernel", "wide")
KERNELS = ("kernel", "wide")
BLOCK_TOKENS = 16  # vLLM's default
NUMBER_BYTES = 2  # bf16
KERNEL_PROGRAMS = 12  # vLLM's NUM_SMS
CHUNK_BYTES = 16_384  # bytes that a program of the kernel has in flight
GIB = 1 << 30


@dataclass(frozen=True)
class KvLayout:
    """The KV cache of one GPU: the parts of a block in each layer. Sizes in bytes."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def piece_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * BLOCK_TOKENS * self.kv_heads * self.head_dim * NUMBER_BYTES

    @property
    def block_bytes(self) -> int:
        """One block in all layers."""
        return self.layers * self.piece_bytes

    @property
    def token_bytes(self) -> int:
        """One token in all layers."""
        return self.block_bytes // BLOCK_TOKENS


@dataclass(frozen=True)
class Pieces:
    """A copy as pieces: their offsets on both sides, int64 tensors of one length, and the bytes of a piece."""

    host: Tensor
    gpu: Tensor
    piece_bytes: int


def pieces(way: str, layout: KvLayout, blocks: tuple[Tensor, Tensor], pools: tuple[int, int]) -> Pieces:
    """Return the pieces of a copy.

    - `blocks`: the blocks' numbers on the host and on the GPU.
    - `pools`: the sizes of both pools in blocks.

    A pool has one layer after the other, unless a block has all its layers together.
    """
    if way in ("whole", "pageable"):
        zero = torch.zeros(1, dtype=torch.int64)
        return Pieces(zero, zero, len(blocks[0]) * layout.block_bytes)
    parts = {"blocks": 1, "halves": 2 * layout.layers}.get(way, layout.layers)
    size = layout.block_bytes // parts
    part = torch.arange(parts, dtype=torch.int64)[:, None]
    host, gpu = (((part * pool + at[None, :]) * size).flatten() for at, pool in zip(blocks, pools, strict=True))
    return Pieces(host, gpu, size)


# Calls


class CopyCalls(Protocol):
    """Copies between addresses; each raises OSError with the driver's error code."""

    def bind_thread(self) -> None:
        """Let the calling thread make copies, too."""
        ...

    def one(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Copy one piece."""
        ...

    def each(self, to: Tensor, source: Tensor, size: int, stream: Stream) -> None:
        """Copy with a call for every piece."""
        ...

    def batch(self, to: Tensor, source: Tensor, size: int, stream: Stream, *, ordered: bool) -> None:
        """Copy all pieces with one call; sources may be read at any time, or in the stream's order."""
        ...


EACH_IN_C = """
typedef int (*copy_one)(unsigned long long, unsigned long long, unsigned long, void *);
int copy_each(copy_one copy, const unsigned long long *to, const unsigned long long *source, unsigned long size,
              unsigned long count, void *stream) {
  for (unsigned long i = 0; i < count; i++) {
    int error = copy(to[i], source[i], size, stream);
    if (error) return error;
  }
  return 0;
}
"""


def each_in_c() -> Any:  # noqa: ANN401 - a function of a library, whose class ctypes keeps to itself
    """Return the loop above, compiled. Raises OSError without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler")
    folder = Path(tempfile.mkdtemp())
    (folder / "each.c").write_text(EACH_IN_C)
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(folder / "each.so"), str(folder / "each.c")]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    found = ctypes.CDLL(str(folder / "each.so")).copy_each
    word = ctypes.c_uint64
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, word, word, ctypes.c_void_p]
    return found


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h: read order of sources, two locations that only managed memory has, flags."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


STREAM_ORDER, ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder of cuda.h


class DriverCalls:
    """CUDA's driver, 12.8 and later."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        word, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._copy = lib.cuMemcpyAsync
        self._copy.argtypes = [word, word, word, pointer]
        self._copy_address = ctypes.cast(lib.cuMemcpyAsync, pointer)
        self._each = each_in_c()
        # CUDA 13: the index of a failed copy is no longer reported
        self._second = hasattr(lib, "cuMemcpyBatchAsync_v2")
        self._batch = lib.cuMemcpyBatchAsync_v2 if self._second else lib.cuMemcpyBatchAsync
        told = [] if self._second else [pointer]
        self._batch.argtypes = [pointer, pointer, pointer, word, pointer, pointer, word, *told, pointer]
        self._in_order, self._any_order = CopyAttributes(STREAM_ORDER), CopyAttributes(ANY_ORDER)
        self._index, self._failed = word(0), word(0)
        self._lib, self._context = lib, pointer()
        check("cuCtxGetCurrent", lib.cuCtxGetCurrent(ctypes.byref(self._context)))

    def bind_thread(self) -> None:
        """Make the GPU's context that of the calling thread, too."""
        check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(self._context))

    def one(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Copy one piece by cuMemcpyAsync, which derives the direction from the addresses."""
        check("cuMemcpyAsync", self._copy(to, source, size, stream.cuda_stream))

    def each(self, to: Tensor, source: Tensor, size: int, stream: Stream) -> None:
        """Copy every piece by cuMemcpyAsync, called in C."""
        where = (to.data_ptr(), source.data_ptr())
        check("cuMemcpyAsync", self._each(self._copy_address, *where, size, len(to), stream.cuda_stream))

    def batch(self, to: Tensor, source: Tensor, size: int, stream: Stream, *, ordered: bool) -> None:
        """Copy by cuMemcpyBatchAsync; the driver reads the addresses and the sizes before it returns."""
        sizes = torch.full_like(to, size)
        where = (to.data_ptr(), source.data_ptr(), sizes.data_ptr())
        attributes = self._in_order if ordered else self._any_order
        order = (ctypes.byref(attributes), ctypes.byref(self._index), 1)
        told = () if self._second else (ctypes.byref(self._failed),)
        check("cuMemcpyBatchAsync", self._batch(*where, len(to), *order, *told, stream.cuda_stream))


def check(what: str, error: int) -> None:
    """Raise OSError if the driver returned an error."""
    if error:
        raise OSError(f"{what} failed with error {error}")


class HostCalls:
    """Copies within the host's memory, to try the rest without a GPU."""

    def __init__(self) -> None:
        def copy(to: int, source: int, size: int, _stream: int | None) -> int:
            ctypes.memmove(to, source, size)
            return 0

        word = ctypes.c_uint64
        self._copy = ctypes.CFUNCTYPE(ctypes.c_int, word, word, ctypes.c_ulong, ctypes.c_void_p)(copy)
        self._each = each_in_c()

    def bind_thread(self) -> None:
        """Do nothing: there is no context."""

    def one(self, to: int, source: int, size: int, stream: Stream) -> None:
        """Copy one piece by memmove."""
        del stream
        ctypes.memmove(to, source, size)

    def each(self, to: Tensor, source: Tensor, size: int, stream: Stream) -> None:
        """Copy every piece by memmove, called back from C."""
        del stream
        copy = ctypes.cast(self._copy, ctypes.c_void_p)
        check("the copy", self._each(copy, to.data_ptr(), source.data_ptr(), size, len(to), None))

    def batch(self, to: Tensor, source: Tensor, size: int, stream: Stream, *, ordered: bool) -> None:
        """Copy in the same way as `each`."""
        del ordered
        self.each(to, source, size, stream)


# Kernels


def move_kernel(
    sources: tl.tensor, targets: tl.tensor, count: tl.tensor, words: tl.constexpr, chunk: tl.constexpr
) -> None:
    """Copy pieces of `words` 8-byte words between addresses; the pieces are distributed over the programs."""
    job = tl.program_id(0)
    at = tl.arange(0, chunk)
    while job < count:
        source = tl.load(sources + job).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + job).to(tl.pointer_type(tl.int64))
        for start in range(0, words, chunk):
            tl.store(target + start + at, tl.load(source + start + at))
        job += tl.num_programs(0)


move_jit: Any = triton.jit(move_kernel, do_not_specialize=["count"]) if triton is not None else None


# Buffers


class Mark(Protocol):
    """A moment of a stream."""

    def record(self, stream: Stream) -> None:
        """Set it after all work that is queued on the stream."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class NoMark:
    """A moment without a GPU, for copies that end within their call."""

    def record(self, stream: Stream) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Let other threads use the CPU."""
        time.sleep(1e-4)


class Mover:
    """A buffer on the host and one on the GPU, and the ways between them. Without a GPU both are on the host."""

    def __init__(self, host_bytes: int, gpu_bytes: int, *, cuda: bool) -> None:
        self.cuda = cuda
        self.memory = memoryview(mmap.mmap(-1, host_bytes))
        self.host = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.gpu = torch.empty(gpu_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
        self.calls: CopyCalls = DriverCalls() if cuda else HostCalls()
        self.ways = tuple(way for way in WAYS if way not in KERNELS or (cuda and move_jit is not None))
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 0

    def pin(self) -> None:
        """Lock the host's buffer in memory, so that the GPU's copy engines reach it."""
        if self.cuda:
            code = torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), self.host.numel(), 0)
            check("cudaHostRegister", int(code))

    def blocks(self, layout: KvLayout, tokens: int) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Return random places for `tokens` tokens on both sides, in blocks, and the sizes of their pools."""
        n = -(-tokens // BLOCK_TOKENS)
        pools = (self.host.numel() // layout.block_bytes, self.gpu.numel() // layout.block_bytes)
        if n > min(pools):
            raise ValueError(f"{n} blocks are more than the pools have, {pools}")
        return (torch.randperm(pools[0])[:n], torch.randperm(pools[1])[:n]), pools

    def submit(self, way: str, layout: KvLayout, tokens: int, *, load: bool) -> tuple[Submit, Pieces]:
        """Return a function that begins to load or store `tokens` tokens on a stream, and the pieces that it copies."""
        moved = pieces(way, layout, *self.blocks(layout, tokens))
        host, gpu = moved.host + self.host.data_ptr(), moved.gpu + self.gpu.data_ptr()
        to, source = (gpu, host) if load else (host, gpu)
        size = moved.piece_bytes
        if way in ("whole", "pageable"):
            ends = (int(to[0]), int(source[0]))
            return lambda stream: self.calls.one(*ends, size, stream), moved
        if way in KERNELS:
            return self._make_kernel_submit(way, to, source, size), moved
        if way == "each":
            return lambda stream: self.calls.each(to, source, size, stream), moved
        ordered = way == "ordered" or not load
        return lambda stream: self.calls.batch(to, source, size, stream, ordered=ordered), moved

    def _make_kernel_submit(self, way: str, to: Tensor, source: Tensor, size: int) -> Submit:
        count, words = len(to), size // 8
        programs = min(count, KERNEL_PROGRAMS if way == "kernel" else self._processors)
        to, source = to.cuda(), source.cuda()

        def submit(stream: Stream) -> None:
            with torch.cuda.stream(stream):
                move_jit[(programs,)](source, to, count, words, min(words, CHUNK_BYTES // 8), num_warps=8)

        return submit

    def check_copy(self, moved: Pieces, submit: Submit, *, load: bool, samples: int = 32) -> bool:
        """Return True if a copy brings the bytes of its source.

        Before it is run, some pieces are filled with random bytes at the source and with zeros at the target.
        """
        picked = sorted({0, len(moved.host) - 1, *torch.randint(len(moved.host), (samples,)).tolist()})
        size = min(moved.piece_bytes, 1 << 20)
        both = [(self.host[h : h + size], self.gpu[g : g + size]) for h, g in self._offsets(moved, picked)]
        for host, gpu in both:
            (host if load else gpu).random_(1, 255)
            (gpu if load else host).zero_()
        self.wait()
        submit(self.stream())
        self.wait()
        return all(bool(host.any()) and torch.equal(host, gpu.cpu()) for host, gpu in both)

    @staticmethod
    def _offsets(moved: Pieces, picked: list[int]) -> list[tuple[int, int]]:
        return [(int(moved.host[i]), int(moved.gpu[i])) for i in picked]

    def stream(self) -> Stream:
        """Return a new stream, or None without a GPU."""
        return torch.cuda.Stream() if self.cuda else None

    def wait(self, stream: Stream = None) -> None:
        """Wait for a stream, or for all of them."""
        if self.cuda:
            (torch.cuda if stream is None else stream).synchronize()

    def mark(self, stream: Stream) -> Mark:
        """Return a mark to wait for all work that is queued on the stream so far."""
        if not self.cuda:
            return NoMark()
        event: Mark = torch.cuda.Event()
        event.record(stream)
        return event
