"""Resource use of a process and its descendants: CPU time between two moments, and memory.

CPU time is the scheduler's count for every thread of the process and its descendants, in nanoseconds
(`/proc/PID/task/TID/schedstat`, proc(5)). It is user and system time together, without the 10 ms steps of
`/proc/PID/stat`. Threads that have ended are missing in `schedstat` but not in `stat`, so if `stat` reports clearly
more, its value is used. The CPU time of a process that ended between the two moments is lost. `Spent.ended` counts such
processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROCESSES_MAX = 1_000
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU of a process and its descendants up to a moment, in seconds."""

    scheduled_s: dict[int, float]
    """CPU time by process id, of threads that still run."""
    ticked_s: dict[int, float]
    """CPU time by process id, of all threads including ended ones, in steps of 10 ms."""


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU between two moments."""

    cpu_s: float
    ended: int
    """Processes that ended between the moments. Their CPU time is missing."""


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants that still run."""
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


def usage(pid: int) -> CpuUsage:
    """Return the CPU time of a process and its descendants so far."""
    scheduled, ticked = {}, {}
    for each in tree(pid):
        try:
            stat = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticked[each] = (int(stat[11]) + int(stat[12])) * TICK_S
            scheduled[each] = sum(_scheduled_s(thread) for thread in Path(f"/proc/{each}/task").iterdir())
        except OSError:
            continue
    return CpuUsage(scheduled, ticked)


def _scheduled_s(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):  # the thread ended, or the kernel has no schedstat: `stat` is used
        return 0.0


def subtract_usage(before: CpuUsage, after: CpuUsage) -> Spent:
    """Return the CPU time between two usages of one process."""
    cpu_s = 0.0
    for pid, scheduled_s in after.scheduled_s.items():
        fine_s = scheduled_s - before.scheduled_s.get(pid, 0.0)
        coarse_s = after.ticked_s.get(pid, 0.0) - before.ticked_s.get(pid, 0.0)
        cpu_s += coarse_s if coarse_s - fine_s > 3 * TICK_S + 0.02 * coarse_s else fine_s
    return Spent(cpu_s, len(before.ticked_s.keys() - after.ticked_s.keys()))


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process and its descendants in MB.

    A shared page counts once for each process.
    """
    pages = 0
    for each in tree(pid):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * PAGE_BYTES / 1e6
