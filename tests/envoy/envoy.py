"""A real Envoy of the tests' own environment before a picker and engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest.common.envoy import EnvoyMode, FrontEnvoy, fronting
from router.app import App
from tests.envoy import install
from tests.gateway.asking import picking
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
    folder: Path, picker_port: int, replica_ports: Sequence[int], mode: EnvoyMode | None = None
) -> AsyncIterator[FrontEnvoy]:
    """A real Envoy before these replicas, once it listens."""
    async with fronting(install.program(), folder, picker_port, replica_ports, mode) as envoy:
        yield envoy


@asynccontextmanager
async def behind(
    folder: Path, count: int = 3, mode: EnvoyMode | None = None, **settings: Any
) -> AsyncIterator[tuple[FrontEnvoy, App, list[FakeEngine]]]:
    """A real Envoy before a picker and so many engines."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
        app = await stack.enter_async_context(picking(*engines, **settings))
        ports = [engine.port for engine in engines]
        envoy = await stack.enter_async_context(front(folder, app.gateway.port, ports, mode))
        yield envoy, app, engines


def chat(text: str, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}
