"""Time of decode steps, prefill and mixed steps of a model's layers on one GPU, with PyTorch only.

    python3 measure.py --out FILE [--seconds 240] [--shapes NAME,NAME] [--device cpu --tiny]

It runs on machines that have only PyTorch (and Triton, if installed). So it is one file that imports nothing of this
project, and longer than others. A few decoder layers with random bf16 weights, one GPU's share under tensor
parallelism, run in a CUDA graph. The time of one layer times their number, plus that of the LM head, is a step. The
weights of a layer are ten times the L2 cache, so each layer reads them from memory as in a real engine. The KV cache of
decodes is paged, in random order. Each kernel is first checked against a plain reference, and the fastest correct one
is used; failures are recorded and left out. Results are written after every part, and at the deadline at the latest.
Fits are least squares of relative errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

try:
    import torch
except ImportError:  # the fits, and their tests, work without it
    torch = None
try:
    import triton
    import triton.language as tl
except ImportError:  # plain kernels only
    triton = tl = None

Tensor: TypeAlias = Any  # PyTorch may be missing during type checks

LEFT_OUT = (
    "all-reduce between GPUs: two a layer under tensor parallelism, which one GPU cannot show",
    "sampling, the embedding, and what an engine's CPU does between two steps",
)
ERROR_MAX = 2e-2  # norm of the error of a kernel in bf16 over the norm of its float32 reference
REPEATS, REPEATS_LEAST, REPEAT_MS = 9, 3, 20.0  # repeats of a point, the minimum, and milliseconds of each
POINT_SECONDS = 1.5  # repeats end after this time, if the minimum is reached
WATCHDOG_SECONDS = 8.0  # a run that hangs is ended this long after the deadline
SPLITS_MAX = 128


@dataclass(frozen=True)
class LayerShape:
    """A model's decoder layer as one of its GPUs has it."""

    name: str
    gpus: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norms: bool
    """True if queries and keys are normed, head by head."""


SHAPES = (
    LayerShape("qwen3-32b-tp2", 2, 64, 5120, 32, 4, 128, 12800, 75968, True),
    LayerShape("qwen3-8b-tp1", 1, 36, 4096, 32, 8, 128, 12288, 151936, True),
    LayerShape("llama-3.1-70b-tp4", 4, 80, 8192, 16, 2, 128, 7168, 32064, False),
)
TINY = (LayerShape("tiny", 1, 4, 64, 4, 2, 32, 128, 256, True),)


@dataclass(frozen=True)
class StepPoint:
    """Work of a step: `sequences` decodes with `context` tokens each, and a chunk of `tokens` after `prior`."""

    kind: str
    sequences: int = 0
    context: int = 0
    tokens: int = 0
    prior: int = 0

    @property
    def pairs(self) -> float:
        """Tokens that the chunk's tokens attend to, summed over them."""
        return self.tokens * (self.prior + self.tokens / 2)


@dataclass(frozen=True)
class Sweep:
    """The measured steps, and the size of the KV cache."""

    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    priors: tuple[int, ...]
    mixed: tuple[tuple[int, int, int, int], ...]
    pool_tokens: int
    page: int

    def points(self) -> Iterator[StepPoint]:
        """Yield all points: decodes, then prefill, then mixed steps."""
        for n in self.decodes:
            yield from (StepPoint("decode", n, c) for c in self.contexts if n * c <= self.pool_tokens)
        for tokens in self.chunks:
            yield from (StepPoint("prefill", tokens=tokens, prior=prior) for prior in self.priors)
        yield from (StepPoint("mixed", *numbers) for numbers in self.mixed)


K = 1024
WHOLE_SWEEP = Sweep(
    decodes=(1, 8, 16, 32, 64, 128, 256),
    contexts=(256, K, 4 * K, 16 * K, 64 * K),
    chunks=(128, 512, 2 * K, 8 * K, 16 * K),
    priors=(0, 8 * K, 32 * K, 96 * K),
    mixed=tuple((64, context, 2 * K, prior) for context in (K, 4 * K) for prior in (0, 8 * K, 32 * K)),
    pool_tokens=512 * K,
    page=64,
)
TINY_SWEEP = Sweep((1, 3), (32, 64), (8, 32), (0, 64), ((3, 32, 16, 32),), 512, 16)


# Kernels in Triton. Their dimensions are powers of two unless a mask handles the rest. Triton evaluates annotations of
# arguments, and knows only its own names.


def add_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    hidden: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a row's sum with its residual, and the RMS norm of that."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    mask = cols < hidden
    value = tl.load(x + row * hidden + cols, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(residual + row * hidden + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(total + row * hidden + cols, value.to(total.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + 1e-6)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * hidden + cols, (value * scale * gain).to(normed.dtype.element_ty), mask=mask)


def gate_kernel(x: tl.tensor, out: tl.tensor, width: tl.constexpr, block: tl.constexpr) -> None:
    """Compute SiLU of a row's first half times its second."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * block + tl.arange(0, block)
    mask = cols < width
    gate = tl.load(x + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def turn_kernel(
    source: tl.tensor, target: tl.tensor, gain: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    count: tl.constexpr, dim: tl.constexpr, norms: tl.constexpr,
) -> None:  # fmt: skip
    """Compute norm and rotary embedding of `count` heads in a row."""
    half: tl.constexpr = dim // 2
    cols = tl.arange(0, half)
    at = (tl.arange(0, count) * dim)[:, None] + cols[None, :]
    a, b = tl.load(source + at).to(tl.float32), tl.load(source + at + half).to(tl.float32)
    if norms:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / dim + 1e-6)[:, None]
        a *= scale * tl.load(gain + cols).to(tl.float32)[None, :]
        b *= scale * tl.load(gain + half + cols).to(tl.float32)[None, :]
    tl.store(target + at, (a * cos - b * sin).to(target.dtype.element_ty))
    tl.store(target + at + half, (b * cos + a * sin).to(target.dtype.element_ty))


def rotate_kernel(
    qkv: tl.tensor, q: tl.tensor, k: tl.tensor, v: tl.tensor, gains: tl.tensor, angles: tl.tensor,
    positions: tl.tensor, slots: tl.tensor,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, norms: tl.constexpr,
) -> None:  # fmt: skip
    """Compute norm and rotary embedding of a row's queries and keys; keys and values go to its slot of the cache."""
    row = tl.program_id(0).to(tl.int64)
    turned = tl.load(positions + row).to(tl.float32) * tl.load(angles + tl.arange(0, dim // 2))
    cos, sin = tl.cos(turned)[None, :], tl.sin(turned)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    source = qkv + row * (heads + 2 * kv_heads) * dim
    turn_jit(source, q + row * heads * dim, gains, cos, sin, heads, dim, norms)
    turn_jit(source + heads * dim, k + slot * kv_heads * dim, gains + dim, cos, sin, kv_heads, dim, norms)
    whole = tl.arange(0, kv_heads * dim)
    tl.store(v + slot * kv_heads * dim + whole, tl.load(source + (heads + kv_heads) * dim + whole))


def split_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, table: tl.tensor, parts: tl.tensor, tops: tl.tensor,
    totals: tl.tensor, pages: tl.tensor, pages_a_split: tl.tensor, scale: tl.tensor,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page: tl.constexpr, padded: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one sequence's queries of one KV head to a run of its pages (flash decoding), in whole pages."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = heads // kv_heads
    rows, cols, tokens = tl.arange(0, padded), tl.arange(0, dim), tl.arange(0, page)
    mine = rows < group
    head = sequence * heads + kv_head * group + rows
    queries = tl.load(q + head[:, None] * dim + cols[None, :], mask=mine[:, None], other=0.0)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    sums = tl.zeros([padded, dim], tl.float32)
    first = split * pages_a_split
    for i in range(first, tl.minimum(first + pages_a_split, pages)):
        number = tl.load(table + sequence * pages + i).to(tl.int64)
        at = ((number * page + tokens) * kv_heads + kv_head)[:, None] * dim + cols[None, :]
        keys, values = tl.load(k + at), tl.load(v + at)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        top = higher
    out = head * tl.num_programs(2) + split
    tl.store(parts + out[:, None] * dim + cols[None, :], sums, mask=mine[:, None])
    tl.store(tops + out, top, mask=mine)
    tl.store(totals + out, total, mask=mine)


def merge_kernel(
    parts: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    dim: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """Merge a head's output from those of its splits."""
    head = tl.program_id(0)
    rows, cols = tl.arange(0, padded), tl.arange(0, dim)
    mask = rows < splits
    top = tl.load(tops + head * splits + rows, mask=mask, other=float("-inf"))
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weights * tl.load(totals + head * splits + rows, mask=mask, other=0.0), 0)
    at = (head * splits + rows)[:, None] * dim + cols[None, :]
    sums = tl.load(parts + at, mask=mask[:, None], other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    tl.store(out + head * dim + cols, result.to(out.dtype.element_ty))


if triton is not None:
    turn_jit = triton.jit(turn_kernel)
    add_norm_jit, gate_jit, rotate_jit = (triton.jit(f) for f in (add_norm_kernel, gate_kernel, rotate_kernel))
    split_jit = triton.jit(split_kernel, do_not_specialize=["pages", "pages_a_split"])
    merge_jit = triton.jit(merge_kernel, do_not_specialize=["splits"])


def power(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


class FusedKernels:
    """The steps between matrix products, each one kernel in Triton, as in engines."""

    def __init__(self, shape: LayerShape, page: int, stages: int = 3, programs: int = 4) -> None:
        """Create the kernels.

        - `stages`: stages of the pipeline of loads in attention.
        - `programs`: programs of attention for each of the GPU's processors.
        """
        self._shape, self._page, self._stages, self._programs = shape, page, stages, programs
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 4

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of x + residual, and that sum; (rows, hidden)."""
        normed, total = torch.empty_like(x), torch.empty_like(x)
        hidden = x.shape[1]
        add_norm_jit[(x.shape[0],)](x, residual, weight, normed, total, hidden, power(hidden), num_warps=8)
        return normed, total

    def gate(self, x: Tensor) -> Tensor:
        """Return SiLU of the first half of each row times the second."""
        width = x.shape[1] // 2
        out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        gate_jit[(x.shape[0], -(-width // 1024))](x, out, width, 1024)
        return out

    def rotate(
        self, qkv: Tensor, gains: Tensor, angles: Tensor, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the queries, (rows, heads, head_dim); keys and values go to `slots` of the cache."""
        s = self._shape
        q = torch.empty((qkv.shape[0], s.heads, s.head_dim), dtype=qkv.dtype, device=qkv.device)
        sizes = (s.heads, s.kv_heads, s.head_dim, s.norms)
        rotate_jit[(qkv.shape[0],)](qkv, q, *cache, gains, angles, positions, slots, *sizes)
        return q

    def decode(self, q: Tensor, cache: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
        """Return the attention of one query per sequence to its pages, (sequences, heads, head_dim)."""
        s, n, pages = self._shape, q.shape[0], table.shape[1]
        wanted = min(SPLITS_MAX, max(1, -(-self._programs * self._processors // (n * s.kv_heads))))
        pages_a_split = max(min(pages, 4), -(-pages // wanted))
        splits = -(-pages // pages_a_split)
        parts = torch.empty((n, s.heads, splits, s.head_dim), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty_like(parts[..., 0]), torch.empty_like(parts[..., 0])
        sizes = (s.heads, s.kv_heads, s.head_dim, self._page, max(16, power(s.heads // s.kv_heads)))
        numbers = (pages, pages_a_split, s.head_dim**-0.5)
        split_jit[(n, s.kv_heads, splits)](
            q, *cache, table, parts, tops, totals, *numbers, *sizes, num_stages=self._stages
        )
        out = torch.empty_like(q)
        merge_jit[(n * s.heads,)](parts, tops, totals, out, splits, s.head_dim, power(splits))
        return out


class PlainKernels:
    """The same in PyTorch's own operators: the reference, and the substitute for a kernel that fails."""

    def __init__(self, shape: LayerShape, page: int, *, gather: bool) -> None:
        self._shape, self._page, self._gather = shape, page, gather

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the same as `FusedKernels`."""
        total = x + residual
        return torch.nn.functional.rms_norm(total, (x.shape[1],), weight, 1e-6), total

    def gate(self, x: Tensor) -> Tensor:
        """Compute the same as `FusedKernels`."""
        gate, up = x.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def rotate(
        self, qkv: Tensor, gains: Tensor, angles: Tensor, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Compute the same as `FusedKernels`."""
        s = self._shape
        q, k, v = qkv.view(len(qkv), -1, s.head_dim).split((s.heads, s.kv_heads, s.kv_heads), 1)
        turned = (positions[:, None].float() * angles)[:, None]
        cos, sin = turned.cos().to(qkv.dtype), turned.sin().to(qkv.dtype)
        rotated = []
        for x, gain in zip((q, k), gains, strict=True):
            x = torch.nn.functional.rms_norm(x, (s.head_dim,), gain, 1e-6) if s.norms else x
            a, b = x.chunk(2, -1)
            rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        cache[0].index_copy_(0, slots, rotated[1])
        cache[1].index_copy_(0, slots, v)
        return rotated[0]

    def decode(self, q: Tensor, cache: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
        """Compute the same as `FusedKernels`; without `gather` the same number of bytes, but pages in storage order."""
        s, n, tokens = self._shape, q.shape[0], table.shape[1] * self._page
        k, v = (x.view(-1, self._page, s.kv_heads, s.head_dim) for x in cache)
        picked = ((x[table] if self._gather else x[: table.numel()]) for x in (k, v))
        k, v = (x.reshape(n, tokens, s.kv_heads, s.head_dim).transpose(1, 2) for x in picked)
        grouped = q.view(n, s.kv_heads, -1, s.head_dim)
        return torch.nn.functional.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)


# Attention of a chunk: q is (1, heads, tokens, dim), k and v are (1, kv heads, prior + tokens, dim).


def plain_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute it with the kernel that PyTorch chooses, with a mask."""
    tokens, total = q.shape[2], k.shape[2]
    mask = torch.ones(tokens, total, dtype=torch.bool, device=q.device).tril(total - tokens)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def flash_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute it with PyTorch's FlashAttention 2; its causal mask is aligned to the last token."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]  # noqa: SLF001 - only it takes both


def cudnn_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute it with the cuDNN kernel: over the chunk and the tokens before it, merged by sums of exponentials."""
    tokens, prior = q.shape[2], k.shape[2] - q.shape[2]
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001 - only it returns the sums
    if not prior:
        return kernel(q, k, v, None, False, 0.0, True, False)[0]
    own, own_sum = kernel(q, k[:, :, prior:], v[:, :, prior:], None, True, 0.0, True, False)[:2]
    old, old_sum = kernel(q, k[:, :, :prior], v[:, :, :prior], None, True, 0.0, False, False)[:2]
    share = torch.sigmoid(own_sum - old_sum).to(q.dtype).reshape(1, -1, tokens, 1)
    return torch.lerp(old, own, share)


ChunkKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK_KERNELS: dict[str, ChunkKernel] = {
    "cudnn": cudnn_chunk, "flash": flash_chunk, "plain": plain_chunk,
}  # fmt: skip


class KernelBench:
    """Measures one device until its deadline, and keeps the results."""

    def __init__(self, device: str, sweep: Sweep, out: Path, deadline: float) -> None:
        self.device, self.sweep, self.out, self.deadline = device, sweep, out, deadline
        self.cuda = device == "cuda"
        self.found: dict[str, Any] = {
            "what": "kernels", "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(self.cuda), "left_out": list(LEFT_OUT), "ceilings": {}, "shapes": {},
            "kernels": [], "points": [], "failed": [], "skipped": [], "fits": {}, "complete": False,
        }  # fmt: skip

    def write(self) -> None:
        """Write the results so far."""
        whole = self.out.with_name(self.out.name + ".part")
        whole.write_text(json.dumps(self.found, indent=1) + "\n")
        whole.replace(self.out)

    def record_failure(self, what: str, error: BaseException) -> None:
        """Record an error, and continue."""
        text = f"{type(error).__name__}: {error}"[:600]
        self.found["failed"].append({"what": what, "error": text})
        print(f"failed: {what}: {text[:200]}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def lap_ms(self, call: Callable[[], object], times: int) -> float:
        """Return the milliseconds of a call, as the mean of `times` in a row."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times

    def time_call(self, run: Callable[[], object]) -> dict[str, Any]:
        """Return the milliseconds of `run` in a CUDA graph, or without one if it cannot be captured."""
        began = time.monotonic()
        for _ in range(2):
            run()
        self.sync()
        call, graphed = run, False
        if self.cuda:
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                call, graphed = graph.replay, True
            except RuntimeError as error:
                self.sync()
                self.record_failure("capture in a graph", error)
        self.lap_ms(call, 1)
        times = int(min(200, max(1, REPEAT_MS / max(1e-3, self.lap_ms(call, 1)))))
        laps: list[float] = []
        while len(laps) < REPEATS_LEAST or (len(laps) < REPEATS and time.monotonic() < began + POINT_SECONDS):
            laps.append(self.lap_ms(call, times))
        return {"ms": median(laps), "least_ms": min(laps), "most_ms": max(laps), "repeats": len(laps), "graph": graphed}

    def measure_ceilings(self) -> None:
        """Measure the limits of the device: bytes copied, read and written, and a large matrix product."""
        side = 8192 if self.cuda else 256
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        ms = self.time_call(lambda: torch.mm(a, b))["ms"]
        self.found["ceilings"]["gemm_tflop_per_s"] = 2 * side**3 / ms / 1e9
        source = torch.randn(side * side * 8, device=self.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        ms = self.time_call(lambda: target.copy_(source))["ms"]
        self.found["ceilings"]["copy_gb_per_s"] = 2 * source.numel() * 2 / ms / 1e6


class ShapeBench:
    """A few layers of one shape on the device, and the points of the sweep measured on them."""

    def __init__(self, bench: KernelBench, shape: LayerShape) -> None:
        self.bench, self.shape = bench, shape
        self.sets = 4
        self.heads_ms: dict[int, dict[str, Any]] = {}
        s = shape
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        sizes = ((width, s.hidden), (s.hidden, s.heads * s.head_dim), (2 * s.intermediate, s.hidden))
        self.weights = [[self.random(*size) for size in (*sizes, (s.hidden, s.intermediate))] for _ in range(self.sets)]
        self.caches = [
            tuple(self.random(bench.sweep.pool_tokens, s.kv_heads, s.head_dim, scale=1.0) for _ in "kv")
            for _ in range(self.sets)
        ]
        self.head = self.random(s.vocabulary, s.hidden)
        self.gain = self.random(s.hidden, scale=0.1) + 1
        self.gains = self.random(2, s.head_dim, scale=0.1) + 1
        half = torch.arange(0, s.head_dim, 2, device=bench.device, dtype=torch.float32)
        self.angles = 1e6 ** (-half / s.head_dim)
        plain = PlainKernels(shape, bench.sweep.page, gather=False)
        self.ops = {name: getattr(plain, name) for name in ("add_norm", "gate", "rotate", "decode")}
        self.chunk: dict[bool, ChunkKernel] = dict.fromkeys(
            (True, False), plain_chunk
        )  # by whether there are tokens before the chunk

    def random(self, *size: int, scale: float = 0.02) -> Tensor:
        """Return random bf16 numbers: zeros would be faster than real ones."""
        made = torch.empty(size, device=self.bench.device, dtype=torch.bfloat16)
        return made.normal_(0.0, scale)

    # Choice of kernels

    def choose(self, what: str, candidates: Mapping[str, Callable[[], Tensor]], right: Tensor) -> str | None:
        """Return the fastest of the candidates with a correct result, and record a line of results on each."""
        best, best_ms = None, math.inf
        for name, run in candidates.items():
            try:
                error = relative_error(run(), right)
                ms = self.bench.time_call(run)["ms"]
            except Exception as failure:  # one kernel less, for any error
                self.bench.record_failure(f"{self.shape.name} {what} {name}", failure)
                continue
            line = {"shape": self.shape.name, "what": what, "kernel": name, "error": error, "ms": ms}
            self.bench.found["kernels"].append(line | {"right": error <= ERROR_MAX})
            if error <= ERROR_MAX and ms < best_ms:
                best, best_ms = name, ms
        return best

    def choose_all(self) -> None:
        """Choose a kernel for every step between matrix products, on inputs that are not measured later."""
        s, sweep, device = self.shape, self.bench.sweep, self.bench.device
        plain = PlainKernels(s, sweep.page, gather=True)
        sets: dict[str, Any] = {"plain": plain}
        if triton is not None and (self.bench.cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            tunings = ((3, 4), (3, 8), (4, 4), (4, 8))
            sets |= {f"triton {a} x {b}": FusedKernels(s, sweep.page, a, b) for a, b in tunings}
        rows, context = (32, 4 * K) if self.bench.cuda else (3, 32)
        x, residual, wide = (
            self.random(rows, s.hidden),
            self.random(rows, s.hidden),
            self.random(rows, 2 * s.intermediate),
        )
        qkv = self.random(rows, (s.heads + 2 * s.kv_heads) * s.head_dim, scale=1.0)
        places = torch.arange(rows, device=device) * 7 + 5
        q = self.random(rows, s.heads, s.head_dim, scale=1.0)
        pages = rows * context // sweep.page
        table = torch.randperm(sweep.pool_tokens // sweep.page, device=device)[:pages].view(rows, -1).to(torch.int32)
        cache = self.caches[0]

        def rotated(one: FusedKernels | PlainKernels) -> Tensor:
            queries = one.rotate(qkv, self.gains, self.angles, places, places, cache)
            return torch.cat([queries.flatten(), cache[0][places].flatten(), cache[1][places].flatten()])

        runs: dict[str, Callable[..., Any]] = {
            "add_norm": lambda one: torch.stack(one.add_norm(x, residual, self.gain)),
            "gate": lambda one: one.gate(wide),
            "rotate": rotated,
            "decode": lambda one: one.decode(q, cache, table),
        }
        for what, run in runs.items():
            tried = sets if what == "decode" else dict(list(sets.items())[:2])
            taken = self.choose(what, {name: partial(run, one) for name, one in tried.items()}, run(plain))
            if taken not in (None, "plain"):
                self.ops[what] = getattr(sets[str(taken)], what)
        self.choose_chunks()

    def choose_chunks(self) -> None:
        """Choose the attention of chunks, with and without tokens before them."""
        s = self.shape
        tokens = 2 * K if self.bench.cuda else 16
        for prior in (0, 2 * tokens):
            q = self.random(1, tokens, s.heads, s.head_dim, scale=1.0).transpose(1, 2)
            k, v = (x[: prior + tokens].unsqueeze(0).transpose(1, 2) for x in self.caches[0])
            right = plain_chunk(q.float(), k.float(), v.float())
            names = CHUNK_KERNELS if self.bench.cuda else {"plain": plain_chunk}
            runs = {name: partial(kernel, q, k, v) for name, kernel in names.items()}
            taken = self.choose(f"chunk of {tokens} after {prior}", runs, right)
            self.chunk[prior > 0] = CHUNK_KERNELS[taken or "plain"]

    # Steps

    def step(self, point: StepPoint, layers: int) -> Callable[[], object]:
        """Return a function that runs `layers` layers on the point's tokens."""
        s, sweep, device = self.shape, self.bench.sweep, self.bench.device
        n, chunk_end = point.sequences, point.prior + point.tokens
        pages, used = point.context // sweep.page, -(-chunk_end // sweep.page)
        free = torch.randperm(sweep.pool_tokens // sweep.page - used, device=device) + used
        table = free[: n * pages].view(n, pages).to(torch.int32)
        after = torch.arange(point.prior, chunk_end, device=device)
        ends = table[:, -1].long() * sweep.page + sweep.page - 1 if n else after[:0]
        positions = torch.cat((torch.full((n,), max(0, point.context - 1), device=device), after))
        slots = torch.cat((ends, after))
        x = self.random(len(slots), s.hidden, scale=1.0)
        ops, chunk = self.ops, self.chunk[point.prior > 0]

        def attention(q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            outs = [ops["decode"](q[:n], cache, table).view(n, -1)] if n else []
            if point.tokens:
                k, v = (part[:chunk_end].unsqueeze(0).transpose(1, 2) for part in cache)
                outs.append(chunk(q[n:].unsqueeze(0).transpose(1, 2), k, v).transpose(1, 2).reshape(point.tokens, -1))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        def run() -> Tensor:
            y, residual = x, x
            for weights, cache in zip(self.weights[:layers], self.caches, strict=False):
                qkv, out, gate_up, down = weights
                normed, residual = ops["add_norm"](y, residual, self.gain)
                q = ops["rotate"](torch.mm(normed, qkv.t()), self.gains, self.angles, positions, slots, cache)
                normed, residual = ops["add_norm"](torch.mm(attention(q, cache), out.t()), residual, self.gain)
                y = torch.mm(ops["gate"](torch.mm(normed, gate_up.t())), down.t())
            return y

        return run

    def head_ms(self, rows: int) -> dict[str, Any]:
        """Return the times of the last norm and the LM head for `rows` rows."""
        if rows not in self.heads_ms:
            x = self.random(rows, self.shape.hidden, scale=1.0)
            self.heads_ms[rows] = self.bench.time_call(
                lambda: torch.mm(self.ops["add_norm"](x, x, self.gain)[0], self.head.t())
            )
        return self.heads_ms[rows]

    def measure(self, point: StepPoint) -> dict[str, Any]:
        """Measure one point. Returns the milliseconds of the whole step on this GPU, and of its parts."""
        layers = self.sets if point.tokens * self.shape.hidden <= 2 * K * 8192 else 2
        layers = min(layers, self.sets)
        some = self.bench.time_call(self.step(point, layers))
        head = self.head_ms(point.sequences + (1 if point.tokens else 0))
        times = self.shape.layers / layers
        whole = {name: some[name] * times + head[name] for name in ("ms", "least_ms", "most_ms")}
        kept = {"layer_ms": some["ms"] / layers, "head_ms": head["ms"], "repeats": some["repeats"]}
        return {"shape": self.shape.name, **asdict(point), **whole, **kept, "graph": some["graph"]}


def relative_error(got: Tensor, right: Tensor) -> float:
    """Return the error of a result: the norm of the difference over that of the right one; 1e9 for NaN or infinity."""
    got, right = got.float(), right.float()
    error = float((got - right).norm() / right.norm())
    return error if math.isfinite(error) else 1e9


def machine(cuda: bool) -> dict[str, Any]:
    """Return a description of the machine of the measurement."""
    kept: dict[str, Any] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    kept["triton"] = str(triton.__version__) if triton is not None else None
    if not cuda:
        return kept | {"gpu": None}
    about = torch.cuda.get_device_properties(0)
    kept |= {"gpu": about.name, "memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return kept | {"processors": about.multi_processor_count, "cudnn": torch.backends.cudnn.version()}


# Fits


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return coefficients that bring their sums of products with `rows` nearest to `wanted`, in relative error.

    Raises ValueError if the rows do not distinguish the coefficients.
    """
    scaled = [[value / y for value in row] for row, y in zip(rows, wanted, strict=True)]
    sizes = [math.sqrt(sum(row[i] ** 2 for row in scaled)) or 1.0 for i in range(len(rows[0]))]
    scaled = [[value / size for value, size in zip(row, sizes, strict=True)] for row in scaled]
    n = len(sizes)
    system = [[sum(r[i] * r[j] for r in scaled) for j in range(n)] + [sum(r[i] for r in scaled)] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda at: abs(system[at][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < 1e-12:
            raise ValueError("too few different points for a fit")
        for at in range(n):
            if at != i:
                part = system[at][i] / system[i][i]
                system[at] = [a - part * b for a, b in zip(system[at], system[i], strict=True)]
    return [system[i][n] / system[i][i] / sizes[i] for i in range(n)]


def terms(point: dict[str, Any], kind: str) -> list[float]:
    """Return the factors of a fit's coefficients."""
    tokens, context = point["tokens"], point["sequences"] * point["context"]
    pairs = tokens * (point["prior"] + tokens / 2)
    if kind == "decode":
        return [1.0, point["sequences"], context]
    return [1.0, tokens, pairs] if kind == "prefill" else [1.0, tokens + point["sequences"], pairs, context]


COEFFICIENTS = {
    "decode": ("floor_ms", "sequence_ms", "context_token_ms"),
    "prefill": ("floor_ms", "token_ms", "pair_ms"),
    "step": ("floor_ms", "token_ms", "pair_ms", "context_token_ms"),
}


def fit(points: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return one fit: `decode` and `prefill` of their own points, `step` one formula for all of them."""
    chosen = [point for point in points if kind in ("step", point["kind"])]
    rows, wanted = [terms(point, kind) for point in chosen], [point["ms"] for point in chosen]
    if len(rows) <= len(COEFFICIENTS[kind]):
        raise ValueError(f"only {len(rows)} points")
    found = least_squares(rows, wanted)
    guesses = (sum(c * value for c, value in zip(found, row, strict=True)) for row in rows)
    errors = sorted(abs(guess / ms - 1) for guess, ms in zip(guesses, wanted, strict=True))
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    named = dict(zip(COEFFICIENTS[kind], found, strict=True))
    return named | {"points": len(rows), "median_error": median(errors), "p90_error": p90}


# The command


def run_shape(bench: KernelBench, shape: LayerShape, deadline: float) -> None:
    """Measure one shape's points until `deadline`, and fit them."""
    bench.found["shapes"][shape.name] = asdict(shape)
    one = ShapeBench(bench, shape)
    try:
        one.choose_all()
    except Exception as error:  # plain kernels remain
        bench.record_failure(f"{shape.name} choice of kernels", error)
    kind = ""
    for point in bench.sweep.points():
        if point.kind != kind:
            bench.write()
            kind = point.kind
        if time.monotonic() > deadline:
            bench.found["skipped"].append({"shape": shape.name, **asdict(point)})
            continue
        try:
            bench.found["points"].append(one.measure(point))
        except Exception as error:  # one point less
            bench.record_failure(f"{shape.name} {point}", error)
        if bench.cuda and point.tokens:
            torch.cuda.empty_cache()
    fit_shape(bench, shape.name)


def fit_shape(bench: KernelBench, name: str) -> None:
    """Fit one shape's points."""
    points = [point for point in bench.found["points"] if point["shape"] == name]
    for kind in COEFFICIENTS:
        try:
            bench.found["fits"].setdefault(name, {})[kind] = fit(points, kind)
        except (ValueError, ZeroDivisionError) as error:
            bench.record_failure(f"{name} fit of {kind}", error)
    bench.write()


def show(found: dict[str, Any]) -> None:
    """Print a short table of the results."""
    print(f"{found['machine']}\nceilings {found['ceilings']}\nnot included: {'; '.join(found['left_out'])}")
    for line in found["kernels"]:
        print(
            f"  {line['shape']:18} {line['what']:26} {line['kernel']:7} {line['ms']:8.3f} ms  error {line['error']:.1e}"
        )
    for point in found["points"]:
        where = f"{point['sequences']:4} x {point['context']:6}, {point['tokens']:6} after {point['prior']:6}"
        spread = (point["most_ms"] - point["least_ms"]) / point["ms"]
        print(f"  {point['shape']:18} {point['kind']:8} {where} {point['ms']:9.2f} ms +-{spread / 2:.1%}")
    for name, fits in found["fits"].items():
        for kind, values in fits.items():
            print(f"{name} {kind}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
    print(f"{len(found['points'])} points, {len(found['failed'])} failures, {len(found['skipped'])} skipped")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 if PyTorch or the device is missing."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Step times of a model's layers on this GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--seconds", type=float, default=240.0, metavar="S", help="time of the whole run in seconds (240)"
    )
    parser.add_argument("--shapes", metavar="NAME,NAME", help="only these: " + ", ".join(s.name for s in SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shape and sweep for a test on a CPU")
    options = parser.parse_args(argv)
    if torch is None or (options.device == "cuda" and not torch.cuda.is_available()):
        print("PyTorch with a GPU is required; use --device cpu --tiny for a test without one", file=sys.stderr)
        return 2
    known = TINY if options.tiny else SHAPES
    shapes = [s for s in known if not options.shapes or s.name in options.shapes.split(",")]
    if not shapes:
        parser.error(f"--shapes: must be one of {', '.join(s.name for s in known)}")
    sweep = TINY_SWEEP if options.tiny else WHOLE_SWEEP
    bench = KernelBench(options.device, sweep, options.out, began + options.seconds - min(10.0, options.seconds / 10))
    bench.write()

    def bail() -> None:
        bench.found["failed"].append({"what": "the run", "error": "it did not end before its deadline and was killed"})
        bench.write()
        os._exit(3)

    watchdog = threading.Timer(options.seconds + WATCHDOG_SECONDS, bail)
    watchdog.daemon = True
    watchdog.start()
    try:
        with torch.inference_mode():
            measure_all(bench, shapes)
    finally:
        bench.found["seconds"] = round(time.monotonic() - began, 1)
        bench.write()
        watchdog.cancel()
        show(bench.found)
    return 0


def measure_all(bench: KernelBench, shapes: Sequence[LayerShape]) -> None:
    """Measure the ceilings, and then every shape, each with its part of the remaining time."""
    torch.manual_seed(1)
    if not bench.cuda:
        torch.set_num_threads(1)
    try:
        bench.measure_ceilings()
    except Exception as error:  # the points work without them
        bench.record_failure("ceilings", error)
    for number, shape in enumerate(shapes):
        now = time.monotonic()
        try:
            run_shape(bench, shape, now + (bench.deadline - now) / (len(shapes) - number))
        except Exception as error:  # the other shapes remain
            bench.record_failure(shape.name, error)
        if bench.cuda:
            torch.cuda.empty_cache()
    bench.found["complete"] = not bench.found["skipped"]


if __name__ == "__main__":
    sys.exit(main())
