"""Load of `python -m loadtest overhead`: raw HTTP/1.1 over keep-alive connections, for a low cost of the client.

Short answers: a closed loop, in which each connection sends the next request as soon as it has its response. Streams:
all start, then a window with all of them is measured. After that further streams start among them for times to the
first event. Every response is compared with the upstream's bytes, outside of the windows. Any difference is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loadtest.common.answers import CHUNKED, LAST_CHUNK, LENGTH
from loadtest.common.usage import Spent, subtract_usage, usage
from loadtest.proxy_cost import answers, bodies

ANSWER_TIMEOUT_S = 20.0
SETTLE_S, STARTING_S = 0.3, 1.0  # time for which all streams have run before the window; time to start them
PROBE_LANES, PROBE_EVERY_S = 16, 0.006
ERRORS_MAX = 1_000  # limit for a closed loop with only failures

Address = tuple[str, int]

_CHUNKED_LEFT = -1


class LoadError(Exception):
    """A measurement failed; the message has the reason."""


@dataclass(slots=True)
class Tally:
    """Counts over all connections of a measurement."""

    events: int = 0
    done: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class CpuSample:
    """One case of one router in one round."""

    requests: int = 0
    """Answered within the window; for streams: those that ran in it."""
    errors: Counter[str] = field(default_factory=Counter)
    window_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    def close(self, spent: Spent) -> None:
        """Record the cost of the window."""
        self.cpu_s = spent.cpu_s
        if spent.ended:
            self.errors["a process ended within the window"] += spent.ended


class Connection(asyncio.Protocol):
    """One connection, one request at a time. `done` is called with each response's kind of error, None if it is
    right."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._transport: asyncio.Transport
        self._pieces: list[bytes] = []
        self._left = 0  # remaining bytes of a body with a length
        self._in_head = True
        self._expected: bytes | None = None
        self.done: Callable[[str | None], None] = lambda _: None
        self.busy = self.lost = False
        self.asked_s = self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the connection, closed by either side."""
        self.lost = True
        if self.busy:
            self._finish("closed")

    def close(self) -> None:
        """Close the connection; an open request is not an error."""
        self.busy = False
        self._transport.abort()

    def ask(self, request: bytes, expected: bytes | None) -> None:
        """Send a request with `expected` as the required response body; None accepts any."""
        self._pieces, self._in_head, self._expected = [], True, expected
        self.busy, self.first_s, self.asked_s = True, 0.0, time.perf_counter()
        self._transport.write(request)

    @property
    def began(self) -> bool:
        """True if the first byte of the body has arrived."""
        return self.first_s > 0.0

    def data_received(self, data: bytes) -> None:
        """Process a piece of the response."""
        self._pieces.append(data)
        if self._in_head:
            self._head()
            return
        if self.first_s == 0.0:
            self.first_s = time.perf_counter()
        if self._left == _CHUNKED_LEFT:
            self._tally.events += data.count(b"\n\n")
            if data.endswith(LAST_CHUNK) or (len(data) < 5 and self._ends()):
                self._finish(self._wrong())
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(self._wrong())

    def _ends(self) -> bool:
        return b"".join(self._pieces[-5:]).endswith(LAST_CHUNK)

    def _head(self) -> None:
        data = b"".join(self._pieces)
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head, self._in_head = data[: end - 2], False
        self._pieces = [head, data[end:]]
        length = LENGTH.search(head)
        if length is None and not CHUNKED.search(head):
            self._finish("neither length nor chunks")
            return
        self._left = int(length[1]) if length else _CHUNKED_LEFT
        rest = self._pieces.pop()
        if rest or not self._left:
            self.data_received(rest)

    def _wrong(self) -> str | None:
        """Return the error of the response, or None."""
        head, body = self._pieces[0], b"".join(self._pieces[1:])
        status = head[9:12].decode(errors="replace")
        if status != "200":
            return f"status {status}"
        if self._left == _CHUNKED_LEFT:
            body = b"".join(chunks(body))
        return "body differs" if self._expected is not None and body != self._expected else None

    def _finish(self, wrong: str | None) -> None:
        self.busy = False
        self._pieces = []
        if wrong is None:
            self._tally.done += 1
        else:
            self._tally.errors[wrong] += 1
        self.done(wrong)


def chunks(data: bytes) -> Iterator[bytes]:
    """Yield the complete chunks of a chunked body (RFC 9112, section 7.1)."""
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].partition(b";")[0] or b"0", 16)
        at = end + 2
        if not size:
            return
        yield data[at : at + size]
        at += size + 2


class Connections:
    """Connections that are opened together and closed with the block."""

    def __init__(self, addresses: Sequence[Address], number: int, tally: Tally) -> None:
        self._addresses, self._number, self._tally = addresses, number, tally
        self.all: list[Connection] = []

    async def __aenter__(self) -> list[Connection]:
        loop = asyncio.get_running_loop()
        for i in range(self._number):
            address = self._addresses[i % len(self._addresses)]
            try:
                _, connection = await loop.create_connection(lambda: Connection(self._tally), *address)
            except OSError as error:
                raise LoadError(f"cannot connect to {address[1]}: {error}") from error
            self.all.append(connection)
        return self.all

    async def __aexit__(self, *_: object) -> None:
        for connection in self.all:
            connection.close()
        await asyncio.sleep(0)


async def wait_until(what: Callable[[], bool], timeout_s: float, else_: str) -> None:
    """Wait until the condition is true. Raises LoadError."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline_s:
            raise LoadError(f"{else_} within {timeout_s:g} s")
        await asyncio.sleep(0.005)


# Responses in one piece


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop: its case, number of connections, unmeasured and measured seconds."""

    case: str
    concurrency: int
    warm_s: float
    window_s: float


async def closed_loop(address: Address, load: Loop, pid: int, first: int) -> CpuSample:
    """Send requests without a pause on each connection, and measure the CPU of `pid` and its children within the
    window.

    `first` is the number of the first request: a router must not receive a number twice.
    """
    tally, measured = Tally(), CpuSample()
    async with Connections([address], load.concurrency, tally) as connections:
        made, expected = bodies.requests(load.case, first), answers.answer(bodies.SIZES[load.case])
        going = True

        def ask(connection: Connection) -> None:
            if going and not connection.lost and tally.errors.total() < ERRORS_MAX:
                connection.ask(next(made), expected)

        for connection in connections:
            connection.done = lambda _, connection=connection: ask(connection)  # type: ignore[misc]
            ask(connection)
        await asyncio.sleep(load.warm_s)
        before, begun_s, done = usage(pid), time.perf_counter(), tally.done
        await asyncio.sleep(load.window_s)
        measured.close(subtract_usage(before, usage(pid)))
        measured.window_s, measured.requests = time.perf_counter() - begun_s, tally.done - done
        going = False
        await wait_until(lambda: not any(c.busy for c in connections), ANSWER_TIMEOUT_S, "requests were not answered")
    measured.errors += tally.errors
    return measured


# Streams


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """A load of streams.

    - `number`: streams at a time.
    - `window_s`, `probes_s`: duration of the window and of the probes after it.
    - `rate_per_s`: events a second of each stream.
    - `starting_s`: time to start all.
    """

    number: int
    window_s: float
    probes_s: float
    rate_per_s: float
    starting_s: float = STARTING_S


async def streams(addresses: Sequence[Address], load: StreamLoad, pid: int | None, first: int) -> CpuSample:
    """Measure the CPU of a window in which all streams run, then times to the first event of further streams.

    Without a pid only the latter are measured.
    """
    tally, measured = Tally(), CpuSample(requests=load.number)
    lead_s = SETTLE_S + load.window_s + load.probes_s + load.starting_s
    async with Connections(addresses, load.number, tally) as connections:
        await _warm(connections, first)
        tokens = round(lead_s * load.rate_per_s)
        template, expected = bodies.stream(tokens), answers.stream_body(tokens)
        for i, connection in enumerate(connections):
            connection.ask(template.request(first + load.number + i), expected)
            if i % 8 == 7:
                await asyncio.sleep(0.002)
        await wait_until(lambda: all(c.began for c in connections), ANSWER_TIMEOUT_S, "streams did not begin")
        await asyncio.sleep(SETTLE_S)
        if pid is not None:
            before, begun_s, events = usage(pid), time.perf_counter(), tally.events
            await asyncio.sleep(load.window_s)
            measured.close(subtract_usage(before, usage(pid)))
            measured.window_s, measured.events = time.perf_counter() - begun_s, tally.events - events
        if not all(c.busy for c in connections):
            tally.errors["ended within the window"] += sum(not c.busy for c in connections)
        measured.ttfts_s = await probes(addresses, load.probes_s, tally, first + 2 * load.number)
        await wait_until(lambda: not any(c.busy for c in connections), ANSWER_TIMEOUT_S + lead_s, "streams did not end")
    measured.errors += tally.errors
    return measured


async def _warm(connections: Sequence[Connection], first: int) -> None:
    """Get one short response on every connection, because first requests are not part of the measurement."""
    template = bodies.single(bodies.SHORT_BYTES)
    for i, connection in enumerate(connections):
        connection.ask(template.request(first + i), answers.answer(bodies.SHORT_BYTES))
        if i % 32 == 31:
            await asyncio.sleep(0.01)
    await wait_until(lambda: not any(c.busy for c in connections), ANSWER_TIMEOUT_S, "warm-up was not answered")


async def probes(addresses: Sequence[Address], probes_s: float, tally: Tally, first: int) -> list[float]:
    """Return times to the first event of short streams, started at a steady rate on warm connections."""
    found: list[float] = []
    template, expected = bodies.stream(1), answers.stream_body(1)
    async with Connections(addresses, PROBE_LANES, tally) as lanes:
        await _warm(lanes, first)
        number, idle = first + PROBE_LANES, list(lanes)

        def done(connection: Connection, wrong: str | None) -> None:
            if wrong is None:
                found.append(connection.first_s - connection.asked_s)
            if not connection.lost:
                idle.insert(0, connection)

        for lane in lanes:
            lane.done = lambda wrong, lane=lane: done(lane, wrong)  # type: ignore[misc]
        next_s = time.perf_counter()
        end_s = next_s + probes_s
        while next_s < end_s:
            if idle:
                idle.pop().ask(template.request(number), expected)
                number += 1
            next_s += PROBE_EVERY_S
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        await wait_until(lambda: not any(c.busy for c in lanes), ANSWER_TIMEOUT_S, "streams did not end")
    return found
