"""Environment of a row of `python -m loadtest faults`: faulty replicas, a router in front of them, and a client.

Every row starts new replicas and a new router, so rows cannot affect each other. Every request has a number, and its
prompt carries the number to the replica. So attempts are counted at the replica, independent of the router's report.
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
from loadtest.common.processes import LISTENING, Process, free_port, run_process, wait_until_ready
from loadtest.common.report import Row
from loadtest.faults.upstream import answers

READY_EVERY_S, SETTLE_S = 0.05, 0.3
QUICK = ("--set", "listen.lame_duck_s=0")
LINE_BYTES_MAX = 64 << 20
_READY = re.compile(r"ready \S+ (\d+) control (\d+)")


async def poll_until(what: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Poll the condition every 50 ms until it is true. Returns False if it is not true within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not await what():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(READY_EVERY_S)
    return True


class CaseNotApplicable(Exception):
    """A row that cannot be run for this router; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run, and the factor by which times may exceed the promised ones."""

    full: bool = False
    slack: float = 1.0
    counts: bool = False
    """True if only counts and orders are judged, because other work shares the machine."""

    def pick_count(self, small: int, full: int) -> int:
        """Return a count: the one of section 5 with --full, half of the small one with --counts."""
        return full if self.full else max(1, small // 2) if self.counts else small

    def patience_s(self, seconds_s: float) -> float:
        """Return the seconds to wait for an expected event. If times are not judged: ten times `seconds_s`, at least a
        minute."""
        return max(60.0, 10 * seconds_s) if self.counts else seconds_s


@dataclass(slots=True)
class FaultAnswer:
    """A response as the client received it."""

    id: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""
    """Error that interrupted it; empty if it ended as required by HTTP."""
    began_s: float = 0.0
    first_s: float = 0.0
    """Time of the first byte of the body; 0: never."""
    ended_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True for a complete response with status 200."""
        return self.status == 200 and not self.error

    @property
    def kind(self) -> str:
        """The name under which an answer is counted."""
        return self.error or str(self.status)


class Upstream:
    """One faulty replica: a process, and a connection to its control port."""

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
        """Start the process, on its previous port if it had one. Raises ProcessError."""
        self._starts += 1
        words = ["-m", "loadtest.faults.upstream.process", "--name", self.name, "--port", str(self.port)]
        words = [sys.executable, *words, "--model", self._model]
        process = await self._stack.enter_async_context(run_process(f"{self.name}.{self._starts}", words, self._folder))
        self.process = process
        (said,) = await process.wait_for_output(_READY)
        self.port = int(said[1])
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(said[2]), limit=LINE_BYTES_MAX)

    async def kill(self) -> None:
        """Send SIGKILL to the process."""
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
        """Send a command to the control port. Raises ConnectionError if the process was killed."""
        if self._writer is None:
            raise ConnectionError(f"{self.name} is not there")
        self._writer.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        return json.loads(await self._reader.readline())

    async def fetch_requests(self) -> list[dict[str, Any]]:
        """Return the received requests, oldest first, each with `at`: this replica."""
        return [{**record, "at": self.name} for record in await self.tell("seen")]


class Run:
    """A router in front of its replicas."""

    def __init__(self, upstreams: Sequence[Upstream], process: Process, port: int, http: aiohttp.ClientSession) -> None:
        self.upstreams, self.process, self.port, self.http = list(upstreams), process, port, http
        self.url = f"http://127.0.0.1:{port}"
        self._numbers = count(1)

    @property
    def admin_port(self) -> int:
        """The port of warmroute's admin listener; 0 if it is unknown."""
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
        """Send one request and return its response, or its error. `marks` are for the replica (see
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

    async def fetch_requests(self) -> list[dict[str, Any]]:
        """Return the requests that arrived at replicas with a control connection, by time."""
        found = [record for upstream in self.upstreams for record in await upstream.fetch_requests()]
        return sorted(found, key=lambda record: record["came_s"])

    async def send_to_all(self, do: str, **fields: Any) -> None:  # noqa: ANN401 - JSON of any kind
        """Send a command to all replicas."""
        for upstream in self.upstreams:
            await upstream.tell(do, **fields)

    async def page(self, path: str, *, admin: bool = False, timeout_s: float = 2.0) -> tuple[int, str]:
        """Return status and text of a page; status 0 if there was no response."""
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
        """True for warmroute."""
        return self.router.name == rivals.OURS

    def only_ours(self, why: str) -> None:
        """Raise CaseNotApplicable for any other router."""
        if not self.ours:
            raise CaseNotApplicable(why)

    @asynccontextmanager
    async def run_cluster(
        self,
        replicas: int = 4,
        flags: Sequence[str] = (),
        urls: Sequence[str] = (),
        *,
        key: str = "",
        asked: bool = True,
    ) -> AsyncIterator[Run]:
        """Run replicas and the router, and yield once the router answers. Raises ProcessError, RivalError.

        - `flags`: for warmroute.
        - `urls`: external replicas to use instead.
        - `asked`: True if they accept the same requests as our faulty replicas.
        """
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
            process = await stack.enter_async_context(run_process(router.name, words, self.folder))
            bearer = {"Authorization": f"Bearer {key}"} if key else None
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=bearer))
            run = Run(upstreams, process, port, http)
            await self._ready(run, asked=asked)
            yield run

    async def _ready(self, run: Run, *, asked: bool) -> None:
        """Wait for as many consecutive successful responses as there are replicas, then clear their records."""

        async def missing() -> str:
            for _ in range(max(3, len(run.upstreams))):
                answer = await run.ask(timeout_s=5.0, stream=False) if asked else await self._listens(run)
                if not answer.ok:
                    return answer.kind
            return ""

        await wait_until_ready(run.process, missing, READY_EVERY_S)
        await asyncio.sleep(SETTLE_S)
        await run.send_to_all("clear")

    async def _listens(self, run: Run) -> FaultAnswer:
        status, _ = await run.page("/readyz" if self.ours else "/health")
        return FaultAnswer("", status=status)


async def send_at_rate(per_s: float, requests: int, ask: Callable[[int], Awaitable[FaultAnswer]]) -> list[FaultAnswer]:
    """Return the responses to `requests` requests, in order. Requests start at this rate, independent of responses."""
    began_s = time.monotonic()
    tasks = []
    for i in range(requests):
        await asyncio.sleep(max(0.0, began_s + i / per_s - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask(i)))
    return list(await asyncio.gather(*tasks))


async def send_concurrently(
    concurrency: int, requests: int, ask: Callable[[int], Awaitable[FaultAnswer]]
) -> list[FaultAnswer]:
    """Return the responses to `requests` requests, in order; at most `concurrency` are in flight at a time."""
    numbers, found = iter(range(requests)), list[tuple[int, FaultAnswer]]()

    async def lane() -> None:
        for i in numbers:
            found.append((i, await ask(i)))

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    return [answer for _, answer in sorted(found, key=lambda pair: pair[0])]


def kinds(found: Sequence[FaultAnswer]) -> dict[str, int]:
    """Return the number of failed responses by kind."""
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
    """Return a row that is met if `got` is at most `expected`, unless `ok` overrides this.

    `slack`: the row is a time, which may exceed `expected` by this factor.
    """
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
    """Return a row with the number of failed responses, which must be 0."""
    return row(goal, case, 0, sum(not answer.ok for answer in found), found=found, note=note)
