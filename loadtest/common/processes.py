"""Processes that are measured: started in a group of their own, asked what they spent, and always stopped.

CPU is what the scheduler counted for every thread of a process and its descendants, in nanoseconds
(`/proc/PID/task/TID/schedstat`, proc(5)): user and system time together, without the 10 ms steps of `/proc/PID/stat`.
Threads that ended are not in it; `stat` has those as well, so where it says clearly more it is believed instead.
What a process spent before it ended inside a window is lost; `spent` says that such a one was there.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT_S = 2.0
PROCESSES_MAX = 1_000
LAST_WORDS_BYTES = 2_000
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessError(Exception):
    """A process did not do what it was started for; the message carries the last of what it wrote."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU of a process and its descendants up to a moment, in seconds."""

    scheduled_s: dict[int, float]
    """By process: what its present threads spent."""
    ticked_s: dict[int, float]
    """By process: what it spent, with threads that ended, to 10 ms."""


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU between two moments."""

    cpu_s: float
    ended: int
    """Processes that ended in between; what they spent is missing."""


def tree(pid: int) -> list[int]:
    """A process and its descendants, those that are still there."""
    found, open_ = list[int](), [pid]
    while open_ and len(found) < PROCESSES_MAX:
        each = open_.pop()
        try:
            threads = list(Path(f"/proc/{each}/task").iterdir())
            children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            continue
        found.append(each)
        open_ += children
    return found


def usage(pid: int) -> Usage:
    """What a process and its descendants spent so far."""
    scheduled, ticked = {}, {}
    for each in tree(pid):
        try:
            stat = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticked[each] = (int(stat[11]) + int(stat[12])) * TICK_S
            scheduled[each] = sum(_scheduled_s(thread) for thread in Path(f"/proc/{each}/task").iterdir())
        except OSError:
            continue
    return Usage(scheduled, ticked)


def _scheduled_s(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):  # it ended, or the kernel was built without: `stat` has it
        return 0.0


def spent(before: Usage, after: Usage) -> Spent:
    """What was spent between two moments."""
    cpu_s = 0.0
    for pid, scheduled_s in after.scheduled_s.items():
        fine_s = scheduled_s - before.scheduled_s.get(pid, 0.0)
        coarse_s = after.ticked_s.get(pid, 0.0) - before.ticked_s.get(pid, 0.0)
        cpu_s += coarse_s if coarse_s - fine_s > 3 * TICK_S + 0.02 * coarse_s else fine_s
    return Spent(cpu_s, len(before.ticked_s.keys() - after.ticked_s.keys()))


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its descendants; pages that they share count for each."""
    pages = 0
    for each in tree(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * PAGE_BYTES / 1e6


@dataclass(slots=True)
class Process:
    """One that runs."""

    name: str
    pid: int
    output: Path
    _process: asyncio.subprocess.Process

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def error(self, what: str) -> ProcessError:
        """What happened to it, with the last of what it wrote."""
        try:
            said = self.output.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
        except OSError:
            said = ""
        return ProcessError(f"{self.name} {what}" + (f":\n{said}" if said else ""))

    async def stop(self) -> None:
        """SIGTERM to its group, and SIGKILL to whoever does not follow."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL to its group, with nothing said before."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def ended(self) -> int:
        """Wait until it ends. Returns its exit status, below 0 for the signal that ended it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to its group."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@asynccontextmanager
async def started(name: str, command: Sequence[str], folder: Path) -> AsyncIterator[Process]:
    """A command in a group of its own, what it writes in a file of the folder; stopped however the block ends.

    Raises ProcessError if there is no such command.
    """
    output = folder / f"{name}.log"
    with output.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"{name} cannot be started: {error}") from error
    running = Process(name, process.pid, output, process)
    try:
        yield running
    finally:
        await asyncio.shield(running.stop())
