"""Memory of a picker in a process of its own, while many long bodies come at once and their answers last."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.common.processes import free_ports
from tests.extproc.asking import asking, destinations, endpoint
from tests.support.fakes import FakeEngine
from tests.support.waiting import until

MB = 1 << 20
BODY_BYTES, ROOM_BYTES, STREAMS = 8 * MB, 32 * MB, 40
# Bytes that the process may have more at its peak: each body that has room is in gRPC, here and in what is made of it.
# Without room for them all would be there at once, and some of them until their answers ended: 320 MB and more.
PEAK_BYTES = 8 * ROOM_BYTES


def memory(pid: int, name: str) -> int:
    """Bytes that Linux says of a process: its peak (VmHWM), or now (VmRSS)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.finding("2026-11-28/11")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
async def test_memory_is_bounded_by_the_budget(engine: FakeEngine) -> None:
    """Forty bodies of 8 MB at once under a budget of 32 MB, all of which are placed, and whose streams stay open."""
    port, health = free_ports(2)
    command = [sys.executable, "-m", "router", "serve", "--mode", "extproc", "--admin-port", "0"]
    command += ["--replica", engine.url]
    for key, value in {
        "extproc.port": port, "extproc.health_port": health, "probe.interval_s": 0.1, "listen.drain_s": 0,
        "limits.total_body_bytes_max": ROOM_BYTES, "limits.body_budget_timeout_s": 600,
    }.items():  # fmt: skip
        command += ["--set", f"{key}={value}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    app = SimpleNamespace(extproc=SimpleNamespace(port=port))
    body = json.dumps({"model": "m", "prompt": "x" * BODY_BYTES}).encode()
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            assert b"listening grpc://" in await process.stdout.readline()
        await until(lambda: engine.probes["models"] > 1)
        async with AsyncExitStack() as stack:

            async def placed() -> list[str]:
                it = await stack.enter_async_context(asking(app))  # type: ignore[arg-type]  # its port is all
                headers = {"content-length": str(len(body))}
                return destinations(await it.pick(body, path="/v1/completions", headers=headers))

            assert await placed() == [endpoint(engine)]
            before = memory(process.pid, "VmRSS")
            assert await asyncio.gather(*(placed() for _ in range(STREAMS))) == [[endpoint(engine)]] * STREAMS
            assert memory(process.pid, "VmHWM") - before < PEAK_BYTES
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
