"""Store for routers that can turn hostile: `python -m loadtest.faults.hostile_store`.

It implements enough of Redis' protocol for routers to share state. It prints its port, forwards published messages, and
stores no data. After SIGUSR1 it sends forged messages to each subscriber, as fast as they are accepted.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from loadtest.common.processes import HOST, run_until_interrupt

READY = "ready {port}"
FORGED_BYTES, FORGED_AT_ONCE = 200, 256
ANSWERS = {
    b"PING": b"+PONG\r\n",
    b"PUBLISH": b":1\r\n",
    b"XRANGE": b"*0\r\n",
    b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
    b"CLIENT": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
}
NOTHING = b"$-1\r\n"


def bulk(*words: bytes) -> bytes:
    """Return a list of strings in RESP2."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class HostileStore:
    """The listener, its subscribers, and its hostile state."""

    def __init__(self) -> None:
        self.hostile = asyncio.Event()
        self.sent = 0  # forged messages
        self._subscribers: dict[asyncio.StreamWriter, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        floods: asyncio.Task[None] | None = None
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                words = [await _word(reader) for _ in range(int(line[1:]))]
                if words[0].upper() == b"SUBSCRIBE":
                    self._subscribers[writer] = words[1]
                    writer.write(b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n" % (len(words[1]), words[1]))
                    floods = asyncio.create_task(self._flood(writer, words[1]))
                else:
                    writer.write(ANSWERS.get(words[0].upper(), NOTHING))
                if words[0].upper() == b"PUBLISH":
                    self._pass_on(words[1], words[2])
                await writer.drain()
        self._subscribers.pop(writer, None)
        if floods is not None:
            floods.cancel()
        writer.transport.abort()

    def _pass_on(self, channel: bytes, message: bytes) -> None:
        for writer, subscribed in self._subscribers.items():
            if subscribed == channel and not writer.transport.is_closing():
                writer.write(bulk(b"message", channel, message))

    async def _flood(self, writer: asyncio.StreamWriter, channel: bytes) -> None:
        await self.hostile.wait()
        forged = bulk(b"message", channel, b"x" * FORGED_BYTES) * FORGED_AT_ONCE
        with suppress(OSError):
            while not writer.transport.is_closing():
                writer.write(forged)
                self.sent += FORGED_AT_ONCE
                await writer.drain()
                await asyncio.sleep(0)


async def _word(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


async def serve() -> None:
    """Serve until cancelled."""
    store = HostileStore()
    server = await asyncio.start_server(store.serve, HOST, 0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, store.hostile.set)
    print(READY.format(port=server.sockets[0].getsockname()[1]), flush=True)
    await asyncio.get_running_loop().create_future()


def main() -> int:
    """Run the command line, which has no arguments."""
    return run_until_interrupt(serve())


if __name__ == "__main__":
    raise SystemExit(main())
