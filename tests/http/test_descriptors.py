"""File descriptors: how many clients take, and whose trouble it is when none is left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.fd_limits import FdExhaustion, connections_within, is_emfile, log_connection_limit
from tests.support.fakes import FakeEngine

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def limited(files_max: int, *engines: FakeEngine) -> AsyncIterator[tuple[int, str, str, list[dict[str, Any]]]]:
    """The command with so many descriptors: its pid, its two addresses, and the lines of its log so far."""
    words = f"ulimit -Sn {files_max // 2}; ulimit -Hn {files_max}; exec {sys.executable} -m router serve --port 0"
    words += " --admin-port 0 --set probe.interval_s=0.1 --set listen.lame_duck_s=0 --set log.requests=false"
    words += " --set probe.timeout_s=60 --set upstream.connect_timeout_s=60"
    words += "".join(f" --replica {engine.url}" for engine in engines)
    pipe = asyncio.subprocess.PIPE
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    process = await asyncio.create_subprocess_exec("bash", "-c", words, stdout=pipe, stderr=pipe, env=env)
    lines = list[dict[str, Any]]()

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            lines.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})

    reading = asyncio.create_task(read())
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().split()
        async with aiohttp.ClientSession() as session:
            while (await session.get(f"{said[1]}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        yield process.pid, said[1], said[3], lines
    finally:
        process.terminate()
        await process.wait()
        await reading


async def blamed(admin_url: str, lines: list[dict[str, Any]]) -> list[str]:
    """Everything that says that a replica is at fault."""
    found = [line["event"] for line in lines if line["event"] in ("replica_down", "breaker_open", "bug")]
    async with aiohttp.ClientSession() as session, session.get(f"{admin_url}/metrics") as response:
        page = await response.text()
    failed = re.findall(r"^(warmroute_(?:attempts|replica_failures)_total\{.*\}) (\S+)$", page, re.MULTILINE)
    ours = re.compile('outcome="(ok|descriptors)"')
    return found + [name for name, count in failed if float(count) and not ours.search(name)]


async def of_event(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """The log's lines of this event, once there is one."""
    while not (found := [line for line in lines if line["event"] == event]):
        await asyncio.sleep(0.01)
    return found


@pytest.mark.promise(
    "Idle clients do not exhaust file descriptors, and a shortage counts as no replica's failure.", "clients"
)
async def test_idle_clients_do_not_use_up_the_descriptors(engine: FakeEngine, other: FakeEngine) -> None:
    """With 256 descriptors and 300 idle clients every request on a connection that is open succeeds, no replica is
    blamed, and one line says how many clients are let in, and what to raise. The soft limit is raised to the hard."""
    async with limited(256, engine, other) as (_, url, admin_url, lines):
        host, port = url.removeprefix("http://").split(":")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8)) as session:

            async def ask() -> int:
                async with session.post(url + CHAT, json=BODY) as response:
                    await response.read()
                    return response.status

            assert await asyncio.gather(*(ask() for _ in range(8))) == [200] * 8
            with ExitStack() as stack:
                idle = [stack.enter_context(socket.socket()) for _ in range(300)]
                for each in idle:
                    each.setblocking(False)
                connect = asyncio.get_running_loop().sock_connect
                came = (connect(each, (host, int(port))) for each in idle)
                await asyncio.gather(*came, return_exceptions=True)  # those that are too many are reset
                for _ in range(3):
                    assert await asyncio.gather(*(ask() for _ in range(24))) == [200] * 24
        assert await blamed(admin_url, lines) == []
        (line,) = await of_event(lines, "connections_lowered")
        assert (line["files_max"], line["wanted"], line["level"]) == (256, 16_384, "info")
        assert 64 <= line["connections_max"] <= 128
        assert "LimitNOFILE" in line["raise"]
        assert not [line for line in lines if line["event"] == "descriptors_gone"]


@pytest.mark.promise(
    "Idle clients do not exhaust file descriptors, and a shortage counts as no replica's failure.", "clients"
)
@pytest.mark.skipif(not Path("/proc/self/fd").exists() or not hasattr(resource, "prlimit"), reason="needs prlimit")
async def test_having_none_left_is_the_routers_own_trouble(engine: FakeEngine, other: FakeEngine) -> None:
    """Where no connection to a replica can be opened the answer is 503 in words that say why, no replica is blamed by
    requests or probes, and one line says what to raise; what comes when there are descriptors again is answered."""
    async with limited(256, engine, other) as (pid, url, admin_url, lines):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4)) as session:

            async def ask() -> tuple[int, str]:
                async with session.post(url + CHAT, json=BODY) as response:
                    said = await response.json()
                    return response.status, said.get("error", {}).get("code", "")

            async with session.get(f"{url}/healthz") as response:
                assert response.status == 200
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 256))  # fewer than are open
            for _ in range(12):
                assert await ask() == (503, "out_of_descriptors")
            await asyncio.sleep(0.5)  # probes find none either
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
            for _ in range(12):
                assert await ask() == (200, "")
        assert await blamed(admin_url, lines) == []
        (line,) = await of_event(lines, "descriptors_gone")
        assert (line["level"], line["files_max"]) == ("error", 8)
        assert "ulimit" in line["raise"]


def test_how_many_clients_fit() -> None:
    """Two descriptors a client after the reserve, which takes half at most; never more than settings say, and one
    client at least."""
    assert connections_within(16_384, 2, 1 << 19) == 16_384
    assert connections_within(16_384, 2, 1_024) == (1_024 - 64 - 8) // 2
    assert connections_within(16_384, 0, 1_024) == (1_024 - 64 - 256) // 2
    assert connections_within(16_384, 10_000, 1_024) == 256
    assert connections_within(10, 2, 1_024) == 10
    assert connections_within(16_384, 2, 2) == 1


def test_which_errors_mean_that_none_is_left() -> None:
    """EMFILE and ENFILE, of one address or several, do; a refused connection and a name that is none do not."""
    full, system = OSError(errno.EMFILE, "full"), OSError(errno.ENFILE, "full")
    assert is_emfile(full)
    assert is_emfile(system)
    assert is_emfile(OSError(f"Multiple exceptions: [Errno {errno.EMFILE}] a, [Errno {errno.EMFILE}] b"))
    assert not is_emfile(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    assert not is_emfile(socket.gaierror(socket.EAI_NONAME, "no such name"))
    assert not is_emfile(ValueError("24"))


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is met, and whatever lacks it."""
    now_s = 0.0
    shortage = FdExhaustion(lambda: now_s)
    for _ in range(100):
        shortage.report_shortage("a probe")
        now_s += 0.5
    assert len(caplog.records) == 1
    now_s += 10.0
    shortage.report_shortage("a connection")
    assert len(caplog.records) == 2
    with closing(socket.socket()):
        shortage.look()
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("wanted", "level"), [(16_384, "INFO"), (20_000, "WARNING")])
def test_only_a_limit_that_was_asked_for_is_missed(wanted: int, level: str, caplog: pytest.LogCaptureFixture) -> None:
    """The default is more than most machines give, and nobody asked for it."""
    with caplog.at_level("INFO"):
        log_connection_limit(wanted, 100)
        log_connection_limit(wanted, wanted)
    assert [record.levelname for record in caplog.records] == [level]
