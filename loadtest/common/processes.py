"""Child processes of a benchmark, such as routers and replicas: started, awaited until they serve, always stopped.

A child leads its own process group, so that a Ctrl-C in the terminal reaches only the benchmark, and stopping the child
also stops its own children. With a folder, the child's output goes to a file there, which costs the benchmark nothing
while it measures. Without a folder, the first and last lines are kept in memory, so that no disk fills. Either way an
error quotes the last lines.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MEASURED_STOP_TIMEOUT_S = 2.0
"""Time from SIGTERM to SIGKILL for a process that writes to a file: it was measured and has nothing to finish."""
LAST_WORDS_TIMEOUT_S = 1.0
LOOK_S = 0.02
FREE_PORTS = range(10_000, 32_768)
"""Ports below those that Linux assigns to clients (net.ipv4.ip_local_port_range: 32768 to 60999)."""
PORT_TRIES_MAX = 1_000
FIRST_LINES_MAX = 1_000
LAST_LINES_MAX = 12
READY = re.compile(r"ready (http://\S+)")
LISTENING = re.compile(r"listening (http://\S+) admin (http://\S+)")


class ProcessError(Exception):
    """A process failed to start or to run as expected; the message has the last lines that it wrote."""


class Process:
    """A child that leads its process group, and its output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: Path | None) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._output = output
        self._first = list[str]()
        self._last = deque[str](maxlen=LAST_LINES_MAX)
        self._drains: list[asyncio.Task[None]] = []
        if process.stdout is not None and process.stderr is not None:
            self._drains.append(asyncio.create_task(self._keep_first(process.stdout)))
            self._drains.append(asyncio.create_task(self._keep_last(process.stderr)))

    async def _keep_first(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            if len(self._first) < FIRST_LINES_MAX:
                self._first.append(line.decode(errors="replace"))

    async def _keep_last(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self._last.append(line.decode(errors="replace").rstrip())

    @property
    def output(self) -> Path:
        """The file that the process writes to. Raises ValueError if it was started without a folder."""
        if self._output is None:
            raise ValueError(f"{self.name} writes to no file")
        return self._output

    @property
    def running(self) -> bool:
        """True if the process has not ended."""
        return self._process.returncode is None

    async def wait_for_output(
        self, pattern: re.Pattern[str], count: int = 1, timeout_s: float = START_TIMEOUT_S
    ) -> list[re.Match[str]]:
        """Wait for `count` matches of the pattern in the process's stdout, and return them.

        Raises ProcessError if it ends before, or takes longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = not self.running
            if ended and self._drains:
                await asyncio.wait(self._drains, timeout=LAST_WORDS_TIMEOUT_S)
            text = self._output.read_text(errors="replace") if self._output else "".join(self._first)
            found = list(pattern.finditer(text))
            if len(found) >= count:
                return found[:count]
            if ended:
                raise self.error(f"ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline_s:
                raise self.error(f"was not ready within {timeout_s:g} s")
            await asyncio.sleep(LOOK_S)

    def error(self, what: str) -> ProcessError:
        """Return an error about the process, with the last lines that it wrote."""
        lines: Sequence[str] = self._last
        if self._output:
            with suppress(OSError):
                lines = self._output.read_text(errors="replace").splitlines()[-LAST_LINES_MAX:]
        said = "".join(f"\n  {line}" for line in lines)
        return ProcessError(f"{self.name} {what}{':' if said else ''}{said}")

    def terminate(self) -> None:
        """Send SIGTERM to the process alone, as a kubelet does."""
        self._process.terminate()

    async def kill(self) -> None:
        """Send SIGKILL to the process group without a warning."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def wait_for_exit(self, timeout_s: float | None = None) -> int:
        """Wait until the process ends and return its exit status, negative for the signal that ended it.

        Raises ProcessError if it still runs after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            raise self.error(f"did not end within {timeout_s:g} s") from None

    async def stop(self) -> None:
        """Send SIGTERM to the process group, and SIGKILL to processes that remain."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(MEASURED_STOP_TIMEOUT_S if self._output else STOP_TIMEOUT_S):
                await self._process.wait()
        await self.kill()
        for drain in self._drains:
            drain.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@asynccontextmanager
async def run_process(name: str, command: Sequence[str], folder: Path | None = None) -> AsyncIterator[Process]:
    """Run a command in its own process group and stop it at the end of the block.

    With a folder, its output is a file there. Raises ProcessError if the command does not exist.
    """
    output = folder / f"{name}.log" if folder else None
    with output.open("wb") if output else nullcontext(asyncio.subprocess.PIPE) as sink:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
        except OSError as error:
            raise ProcessError(f"{name} cannot be started: {error}") from error
    running = Process(name, process, output)
    try:
        yield running
    finally:
        await asyncio.shield(running.stop())


@asynccontextmanager
async def engines(
    replicas: int,
    model: str,
    calibration: str,
    kv_tokens: int,
    time_scale: float,
    *,
    host: str = HOST,
    tick_s: float | None = None,
    tell_ttft: bool = False,
) -> AsyncIterator[list[str]]:
    """Run simulated replicas in one process, on free ports; yields their URLs once all of them listen.

    - `tick_s`: wall-clock time in which an answer sends at most one event, except its first and last token; None for
      the engine's default.
    - `tell_ttft`: answers report their time to first token at the engine.
    """
    arguments = ["-m", "loadtest", "engine", "--host", host, "--port", "0", "--replicas", str(replicas)]
    arguments += ["--model", model, "--calibration", calibration, "--kv-tokens", str(kv_tokens)]
    arguments += ["--time-scale", str(time_scale)]
    if tick_s is not None:
        arguments += ["--tick-ms", str(1e3 * tick_s)]
    arguments += ["--tell-ttft"] if tell_ttft else []
    async with run_process("loadtest engine", [sys.executable, *arguments]) as process:
        yield [said[1] for said in await process.wait_for_output(READY, replicas)]


@asynccontextmanager
async def router(
    replicas: Sequence[str],
    *,
    policy: str,
    host: str = HOST,
    port: int = 0,
    admin_port: int = 0,
    settings: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> AsyncIterator[tuple[str, str]]:
    """Run a router in front of the replicas; yields its URL and its admin URL once it is ready.

    - `port`, `admin_port`: 0 for a free one.
    - `settings`: values of `--set`.
    - `flags`: further words of the command line.
    """
    arguments = ["-m", "router", "serve", "--host", host, "--port", str(port), "--admin-port", str(admin_port)]
    arguments += ["--set", "listen.lame_duck_s=0", "--policy", policy]
    arguments += [word for url in replicas for word in ("--replica", url)]
    arguments += [word for setting in settings for word in ("--set", setting)]
    async with run_process("the router", [sys.executable, *arguments, *flags]) as process:
        (listening,) = await process.wait_for_output(LISTENING)
        async with aiohttp.ClientSession() as session:

            async def missing() -> str:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{listening[1]}/readyz") as response:
                        return "" if response.status == 200 else f"/readyz answers {response.status}"
                return "/readyz does not answer"

            await wait_until_ready(process, missing)
        yield listening[1], listening[2]


async def wait_until_ready(process: Process, missing: Callable[[], Awaitable[str]], every_s: float = LOOK_S) -> None:
    """Wait until `missing` returns an empty text; otherwise it returns the reason why the process is not ready."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.running:
        if not (what := await missing()):
            return
        if time.monotonic() > deadline_s:
            raise process.error(f"was not ready within {START_TIMEOUT_S:g} s: {what}")
        await asyncio.sleep(every_s)
    raise process.error("ended before it was ready")


def free_ports(count: int) -> list[int]:
    """Return consecutive TCP ports of 127.0.0.1 that were free a moment ago.

    The system assigns none of them to an outgoing connection or to a process that listens on port 0. So only another
    call of this function can take one in the meantime.
    """
    for _ in range(PORT_TRIES_MAX):
        first = random.SystemRandom().randrange(FREE_PORTS.start, FREE_PORTS.stop - count)
        ports = list(range(first, first + count))
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind((HOST, port))
            except OSError:
                continue
            return ports
    raise ProcessError(f"no {count} free ports in a row in {PORT_TRIES_MAX} tries")


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    return free_ports(1)[0]


async def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run the work and return its exit status.

    The first SIGINT or SIGTERM cancels it, so that every child is stopped on the way out. The status is then 128 plus
    the signal's number.
    """
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        if not received:
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + received[0] if received else 1


def run_until_interrupt(serving: Coroutine[Any, Any, None]) -> int:
    """Run a server until Ctrl-C and return the exit status."""
    try:
        uvloop.run(serving)
    except KeyboardInterrupt:
        return 130
    return 0
