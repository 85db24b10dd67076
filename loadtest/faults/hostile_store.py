"""Store for routers that can turn hostile: `python -m loadtest.faults.hostile_store`.

It implements enough of Redis' protocol for routers to share state. It prints its port, keeps the last messages of the
stream, and stores no other data. After SIGUSR1 each read of the stream returns as many forged messages as it asks for,
at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from contextlib import suppress

from loadtest.common.processes import HOST, run_until_interrupt

READY = "ready {port}"
FORGED_BYTES = 200
KEPT = 256  # messages
ANSWERS = {
    b"PING": b"+PONG\r\n",
    b"CLIENT": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
    b"SET": b"+OK\r\n",
    b"SADD": b":1\r\n",
    b"DEL": b":1\r\n",
    b"SREM": b":1\r\n",
    b"SMEMBERS": b"*0\r\n",
}
NOTHING, NO_LIST = b"$-1\r\n", b"*-1\r\n"


class HostileStore:
    """The listener, the stream, and its hostile state."""

    def __init__(self) -> None:
        self.hostile = False
        self.sent = 0  # forged messages
        self._stream: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._last = 0
        self._added = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                words = [await _word(reader) for _ in range(int(line[1:]))]
                name = words[0].upper()
                if name == b"XADD":
                    writer.write(self._add(words[-1]))
                elif name == b"XREAD":
                    writer.write(await self._read(words))
                else:
                    writer.write(ANSWERS.get(name, NOTHING))
                await writer.drain()
        writer.transport.abort()

    def turn(self) -> None:
        """Become hostile."""
        self.hostile = True
        self._added.set()

    def _add(self, message: bytes) -> bytes:
        self._last += 1
        self._stream.append((self._last, message))
        self._added.set()
        return bulk(b"%d-0" % self._last)[4:]

    async def _read(self, words: list[bytes]) -> bytes:
        """Answer XREAD [COUNT n] [BLOCK ms] STREAMS key ... id ...; only the first key has entries."""
        options = dict(zip(words[1:-1:2], words[2::2], strict=False))
        streams = [word.upper() for word in words].index(b"STREAMS")
        keys = words[streams + 1 : streams + 1 + (len(words) - streams - 1) // 2]
        after = int(words[streams + 1 + len(keys)].partition(b"-")[0])
        found = [each for each in self._stream if each[0] > after]
        if self.hostile:
            count = int(options.get(b"COUNT", b"1"))
            found = [(self._last + n, b"x" * FORGED_BYTES) for n in range(1, count + 1)]
            self._last, self.sent = self._last + count, self.sent + count
        elif not found and b"BLOCK" in options:
            self._added.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(int(options[b"BLOCK"]) / 1e3):
                    await self._added.wait()
            found = [each for each in self._stream if each[0] > after]
        if not found:
            return NO_LIST
        entries = b"".join(b"*2\r\n" + bulk(b"%d-0" % id_)[4:] + bulk(b"m", message) for id_, message in found)
        return b"*1\r\n*2\r\n" + bulk(keys[0])[4:] + b"*%d\r\n" % len(found) + entries


def bulk(*words: bytes) -> bytes:
    """Return a list of strings in RESP2."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


async def _word(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


async def serve() -> None:
    """Serve until cancelled."""
    store = HostileStore()
    server = await asyncio.start_server(store.serve, HOST, 0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, store.turn)
    print(READY.format(port=server.sockets[0].getsockname()[1]), flush=True)
    await asyncio.get_running_loop().create_future()


def main() -> int:
    """Run the command line, which has no arguments."""
    return run_until_interrupt(serve())


if __name__ == "__main__":
    raise SystemExit(main())
