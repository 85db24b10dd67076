"""The command's own process with `--workers N`: starts hub and workers, restarts those that die, ends them in order.

It binds the sockets and passes them to the children. So no connection is refused while a worker or the hub is away, and
ports stay the same. It reads settings and the files that they name, and passes the contents to the children. So all
children serve with the contents that were last accepted. It serves no request itself, and little in it could fail. A
child that dies is started again after a pause that grows while it keeps dying, at most RESTARTS_MAX times in WINDOW_S.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec.structs import replace

from router.config import file_contents
from router.config.reload import Reloader, files_of
from router.config.schema import Settings
from router.http.acceptor import cannot_listen, url_of
from router.http.server import close_queue
from router.multiprocess.commands import READY, LameDuck, Order, ProcessSpec, Reload, ReloadRefused, encode_frame
from router.telemetry import logs
from router.telemetry.build import log_build_info

log = logging.getLogger(__name__)

BACKLOG = 1_024
HUB_BACKLOG = 64
START_S = 60.0  # longest start of a child: it may have to load tokenizers
PAUSE_S = 0.1  # pause before a child that died is started again; doubled while it keeps dying
PAUSE_S_MAX = 5.0
LIVED_S = 10.0  # a child that lived longer did not die of its start
RESTARTS_MAX = 10
WINDOW_S = 60.0
GRACE_S = 5.0  # time beyond `listen.drain_s` after which children are killed


def run(settings: Settings, read: file_contents.NotedRead[Settings], file: Path | None = None) -> int:
    """Serve until a signal ends it. `read` has read the settings, and reads them again, from `file` among others. It
    raises SettingsError. Returns the exit status."""
    logs.setup(settings.log.level, settings.log.format, requests=settings.log.requests, shared=True)
    try:
        return asyncio.run(_Supervisor(settings, read, file).run())
    except OSError as error:
        print(f"warmroute: {error.strerror or error}", file=sys.stderr)
        return 1


class _Supervisor:
    def __init__(self, settings: Settings, read: file_contents.NotedRead[Settings], file: Path | None) -> None:
        self._read = read
        self._files = read.files  # contents of files that settings name, as they were last accepted
        self._settings = settings
        self._reloader = Reloader(settings, read, self._apply, self._on_reload_result, file=file)
        self._stop = asyncio.Event()
        self._lame_duck = False  # the supervisor got SIGTERM, and does not drain yet
        self._now = asyncio.Event()  # set: children are killed without a wait for the end of their answers
        self._children: list[_Child] = []

    async def run(self) -> int:
        """Run the router. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reloader.ask)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-", ignore_cleanup_errors=True))
            url, admin_url = self._prepare(stack, Path(folder, "hub"))
            keeping = [asyncio.create_task(child.keep()) for child in self._children]
            try:
                if await self._await_all_ready():
                    log_build_info()
                    logs.log_listening(url, admin_url)
                    reloading = asyncio.create_task(self._reloader.watch())
                    await self._stop.wait()
                    reloading.cancel()
                    await self._lame_duck_phase()
                    close_queue(self._main)
                    stack.close()  # closes the listening sockets: no connection waits for an accept that never comes
                    return await self._drain(keeping)
                if self._stop.is_set():
                    return 130
                print("warmroute: a process did not start; what it wrote is above", file=sys.stderr)
                return 1
            finally:
                for child in self._children:
                    child.kill()
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)

    def _prepare(self, stack: ExitStack, path: Path) -> tuple[str, str]:
        """Bind all sockets and set up the children. Only this user can enter the temporary folder (0700)."""
        s = self._settings.listen
        main = self._main = stack.enter_context(_bound(s.host, s.port))
        admin = stack.enter_context(_bound(s.admin_host, s.admin_port, admin=True))
        hub = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            hub.bind(os.fspath(path))
        except OSError as error:  # a path of over 107 bytes, for instance
            raise OSError(f"no unix socket can be bound in the temporary folder (TMPDIR): {error}") from error
        hub.listen(HUB_BACKLOG)
        spec = ProcessSpec(settings=self._settings, files=self._files, path=os.fspath(path))
        fds = (hub.fileno(), admin.fileno())
        self._children = [_Child("hub", replace(spec, hub_fd=fds[0], admin_fd=fds[1]), fds)]
        settings = _share(self._settings)
        for number in range(s.workers):
            spec = replace(spec, settings=settings, worker=number, main_fd=main.fileno())
            self._children.append(_Child(f"worker {number}", spec, (main.fileno(),)))
        return url_of(*main.getsockname()[:2], tls=bool(s.tls_certificate)), url_of(*admin.getsockname()[:2])

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._now.set()
        else:
            self._lame_duck = number == signal.SIGTERM
        self._stop.set()

    def _apply(self, settings: Settings) -> None:
        """Send the new settings to all children, those started later included."""
        logs.configure(settings.log.level, requests=settings.log.requests)
        self._settings = settings
        auth = settings.auth  # a process that starts later has the same secrets as the others
        fixed = {file_contents.key_of(file) for file in (auth.secret_file, auth.secret_before_file)}
        kept = {key: self._files[key] for key in fixed if key in self._files}
        named = {file_contents.key_of(file) for file in files_of(settings)} | fixed
        self._files = {k: v for k, v in (self._files | self._read.files | kept).items() if k in named}
        for child in self._children:
            child.reload(settings if child.spec.worker is None else _share(settings), self._files)

    def _on_reload_result(self, result: str) -> None:
        if result != "ok":
            self._children[0].say(ReloadRefused())

    async def _lame_duck_phase(self) -> None:
        """Serve as a lame duck, from SIGTERM until the drain begins."""
        if not self._lame_duck:
            return
        for child in self._children:
            child.lame_duck()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.listen.lame_duck_s):
                await self._now.wait()

    async def _await_all_ready(self) -> bool:
        """True if all children became ready before one failed or the router received a signal to stop."""
        ready = asyncio.gather(*(child.ready for child in self._children))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((ready, stopping), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            return ready.done() and all(ready.result())
        finally:
            ready.cancel()
            stopping.cancel()

    async def _drain(self, keeping: list[asyncio.Task[None]]) -> int:
        for child in self._children:
            child.drain()
        now = asyncio.create_task(self._now.wait())
        done = asyncio.create_task(asyncio.wait(keeping))
        await asyncio.wait(
            (now, done), timeout=self._settings.listen.drain_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        now.cancel()
        done.cancel()
        return 130 if self._now.is_set() else 0


class _Child:
    """The hub or one worker: a process, and those that replace it when it dies."""

    def __init__(self, name: str, spec: ProcessSpec, fds: tuple[int, ...]) -> None:
        self.name = name
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # result of the first process
        self.spec = spec
        self._fds = fds
        self._lame = False
        self._process: asyncio.subprocess.Process | None = None
        self._draining = False
        self._restarts: deque[float] = deque(maxlen=RESTARTS_MAX)

    async def keep(self) -> None:
        """Start the process, again whenever it ends; return when it ends while draining, or was never ready."""
        pause_s = PAUSE_S
        while True:
            started_s = time.monotonic()
            process = await self._start()
            said = await process.stdout.readline() if process.stdout else b""
            if not self.ready.done():
                self.ready.set_result(said == READY)
            status = await process.wait()
            if self._draining or not self.ready.result():
                return
            lived_s = time.monotonic() - started_s
            pause_s = PAUSE_S if lived_s >= LIVED_S else pause_s
            fields = {"process": self.name, "pid": process.pid, "status": status, "lived_s": round(lived_s, 1)}
            log.error("a process died and is started again", extra={"event": "process_died", "fields": fields})
            await asyncio.sleep(max(pause_s, self._barred_s()))
            pause_s = min(pause_s * 2, PAUSE_S_MAX)
            self._restarts.append(time.monotonic())
            if self._draining:
                return

    def _barred_s(self) -> float:
        """Return the seconds until the process may be started again."""
        if len(self._restarts) < RESTARTS_MAX:
            return 0.0
        return max(0.0, self._restarts[0] + WINDOW_S - time.monotonic())

    async def _start(self) -> asyncio.subprocess.Process:
        arguments = ("-m", "router.multiprocess")
        pipe = asyncio.subprocess.PIPE
        # the child inherits the block, until it can ignore the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=pipe, stdout=pipe, pass_fds=self._fds
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self._process = process
        if self._draining and process.stdin is not None:
            process.stdin.close()
            return process
        log.info(
            "a process was started",
            extra={"event": "process_started", "fields": {"process": self.name, "pid": process.pid}},
        )
        if process.stdin is not None:
            process.stdin.write(encode_frame(self.spec) + (encode_frame(LameDuck()) if self._lame else b""))
            with suppress(ConnectionError):
                await process.stdin.drain()
        return process

    def say(self, order: Order) -> None:
        """Send a message to the present process."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(encode_frame(order))

    def reload(self, settings: Settings, files: dict[str, bytes]) -> None:
        """Put new settings and contents of files in force, for processes started later too."""
        self.spec = replace(self.spec, settings=settings, files=files)
        self.say(Reload(settings, files))

    def lame_duck(self) -> None:
        """Make this process and later ones serve as lame ducks."""
        self._lame = True
        self.say(LameDuck())

    def drain(self) -> None:
        """Make the process drain, by ending its standard input."""
        self._draining = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process at once."""
        self._draining = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


def _share(settings: Settings) -> Settings:
    """Return a worker's settings: each worker gets its part of the retry budget, of the connections and of the
    bodies."""
    upstream, listen, limits = settings.upstream, settings.listen, settings.limits
    floor_per_s = upstream.retry_floor_per_s / listen.workers
    return dataclasses.replace(
        settings,
        upstream=dataclasses.replace(upstream, retry_floor_per_s=floor_per_s),
        listen=dataclasses.replace(
            listen,
            connections_max=-(-listen.connections_max // listen.workers),
            connections_per_client_max=-(-listen.connections_per_client_max // listen.workers),
        ),
        limits=dataclasses.replace(
            limits, total_body_bytes_max=max(limits.body_bytes_max, -(-limits.total_body_bytes_max // listen.workers))
        ),
    )


def _bound(host: str, port: int, *, admin: bool = False) -> socket.socket:
    """Return a listening socket that children accept on. Raises OSError with the setting's name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(found[4][:2], family=found[0], backlog=BACKLOG)
    except OSError as error:
        raise cannot_listen(error, host, port, admin=admin) from error
    listening.setblocking(False)
    return listening
