"""What a row of `python -m loadtest faults` works with: faulty replicas, a router before them, a client.

Every row starts its replicas and its router afresh, so that no row sees what another has done. Every request has a
number, which its prompt carries to the replica: so attempts are counted where they arrive, whatever the router says.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from loadtest.common import rivals
from loadtest.common.processes import LISTENING, Process, free_port, started, until_ready
from loadtest.common.report import Row
from loadtest.faults.upstream import answers

READY_EVERY_S, SETTLE_S = 0.05, 0.3
QUICK = ("--set", "listen.lame_duck_s=0")
LINE_BYTES_MAX = 64 << 20
_READY = re.compile(r"ready \S+ (\d+) control (\d+)")


async def until(what: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Wait until it is so, looking every 50 ms; whether it was within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not await what():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(READY_EVERY_S)
    return True


class NotForThis(Exception):
    """A row that cannot be run for this router; the message says why."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run, and by how much times may exceed what is promised."""

    full: bool = False
    slack: float = 1.0
    counts: bool = False
    """Whether only counts and orders are judged, as where other work takes the machine's time."""

    def of(self, small: int, full: int) -> int:
        """A count: the one of section 5 with --full, half of the small one with --counts."""
        return full if self.full else max(1, small // 2) if self.counts else small

    def patience_s(self, seconds_s: float) -> float:
        """Seconds to wait for what must come: as promised, or ten times as long, a minute at least, where no time is
        judged."""
        return max(60.0, 10 * seconds_s) if self.counts else seconds_s


@dataclass(slots=True)
class FaultAnswer:
    """What a client got."""

    id: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""
    """What broke it on the way; empty: it ended as HTTP has it."""
    began_s: float = 0.0
    first_s: float = 0.0
    """Time at which the first byte of the body came; 0: never."""
    ended_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it is a whole 200."""
        return self.status == 200 and not self.error

    @property
    def kind(self) -> str:
        """The name under which an answer is counted."""
        return self.error or str(self.status)


class Upstream:
    """One faulty replica: a process, and a line to its control port."""

    def __init__(self, name: str, folder: Path, model: str = answers.MODEL) -> None:
        self.name, self._folder, self._model = name, folder, model
        self.port = 0
        self._stack = AsyncExitStack()
        self._starts = 0
        self._writer: asyncio.StreamWriter | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, on the port that it had if it had one. Raises ProcessError."""
        self._starts += 1
        words = ["-m", "loadtest.faults.upstream.process", "--name", self.name, "--port", str(self.port)]
        words = [sys.executable, *words, "--model", self._model]
        process = await self._stack.enter_async_context(started(f"{self.name}.{self._starts}", words, self._folder))
        self.process = process
        (said,) = await process.said(_READY)
        self.port = int(said[1])
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(said[2]), limit=LINE_BYTES_MAX)

    async def kill(self) -> None:
        """SIGKILL it."""
        await self._hang_up()
        await self.process.kill()

    async def stop(self) -> None:
        """End the process."""
        await self._hang_up()
        await self._stack.aclose()

    async def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    async def tell(self, do: str, **fields: Any) -> Any:  # noqa: ANN401 - JSON of any kind
        """A command to its control port. Raises ConnectionError where it was killed."""
        if self._writer is None:
            raise ConnectionError(f"{self.name} is not there")
        self._writer.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        return json.loads(await self._reader.readline())

    async def seen(self) -> list[dict[str, Any]]:
        """Requests it got, oldest first, each with `at`: this replica."""
        return [{**record, "at": self.name} for record in await self.tell("seen")]


class Run:
    """A router before its replicas."""

    def __init__(self, upstreams: Sequence[Upstream], process: Process, port: int, http: aiohttp.ClientSession) -> None:
        self.upstreams, self.process, self.port, self.http = list(upstreams), process, port, http
        self.url = f"http://127.0.0.1:{port}"
        self._numbers = count(1)

    @property
    def admin_port(self) -> int:
        """The port of warmroute's admin listener; 0 if it is not known."""
        said = LISTENING.search(self.process.output.read_text(errors="replace"))
        return (urlsplit(said[2]).port or 0) if said else 0

    async def ask(
        self,
        *,
        api: str = "chat",
        stream: bool = True,
        timeout_s: float = 15.0,
        text: str = "",
        max_tokens: int = 8,
        headers: dict[str, str] | None = None,
        **marks: object,
    ) -> FaultAnswer:
        """One request; what goes wrong is in the answer. `marks` are for the replica (see
        faults/upstream/process.py)."""
        found = FaultAnswer(str(next(self._numbers)))
        marker = " ".join(f"{key}={value}" for key, value in {"id": found.id, **marks}.items())
        shape = answers.APIS[api]
        body = shape.request(f"[[{marker}]] {text or f'question {found.id}'}", stream=stream, tokens=max_tokens)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        found.began_s = time.monotonic()
        try:
            async with self.http.post(self.url + shape.path, json=body, timeout=limit, headers=headers) as response:
                found.status, found.headers = response.status, {k.lower(): v for k, v in response.headers.items()}
                async for piece in response.content.iter_any():
                    found.pieces_s.append(time.monotonic())
                    found.body += piece
        except TimeoutError:
            found.error = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            found.error = type(error).__name__
        found.ended_s = time.monotonic()
        found.first_s = found.pieces_s[0] if found.pieces_s else 0.0
        return found

    async def seen(self) -> list[dict[str, Any]]:
        """Requests that arrived at replicas which can be asked, by time."""
        found = [record for upstream in self.upstreams for record in await upstream.seen()]
        return sorted(found, key=lambda record: record["came_s"])

    async def all(self, do: str, **fields: Any) -> None:  # noqa: ANN401 - JSON of any kind
        """Send a command to all replicas."""
        for upstream in self.upstreams:
            await upstream.tell(do, **fields)

    async def page(self, path: str, *, admin: bool = False, timeout_s: float = 2.0) -> tuple[int, str]:
        """Status and text of a page; 0 if there was no answer."""
        url = f"http://127.0.0.1:{self.admin_port}" if admin else self.url
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.http.get(url + path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                return response.status, await response.text()
        return 0, ""


@dataclass(frozen=True, slots=True)
class Bench:
    """One router under test."""

    router: rivals.Rival
    scale: Scale
    folder: Path

    @property
    def ours(self) -> bool:
        """Whether it is warmroute."""
        return self.router.name == rivals.OURS

    def only_ours(self, why: str) -> None:
        """Raises NotForThis for anybody else."""
        if not self.ours:
            raise NotForThis(why)

    @asynccontextmanager
    async def running(
        self,
        replicas: int = 4,
        flags: Sequence[str] = (),
        urls: Sequence[str] = (),
        *,
        key: str = "",
        asked: bool = True,
    ) -> AsyncIterator[Run]:
        """Replicas and the router, once it answers; `flags` are for warmroute. With `urls` the replicas are somebody
        else's; `asked`: they take questions as ours do. Raises ProcessError, RivalError."""
        async with AsyncExitStack() as stack:
            upstreams = [Upstream(f"r{i}", self.folder) for i in range(0 if urls else replicas)]
            for upstream in upstreams:
                stack.push_async_callback(upstream.stop)
            await asyncio.gather(*(upstream.start() for upstream in upstreams))
            router = self.router
            if self.ours:
                router = rivals.Rival(router.name, (*router.command, *QUICK, *flags))
            port = free_port()
            words = router.words(port, list(urls) or [u.url for u in upstreams], self.folder)
            process = await stack.enter_async_context(started(router.name, words, self.folder))
            bearer = {"Authorization": f"Bearer {key}"} if key else None
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=bearer))
            run = Run(upstreams, process, port, http)
            await self._ready(run, asked=asked)
            yield run

    async def _ready(self, run: Run, *, asked: bool) -> None:
        """Wait until as many answers in a row as there are replicas are fine, then forget them."""

        async def missing() -> str:
            for _ in range(max(3, len(run.upstreams))):
                answer = await run.ask(timeout_s=5.0, stream=False) if asked else await self._listens(run)
                if not answer.ok:
                    return answer.kind
            return ""

        await until_ready(run.process, missing, READY_EVERY_S)
        await asyncio.sleep(SETTLE_S)
        await run.all("clear")

    async def _listens(self, run: Run) -> FaultAnswer:
        status, _ = await run.page("/readyz" if self.ours else "/health")
        return FaultAnswer("", status=status)


async def at_rate(per_s: float, requests: int, ask: Callable[[int], Awaitable[FaultAnswer]]) -> list[FaultAnswer]:
    """The answers to so many requests, in order; requests begin at this rate, whatever was answered."""
    began_s = time.monotonic()
    tasks = []
    for i in range(requests):
        await asyncio.sleep(max(0.0, began_s + i / per_s - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask(i)))
    return list(await asyncio.gather(*tasks))


async def at_most(concurrency: int, requests: int, ask: Callable[[int], Awaitable[FaultAnswer]]) -> list[FaultAnswer]:
    """The answers to so many requests, in order; at most `concurrency` are in flight at a time."""
    numbers, found = iter(range(requests)), list[tuple[int, FaultAnswer]]()

    async def lane() -> None:
        for i in numbers:
            found.append((i, await ask(i)))

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


def kinds(found: Sequence[FaultAnswer]) -> dict[str, int]:
    """What was not fine, counted by kind."""
    counted: dict[str, int] = {}
    for answer in found:
        if not answer.ok:
            counted[answer.kind] = counted.get(answer.kind, 0) + 1
    return counted


def row(
    goal: int,
    case: str,
    expected: float,
    got: float | None,
    *,
    ok: bool | None = None,
    slack: float | None = None,
    found: Sequence[FaultAnswer] = (),
    note: str = "",
) -> Row:
    """A row that is met when `got` is at most what is expected, unless `ok` says; with a slack it is a time, which
    may be so many times that."""
    if ok is None:
        ok = got is not None and got <= expected * (slack or 1.0)
    errors = kinds(found)
    return Row(
        goal=str(goal),
        case=case,
        expected=expected,
        got=None if got is None else round(got, 3),
        ok=ok,
        timed=None if slack is None else True,
        requests=len(found) or None,
        errors=sum(errors.values()) if found else None,
        errors_by_kind=errors,
        note=note or None,
    )


def failures(goal: int, case: str, found: Sequence[FaultAnswer], *, note: str = "") -> Row:
    """A row of how many of these answers were not fine, which none may be."""
    return row(goal, case, 0, sum(not answer.ok for answer in found), found=found, note=note)
