"""One engine's address, with the free connections to it."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from functools import cache
from urllib.parse import urlsplit

from router.config.fd_limits import is_emfile
from router.config.tls import replica_context
from router.http.engine_connection import UpstreamConnection
from router.http.failures import ConnectFailed, NoDescriptor, ReplicaRemoved, describe
from router.http.outbox import Outbox
from router.http.read_fairness import ReadFairness


class ConnectionPool:
    """One engine's address and its free connections, with the last used on top."""

    __slots__ = (
        "_forgotten",
        "_free",
        "_host",
        "_loop",
        "_outbox",
        "_pace",
        "_port",
        "_tls",
        "host_line",
        "path",
        "served_s",
    )

    def __init__(self, url: str, outbox: Outbox, pace: ReadFairness, tls: Callable[[], ssl.SSLContext]) -> None:
        self._outbox, self._pace = outbox, pace
        self._loop = asyncio.get_running_loop()  # cached, because the call for the running loop takes a system call
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = tls if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._free: list[UpstreamConnection] = []
        self._forgotten = False
        self.served_s = float("-inf")  # time at which it last gave an answer without an error
        self.host_line = f"host: {parts.netloc}\r\n".encode("idna" if not parts.netloc.isascii() else "ascii")
        self.path = parts.path

    def free(self, since_s: float) -> UpstreamConnection | None:
        """Return a free connection that was used at this time or later, or None."""
        while self._free:
            connection = self._free.pop()
            if not connection.usable:
                continue
            if connection.idle_since_s >= since_s:
                return connection
            # The watchdog is late, for example because the machine was suspended: the engine may be closing this
            # connection.
            connection.abort()
        return None

    async def connect(self, timeout_s: float) -> UpstreamConnection:
        """Return a new connection. Raises ConnectFailed, ReplicaRemoved if the engine is forgotten in the meantime, and
        NoDescriptor if this process may open no further files."""
        loop, connection = self._loop, UpstreamConnection(self._give_back, self._outbox, self._pace)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: connection, self._host, self._port, ssl=self._tls() if self._tls else None
                )
        except asyncio.CancelledError:
            connection.connection_lost(None)  # uvloop closes the transport, and does not always report it
            raise
        except TimeoutError as late:
            raise ConnectFailed("timed out", timed_out=True) from late
        except OSError as error:
            if is_emfile(error):
                raise NoDescriptor("no file descriptor is left") from error
            raise ConnectFailed(describe(error), refused=_is_connection_refused(error)) from error
        if self._forgotten:
            connection.abort()
            raise ReplicaRemoved("the replica was removed")
        return connection

    def close_idle(self, before_s: float) -> None:
        """Close free connections that were last used before this time."""
        stale = [each for each in self._free if each.idle_since_s < before_s]
        self._free = [each for each in self._free if each.idle_since_s >= before_s and each.usable]
        for connection in stale:
            connection.abort()

    def forget(self) -> None:
        """Close the free connections of an engine that left, and the others when they are returned."""
        self._forgotten = True
        self.close_idle(float("inf"))

    def _give_back(self, connection: UpstreamConnection) -> None:
        if self._forgotten:
            connection.abort()
            return
        connection.idle_since_s = self._loop.time()
        self._free.append(connection)


@cache
def client_tls() -> ssl.SSLContext:
    """Return one TLS context for all engines: reading the machine's certificates takes 20 ms and a megabyte."""
    return replica_context("", "", "")


def _is_connection_refused(error: OSError) -> bool:
    """True if no process listens there. A name with several addresses counts as refused if each of them refused.
    Asyncio then raises an error with a message and no number."""
    if error.errno is not None:
        return error.errno == errno.ECONNREFUSED
    said = str(error)
    return said.startswith("Multiple exceptions") and said.count("[Errno") == said.count(
        f"[Errno {errno.ECONNREFUSED}]"
    )
