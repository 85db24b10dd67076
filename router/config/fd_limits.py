"""File descriptors: the limit of this process, the part of it for clients, and the log line if none is left.

A client's connection may need a second descriptor, for the connection to its engine, so clients get half of the limit
after a reserve. If descriptors run out in spite of this, it is a failure of the router, and is never attributed to a
replica.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import socket
import time
from collections.abc import Callable

from router.config.schema import ListenSettings

log = logging.getLogger(__name__)

RESERVE = 64  # standard streams, listeners, files, event streams, and connections of scrapes and admin pages
A_REPLICA = 4  # descriptors for a replica's probes and events
REPLICAS_FOUND = 64  # assumed number of replicas if discovery finds them
LIMITS_TRIED = (1 << 20, 10_240)  # tried without a hard limit: Linux's default, and the maximum of macOS
SAY_S = 60.0  # seconds between two log lines about a lack of descriptors
HOW = "LimitNOFILE= of the systemd service, `ulimit -n`, or the limit of the container's runtime"

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_NUMBERS = re.compile(r"\[Errno (\d+)\]")


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, for this process and those that it starts. Returns the limit
    that is in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard,) if hard != resource.RLIM_INFINITY else LIMITS_TRIED:
        if soft != resource.RLIM_INFINITY and soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return wanted
    return soft


def connections_within(wanted: int, replicas: int, files_max: int | None = None) -> int:
    """Return the number of client connections that may be open, at most `wanted`, in addition to `replicas` replicas
    (0: discovery finds them). `files_max`: None stands for the limit that is in force."""
    if files_max is None:
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files_max == resource.RLIM_INFINITY:
            return wanted
    reserve = min(files_max // 2, RESERVE + A_REPLICA * (replicas or REPLICAS_FOUND))
    return max(1, min(wanted, (files_max - reserve) // 2))


def log_connection_limit(wanted: int, allowed: int) -> None:
    """Log once, at the start, that fewer connections are accepted than the settings allow."""
    if allowed >= wanted:
        return
    fields = {
        "connections_max": allowed,
        "wanted": wanted,
        "files_max": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "raise": HOW,
    }
    log.log(
        logging.INFO if wanted == ListenSettings().connections_max else logging.WARNING,  # a default is not a request
        "fewer client connections are accepted than configured: the limit of open files is too low",
        extra={"event": "connections_lowered", "fields": fields},
    )


def is_emfile(error: BaseException) -> bool:
    """True if an error of connecting, accepting or opening was caused by a lack of descriptors."""
    cause = getattr(error, "os_error", None) or error
    # a name cannot be looked up without a socket, and the error has no further details
    if isinstance(cause, socket.gaierror):
        return not can_open()
    if not isinstance(cause, OSError):
        return False
    if cause.errno is not None:
        return cause.errno in _NONE_LEFT
    return any(int(number) in _NONE_LEFT for number in _NUMBERS.findall(str(cause)))  # one for each address of a name


def can_open() -> bool:
    """True if a descriptor is left; takes about 10 us."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _NONE_LEFT
    return True


class FdExhaustion:
    """Logs that no descriptor is left, at most once in SAY_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = float("-inf")

    def report_shortage(self, where: str) -> None:
        """Log that no descriptor was left for this purpose."""
        now_s = self._clock()
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error(
            "no file descriptor is left: requests are rejected until one is free",
            extra={"event": "descriptors_gone", "fields": {"for": where, "files_max": limit, "raise": HOW}},
        )

    def look(self) -> None:
        """Check if a descriptor is left. No error reports clients that the kernel could not hand over."""
        if not can_open():
            self.report_shortage("a client connection")


shortage = FdExhaustion()  # of this process: one log line for all that lacks a descriptor
