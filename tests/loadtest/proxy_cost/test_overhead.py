"""Promises of the overhead instrument: its upstream and its load are right, its CPU is whole, its goals are judged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from loadtest.common import rivals
from loadtest.common.answers import LAST_CHUNK, chunk
from loadtest.common.processes import run_process
from loadtest.common.report import Row
from loadtest.common.usage import CpuUsage, rss_mb, subtract_usage, tree, usage
from loadtest.proxy_cost import answers as overhead_answers
from loadtest.proxy_cost import bodies
from loadtest.proxy_cost import load as overhead_load
from loadtest.proxy_cost.load import Connections, Loop, StreamLoad, Tally, chunks, closed_loop, streams
from loadtest.proxy_cost.report import goals
from loadtest.proxy_cost.upstream import FakeUpstream, TimerWheel, Written
from tests.support.waiting import alive

FAST_PER_S = 500.0  # events a second of a stream, so that tests take no time


@asynccontextmanager
async def upstream(rate_per_s: float = FAST_PER_S) -> AsyncIterator[tuple[tuple[str, int], Written]]:
    """A replica on a free port."""
    loop, written, connections = asyncio.get_running_loop(), Written(), list[FakeUpstream]()
    wheel = TimerWheel(loop, rate_per_s)

    def replica() -> FakeUpstream:
        connections.append(FakeUpstream(wheel, written))
        return connections[-1]

    server = await loop.create_server(replica, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname(), written
    finally:
        server.close()
        for connection in connections:
            connection._transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0.01)  # the wheel stops when it finds no stream


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to it."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Status line and body of the next answer, chunks taken apart."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in head:
        raw = await reader.readuntil(LAST_CHUNK)
        return head.split(b"\r\n")[0], b"".join(chunks(raw))
    length = int(head.partition(b"content-length:")[2].split()[0])
    return head.split(b"\r\n")[0], await reader.readexactly(length)


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 20])
async def test_requests_may_come_in_any_pieces(piece: int) -> None:
    """Answers and streams are the same however a request is cut, one after the other on one connection."""
    short, stream = bodies.single(512).request(1), bodies.stream(3).request(2)
    async with upstream() as (address, _), connected(address) as (reader, writer):
        for request, expected in ((short, overhead_answers.answer(512)), (stream, overhead_answers.stream_body(3))):
            for at in range(0, len(request), piece):
                writer.write(request[at : at + piece])
                await writer.drain()
            assert await answer(reader) == (b"http/1.1 200 ok", expected)


async def test_ids_are_told_where_they_are_asked_for() -> None:
    """Each event has as many as an engine's, and is the same but for them."""
    body = json.dumps({"stream": True, "max_tokens": 20, "return_token_ids": True}, separators=(",", ":")).encode()
    async with upstream() as (address, _), connected(address) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        said = (await answer(reader))[1]
    assert len(re.findall(rb'"token_ids": ?\[\d+\]', said)) == 20
    ids = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[\d, ]*\]')
    assert ids.sub(rb"\1null", said) == overhead_answers.stream_body(20)


async def test_requests_may_come_at_once_or_in_chunks() -> None:
    """Pipelined requests are answered in turn, one behind a stream after it; chunked bodies are understood."""
    short, stream = bodies.single(512).request(1), bodies.stream(2).request(2)
    body = stream.partition(b"\r\n\r\n")[2]
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += chunk(body[:200]) + chunk(body[200:]) + LAST_CHUNK
    async with upstream() as (address, _), connected(address) as (reader, writer):
        writer.write(stream + short)
        assert (await answer(reader))[1] == overhead_answers.stream_body(2)
        assert (await answer(reader))[1] == overhead_answers.answer(512)
        writer.write(chunked)
        assert (await answer(reader))[1] == overhead_answers.stream_body(2)


async def test_settings_behind_a_long_prompt_are_found() -> None:
    """A router that writes the body anew may put `stream` last."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 300_000}], "max_tokens": 1, "stream": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with upstream() as (address, _), connected(address) as (reader, writer):
        writer.write(head + body)
        assert (await answer(reader))[1] == overhead_answers.stream_body(1)


async def test_pages_that_routers_ask_for() -> None:
    """Health, models and metrics are there; anything else is 404 and remembered."""
    async with upstream() as (address, written), connected(address) as (reader, writer):
        for page, status in (("/health", 200), ("/v1/models", 200), ("/metrics", 200), ("/get_server_info", 404)):
            writer.write(f"GET {page} HTTP/1.1\r\n\r\n".encode())
            line, body = await answer(reader)
            assert int(line.split()[1]) == status
            if page == "/v1/models":
                assert [model["id"] for model in json.loads(body)["data"]] == [overhead_answers.MODEL]
    assert written.paths["/get_server_info"] == 1


async def test_streams_send_single_events() -> None:
    """Each event is an HTTP chunk of its own, and of the size that vLLM's have."""
    async with upstream() as (address, _), connected(address) as (reader, writer):
        writer.write(bodies.stream(20).request(1))
        await reader.readuntil(b"\r\n\r\n")
        found = list(chunks(await reader.readuntil(LAST_CHUNK)))
    assert all(chunk.count(b"\n\n") == 1 and chunk.endswith(b"\n\n") for chunk in found)
    assert len(found) == 1 + 20 + 3
    assert all(200 <= len(chunk) <= 260 for chunk in found[1:-1])
    assert 200 <= len(found[0]) <= 300  # with a field for the prompt's ids


async def test_a_flood_stops_where_nobody_reads() -> None:
    """Of many MB no more is written than buffers take until the client reads, and then all of it."""
    size = 64 << 20
    request = bodies.single(512, stream=True, flood_bytes=size).request(1)
    loop = asyncio.get_running_loop()
    async with upstream() as (address, written):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, request)
            before = -1
            while before != written.flood_bytes or not before:
                before = written.flood_bytes
                await asyncio.sleep(0.1)
            assert 0 < written.flood_bytes < size // 2
            end = b""
            while not end.endswith(LAST_CHUNK):
                data = await loop.sock_recv(client, 1 << 20)
                assert data
                end = (end + data)[-5:]
        assert written.flood_bytes >= size


async def answering(bytes_: bytes, *, close: bool = False) -> Counter[str]:
    """Errors that the load sees where a server answers with these bytes."""
    handled = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(bytes_), 50):
            writer.write(bytes_[at : at + 50])
            await writer.drain()
        if not close:
            with suppress(ConnectionError):
                while await reader.read(1_000):
                    pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        handled.set()

    server, tally = await asyncio.start_server(handle, "127.0.0.1", 0), Tally()
    async with server:
        async with Connections([server.sockets[0].getsockname()], 1, tally) as [connection]:
            connection.ask(bodies.single(512).request(1), b"abcd")
            await overhead_load.wait_until(lambda: not connection.busy, 5.0, "no answer")
        await handled.wait()
    return tally.errors


@pytest.mark.parametrize(
    ("head", "body", "close", "wrong"),
    [
        ("200 OK\r\nContent-Length: 4", b"abcd", False, []),
        ("200 OK\r\nTransfer-Encoding: chunked", b"1\r\na\r\n3;x=y\r\nbcd\r\n0\r\n\r\n", False, []),
        ("200 OK\r\nContent-Length: 4", b"abce", False, ["body differs"]),
        ("200 OK\r\nTransfer-Encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n", False, ["body differs"]),
        ("503 Service Unavailable\r\nContent-Length: 4", b"abcd", False, ["status 503"]),
        ("200 OK\r\nContent-Length: 4", b"ab", True, ["closed"]),
        ("200 OK", b"abcd", True, ["neither length nor chunks"]),
    ],
)
async def test_load_sees_what_is_wrong(head: str, body: bytes, close: bool, wrong: list[str]) -> None:
    """Only an answer with status 200 and every byte of its body is right."""
    assert list(await answering(f"HTTP/1.1 {head}\r\n\r\n".encode() + body, close=close)) == wrong


async def test_a_closed_loop_counts_its_window() -> None:
    """Requests of the window are answered and right, and their CPU is that of the process that was named."""
    async with upstream() as (address, _):
        measured = await closed_loop(address, Loop("short", 4, 0.05, 0.2), os.getpid(), 0)
    assert not measured.errors
    assert measured.requests > 0
    assert 0.0 < measured.cpu_s <= measured.window_s * 2


async def test_streams_are_counted_while_all_run() -> None:
    """Events are seen in the window, no more than streams send; further ones give times to the first event."""
    async with upstream(50.0) as (address, _):
        measured = await streams([address], StreamLoad(10, 0.5, 0.2, 50.0), os.getpid(), 0)
    assert not measured.errors
    assert 0 < measured.events < 10 * 50.0 * measured.window_s + 10 * 50.0
    assert measured.ttfts_s
    assert all(ttft_s > 0 for ttft_s in measured.ttfts_s)


def test_no_two_requests_are_alike() -> None:
    """Bodies are JSON of their case's size; short ones differ from the first message on, the others at their end."""
    for case, size in bodies.SIZES.items():
        made = bodies.requests(case)
        found = [next(made).partition(b"\r\n\r\n") for _ in range(130)]
        assert len({body for _, _, body in found}) == 130
        for head, _, body in found[:3]:
            assert int(head.rpartition(b":")[2]) == len(body)
            assert 0.9 * size < len(body) < 1.1 * size
            assert json.loads(body)["model"] == overhead_answers.MODEL
            assert body.isascii()


SPINS = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
exec(sys.argv[2])
print("done", flush=True)
child.wait()
"""


async def test_cpu_is_of_the_whole_tree(tmp_path: Path) -> None:
    """Threads and children count; stopping the process stops its children."""
    child = SPINS.format(seconds=0.2) + "print('done', flush=True)\ntime.sleep(600)"
    thread = f"threading.Thread(target=exec, args=({SPINS.format(seconds=0.1)!r},))"
    own = f"import threading\nt = {thread}\nt.start()\nt.join()"
    async with run_process("it", [sys.executable, "-c", PARENT, child, own], tmp_path) as process:
        before = CpuUsage({}, {})
        await overhead_load.wait_until(lambda: process.output.read_text().count("done") == 2, 60.0, "not done")
        found = subtract_usage(before, usage(process.pid))
        pids = tree(process.pid)
        assert rss_mb(process.pid) > 5
    assert len(pids) == 2
    assert 0.25 < found.cpu_s < 3.0
    await overhead_load.wait_until(lambda: not any(map(alive, pids)), 60.0, "they live on")


def test_a_process_that_ended_is_said() -> None:
    """What it spent cannot be known; threads that ended are known from the coarser count."""
    before = CpuUsage({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0})

    assert subtract_usage(before, CpuUsage({1: 1.5}, {1: 1.5})).ended == 1
    assert subtract_usage(before, CpuUsage({1: 1.5, 2: 1.2}, {1: 1.5, 2: 1.2})).cpu_s == pytest.approx(0.7)
    assert subtract_usage(before, CpuUsage({1: 1.1, 2: 1.0}, {1: 1.9, 2: 1.0})).cpu_s == pytest.approx(0.9)
    assert subtract_usage(before, CpuUsage({1: 1.1, 2: 1.0, 3: 0.3}, {1: 1.1, 2: 1.0, 3: 0.3})).cpu_s == pytest.approx(
        0.4
    )


def test_command_lines(tmp_path: Path) -> None:
    """Places in a command line are filled; what is no command line says so."""
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    made = rivals.custom("mine=run --port {port} {urls} --all={urls}")

    assert made.name == "mine"
    assert made.words(5, urls, tmp_path) == ["run", "--port", "5", *urls, f"--all={' '.join(urls)}"]
    words = rivals.ours(["--policy", "warm"]).words(5, urls, tmp_path)
    assert words[-6:] == ["--replica", urls[0], "--replica", urls[1], "--policy", "warm"]
    for wrong in ("mine", "=x {port} {urls}", "mine=run {port}"):
        with pytest.raises(rivals.RivalError):
            rivals.custom(wrong)
    with pytest.raises(rivals.RivalError, match="nothing"):
        rivals.custom("mine=run {port} {urls} {nothing}").words(5, urls, tmp_path)


def test_rivals_are_found_in_one_environment_or_each_in_its_own(tmp_path: Path) -> None:
    """A rival is there if its module is; nginx is written a configuration without buffers for answers."""
    for folder, module in ((tmp_path / "smg", "smg"), (tmp_path, "vllm_router")):
        package = folder / "lib" / "python3.11" / "site-packages" / module
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    found = rivals.find_installed(tmp_path)
    nginx = rivals.Rival("nginx", ("nginx", "-c", "{folder}/nginx.conf"), nginx=True)
    nginx.words(7, ["http://127.0.0.1:1"], tmp_path)

    assert found.keys() - {"nginx"} == {"smg", "vllm-router"}
    assert found["smg"].command[0] == str(tmp_path / "smg" / "bin" / "python")
    assert "cache_aware" in found["smg"].command
    assert "proxy_buffering off;" in (tmp_path / "nginx.conf").read_text()
    assert "server 127.0.0.1:1;" in (tmp_path / "nginx.conf").read_text()


def figures(**cpu_us: float) -> list[Row]:
    """Rows of stream300 and short by router, these µs each."""
    names = {"ours": "warmroute", "pure": "warmroute (pure)", "nginx": "nginx", "smg": "smg", "sglang": "sglang-router"}
    chunks_ = [Row(router=names[n], case="stream300", errors=0, cpu_us_per_chunk=us) for n, us in cpu_us.items()]
    return [
        *chunks_,
        *(Row(router=names[n], case="short", errors=0, cpu_us_per_request=us) for n, us in cpu_us.items()),
    ]


def verdicts(rows: list[Row], slack: float = 0.0) -> dict[str, bool | None]:
    """Of goals by their first words."""
    return {f"{row.case} {(row.goal or '').split(' x ')[0]}": row.ok for row in goals(rows, slack)}


def test_goals_are_judged_by_the_best_rival() -> None:
    """Ratios are to nginx and to the cheapest LLM router; a goal is missed at its limit where it says `under`."""
    of = "short CPU under 0.6", "stream300 CPU at most 1.15", "stream300 CPU under 0.7"
    assert verdicts(figures(ours=11.5, nginx=10, smg=40, sglang=20)) == dict(zip(of, (True, True, True), strict=True))
    assert verdicts(figures(ours=11.6, nginx=10, smg=12, sglang=20)) == dict(
        zip(of, (False, False, False), strict=True)
    )
    assert verdicts(figures(ours=12, nginx=100, smg=20))[of[0]] is False
    assert verdicts(figures(ours=12, nginx=100, smg=20), slack=0.1)[of[0]] is True


def test_without_native_code_no_rival_is_cheaper() -> None:
    """The router without native code has a goal of its own for requests: what the best LLM router takes."""
    goal = "short without native code: CPU at most 1"
    assert verdicts(figures(ours=1, pure=20, smg=20, sglang=30))[goal] is True
    assert verdicts(figures(ours=1, pure=21, smg=20, sglang=30))[goal] is False
    assert goal not in verdicts(figures(ours=1, smg=20))


def test_goals_without_a_yardstick_are_not_met() -> None:
    """Where nobody is there to compare with, or only one that made errors, nothing is judged; our errors are a miss."""
    assert set(verdicts(figures(ours=1)).values()) == {None}
    assert all("not judged" in (row.goal or "") for row in goals(figures(ours=1), 0.0))
    rows = figures(ours=1, nginx=10, smg=10)
    for row in rows:
        row.errors = 1 if row.router == "smg" else 0
    assert [row.ok for row in goals(rows, 0.0)] == [None, True, None]
    rows[0].errors = 1
    assert goals(rows, 0.0)[1].ok is False


def test_ttft_goal_has_an_allowance() -> None:
    """The added p99 may be the best rival's, and a little more only with slack."""
    rows = [
        Row(router=name, case="stream100", errors=0, cpu_us_per_chunk=1.0, added_ttft_p99_ms=ms)
        for name, ms in (("warmroute", 0.7), ("smg", 0.6), ("vllm-router", 40.0))
    ]
    assert [row.ok for row in goals(rows, 0.0)] == [False]
    assert [row.ok for row in goals(rows, 0.2)] == [True]
