"""Routers as processes, each with its own network to the store and its own wall clock, and a store with a replica."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from loadtest.common import rivals
from loadtest.common.networks import Network
from loadtest.common.processes import LISTENING, Process, ProcessError, free_port, run_process
from loadtest.common.stores import NO_PROGRAM, RunningStore, programs
from loadtest.faults.bench import poll_until

SETTINGS = {
    "listen.lame_duck_s": 0,
    "probe.interval_s": 0.5,
    "upstream.retries_max": 2,
    "log.level": "info",
}
FOLLOWS_S = 20.0  # time limit for a replica of a store to receive all data
# Only the wall clock is shifted: the monotonic clock cannot be set.
_SKEWED = (
    "import sys,time; o=float(sys.argv.pop(1)); t=time.time; time.time=lambda: t()+o; "
    "from router.cli.main import main; sys.exit(main())"
)


class HistoryRouter:
    """One router: a process that is restarted after it was killed, on the same ports."""

    def __init__(self, number: int, folder: Path, words: Sequence[str], skew_s: float, network: Network) -> None:
        self.number, self.network, self.port = number, network, free_port()
        self._folder, self._admin_port = folder, free_port()
        self._words = [*rivals.interpreter(), "-c", _SKEWED, f"{skew_s:g}", "serve", "--host", "127.0.0.1"]
        self._words += ["--port", str(self.port), "--admin-port", str(self._admin_port), *words]
        self._words += ["--set", f"peering.redis_url=redis://127.0.0.1:{network.port}"]
        self._stack = AsyncExitStack()
        self._starts = 0
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """The base URL for operators."""
        return f"http://127.0.0.1:{self._admin_port}"

    async def start(self) -> None:
        """Start the process, and wait until it listens. Raises ProcessError."""
        self._starts += 1
        name = f"router{self.number}.{self._starts}"
        self._process = await self._stack.enter_async_context(run_process(name, self._words, self._folder))
        await self._process.wait_for_output(LISTENING)

    async def kill(self) -> None:
        """Kill the process, which loses its state."""
        if self._process is not None:
            await self._process.kill()

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal: SIGSTOP, SIGCONT."""
        if self._process is not None and self._process.running:
            os.kill(self._process.pid, number)

    async def close(self) -> None:
        """End the router permanently."""
        self.send(signal.SIGCONT)
        await self._stack.aclose()

    def logs(self, pattern: re.Pattern[bytes]) -> list[bytes]:
        """Return all matches in the output of all its processes."""
        files = sorted(self._folder.glob(f"router{self.number}.*"))
        return [found for file in files if file.is_file() for found in pattern.findall(file.read_bytes())]


class Stores:
    """A store and its replica, which takes over if the store fails."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder, self._count = stack, folder, 0
        self.leads: RunningStore
        self._follows: RunningStore

    async def open(self) -> None:
        """Start both. Raises ProcessError."""
        self.leads = await self._new()
        await self._follow()

    async def fail_over(self, networks: Sequence[Network]) -> None:
        """Kill the store, promote its replica, and start a new replica."""
        await self.leads.kill()
        self.leads = self._follows
        await self.leads.follow(None)
        for network in networks:
            await network.lead(self.leads.port)
        await self._follow()

    async def refollow(self) -> None:
        """Wait until the replica follows a store that was restarted empty."""
        if not await poll_until(self._follows.follows, FOLLOWS_S):
            raise ProcessError("the replica of the store does not follow it again")

    async def _follow(self) -> None:
        self._follows = await self._new()
        await self._follows.follow(self.leads.port)
        if not await poll_until(self._follows.follows, FOLLOWS_S):
            raise ProcessError("a replica of the store does not follow it")

    async def _new(self) -> RunningStore:
        self._count += 1
        folder = self._folder / f"store{self._count}"
        folder.mkdir()
        made = RunningStore(programs()[0], free_port(), folder)
        await made.start()
        self._stack.push_async_callback(_end, made)
        return made


async def _end(store: RunningStore) -> None:
    store.thaw()
    await store.kill()
    store.close()


@asynccontextmanager
async def fleet(
    folder: Path, engines: Sequence[str], keys_file: Path, skews_s: Sequence[float]
) -> AsyncIterator[tuple[list[HistoryRouter], Stores]]:
    """Run a router for each wall clock offset in `skews_s`, and their stores. Raises ProcessError."""
    if not programs():
        raise ProcessError(NO_PROGRAM)
    words = [word for url in engines for word in ("--replica", url)]
    settings = SETTINGS | {"auth.keys_file": keys_file, "peering.expected_routers": len(skews_s)}
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    async with AsyncExitStack() as stack:
        stores = Stores(stack, folder)
        await stores.open()
        routers = []
        for number, skew_s in enumerate(skews_s):
            network = await stack.enter_async_context(Network(stores.leads.port))
            router = HistoryRouter(number, folder, words, skew_s, network)
            stack.push_async_callback(router.close)
            await router.start()
            routers.append(router)
        yield routers, stores
