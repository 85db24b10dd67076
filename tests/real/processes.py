"""Start a server as a process tree, wait until it serves, end the whole tree: vLLM and the router alike.

Theory: a server is put into a process group of its own, so that one signal by number reaches its children
too (vLLM leaves its engine core and tracker behind when only its first process is killed), and its output
goes to a file, so that no full pipe can stop it and a failure can show the end of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

POLL_S = 0.05
LOG_TAIL_LINES = 40
LOG_LINE_CHARS_MAX = 400
GROUP_END_S = 20.0


class NotServing(RuntimeError):
    """A process ended, or did not become ready in time; the message shows the end of its log."""


def wait_until(what: str, ready: Callable[[], bool], timeout_s: float) -> float:
    """Poll until `ready` and return the seconds it took; TimeoutError naming `what` after `timeout_s`."""
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - started


def group_members(group: int) -> Iterator[tuple[Path, str]]:
    """The /proc folders of a process group's members that are not zombies, with their names."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            before, _, after = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue
        # proc(5): after the name come state, parent, process group.
        fields = after.split()
        if int(fields[2]) == group and fields[0] not in "ZX":
            yield entry, before.partition("(")[2]


def group_alive(group: int) -> bool:
    """Whether a process group still has a member that is not a zombie."""
    return any(True for _ in group_members(group))


class Server:
    """A running process group with a log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self.log = log
        # Appended to: a restarted server's first life stays readable.
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.group = self.process.pid

    def log_text(self) -> str:
        """All it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last LOG_TAIL_LINES lines it has written."""
        lines = [line[:LOG_LINE_CHARS_MAX] for line in self.log_text().splitlines()[-LOG_TAIL_LINES:]]
        return "\n".join([f"--- {self.name}: {self.log}", *lines, "---"])

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> float:
        """Wait until `ready`, return the seconds it took; NotServing if it ends first or is late."""

        def ready_or_dead() -> bool:
            code = self.process.poll()
            if code is not None:
                raise NotServing(f"{self.name} ended with {code} before it served\n{self.log_tail()}")
            return ready()

        try:
            return wait_until(self.name, ready_or_dead, timeout_s)
        except TimeoutError as late:
            raise NotServing(f"{late}\n{self.log_tail()}") from late

    def deprioritize(self, name: str) -> None:
        """Have its processes whose name begins so compute only when nobody else wants to. vLLM's steps without a pause,
        also while blocks wait to be fetched: two of them on two cores kept the threads that serve them, the router and
        clients waiting for seconds."""
        for entry, comm in group_members(self.group):
            if not comm.startswith(name):
                continue
            for thread in (entry / "task").iterdir():
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

    def terminate(self) -> None:
        """Ask the first process to stop, as a supervisor would, and do not wait."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole tree at once and wait until nothing of it is left; harmless when it has ended."""
        if group_alive(self.group):
            os.killpg(self.group, signal.SIGKILL)
        self.process.wait(timeout=GROUP_END_S)
        wait_until(f"end of {self.name}", lambda: not group_alive(self.group), GROUP_END_S)

    def stop(self, grace_s: float) -> int | None:
        """SIGTERM, `grace_s` to go by itself, then SIGKILL to the tree; the exit code, None without one."""
        if self.process.poll() is None:
            self.terminate()
        try:
            code: int | None = self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return code
