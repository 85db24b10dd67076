"""A real Envoy of the tests' own environment before a picker and engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest.common.envoy import EnvoyMode, FrontEnvoy, run_envoy
from router.router_server import RouterServer
from tests.envoy import install
from tests.extproc.asking import picking
from tests.support.fakes import FakeEngine

DUPLEX, DUPLEX_IN = "duplex", "duplex in"
MODES = {
    "headers": EnvoyMode(request="NONE"),
    "cheap": EnvoyMode(),
    "no heads": EnvoyMode(response_head="SKIP"),
    "streamed": EnvoyMode(response="STREAMED"),
    DUPLEX: EnvoyMode(request="FULL_DUPLEX_STREAMED", response="FULL_DUPLEX_STREAMED"),
    DUPLEX_IN: EnvoyMode(request="FULL_DUPLEX_STREAMED", response="NONE"),
    "named": EnvoyMode(named=True),
    "duplex in, streamed out": EnvoyMode(request="FULL_DUPLEX_STREAMED", response="STREAMED"),
}


@asynccontextmanager
async def front(
    folder: Path, picker_ports: int | Sequence[int], replica_ports: Sequence[int], mode: EnvoyMode | None = None
) -> AsyncIterator[FrontEnvoy]:
    """A real Envoy before these replicas, once it listens."""
    async with run_envoy(install.program(), folder, picker_ports, replica_ports, mode) as envoy:
        yield envoy


@asynccontextmanager
async def behind(
    folder: Path, count: int = 3, mode: EnvoyMode | None = None, **settings: Any
) -> AsyncIterator[tuple[FrontEnvoy, RouterServer, list[FakeEngine]]]:
    """A real Envoy before a picker and so many engines."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
        app = await stack.enter_async_context(picking(*engines, **settings))
        ports = [engine.port for engine in engines]
        envoy = await stack.enter_async_context(front(folder, app.extproc.port, ports, mode))
        yield envoy, app, engines


@asynccontextmanager
async def picker_process(port: int, *engines: FakeEngine, **settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router in a process of its own, whose picker listens on this port."""
    command = [sys.executable, "-m", "router", "serve", "--mode", "extproc", "--admin-port", "0"]
    for engine in engines:
        command += ["--replica", engine.url]
    for key, value in {
        "extproc.port": port, "extproc.health_port": 0, "probe.interval_s": 0.1, "listen.lame_duck_s": 0.2,
        "listen.drain_s": 600, **{key.replace("__", "."): value for key, value in settings.items()},
    }.items():  # fmt: skip
        command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            assert b"listening grpc://" in await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def chat(text: str, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}
