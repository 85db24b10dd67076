"""`warmroute serve --workers 2` as a command, with real processes that are killed at the worst moment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.multiprocess.stubs import until
from tests.support.fakes import FakeEngine, half_then_waits
from tests.support.waiting import alive

HUB = "hub"
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


class Command:
    """The running command: its URLs, and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder  # for its temporary files
        self.url = self.admin_url = ""
        self.lines: list[dict[str, Any]] = []
        self.wrote: list[str] = []

    async def read(self) -> None:
        """Everything it writes on standard error."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.wrote.append(line.decode())
            if line.startswith(b"{"):
                self.lines.append(json.loads(line))

    async def kill(self) -> None:
        """End its first process, as by `kill -9`."""
        self.process.kill()
        await self.process.wait()

    def pids(self, name: str = "") -> list[int]:
        """Of every process that was started under this name (or any), the latest last."""
        started = [line for line in self.lines if line["message"] == "a process was started"]
        return [line["pid"] for line in started if name in ("", line["process"])]

    def said(self, message: str) -> int:
        """How often."""
        return sum(line["message"] == message for line in self.lines)


@asynccontextmanager
async def command(
    *engines: FakeEngine | str,
    workers: int = 2,
    config: Path | None = None,
    tls: ssl.SSLContext | None = None,
    module: str = "router",
    **more: str,
) -> AsyncIterator[Command]:
    """The command in front of these engines, ready; killed with all its children if it is still there at the end.
    `module` is another one that runs the router's."""
    arguments = ["-m", module, "serve", "--port", "0", "--admin-port", "0", "--workers", str(workers)]
    arguments += ["--config", str(config)] if config else []
    base = {"probe.interval_s": "0.2", "log.requests": "false", "listen.lame_duck_s": "0"}
    # None of the processes is as busy as that, and a hub that is killed is missed at once.
    base |= {"probe.timeout_s": "60", "upstream.connect_timeout_s": "60", "listen.hub_timeout_s": "60"}
    settings = base | {k.replace("__", "."): v for k, v in more.items()}
    for engine in engines:
        arguments += ["--replica", engine if isinstance(engine, str) else engine.url]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    pipe = asyncio.subprocess.PIPE
    folder = tempfile.mkdtemp()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")} | {"TMPDIR": folder},
    )
    running = Command(process, Path(folder))
    reading = asyncio.create_task(running.read())
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().split()
        assert said[::2] == ["listening", "admin"], "".join(running.wrote)
        running.url, running.admin_url = said[1], said[3]
        connector = aiohttp.TCPConnector(ssl=tls or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while (await session.get(f"{running.url}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        await until(lambda: len(running.pids()) == (workers + 1 if workers > 1 else 0))
        yield running
    finally:
        for pid in (process.pid, *running.pids()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        await process.wait()
        await reading
        shutil.rmtree(folder)


def body(prompt: str = "hi", *, stream: bool = False) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]}


class Traffic:
    """Requests, each on a connection of its own, four at a time, until the block ends."""

    def __init__(self, url: str) -> None:
        self._url = url + CHAT
        self.reasons: list[str] = []
        self.broken: list[Exception] = []

    @asynccontextmanager
    async def going(self) -> AsyncIterator[Traffic]:
        """Start, and stop."""
        self._on = True
        tasks = [asyncio.create_task(self._ask(number)) for number in range(4)]
        try:
            yield self
        finally:
            self._on = False
            await asyncio.gather(*tasks)

    async def _ask(self, number: int) -> None:
        while self._on:
            await self.once(f"conversation {number}")

    async def once(self, prompt: str) -> None:
        """One request. Raises when it is refused; one that breaks is remembered."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                async with session.post(self._url, json=body(prompt)) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                    self.reasons.append(answer.headers["x-warmroute-reason"])
            except aiohttp.ClientConnectorError:
                raise  # refused
            except aiohttp.ClientError as error:
                self.broken.append(error)

    async def more(self, answers: int) -> None:
        """Wait for so many more."""
        enough = len(self.reasons) + answers
        await until(lambda: len(self.reasons) >= enough)


@asynccontextmanager
async def streams(url: str, number: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """So many streams that have begun, on a connection each."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        begun = [await session.post(url + CHAT, json=body(stream=True)) for _ in range(number)]
        for response in begun:
            assert b"w0" in await response.content.readany()
        yield begun


async def json_of(url: str) -> Any:
    """A page."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


async def open_leases(command: Command) -> int:
    """By the hub's books; -1 where it is not there."""
    try:
        rows = (await json_of(command.admin_url + "/admin/replicas"))["replicas"]
    except aiohttp.ClientError:
        return -1
    return sum(row["in_flight"] for row in rows)


async def leases_are(command: Command, number: int) -> None:
    """Wait until so many are open."""
    while await open_leases(command) != number:
        await asyncio.sleep(0.01)


async def metric(command: Command, name: str) -> float:
    """Sum of a metric's series, by one scrape."""
    async with aiohttp.ClientSession() as session, session.get(command.admin_url + "/metrics") as response:
        rows = (line.rpartition(" ") for line in (await response.text()).splitlines())
        return sum(float(value) for series, _, value in rows if series.partition("{")[0] == name)


async def metric_is(command: Command, name: str, wanted: float) -> None:
    """Wait until it has that value: what ended a moment ago is a millisecond away from the hub."""
    while (value := await metric(command, name)) != wanted:
        assert value < wanted
        await asyncio.sleep(0.01)


def holder(response: aiohttp.ClientResponse, pids: list[int]) -> int:
    """Which of these processes has the other end of the connection."""
    assert response.connection is not None
    assert response.connection.transport is not None
    ends = [response.connection.transport.get_extra_info(name)[1] for name in ("peername", "sockname")]
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inode = next(row[9] for row in rows if [int(row[n].rpartition(":")[2], 16) for n in (1, 2)] == ends)
    return next(pid for pid in pids if f"socket:[{inode}]" in links(pid))


def links(pid: int) -> set[str]:
    """What its file descriptors are."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(fd.readlink()))
        except OSError:  # closed meanwhile
            continue
    return found


async def rest_of(response: aiohttp.ClientResponse) -> bool:
    """Whether the stream ended as it should."""
    try:
        return b"[DONE]" in await response.content.read()
    except aiohttp.ClientError:
        return False


@pytest.mark.long
async def test_a_killed_worker_breaks_its_own_connections_and_nothing_else(engine: FakeEngine) -> None:
    """kill -9 under traffic: nobody is refused, what it had open breaks and is given back, the other's streams end
    well, and it is started again."""
    engine.script.extend([half_then_waits] * 6)
    async with command(engine) as router, streams(router.url, 6) as begun:
        hub, victim = router.pids(HUB), holder(begun[0], router.pids("worker 0") + router.pids("worker 1"))
        doomed = [response for response in begun if holder(response, router.pids()) == victim]
        await leases_are(router, 6)
        traffic = Traffic(router.url)
        async with traffic.going():
            await traffic.more(20)
            os.kill(victim, signal.SIGKILL)
            await traffic.more(20)
            await until(lambda: router.said("a process was started") == 4)
            await until(lambda: router.said("a worker joined") == 3)
            await traffic.more(20)
        assert len(traffic.broken) <= 4  # one a client
        await leases_are(router, 6 - len(doomed))
        engine.go_on.set()
        assert [await rest_of(response) for response in begun] == [response not in doomed for response in begun]
        await leases_are(router, 0)
        assert router.pids(HUB) == hub


@pytest.mark.long
async def test_without_the_hub_requests_go_on_and_say_so(engine: FakeEngine, other: FakeEngine) -> None:
    """kill -9 of the hub under traffic: no request fails; placements by the ring say so, are counted, and end when it
    is back; what was open stays open in its books."""
    engine.script.append(half_then_waits)
    other.script.append(half_then_waits)
    async with command(engine, other) as router, streams(router.url, 1) as (stream,):
        for each in (engine, other):
            each.script.clear()  # one of them has the stream, the rest is answered at once
        traffic = Traffic(router.url)
        async with traffic.going():
            await traffic.more(20)
            assert "policy" not in traffic.reasons
            os.kill(*router.pids(HUB), signal.SIGKILL)
            await until(lambda: traffic.reasons.count("policy") >= 20)
            await until(lambda: traffic.reasons[-8:].count("policy") == 0)
        assert not traffic.broken
        by_ring = traffic.reasons.count("policy")
        await metric_is(router, "warmroute_worker_hub_lost_placements_total", by_ring)
        assert 1 <= router.said("the hub is lost: placing by the ring") <= 2  # once a worker, if it had any requests
        await leases_are(router, 1)
        for each in (engine, other):
            each.go_on.set()
        assert await rest_of(stream)
        await leases_are(router, 0)
        assert await metric(router, "warmroute_in_flight_requests") == 0


async def test_sigterm_drains(engine: FakeEngine) -> None:
    """A stream that runs ends well; meanwhile new connections are refused; then every process is gone, status 0."""
    engine.script.append(half_then_waits)
    async with command(engine) as router, streams(router.url, 1) as (stream,):
        router.process.send_signal(signal.SIGTERM)
        host, port = router.url.removeprefix("http://").split(":")
        await until(lambda: refused(host, int(port)))
        assert await open_leases(router) == 1  # the hub goes last
        engine.go_on.set()
        assert await rest_of(stream)
        assert await router.process.wait() == 0
        assert not [pid for pid in router.pids() if alive(pid)]
        assert len(router.pids()) == 3
        assert not list(router.folder.iterdir())


def refused(host: str, port: int) -> bool:
    """Whether nobody listens."""
    with socket.socket() as tried:
        return tried.connect_ex((host, port)) != 0


@pytest.mark.long
async def test_children_end_when_the_supervisor_is_killed(engine: FakeEngine) -> None:
    """kill -9 of the command leaves no process and no folder behind."""
    async with command(engine) as router:
        router.process.kill()
        await router.process.wait()
        await until(lambda: not [pid for pid in router.pids() if alive(pid)])
        assert not list(router.folder.iterdir())


@pytest.mark.long
async def test_one_scrape_has_the_requests_of_all_workers(engine: FakeEngine, other: FakeEngine) -> None:
    """Requests, placements and usage of both workers add up on either port; models and readiness are the hub's."""
    async with command(engine, other) as router:
        traffic = Traffic(router.url)
        for number in range(30):
            await traffic.once(f"{number}")
        async with aiohttp.ClientSession() as session:
            async with session.post(router.url + CHAT, json=body() | {"model": "x"}) as answer:
                assert answer.status == 404
            await metric_is(router, "warmroute_requests_total", 31)
            assert await metric(router, "warmroute_decisions_total") == 30
            assert await metric(router, "warmroute_cached_tokens_total") == 30 * 32
            async with session.get(router.url + "/metrics") as page:
                assert 'status="404"} 1.0' in await page.text()
        assert [row["id"] for row in (await json_of(router.url + "/v1/models"))["data"]] == ["m"]
        decisions = (await json_of(router.admin_url + "/admin/decisions?limit=500"))["decisions"]
        assert [len(row["candidates"]) for row in decisions if row["status"] == 200] == [2] * 30


async def test_two_workers_decide_as_one(engine: FakeEngine, other: FakeEngine) -> None:
    """The same conversations, each turn on a new connection: the same tokens are predicted to be cached by two workers
    as by one, but for what a worker's word on an answer comes too late for: two that knew nothing of each other would
    have half of it."""
    predicted = []
    for workers in (1, 2):
        async with command(engine, other, workers=workers) as router:
            traffic = Traffic(router.url)
            for turn in range(6):
                for conversation in range(6):
                    await traffic.once(f"{conversation}" + "".join(f"turn {n} " * 200 for n in range(turn)))
            await metric_is(router, "warmroute_requests_total", 36)
            tokens = await metric(router, "warmroute_prompt_tokens_total")
            predicted.append(await metric(router, "warmroute_predicted_cached_tokens_total") / tokens)
    assert predicted[0] == pytest.approx(predicted[1], abs=0.05)
    assert predicted[0] > 0.4


async def test_a_port_that_is_taken_is_said(engine: FakeEngine) -> None:
    """Exit status 1, one line that names the settings, and no process left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["-m", "router", "serve", "--workers", "2", "--replica", engine.url, "--admin-port", "0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--port", str(taken.getsockname()[1]), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"listen.port" in errors
    assert errors.count(b"\n") == 1
