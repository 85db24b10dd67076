"""Goals 20, 21 and 23. Permission and targets for new replicas; clients that send too slowly, too much, or bombs."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp

from loadtest.common.answers import plain
from loadtest.common.processes import ProcessError, free_port, run_process
from loadtest.common.report import Row
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, Run, failures, poll_until, row, send_at_rate
from loadtest.faults.upstream import answers

TOKEN = "a-token-of-the-admins-alone"  # noqa: S105 - of a router that lives for seconds
PROBED_S = 3.0
START_S = 10.0
HEAD_TIMEOUT_S, SLOW_BODY_MAX_S, WAIT_S = 10.0, 15.0, 20.0
BODY_MAX_MIB, SENT_MIB = 32, 64
BOMB_MIB, FULL_BOMB_MIB = 256, 1_024
BOMB_RSS_MAX_MB = 16.0 * 1.048576
LEVELS = 100_000


class SsrfCanary:
    """A listener that must not receive connections; it redirects each one to another listener."""

    def __init__(self) -> None:
        self.connects = 0
        self.port = 0

    @asynccontextmanager
    async def listen(self, to: SsrfCanary | None = None) -> AsyncIterator[SsrfCanary]:
        """Listen while the block runs."""

        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connects += 1
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await reader.readuntil(b"\r\n\r\n")
                there = f"location: http://127.0.0.1:{to.port}/\r\n" if to else ""
                writer.write(plain("302 Found" if to else "200 OK", b"{}", headers=there))
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(came, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


async def admin_closed(bench: Bench) -> list[Row]:
    """Goals 20 and 21: no client can make the router connect to a target that its operator did not allow."""
    second, first = SsrfCanary(), SsrfCanary()
    async with second.listen(), first.listen(second), bench.run_cluster(1) as run:
        taken = []
        for port in {run.port, run.admin_port or run.port}:
            taken += await _register(run, port, f"http://127.0.0.1:{first.port}")
        await asyncio.sleep(PROBED_S)
        found = [
            row(20, "adding a replica without a key: taken", 0, len(taken), note=", ".join(taken)),
            row(21, "... connects to the named addresses", 0, first.connects),
            row(21, "... and to where that redirects", 0, second.connects),
        ]
    if bench.ours:
        found += await _ours(bench)
    return found


async def _came(canary: SsrfCanary) -> bool:
    return canary.connects > 0


async def _register(run: Run, port: int, url: str) -> list[str]:
    """Return the ways to add a worker that were accepted."""
    base, taken = f"http://127.0.0.1:{port}", []
    for path, body in (("/workers", {"url": url}), (f"/add_worker?url={url}", None), ("/admin/replicas", {"url": url})):
        with suppress(aiohttp.ClientError, TimeoutError):
            async with run.http.post(base + path, json=body, timeout=aiohttp.ClientTimeout(total=3.0)) as response:
                if response.status < 300:
                    taken.append(f"{path.partition('?')[0]}: {response.status}")
    return taken


async def _ours(bench: Bench) -> list[Row]:
    second, first, allowed = SsrfCanary(), SsrfCanary(), SsrfCanary()
    async with second.listen(), first.listen(second), allowed.listen(first):
        where = f"http://127.0.0.0/8:{allowed.port}"
        flags = ("--set", f"admin.token={TOKEN}", "--set", f"admin.replicas_allowed={where}")
        async with bench.run_cluster(1, flags) as run:
            base = f"http://127.0.0.1:{run.admin_port}/admin/replicas"
            bearer = {"Authorization": f"Bearer {TOKEN}"}

            async def add(url: str, headers: dict[str, str]) -> int:
                async with run.http.post(base, json={"url": url}, headers=headers) as response:
                    return response.status

            strangers = [
                await add(f"http://127.0.0.1:{allowed.port}", headers)
                for headers in ({}, {"Authorization": "Bearer x"})
            ]
            outside = [await add(url, bearer) for url in _vectors(first.port, allowed.port)]
            inside = await add(f"http://127.0.0.1:{allowed.port}", bearer)
            await asyncio.sleep(PROBED_S)
            await poll_until(lambda: _came(allowed), bench.scale.patience_s(PROBED_S) - PROBED_S)
    let_in = sum(status < 300 for status in outside)
    return [
        row(20, "adding a replica without the token or with another: not 401", 0, sum(s != 401 for s in strangers)),
        row(21, f"{len(outside)} URLs outside the list, with the token: taken", 0, let_in),
        row(21, "... inside it: taken and looked at", 1, allowed.connects, ok=inside < 300 and allowed.connects > 0),
        row(21, "... connects to where that redirects, and outside", 0, first.connects + second.connects),
        await _open_admin(bench),
    ]


def _vectors(canary: int, allowed: int) -> list[str]:
    """Return URLs that mean the canary, or that could be mistaken for the allowed one."""
    hosts = ("127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "[::1]")
    urls = [f"http://{host}:{canary}" for host in hosts]
    urls += [f"http://{host}:{allowed}" for host in hosts[1:]]
    ours = f"127.0.0.1:{allowed}"
    bad = f"http://127.0.0.1:{canary}"
    urls += [f"http://{ours}@127.0.0.1:{canary}", f"{bad}#@{ours}", f"{bad}\\@{ours}"]
    return [
        *urls,
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        f"gopher://{ours}/",
        f"http://{ours}/../x",
    ]


async def _open_admin(bench: Bench) -> Row:
    """Goal 20: an admin listener on all interfaces needs a token."""
    port = free_port()
    words = [*bench.router.words(port, ["http://127.0.0.1:1"], bench.folder), "--set", "listen.admin_host=0.0.0.0"]
    status = None
    async with run_process("open-admin", words, bench.folder) as process:
        with suppress(ProcessError):
            status = await process.wait_for_exit(bench.scale.patience_s(START_S))
    return row(20, "admin listener on 0.0.0.0 without a token: exit status", 2, status, ok=status not in (None, 0))


# Too slow, too much


async def slow_clients(bench: Bench) -> list[Row]:
    """Goal 23: incomplete heads and very slow bodies, while others are served."""
    clients = bench.scale.pick_count(100, 1_000)
    async with bench.run_cluster(2) as run:
        beginning = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        slow = beginning + b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n{"
        wait_s = bench.scale.patience_s(WAIT_S)
        heads = [asyncio.create_task(_closed_s(run, beginning, wait_s)) for _ in range(clients)]
        bodies = [asyncio.create_task(_closed_s(run, slow, wait_s, drip=b" " * 50)) for _ in range(10)]
        asked = await send_at_rate(10, int(10 * HEAD_TIMEOUT_S), lambda _: run.ask())
        heads_s, bodies_s = [await t for t in heads], [await t for t in bodies]
    slack = bench.scale.slack
    half_open = f"{clients} half-open heads: seconds until all are closed"
    return [
        row(23, half_open, HEAD_TIMEOUT_S + 1, _last(heads_s), slack=slack),
        row(23, "10 bodies of 50 bytes/s: seconds until all are closed", SLOW_BODY_MAX_S, _last(bodies_s), slack=slack),
        failures(23, "... others' errors meanwhile", asked),
    ]


def _last(closed_s: list[float | None]) -> float | None:
    return None if None in closed_s else max(each for each in closed_s if each is not None)


async def _closed_s(run: Run, first: bytes, wait_s: float, drip: bytes = b"") -> float | None:
    """Return the seconds until the router closes the connection; None if it does not."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    try:
        writer.write(first)
        async with asyncio.timeout(wait_s):
            reading = asyncio.ensure_future(reader.read())
            while not reading.done():
                await asyncio.wait([reading], timeout=1.0)
                if drip and not reading.done():
                    writer.write(drip)
            return time.monotonic() - began_s
    except TimeoutError:
        return None
    except OSError:
        return time.monotonic() - began_s
    finally:
        writer.close()


async def bombs(bench: Bench) -> list[Row]:
    """Goal 23: bodies that are too long, compressed, or nested."""
    found = []
    async with bench.run_cluster(2) as run:

        async def pour() -> AsyncIterator[bytes]:
            for _ in range(SENT_MIB):
                yield b" " * (1 << 20)

        status, grew_mb = await _send_body(run, pour, {})
        found.append(row(23, f"{SENT_MIB} MiB in chunks: status", 413, status, ok=status == 413))
        limit_mb = BODY_MAX_MIB * 1.25 * 1.048576
        found.append(row(23, f"... RSS growth, MB (the limit is {BODY_MAX_MIB} MiB)", round(limit_mb, 1), grew_mb))
        bomb_mib = bench.scale.pick_count(BOMB_MIB, FULL_BOMB_MIB)
        bomb = gzip.compress(b" " * (bomb_mib << 20), 9)
        status, grew_mb = await _send_body(run, lambda: bomb, {"content-encoding": "gzip"})
        name = f"gzip of {len(bomb) >> 10} KiB that holds {bomb_mib} MiB: status"
        found.append(row(23, name, 415, status, ok=status == 415))
        found.append(row(23, "... RSS growth, MB", round(BOMB_RSS_MAX_MB, 1), grew_mb))
        nested = answers.APIS["chat"].request("%", stream=False)
        body = json.dumps(nested).replace('"%"', "[" * LEVELS + "]" * LEVELS).encode()
        status, _ = await _send_body(run, lambda: body, {})
        found.append(row(23, f"JSON of {LEVELS:,} levels: status", 400, status, ok=status == 400))
        after = await send_at_rate(20, 10, lambda _: run.ask())
        reached = [record for record in await run.fetch_requests() if record["bytes"] > LEVELS]
        found.append(row(23, "... replicas that saw any of these", 0, len(reached), found=after))
    return found


async def _send_body(
    run: Run, body: Callable[[], bytes | AsyncIterator[bytes]], headers: dict[str, str]
) -> tuple[int | None, float]:
    """Return the status, and the router's largest growth in the meantime, in MB."""
    before_mb = rss_mb(run.process.pid)
    grown = [0.0]

    async def watch() -> None:
        while True:
            grown.append(rss_mb(run.process.pid) - before_mb)
            await asyncio.sleep(0.02)

    watching, status = asyncio.create_task(watch()), None
    try:
        limit = aiohttp.ClientTimeout(total=20.0)
        head = {"content-type": "application/json", **headers}
        async with run.http.post(
            run.url + "/v1/chat/completions", data=body(), headers=head, timeout=limit
        ) as response:
            status = response.status
            await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass
    await asyncio.sleep(0.1)
    watching.cancel()
    return status, max(grown)
