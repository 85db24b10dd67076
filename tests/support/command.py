"""`warmroute serve` as a command, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ECONNRESET
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.fakes import FakeEngine
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


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
        """End it, as by `kill -9`."""
        self.process.kill()
        await self.process.wait()

    def said(self, message: str) -> int:
        """How often."""
        return sum(line["message"] == message for line in self.lines)


@asynccontextmanager
async def command(
    *engines: FakeEngine | str, config: Path | None = None, module: str = "router", **more: str
) -> AsyncIterator[Command]:
    """The command in front of these engines, ready; killed if it is still there at the end.
    `module` is another one that runs the router's."""
    arguments = ["-m", module, "serve", "--port", "0", "--admin-port", "0"]
    arguments += ["--config", str(config)] if config else []
    base = {"probe.interval_s": "0.2", "log.requests": "false", "listen.lame_duck_s": "0"}
    base |= {"probe.timeout_s": "60", "upstream.connect_timeout_s": "60"}  # no machine is as busy as that
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
        async with aiohttp.ClientSession() as session:
            while (await session.get(f"{running.admin_url}/readyz")).status != 200:
                await asyncio.sleep(0.02)
        yield running
    finally:
        if process.returncode is None:
            process.kill()
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
            except aiohttp.ClientError as error:
                # A connection that the kernel had accepted may be reset before `connect` returns, which is no refusal.
                if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno != ECONNRESET:
                    raise
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


async def metric(command: Command, name: str) -> float:
    """Sum of a metric's series, by one scrape."""
    async with aiohttp.ClientSession() as session, session.get(command.admin_url + "/metrics") as response:
        rows = (line.rpartition(" ") for line in (await response.text()).splitlines())
        return sum(float(value) for series, _, value in rows if series.partition("{")[0] == name)


async def rest_of(response: aiohttp.ClientResponse) -> bool:
    """Whether the stream ended as it should."""
    try:
        return b"[DONE]" in await response.content.read()
    except aiohttp.ClientError:
        return False
