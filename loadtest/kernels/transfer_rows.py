"""Steps of a model's layers beside endless transfers, and the slowdown of both; see transfers.py."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

try:
    import torch
except ImportError:  # `main` reports the missing package
    torch = None

if TYPE_CHECKING or __package__:
    from loadtest.kernels import copies, measure
    from loadtest.kernels.transfer_bench import TransferBench, layout_of
else:  # run as a script, from a copy of this folder
    import copies
    import measure
    from transfer_bench import TransferBench, layout_of

WINDOW_SECONDS = 0.5  # time for which a step is repeated beside transfers
# Transfers beside steps: names of traffic, each of one or two endless rows of transfers (load or store, way).
TRAFFIC: dict[str, tuple[tuple[bool, str], ...]] = {
    "none": (),
    "load whole": ((True, "whole"),),
    "load blocks": ((True, "blocks"),),
    "load batch": ((True, "batch"),),
    "load ordered": ((True, "ordered"),),
    "load each": ((True, "each"),),
    "load kernel": ((True, "kernel"),),
    "load wide": ((True, "wide"),),
    "store batch": ((False, "batch"),),
    "store kernel": ((False, "kernel"),),
    "load and store batch": ((True, "batch"), (False, "batch")),
    "load and store blocks": ((True, "blocks"), (False, "blocks")),
}


class Row(threading.Thread):
    """Endless transfers, one after the other, on a separate stream; the next is submitted before one ends."""

    def __init__(self, mover: copies.Mover, submit: copies.Submit, transfer_bytes: int) -> None:
        super().__init__(daemon=True)
        self._mover, self._submit, self._bytes = mover, submit, transfer_bytes
        self._ends: list[float] = []
        self._stopped = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Transfer until `stop`."""
        try:
            self._mover.calls.bind_thread()
            stream = self._mover.stream()
            under_way: deque[copies.Mark] = deque()
            while not self._stopped.is_set():
                self._submit(stream)
                under_way.append(self._mover.mark(stream))
                if len(under_way) > 1:
                    under_way.popleft().synchronize()
                    self._ends.append(time.perf_counter())
            self._mover.wait(stream)
        except Exception as error:  # raised by `gb_per_s`
            self.error = error

    def stop(self) -> None:
        """End after the current transfer."""
        self._stopped.set()
        self.join(20)

    def gb_per_s(self, begin: float, end: float) -> float:
        """Return the speed between the first and the last end of a transfer in a span of the clock."""
        if self.error is not None:
            raise self.error
        inside = [at for at in self._ends if begin <= at <= end]
        if len(inside) > 1:
            return (len(inside) - 1) * self._bytes / (inside[-1] - inside[0]) / 1e9
        return len(inside) * self._bytes / (end - begin) / 1e9


def capture_graph(bench: TransferBench, run: Callable[[], object]) -> Callable[[], object]:
    """Return `run` as the replay of a CUDA graph; unchanged without a GPU."""
    for _ in range(2):
        run()
    bench.sync()
    if not bench.cuda:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def step_ms(bench: TransferBench, call: Callable[[], object]) -> tuple[float, float, float]:
    """Return the milliseconds of a call, repeated for a while, and the clock before and after."""
    start = time.perf_counter()
    bench.lap_ms(call, 1)
    times = max(3, int(WINDOW_SECONDS / max(1e-5, time.perf_counter() - start))) if bench.cuda else 20
    begin = time.perf_counter()
    ms = bench.lap_ms(call, times)
    return ms, begin, time.perf_counter()


def measure_under_traffic(
    bench: TransferBench, mover: copies.Mover, layout: copies.KvLayout, traffic: str, call: Callable[[], object] | None
) -> tuple[float | None, list[float]]:
    """Return the milliseconds of a call beside some traffic, and the speed of each of its rows in GB/s."""
    tokens, rows = bench.whole.row_tokens, []
    for load, way in TRAFFIC[traffic]:
        submit, _ = mover.submit(way, layout, tokens, load=load)
        submit(mover.stream())  # kernels are compiled before time counts
        rows.append(Row(mover, submit, tokens * layout.token_bytes))
    bench.sync()
    for row in rows:
        row.start()
    try:
        time.sleep(0.05)
        begin = time.perf_counter()
        ms: float | None = None
        if call is None:
            time.sleep(WINDOW_SECONDS if bench.cuda else 0.1)
            end = time.perf_counter()
        else:
            ms, begin, end = step_ms(bench, call)
    finally:
        for row in rows:
            row.stop()
        bench.sync()
    return ms, [row.gb_per_s(begin, end) for row in rows]


def measure_contention(bench: TransferBench, mover: copies.Mover, shape: measure.LayerShape) -> None:
    """Measure steps of a shape alone and beside each traffic, and the traffic alone."""
    layout = layout_of(shape)
    names = [name for name, rows in TRAFFIC.items() if rows and all(way in mover.ways for _, way in rows)]
    for traffic in names:
        with bench.part(f"{shape.name} {traffic} alone"):
            if not bench.late(f"{shape.name} {traffic} alone"):
                _, speeds = measure_under_traffic(bench, mover, layout, traffic, None)
                bench.found["traffic"].append({"shape": shape.name, "traffic": traffic, "gb_per_s": speeds})
    layers = measure.ShapeBench(bench, shape)
    with bench.part(f"{shape.name} choice of kernels"):
        layers.choose_all()
    for point in bench.whole.steps:
        with bench.part(f"{shape.name} {point.kind}"):
            run = layers.step(point, layers.sets)  # kept, because the graph uses its tensors
            call = capture_graph(bench, run)
            for traffic in ("none", *names):
                what = {"shape": shape.name, "step": point.kind, "layers": layers.sets, "traffic": traffic}
                with bench.part(f"{what}"):
                    if not bench.late(f"{what}"):
                        alone, _, _ = step_ms(bench, call)
                        ms, speeds = measure_under_traffic(bench, mover, layout, traffic, call)
                        again, _, _ = step_ms(bench, call)
                        found = {"alone_ms": (alone + again) / 2, "alone_spread": abs(alone - again) / alone}
                        bench.found["contention"].append(what | found | {"ms": ms, "gb_per_s": speeds})
