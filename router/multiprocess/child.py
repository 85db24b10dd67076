"""Child of the supervisor, hub or worker: `python -m router.multiprocess`, with its role from standard input.

Standard input brings one Spec and then stays open for Orders. Its end means that the child must drain: the supervisor
requests that, or is gone. SIGTERM means the same, unless the supervisor got it too. systemd, for example, sends it to
all processes, and then the supervisor decides the time. SIGINT and SIGHUP are left to the supervisor, because a
terminal sends them to all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from router.config import file_contents
from router.config.reload import REFUSED
from router.config.schema import Settings, SettingsError
from router.control.control_plane import ControlPlane
from router.eventloop import run, start_task
from router.multiprocess import protocol
from router.multiprocess.commands import READY, SPEC_BYTES_MAX, LameDuck, Order, ProcessSpec, Reload, order_of
from router.multiprocess.control_server import ControlServer
from router.multiprocess.remote_placement import RemotePlacementService
from router.proxy.http_frontend import HttpFrontend
from router.telemetry import logs
from router.telemetry.loop_lag import LoopLagMonitor
from router.telemetry.process_totals import CPU_MS, LINES_DROPPED

log = logging.getLogger(__name__)

SETTLE_S = 2.0  # longest wait for the first probes, before workers get the set of ready replicas
VIEW_S = 5.0  # a worker's longest wait for its first view; in the meantime others serve, or clients wait to be accepted
ALONE_S = 0.5  # wait after SIGTERM: by then the supervisor has sent LameDuck if it got the signal, too
GRACE_S = 2.0  # time beyond `listen.drain_s` that the hub has to drain


def main() -> int:
    """Read the Spec, and run the hub or the worker that it describes. Returns the exit status."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the supervisor blocked the signal for its children
    size = int.from_bytes(_exactly(4), "little")
    if not 0 < size <= SPEC_BYTES_MAX:
        return 2
    spec = msgspec.msgpack.decode(_exactly(size), type=ProcessSpec)
    file_contents.install(spec.files)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = spec.settings.log
    logs.setup(log.level, log.format, requests=log.requests, shared=True)
    work = _hub(spec) if spec.worker is None else _worker(spec, spec.worker)
    try:
        run(work)
    except (OSError, SettingsError) as error:
        print(f"warmroute: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 1
    finally:
        if spec.worker is None and _is_stdin_closed():
            with suppress(OSError):
                Path(spec.path).unlink()
                Path(spec.path).parent.rmdir()
    return 0


def _is_stdin_closed() -> bool:
    """True if standard input has ended. By then the supervisor has removed its folder, or was killed and never will.
    The parent's id is no evidence: files of a dying supervisor are closed some time before it stops being the
    parent."""
    asking = select.poll()
    asking.register(0, select.POLLIN)
    return any(events & select.POLLHUP for _, events in asking.poll(0))


def _exactly(size: int) -> bytes:
    data = bytearray()  # bytes would be copied for each piece of a keys file
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return b"\0" * size
        data += piece
    return bytes(data)


class _CommandReader:
    """Orders of the supervisor, kept until a handler is set."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()  # set at SIGTERM and at the end of standard input
        self._frames = protocol.Frames(SPEC_BYTES_MAX)
        self._lame_duck = False  # the supervisor is ending, and will send the time to drain
        self._kept: list[Order] = []
        self._do: Callable[[Order], None] = self._kept.append
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._loop.call_later, ALONE_S, self._on_sigterm)
        self._loop.add_reader(0, self._read)

    def follow(self, do: Callable[[Order], None]) -> None:
        """Pass all orders, past and future, to this function."""
        self._do = do
        for order in self._kept:
            do(order)

    def _on_sigterm(self) -> None:
        if not self._lame_duck:
            self.stop.set()

    def _read(self) -> None:
        data = os.read(0, 65_536)
        if not data:
            self._loop.remove_reader(0)
            self.stop.set()
        for body in self._frames.feed(data):
            order = order_of(body)
            self._lame_duck = self._lame_duck or isinstance(order, LameDuck)
            self._do(order)


def _reload(reload: Callable[[Settings], None], order: Reload) -> bool:
    """Apply settings with the contents of the files that they name. Returns True on success."""
    settings = order.settings
    try:
        with file_contents.install_or_restore(order.files):
            reload(settings)
    except SettingsError as error:
        for problem in error.problems:
            log.error(REFUSED, extra={"event": "config_rejected", "fields": {"problem": problem}})  # noqa: TRY400 - no trace
        return False
    logs.configure(settings.log.level, requests=settings.log.requests)
    return True


def _ready() -> None:
    with suppress(OSError):  # if the reader of standard output is gone, standard input has ended too
        os.write(1, READY)


async def _hub(spec: ProcessSpec) -> None:
    orders, settings = _CommandReader(), spec.settings
    hub = ControlPlane(settings, admin_socket=socket.socket(fileno=spec.admin_fd))

    def do(order: Order) -> None:
        if isinstance(order, LameDuck):
            hub.drain()
        else:
            taken = isinstance(order, Reload) and _reload(hub.reload, order)
            hub.count_reload("ok" if taken else "refused")

    async with hub:
        orders.follow(do)
        _ready()
        probing, stopping = asyncio.create_task(hub.probe_now()), asyncio.create_task(orders.stop.wait())
        # Workers that know replicas from an earlier hub must not receive an empty view.
        discovering = asyncio.create_task(hub.discovered.wait())
        await asyncio.wait((discovering, stopping), return_when=asyncio.FIRST_COMPLETED)
        discovering.cancel()
        await asyncio.wait((probing, stopping), timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        listening = socket.socket(fileno=spec.hub_fd)
        async with ControlServer(hub, listening, ids=settings.events.request_full_reports) as server:
            hub.attach_frontends(server)
            await stopping
            hub.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(hub.settings.listen.drain_s + GRACE_S):
                    await server.empty.wait()


async def _worker(spec: ProcessSpec, number: int) -> None:
    orders, settings, stalls = _CommandReader(), spec.settings, LoopLagMonitor()
    placer = RemotePlacementService(spec.path, number, settings, figures=lambda: stalls.figures() | _figures())
    async with placer, AsyncExitStack() as stack:
        stack.push_async_callback(start_task(stalls.watch()))
        with suppress(TimeoutError):
            async with asyncio.timeout(VIEW_S):
                await placer.viewed.wait()
        async with HttpFrontend(settings, placer, listening=socket.socket(fileno=spec.main_fd)) as edge:
            placer.serve(edge)
            placer.set_tenants(edge.keys.tenants if edge.keys is not None else {})
            orders.follow(partial(_do, edge, placer))
            _ready()
            await orders.stop.wait()


def _figures() -> dict[str, int]:
    """Figures of this process. CPU time is rounded to seconds, because every change is a message."""
    return {LINES_DROPPED: logs.count_dropped(), CPU_MS: int(time.process_time()) * 1_000}


def _do(edge: HttpFrontend, placer: RemotePlacementService, order: Order) -> None:
    if isinstance(order, LameDuck):
        edge.lame_duck()
    elif isinstance(order, Reload):
        _reload(edge.reload, order)
        placer.set_tenants(edge.keys.tenants if edge.keys is not None else {})
