"""Simulated replicas and routers as child processes: started, awaited until they serve, and always stopped.

Each child leads a process group of its own, so that a Ctrl-C in the terminal reaches only us, and stopping it
takes along whatever it started. What it prints is drained into a short memory, so that a child that dies
early can be quoted.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
LAST_WORDS_TIMEOUT_S = 1.0
LINES_KEPT = 12
READY = re.compile(r"ready (http://\S+)")
LISTENING = re.compile(r"listening (http://\S+) admin (http://\S+)")


class ChildError(Exception):
    """A child did not come up; the message carries the last lines it wrote."""


class Child:
    """One child process and the end of what it wrote."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None or process.stderr is None:
            raise ValueError("a child's output and errors must be pipes")
        self.name = name
        self._process = process
        self._output = process.stdout
        self._errors: deque[str] = deque(maxlen=LINES_KEPT)
        self._drains = [asyncio.create_task(_drain(process.stderr, self._errors))]

    async def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The next line of its output that the pattern matches. Raises ChildError if it ends without."""
        while line := await self._output.readline():
            if match := pattern.search(line.decode(errors="replace")):
                return match
        await self._process.wait()
        await asyncio.wait(self._drains, timeout=LAST_WORDS_TIMEOUT_S)
        raise self.error(f"ended with exit code {self._process.returncode}")

    def error(self, what: str) -> ChildError:
        """What happened to it, with the last lines it wrote to stderr."""
        said = "".join(f"\n  {line}" for line in self._errors)
        return ChildError(f"{self.name} {what}{':' if said else ''}{said}")

    def started(self) -> None:
        """Called when no more of its output is waited for, so that its pipe cannot fill."""
        self._drains.append(asyncio.create_task(_drain(self._output, deque(maxlen=1))))

    @property
    def pid(self) -> int:
        """Of the process, which leads its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    def terminate(self) -> None:
        """SIGTERM to the child alone, as a kubelet sends it."""
        self._process.terminate()

    async def ended(self, timeout_s: float) -> int:
        """Wait until it ends. Returns its exit status; raises ChildError if it does not within so long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            raise self.error(f"did not end within {timeout_s:g} s") from None

    async def stop(self) -> None:
        """SIGTERM to the child's group, SIGKILL if that is not enough."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
                break
            except TimeoutError:
                continue
        for drain in self._drains:
            drain.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)


async def _drain(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode(errors="replace").rstrip())


@asynccontextmanager
async def child(name: str, arguments: Sequence[str]) -> AsyncIterator[Child]:
    """`python ARGUMENTS` with the interpreter we run on, stopped when the block ends, however it ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    started = Child(name, process)
    try:
        yield started
    finally:
        await asyncio.shield(started.stop())


@asynccontextmanager
async def engines(
    *,
    replicas: int,
    host: str,
    model: str,
    calibration: str,
    kv_tokens: int,
    time_scale: float,
    tick_s: float | None = None,
    tell_ttft: bool = False,
) -> AsyncIterator[list[str]]:
    """Simulated replicas in one process, on free ports; yields their URLs once all of them listen.

    `tick_s` is wall time in which an answer has at most one event, but for its first and last token; None: the engine's
    default. With `tell_ttft` answers say what their time to first token was at the engine.
    """
    arguments = ["-m", "loadtest", "engine", "--host", host, "--port", "0", "--replicas", str(replicas)]
    arguments += ["--model", model, "--calibration", calibration, "--kv-tokens", str(kv_tokens)]
    arguments += ["--time-scale", str(time_scale)]
    if tick_s is not None:
        arguments += ["--tick-ms", str(1e3 * tick_s)]
    arguments += ["--tell-ttft"] if tell_ttft else []
    async with child("loadtest engine", arguments) as process:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                urls = [(await process.match(READY))[1] for _ in range(replicas)]
        except TimeoutError:
            raise process.error(f"did not listen within {START_TIMEOUT_S:g} s") from None
        process.started()
        yield urls


@asynccontextmanager
async def router(
    replicas: Sequence[str],
    *,
    policy: str,
    host: str,
    port: int = 0,
    admin_port: int = 0,
    settings: Sequence[str] = (),
) -> AsyncIterator[tuple[str, str]]:
    """A router in front of the replicas; yields its URL and its admin URL once ready. Port 0: a free one. `settings`
    are further ones, as `--set` takes them."""
    arguments = [
        "-m",
        "router",
        "serve",
        "--host",
        host,
        "--port",
        str(port),
        "--admin-port",
        str(admin_port),
        "--set",
        "listen.lame_duck_s=0",
    ]
    arguments += ["--policy", policy]
    for url in replicas:
        arguments += ["--replica", url]
    for setting in settings:
        arguments += ["--set", setting]
    async with child("the router", arguments) as process:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                listening = await process.match(LISTENING)
                process.started()
                await _ready(process, listening[1])
        except TimeoutError:
            raise process.error(f"was not ready within {START_TIMEOUT_S:g} s") from None
        yield listening[1], listening[2]


async def _ready(process: Child, url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while process.running:
            try:
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise process.error("ended before it was ready")
