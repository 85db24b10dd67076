"""What the children of the supervisor do: `python -m router.workers`, told on standard input.

Standard input brings one Spec and then stays open: when it ends, the supervisor wants us to drain, or is gone, which
comes to the same. So does SIGTERM. SIGINT is left to the supervisor, since a terminal sends it to all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from router import logs
from router.edge import Edge
from router.hub import Hub
from router.running import run
from router.workers.client import RemotePlacer
from router.workers.server import HubServer
from router.workers.spec import READY, SPEC_BYTES_MAX, Spec

SETTLE_S = 2.0  # for the first probes, before workers are told what is ready
VIEW_S = 5.0  # that a worker waits for its first view: until then others serve, or clients wait to be accepted
GRACE_S = 2.0  # of the hub, beyond `listen.drain_s`


def main() -> int:
    """Read the Spec and be what it says. Returns the exit status."""
    size = int.from_bytes(_exactly(4), "little")
    if not 0 < size <= SPEC_BYTES_MAX:
        return 2
    spec = msgspec.msgpack.decode(_exactly(size), type=Spec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = spec.settings.log
    logs.setup(log.level, log.format, requests=log.requests, shared=True)
    work = _hub(spec) if spec.worker is None else _worker(spec, spec.worker)
    try:
        run(work)
    except OSError as error:
        print(f"warmroute: {error.strerror or error}", file=sys.stderr)
        return 1
    finally:
        if spec.worker is None and os.getppid() != spec.supervisor:  # which would have removed its folder
            with suppress(OSError):
                Path(spec.path).unlink()
                Path(spec.path).parent.rmdir()
    return 0


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return b"\0" * size
        data += piece
    return data


def _asked_to_stop() -> asyncio.Event:
    """Set at SIGTERM and at the end of standard input."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        if not os.read(0, 4_096):
            loop.remove_reader(0)
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(0, ended)
    return stop


def _ready() -> None:
    with suppress(OSError):  # nobody reads it any more: then standard input has ended too
        os.write(1, READY)


async def _hub(spec: Spec) -> None:
    stop, settings = _asked_to_stop(), spec.settings
    server: HubServer | None = None

    def lost(replica: str) -> None:
        if server is not None:
            server.lost(replica)

    hub = Hub(
        settings,
        in_flight=lambda: server.in_flight if server is not None else 0,
        lost=lost,
        admin_socket=socket.socket(fileno=spec.admin_fd),
    )
    hub.left = lambda replica: server.left(replica) if server is not None else None
    async with hub:
        _ready()
        probing, stopping = asyncio.create_task(hub.probe_now()), asyncio.create_task(stop.wait())
        await asyncio.wait((probing, stopping), timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        listening = socket.socket(fileno=spec.hub_fd)
        async with HubServer(hub, listening, ids=settings.events.announce) as server:
            await stopping
            hub.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(settings.listen.drain_s + GRACE_S):
                    await server.empty.wait()


async def _worker(spec: Spec, number: int) -> None:
    stop, settings, edge = _asked_to_stop(), spec.settings, None
    placer = RemotePlacer(
        spec.path,
        worker=number,
        in_flight=lambda: edge.in_flight if edge else 0,
        lost=lambda replica: edge.lost(replica) if edge else None,
        left=lambda replica: edge.left(replica) if edge else None,
        figures=lambda: edge.figures() if edge else {},
        clock=time.monotonic,
        timeout_s=settings.listen.hub_timeout_s,
        response_ids_max=settings.limits.response_ids_max,
        private_responses=bool(settings.auth.keys_file),
    )
    async with placer:
        with suppress(TimeoutError):
            async with asyncio.timeout(VIEW_S):
                await placer.viewed.wait()
        async with Edge(settings, placer, listening=socket.socket(fileno=spec.main_fd)) as edge:
            _ready()
            await stop.wait()
