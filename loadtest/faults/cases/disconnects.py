"""Goals 6 and 7: clients that disconnect, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtest.common.report import Row, percentile
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, FaultAnswer, Run, Scale, poll_until, row
from loadtest.faults.upstream import answers

CLOSED_P99_MAX_MS = 50.0
LANES = 8
QUEUERS, QUEUED_TIMEOUT_S = 10, 4.0
GONE_S = 1.0  # an upstream that still works for a disconnected client after this time counts as never notified
FLOOD_BYTES = 150_000_000
GROWTH_MAX_MIB, MIB = 1.0, 1 << 20
LATER_MAX_MS = 5.0
SEND_TIMEOUT_S, SEND_TIMEOUT_GRACE_S = 6.0, 3.0
SMALL_BUFFER_BYTES = 4_096
STALL_TIMEOUT_S, STALLED_S = 5.0, 0.6
_GAUGES = re.compile(r"^warmroute_(?:in_flight_requests|replica_in_flight|queued\w*)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in the life of a request at which its client disconnects."""

    name: str
    stream: bool
    marks: str
    last_s: float = 0.06
    """The client disconnects at a random moment up to this time."""


POINTS = (
    Point("before headers, non-streaming", stream=False, marks="fault=hang"),
    Point("before headers, streaming", stream=True, marks="fault=hang"),
    Point("before the first byte", stream=True, marks="fault=hang_headers"),
    Point("in mid-stream", stream=True, marks="tokens=500 token_s=0.01", last_s=0.2),
    Point("in a long answer, non-streaming", stream=False, marks="tokens=500 token_s=0.01", last_s=0.2),
)


def request(id_: str, marks: str, *, stream: bool) -> bytes:
    """Return a chat request as bytes."""
    shape = answers.APIS["chat"]
    body = json.dumps(shape.request(f"[[id={id_} {marks}]] question {id_}", stream=stream)).encode()
    head = f"POST {shape.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def gauges(run: Run) -> float:
    """Return the sum of warmroute's gauges of requests in progress."""
    _, page = await run.page("/metrics", admin=True)
    found = _GAUGES.findall(page)
    return sum(map(float, found)) if found else -1.0


async def wait_until_idle(run: Run, timeout_s: float) -> float:
    """Return the gauges once they are zero, or after `timeout_s`."""

    async def nothing() -> bool:
        return await gauges(run) == 0

    await poll_until(nothing, timeout_s)
    return await gauges(run)


async def disconnects(bench: Bench) -> list[Row]:
    """Goal 6: time until a replica is notified that the client has disconnected."""
    found, chance = [], random.Random(6)
    async with bench.run_cluster(2) as run:
        for point in POINTS:
            await run.send_to_all("clear")
            found.append(await _leave(run, point, bench.scale.pick_count(60, 2_000), chance, bench.scale))
        if bench.ours:
            left = await wait_until_idle(run, bench.scale.patience_s(GONE_S))
            found.append(row(6, "gauges of open requests, afterwards", 0, left, ok=left == 0))
    if bench.ours:
        found.append(await _measure_queue_disconnects(bench))
    return found


async def _leave(run: Run, point: Point, clients: int, chance: random.Random, scale: Scale) -> Row:
    left_s: dict[str, float] = {}
    numbers = iter(range(clients))

    async def lane() -> None:
        for number in numbers:
            id_ = f"leaves{number}"
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writer.write(request(id_, point.marks, stream=point.stream))
            await asyncio.sleep(chance.uniform(0.0, point.last_s))
            left_s[id_] = time.monotonic()
            writer.close()

    async def all_told() -> bool:
        return not [each for each in await run.fetch_requests() if each["closed_s"] is None and each["ended_s"] is None]

    await asyncio.gather(*(lane() for _ in range(LANES)))
    await asyncio.sleep(GONE_S)
    gone_s = scale.patience_s(GONE_S)
    await poll_until(all_told, gone_s - GONE_S)
    times_ms, never, arrived = [], 0, 0
    for record in await run.fetch_requests():
        if (at_s := left_s.get(record["id"])) is None:
            continue
        arrived += 1
        if record["closed_s"] is None and record["ended_s"] is None:
            never += 1
        elif record["closed_s"] is not None:
            times_ms.append(1e3 * max(0.0, record["closed_s"] - at_s))
    p99_ms = percentile(times_ms, 99) if not never else None
    note = f"{arrived} of {clients} had arrived" + (f", {never} got no answer within {gone_s:g} s" if never else "")
    made = row(6, f"client leaves {point.name}: upstream closed, p99 ms", CLOSED_P99_MAX_MS, p99_ms, note=note)
    if not never:
        made.timed, made.ok = True, p99_ms is not None and p99_ms <= CLOSED_P99_MAX_MS * scale.slack
    return made


async def _measure_queue_disconnects(bench: Bench) -> Row:
    """Goal 6: the request of a client that disconnects from the router's queue reaches no replica."""
    flags = ("--set", "admission.in_flight_max=1")
    async with bench.run_cluster(1, flags) as run:
        first = asyncio.create_task(run.ask(tokens=500, token_s=0.01))
        await poll_until(lambda: _has_at_least(run, "in_flight_requests", 1), QUEUED_TIMEOUT_S)
        writers = []
        for i in range(QUEUERS):
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writer.write(request(f"queued{i}", "", stream=i % 2 == 0))
            writers.append(writer)
        await poll_until(lambda: _has_at_least(run, "queued_requests", QUEUERS), QUEUED_TIMEOUT_S)
        for writer in writers:
            writer.close()
        answer = await first
        await asyncio.sleep(GONE_S)
        reached = sum(record["id"].startswith("queued") for record in await run.fetch_requests())
        return row(6, "client leaves the queue: requests that still reach a replica", 0, reached, found=[answer])


async def _has_at_least(run: Run, gauge: str, requests: int) -> bool:
    """True if a gauge of the router is at least `requests`."""
    _, page = await run.page("/metrics", admin=True)
    counted = re.findall(rf"^warmroute_{gauge}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, counted)) >= requests


# Clients that do not read


async def slow_readers(bench: Bench) -> list[Row]:
    """Goal 7: floods that the client does not read. Rivals get one, because some buffer all of it."""
    clients = bench.scale.pick_count(10, 100) if bench.ours else 1
    flags = ("--set", f"listen.send_timeout_s={SEND_TIMEOUT_S:g}")
    async with bench.run_cluster(2, flags) as run:
        before_ms = await _gap_p99_ms(run)
        before_mb = rss_mb(run.process.pid)
        sockets = [await _deaf(run, i) for i in range(clients)]
        began_s = time.monotonic()
        try:
            grew_mb, taken = await _wait_for_stall(run, before_mb)
            meanwhile_ms = await _gap_p99_ms(run)
            closed_s = await _cut(run, began_s) if bench.ours else None
        finally:
            for each in sockets:
                each.close()
    per_mib = grew_mb * 1e6 / MIB / clients
    note = f"{taken / clients / 1e6:.1f} of {FLOOD_BYTES / 1e6:g} MB taken of each"
    later, slack = "others' p99 between tokens meanwhile, ms more", bench.scale.slack
    found = [
        row(7, f"{clients} clients read nothing: RSS growth a stream, MiB", GROWTH_MAX_MIB, per_mib, note=note),
        row(7, later, LATER_MAX_MS, max(0.0, meanwhile_ms - before_ms), slack=slack, note=f"{before_ms:.1f} ms before"),
    ]
    if bench.ours:
        limit_s = SEND_TIMEOUT_S + SEND_TIMEOUT_GRACE_S
        name = f"cut after send_timeout_s={SEND_TIMEOUT_S:g}: seconds until replicas are free"
        found.append(row(7, name, limit_s, closed_s, slack=slack))
    return found


async def _deaf(run: Run, number: int) -> socket.socket:
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    await loop.sock_connect(client, ("127.0.0.1", run.port))
    await loop.sock_sendall(client, request(f"deaf{number}", f"flood_bytes={FLOOD_BYTES}", stream=True))
    return client


async def _count_flooded_bytes(run: Run) -> int:
    return sum([(await u.tell("figures"))["flooded_bytes"] for u in run.upstreams])


async def _wait_for_stall(run: Run, before_mb: float) -> tuple[float, int]:
    """Return the router's largest growth in MB until it accepted no further bytes, and the accepted bytes."""
    grew_mb, taken, since_s = 0.0, -1, time.monotonic()
    deadline_s = since_s + STALL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        now = await _count_flooded_bytes(run)
        grew_mb = max(grew_mb, rss_mb(run.process.pid) - before_mb)
        if now != taken:
            taken, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > STALLED_S:
            break
        await asyncio.sleep(0.1)
    return grew_mb, taken


async def _gap_p99_ms(run: Run) -> float:
    """Return the p99 of gaps between events, in ms, of ten streams of twenty tokens a second."""
    asked: Sequence[FaultAnswer] = await asyncio.gather(*(run.ask(tokens=30, token_s=0.05) for _ in range(10)))
    gaps_ms = [1e3 * (b - a) for answer in asked for a, b in zip(answer.pieces_s, answer.pieces_s[1:], strict=False)]
    return percentile(gaps_ms, 99) or 0.0


async def _cut(run: Run, began_s: float) -> float | None:
    """Return the seconds until no replica floods; None if that does not happen."""
    with suppress(TimeoutError):
        async with asyncio.timeout(3 * SEND_TIMEOUT_S):
            while True:
                if not sum([(await u.tell("figures"))["running"] for u in run.upstreams]):
                    return time.monotonic() - began_s
                await asyncio.sleep(0.1)
    return None
