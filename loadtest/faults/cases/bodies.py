"""Goal 23: unauthorized bodies, and more bodies than fit the budget; their cost in the router's memory.

Clients are plain sockets, and all send from the same megabyte, so that thousands of them fit on the router's machine.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

from loadtest.common.report import Row
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, row, send_at_rate
from router.config.api_keys import entry_of, make_key

KEYLESS, KEYED = 4_096, 64
BODY_MIB, SENT_MIB = 32, 31
KEYLESS_MAX_MB = 64.0
BUDGET_MIB, WAIT_S = 256, 3.0
# Not in the budget: connections, and memory kept by the event loop and the allocator.
BESIDE_MB = 64.0
PIECE = bytes(1 << 20)
ANSWERED_S = 30.0
OPEN_AT_ONCE = 256


def head(key: str = "") -> bytes:
    """Return the head of a request with a body of 32 MiB."""
    shown = f"authorization: Bearer {key}\r\n" if key else ""
    length = f"content-length: {BODY_MIB << 20}\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{shown}{length}\r\n".encode()


async def bodies(bench: Bench) -> list[Row]:
    """Goal 23: thousands of clients without a key, each sending a body; then more bodies with a key than fit."""
    bench.only_ours("needs keys")
    key = make_key()
    keys = bench.folder / "keys.yaml"
    await asyncio.to_thread(_write, keys, entry_of(key, "acme") + entry_of(other := make_key(), "umbra"))
    flags = ["--set", f"auth.keys_file={keys}", "--set", f"listen.connections_per_client_max={2 * KEYLESS}"]
    async with bench.run_cluster(2, flags, key=other) as run:
        statuses, grew_mb, asked = await _pour_bodies(bench, run, KEYLESS, head(), ANSWERED_S)
    name = f"{KEYLESS:,} clients without a key, each with {BODY_MIB} MiB under way"
    found = [
        row(23, f"{name}: RSS growth, MB", KEYLESS_MAX_MB, grew_mb),
        row(23, "... answered with anything but 401", 0, sum(statuses.values()) - statuses[401] - statuses[0]),
        row(23, "... not answered at all", 0, statuses[0]),
        failures(23, "... others' errors meanwhile", asked),
    ]
    flags += [
        "--set",
        f"limits.total_body_bytes_max={BUDGET_MIB << 20}",
        "--set",
        f"limits.body_budget_timeout_s={WAIT_S}",
    ]
    async with bench.run_cluster(2, flags, key=other) as run:
        statuses, grew_mb, asked = await _pour_bodies(bench, run, KEYED, head(key), 2 * WAIT_S)
    limit_mb = (BUDGET_MIB << 20) / 1e6 + BESIDE_MB
    name = f"{KEYED} clients of one tenant, each with {SENT_MIB} of {BODY_MIB} MiB, of a budget of {BUDGET_MIB} MiB"
    return [
        *found,
        row(23, f"{name}: RSS growth, MB", round(limit_mb, 1), grew_mb, note=f"statuses {dict(statuses)}"),
        failures(23, "... another tenant's errors meanwhile", asked),
    ]


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


async def _pour_bodies(
    bench: Bench, run: Run, count: int, first: bytes, for_s: float
) -> tuple[Counter[int], float, list[FaultAnswer]]:
    """Return statuses (0: none), the router's largest growth in MB, and others' responses while `count` clients send.

    The clients stop when each has a response or after `for_s`.
    """
    before_mb = rss_mb(run.process.pid)
    grown = [0.0]

    async def watch() -> None:
        while True:
            grown.append(rss_mb(run.process.pid) - before_mb)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    others = asyncio.create_task(send_at_rate(5, 20, lambda _: run.ask(timeout_s=bench.scale.patience_s(15.0))))
    opening = asyncio.Semaphore(OPEN_AT_ONCE)
    clients = [asyncio.create_task(_pour(run.port, first, opening)) for _ in range(count)]
    await asyncio.wait(clients, timeout=bench.scale.patience_s(for_s))
    for client in clients:
        client.cancel()
    ended = await asyncio.gather(*clients, return_exceptions=True)
    asked = await others
    watching.cancel()
    statuses = Counter(each if isinstance(each, int) else 0 for each in ended)
    return statuses, max(grown), asked


async def _pour(port: int, first: bytes, opening: asyncio.Semaphore) -> int:
    """Send a head and most of its body, as fast as accepted, until there is a response. Returns the status."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        async with opening:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, first)
        sending = asyncio.create_task(_send(sock))
        answer = b""
        try:
            while len(answer) < 12 and (said := await loop.sock_recv(sock, 4_096)):
                answer += said
            return int(answer[9:12] or 0)
        except (OSError, ValueError):
            return 0
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending


async def _send(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        for _ in range(SENT_MIB):
            await loop.sock_sendall(sock, PIECE)
