"""Two measurements of warmroute alone: a client that does not read, and prompts of 8 MB.

slow_reader: a stream of 150 MB is sent as fast as it is accepted. The client reads no bytes for a while and then all of
them. The router's memory must not grow by the unread bytes, the upstream must have been paused, and no event may be
missing at the end.

long_prompts: a separate process sends 16 prompts of 8 MB at a time. In the meantime a /healthz request is sent every 5
ms, without waiting for the previous response, so that one long pause is not one sample. The sender has a lower
priority, so that on few cores the figure is the router's and not the wait for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import uvloop

from loadtest.common.answers import LAST_CHUNK
from loadtest.common.processes import run_process
from loadtest.common.report import Row, percentile
from loadtest.common.usage import rss_mb
from loadtest.proxy_cost import answers, bodies, load

FLOOD_BYTES = 150_000_000
STALL_S, STALLED_S, STALL_TIMEOUT_S = 0.2, 1.0, 20.0
SMALL_BUFFER_BYTES, READ_BYTES, READ_TIMEOUT_S = 4_096, 1 << 18, 60.0
RSS_GROWTH_MAX_MB = 4.0

PROMPTS, PROMPT_BYTES = 16, 8_000_000
HEALTH_LANES, HEALTH_EVERY_S, HEALTH_P99_MAX_MS = 128, 0.005, 50.0
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
PENALTY = 5  # nice(2)
SENDER_GRACE_S = 60.0


# A client that does not read


async def slow_reader(address: load.Address, pid: int, replicas: Sequence[load.Address], rate_per_s: float) -> Row:
    """Return the row; `got` is the largest growth of the router's memory in MB. Raises LoadError."""
    await load.streams([address], load.StreamLoad(20, 0.2, 0.2, rate_per_s), None, 1)
    loop, before_mb = asyncio.get_running_loop(), rss_mb(pid)
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        await loop.sock_connect(client, address)
        # The request includes usage, because the upstream always sends it: the router removes a chunk that was not
        # requested.
        options = {"stream": True, "stream_options": {"include_usage": True}, "flood_bytes": FLOOD_BYTES}
        request = bodies.single(bodies.SHORT_BYTES, **options).request(1)
        await loop.sock_sendall(client, request)
        grew_mb, written = await _wait_for_stall(pid, before_mb, replicas)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                events = await _read_all(client)
        except TimeoutError:
            raise load.LoadError(f"slow_reader: the rest did not come within {READ_TIMEOUT_S:g} s") from None
    errors = {}
    if written >= FLOOD_BYTES:
        errors["the upstream was never stopped"] = 1
    if events != _flood_events():
        errors["events are missing"] = _flood_events() - events
    return Row(
        workload="slow_reader",
        requests=1,
        errors=len(errors),
        errors_by_kind=errors,
        rss_mb=rss_mb(pid),
        goal=f"RSS grows < {RSS_GROWTH_MAX_MB:g} MB; {written / 1e6:.1f} of {FLOOD_BYTES / 1e6:g} MB were taken",
        expected=RSS_GROWTH_MAX_MB,
        got=round(grew_mb, 2),
        ok=grew_mb < RSS_GROWTH_MAX_MB and not errors,
    )


async def _wait_for_stall(pid: int, before_mb: float, replicas: Sequence[load.Address]) -> tuple[float, int]:
    """Wait until no further bytes of the stream are accepted. Returns (largest growth in MB, accepted bytes)."""
    deadline_s = time.monotonic() + STALL_TIMEOUT_S
    grew_mb, taken, since_s = 0.0, -1, time.monotonic()
    while time.monotonic() < deadline_s:
        now = await fetch_written_bytes(replicas[0])
        grew_mb = max(grew_mb, rss_mb(pid) - before_mb)
        if now != taken:
            taken, since_s = now, time.monotonic()
        elif now and time.monotonic() - since_s >= STALLED_S:
            return grew_mb, taken
        await asyncio.sleep(STALL_S)
    raise load.LoadError("slow_reader: the stream neither stopped nor ended")


async def fetch_written_bytes(replica: load.Address) -> int:
    """Return the bytes of the latest flood that the upstream could write."""
    reader, writer = await asyncio.open_connection(*replica)
    try:
        writer.write(b"GET /written HTTP/1.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        page = json.loads(await reader.readexactly(length))
        return int(page["flood_bytes"])
    finally:
        writer.close()


def _flood_events() -> int:
    pieces = -(-FLOOD_BYTES // len(answers.FLOOD_PIECE))
    return 1 + pieces * answers.FLOOD_PIECE_EVENTS + len(answers.LAST)


async def _read_all(client: socket.socket) -> int:
    """Return the number of events until the last chunk, or until the connection is closed."""
    loop, events, end = asyncio.get_running_loop(), 0, b""
    while data := await loop.sock_recv(client, READ_BYTES):
        # A boundary between two line breaks is not visible in either piece.
        events += data.count(b"\n\n") + (end.endswith(b"\n") and data.startswith(b"\n"))
        end = (end + data[-8:])[-8:]
        if end.endswith(LAST_CHUNK):
            break
    return events


# Prompts of 8 MB


async def long_prompts(address: load.Address, folder: Path, seconds_s: float, rounds: int) -> Row:
    """Return the row; `got` is the p99 of /healthz in ms, the median of the rounds. Raises LoadError, ProcessError."""
    p99s_ms, done, errors = list[float](), 0, Counter[str]()
    for _ in range(rounds):
        times_s, answered, failed = await health_beside_long_prompts(address, folder, seconds_s)
        p99s_ms.append(1e3 * (percentile(times_s, 99) or 0.0))
        done += answered
        errors += Counter(failed)
    p99_ms = median(p99s_ms)
    return Row(
        workload="long_prompts",
        requests=done,
        errors=errors.total(),
        errors_by_kind=dict(errors),
        goal=f"/healthz p99 < {HEALTH_P99_MAX_MS:g} ms beside {PROMPTS} prompts of {PROMPT_BYTES / 1e6:g} MB",
        expected=HEALTH_P99_MAX_MS,
        got=round(p99_ms, 2),
        ok=p99_ms < HEALTH_P99_MAX_MS and not errors and done > 0,
    )


async def health_beside_long_prompts(
    address: load.Address, folder: Path, seconds_s: float
) -> tuple[list[float], int, dict[str, int]]:
    """Return the seconds of each /healthz, the number of prompts answered in the meantime, and errors.

    Raises LoadError, ProcessError.
    """
    tally, times_s = load.Tally(), list[float]()
    command = [sys.executable, "-m", "loadtest.proxy_cost.extremes", str(address[1]), "--seconds", str(seconds_s)]
    async with (
        load.Connections([address], HEALTH_LANES, tally) as lanes,
        run_process("sender", command, folder) as sender,
    ):
        await sender.wait_for_output(re.compile("sending"), timeout_s=load.ANSWER_TIMEOUT_S)
        idle = list(lanes)
        for lane in lanes:
            lane.done = lambda _, lane=lane: answered(lane)  # type: ignore[misc]

        def answered(lane: load.Connection) -> None:
            times_s.append(time.perf_counter() - lane.asked_s)
            idle.append(lane)

        due_s, end_s = time.perf_counter(), time.perf_counter() + seconds_s
        while due_s < end_s:
            await load.wait_until(lambda: bool(idle), load.ANSWER_TIMEOUT_S, "/healthz was not answered")
            idle.pop().ask(HEALTH, None)
            due_s += HEALTH_EVERY_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        await load.wait_until(lambda: not sender.running, SENDER_GRACE_S, "prompts of 8 MB were not answered")
        said = json.loads(sender.output.read_text().splitlines()[-1])
    return times_s, said["done"], {**tally.errors, **said["errors"]}


async def send(port: int, seconds_s: float, concurrency: int, size: int) -> load.Tally:
    """Send prompts of `size` bytes, `concurrency` at a time."""
    tally = load.Tally()
    template = bodies.single(size)
    async with load.Connections([("127.0.0.1", port)], concurrency, tally) as connections:
        print("sending", flush=True)
        end_s, number = time.monotonic() + seconds_s, 0

        def ask(index: int) -> None:
            nonlocal number
            if time.monotonic() < end_s and not connections[index].lost:
                number += 1
                connections[index].ask(template.request(number), answers.answer(size))

        for i, connection in enumerate(connections):
            connection.done = lambda _, i=i: ask(i)  # type: ignore[misc]
            ask(i)
        await load.wait_until(lambda: not any(c.busy for c in connections), seconds_s + SENDER_GRACE_S, "no answer")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process that sends prompts of 8 MB; the last line of output has the results."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.proxy_cost.extremes", description="Send long prompts.")
    parser.add_argument("port", type=int)
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="start no prompt after this time in seconds (4)"
    )
    options = parser.parse_args(argv)
    os.nice(PENALTY)
    try:
        tally = uvloop.run(send(options.port, options.seconds, PROMPTS, PROMPT_BYTES))
    except load.LoadError as error:
        print(json.dumps({"done": 0, "errors": {str(error): 1}}), flush=True)
        return 1
    print(json.dumps({"done": tally.done, "errors": dict(tally.errors)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
