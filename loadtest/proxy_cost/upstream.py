"""Replicas with negligible cost, behind the routers that `python -m loadtest overhead` compares.

One process has one port per replica, raw protocols on uvloop, and precomputed bytes. A request is answered at once. A
stream sends its first event at once and then one event a period. Each event is a separate HTTP chunk and write, as in
vLLM. All streams are in one timer wheel of 1 ms slots, spread evenly, so that a router receives single chunks and no
bursts.

The format of the responses is that of vLLM 0.32's chat completions. Requests are parsed only as much as needed.
`stream`, `max_tokens` and `flood_bytes` are searched in the first and last bytes of a body, because routers that
rewrite a body change the order of fields.

`flood_bytes` requests a stream of that size, as fast as it is accepted; GET /written returns the bytes written so far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Sequence

from loadtest.common.answers import ASKS_STREAM, CHUNKED, LAST_CHUNK, LENGTH, NOT_FOUND, plain
from loadtest.common.processes import run_until_interrupt
from loadtest.proxy_cost import answers

RATE_PER_S = 30.0  # events a second of one stream, as of a busy engine
SLOT_S = 0.001  # the resolution of libuv's timers
LATE_SLOTS_MAX = 200  # the excess of a longer stall is skipped
ENDS_BYTES = 4_096  # bytes at each end of a body that are searched for its settings
HEAD_BYTES_MAX = 64 << 10
BACKLOG = 1_024
READY = "ready http://{host}:{port}"

_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_FLOOD = re.compile(rb'"flood_bytes":\s*(\d+)')


class TimerWheel:
    """Timer wheel that turns once a period; each stream is in one slot and sends an event when the slot is due."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate_per_s: float) -> None:
        self._loop = loop
        self._slots: list[dict[FakeUpstream, None]] = [{} for _ in range(max(1, round(1 / rate_per_s / SLOT_S)))]
        self._streams = self._turn = self._at = 0
        self._ticking = False
        self._began_s = 0.0

    def add(self, stream: FakeUpstream) -> int:
        """Add a stream to the next slot in rotation, and return the slot."""
        self._turn = (self._turn + 7) % len(self._slots)  # streams that start together are not due together
        self._slots[self._turn][stream] = None
        self._streams += 1
        if not self._ticking:
            self._ticking, self._began_s, self._at = True, time.monotonic(), 0
            self._loop.call_later(SLOT_S, self._tick)
        return self._turn

    def remove(self, stream: FakeUpstream, slot: int) -> None:
        """Remove a stream."""
        if self._slots[slot].pop(stream, self) is None:
            self._streams -= 1

    def _tick(self) -> None:
        due = int((time.monotonic() - self._began_s) / SLOT_S)
        self._at = max(self._at, due - LATE_SLOTS_MAX)
        while self._at < due:
            self._at += 1
            for stream in tuple(self._slots[self._at % len(self._slots)]):
                stream.send_next()
        if self._streams:
            self._loop.call_later(SLOT_S, self._tick)
        else:
            self._ticking = False


class Written:
    """Flood bytes written by the whole process, and its requests by path."""

    def __init__(self) -> None:
        self.flood_bytes = self.rendered = 0
        self.paths: dict[str, int] = {}


class FakeUpstream(asyncio.Protocol):
    """One connection to a replica."""

    def __init__(self, wheel: TimerWheel, written: Written) -> None:
        self._wheel, self._written = wheel, written
        self._transport: asyncio.Transport
        self._held = b""  # bytes of an incomplete head, or received while a stream runs
        self._head = b""
        self._left = 0  # remaining bytes of a body; -1: chunked, so unknown
        self._first = self._last = self._before_last = b""
        self._slot = -1
        self._sent = self._tokens = 0
        self._chunks = answers.TOKEN_CHUNKS  # events of the current stream
        self._flood = 0
        self._poured = False  # the next piece of it is scheduled
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection's stream."""
        self._wheel.remove(self, self._slot)
        self._flood = 0

    def pause_writing(self) -> None:
        """Pause writing: the client reads too slowly."""
        self._paused = True

    def resume_writing(self) -> None:
        """Resume writing: the client reads again."""
        self._paused = False
        self._pour_soon()

    def data_received(self, data: bytes) -> None:
        """Process a piece of a request, or several requests."""
        if self._slot >= 0 or self._flood:
            self._held += data
        elif self._head:
            self._body(data)
        else:
            self._begin(self._held + data if self._held else data)

    def _begin(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._held = data
            if len(data) > HEAD_BYTES_MAX:
                self._transport.abort()
            return
        self._held, self._head = b"", data[:end]
        length = LENGTH.search(self._head)
        self._left = int(length[1]) if length else -1 if CHUNKED.search(self._head) else 0
        self._first = self._last = self._before_last = b""
        self._size = 0
        self._body(data[end + 4 :])

    def _body(self, data: bytes) -> None:
        if not self._first:
            self._first = data
        if self._left < 0:  # JSON has no bare CR LF, so this ending is the last chunk
            self._before_last, self._last = self._last[-ENDS_BYTES:], data
            ended = (self._before_last[-len(LAST_CHUNK) :] + data).endswith(LAST_CHUNK)
            rest = b""
        else:
            rest, data = data[self._left :], data[: self._left]
            self._before_last, self._last = self._last, data
            self._left -= len(data)
            ended = not self._left
        self._size += len(data)
        if ended:
            self._answer()
            if rest:
                self.data_received(rest)

    def _answer(self) -> None:
        method, path, _ = (*self._head.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:3]
        self._head = b""
        path = path.partition(b"?")[0]
        if path in answers.ASKED and method == b"POST":
            ends = self._first[:ENDS_BYTES] + b" " + (self._before_last[-ENDS_BYTES:] + self._last)[-ENDS_BYTES:]
            if not ASKS_STREAM.search(ends):
                self._transport.write(answers.response(self._size))
            else:
                self._stream(ends)
            return
        name = path.decode(errors="replace")
        if name in self._written.paths or len(self._written.paths) < 100:
            self._written.paths[name] = self._written.paths.get(name, 0) + 1
        if path in answers.RENDERED:
            self._written.rendered += 1
            page = {"token_ids": [self._written.rendered, *range(31)], "tokens": [self._written.rendered], "count": 32}
            self._transport.write(plain("200 OK", json.dumps(page).encode()))
        elif path == b"/written":
            page = {"flood_bytes": self._written.flood_bytes, "paths": self._written.paths}
            self._transport.write(plain("200 OK", json.dumps(page).encode()))
        else:
            self._transport.write(answers.PAGES.get(path, NOT_FOUND))

    def _stream(self, ends: bytes) -> None:
        flood, tokens = _FLOOD.search(ends), _TOKENS.search(ends)
        self._sent, self._tokens = 0, int(tokens[1]) if tokens else 100
        ids = b'"return_token_ids":true' in ends
        self._chunks = answers.ID_CHUNKS if ids else answers.TOKEN_CHUNKS
        self._transport.write(answers.ID_START if ids else answers.START)
        if flood:
            self._flood = int(flood[1])
            self._written.flood_bytes = 0
            self._pour_soon()
        else:
            self._slot = self._wheel.add(self)

    def send_next(self) -> None:
        """Send the stream's next event, or its last ones."""
        if self._paused:
            return
        if self._sent < self._tokens:
            self._transport.write(self._chunks[self._sent % len(self._chunks)])
            self._sent += 1
            return
        self._wheel.remove(self, self._slot)
        self._slot = -1
        self._end()

    def _pour(self) -> None:
        """Write a piece of a flood, and schedule the next unless writing is paused."""
        self._poured = False
        if self._flood <= 0 or self._paused:
            return
        self._transport.write(answers.FLOOD_PIECE)
        self._flood -= len(answers.FLOOD_PIECE)
        self._written.flood_bytes += len(answers.FLOOD_PIECE)
        if self._flood > 0:
            self._pour_soon()
        else:
            self._flood = 0
            self._end()

    def _pour_soon(self) -> None:
        if not self._poured:
            self._poured = True
            asyncio.get_running_loop().call_soon(self._pour)

    def _end(self) -> None:
        self._transport.write(answers.END)
        if self._held:
            held, self._held = self._held, b""
            self.data_received(held)


# The process


async def serve(host: str, replicas: int, rate_per_s: float) -> None:
    """Serve replicas on free ports until cancelled; print each in one line."""
    loop = asyncio.get_running_loop()
    wheel, written = TimerWheel(loop, rate_per_s), Written()
    servers = []
    for _ in range(replicas):
        server = await loop.create_server(lambda: FakeUpstream(wheel, written), host, 0, backlog=BACKLOG)
        servers.append(server)
        print(READY.format(host=host, port=server.sockets[0].getsockname()[1]), flush=True)
    await loop.create_future()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.proxy_cost.upstream", description=serve.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--replicas", type=int, default=4, metavar="N", help="number of replicas, each with a separate port (4)"
    )
    parser.add_argument(
        "--rate", type=float, default=RATE_PER_S, metavar="N", help="events per second of a stream (30)"
    )
    options = parser.parse_args(argv)
    return run_until_interrupt(serve(options.host, options.replicas, options.rate))


if __name__ == "__main__":
    raise SystemExit(main())
