"""Call one engine, and say of each failure what a retry may do.

Engines send status and headers before they prefill, so an answer only counts as begun with the first event of its
body: `call` returns then, and everything before is a failure that another replica may make good. Generation has no
side effects; what a retry costs is GPU time, which is why timeouts are not retried by default.

One watchdog for all calls replaces timers per call and per chunk. It ends calls that are silent for too long, and
those still silent on a replica that is known to be lost (vLLM 0.32 on SIGTERM closes its listener and leaves
requests in flight without a byte or a close).
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from urllib.parse import urlsplit

from router.core.dialects.sglang import with_rank
from router.core.facts import Replica
from router.exchange import Answer, BrokeMidway, Connection, Failure, say
from router.outbox import Outbox
from router.tls import replica_context

WATCH_INTERVAL_S = 0.5
SHUTTING_DOWN = (b"after shutdown", b"EngineCore encountered an issue", b"EngineDeadError")  # vLLM 0.32
STATUS_RETRIED = (502, 503)
LOST_SILENCE_S = 2.0  # a begun answer this silent, on a replica where nobody listens, will not go on
# vLLM 0.32 (entrypoints/generate/base/serving.py) and SGLang 0.5.23 (entrypoints/openai/serving_base.py) read it.
RANK_HEADER = "X-data-parallel-rank"


class ConnectFailed(Failure):
    """Nothing was sent. `refused`: nobody listens there, which is proof that the engine is gone."""

    kind = "connect"

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class ReplicaLost(Failure):
    """The request was silent, and its replica now refuses connections."""

    kind = "lost"


class TimedOut(Failure):
    """No byte of the body in time."""

    kind = "timeout"
    retry = False


class EngineFailed(Failure):
    """The engine answered that it cannot serve. `answer` is what it said, for when nobody else can either."""

    kind = "engine"

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class Server:
    """One engine's address and the free connections to it, those used last on top."""

    __slots__ = ("_forgotten", "_free", "_host", "_outbox", "_port", "_tls", "host_line", "path")

    def __init__(self, url: str, outbox: Outbox, tls: Callable[[], ssl.SSLContext]) -> None:
        self._outbox = outbox
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = tls if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._free: list[Connection] = []
        self._forgotten = False
        self.host_line = f"host: {parts.netloc}\r\n".encode("idna" if not parts.netloc.isascii() else "ascii")
        self.path = parts.path

    def free(self) -> Connection | None:
        """A connection that waits for a request, if there is one."""
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                return connection
        return None

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection. Raises ConnectFailed."""
        loop, connection = asyncio.get_running_loop(), Connection(self._give_back, self._outbox)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: connection, self._host, self._port, ssl=self._tls() if self._tls else None
                )
        except asyncio.CancelledError:
            connection.connection_lost(None)  # uvloop closes it, and does not always say so
            raise
        except TimeoutError as error:
            raise ConnectFailed("timed out", refused=False) from error
        except OSError as error:
            raise ConnectFailed(say(error), refused=_refused(error)) from error
        return connection

    def close_idle(self, before_s: float) -> None:
        """Close connections that wait since before this time."""
        stale = [each for each in self._free if each.idle_since_s < before_s]
        self._free = [each for each in self._free if each.idle_since_s >= before_s and each.usable]
        for connection in stale:
            connection.abort()

    def forget(self) -> None:
        """Close free connections, and those in use when they are given back."""
        self._forgotten = True
        self.close_idle(float("inf"))

    def _give_back(self, connection: Connection) -> None:
        if self._forgotten:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._free.append(connection)


class Upstream:
    """Connections to all engines."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        held_bytes_max: int,
        outbox: Outbox | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Without an `outbox` it has one of its own; without `tls` replicas must be known to the machine. `tls` may be
        replaced by another: connections to come have that."""
        self.tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keepalive_s = keepalive_s
        self._held_bytes_max = held_bytes_max
        self._answers: set[Answer] = set()
        self._servers: dict[str, Server] = {}  # by replica
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox or Outbox(self._loop)

    async def close(self) -> None:
        """Close all connections."""
        for answer in list(self._answers):
            answer.close()
        for server in self._servers.values():
            server.close_idle(float("inf"))
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def forget(self, replica: str) -> None:
        """The replica left: its free connections are closed."""
        server = self._servers.pop(replica, None)
        if server is not None:
            server.forget()

    async def watch(self) -> None:
        """The watchdog: runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s = self._loop.time()
            for server in self._servers.values():
                server.close_idle(now_s - self._keepalive_s)
            for answer in list(self._answers):
                limit_s = self._idle_timeout_s if answer.begun else self._first_byte_timeout_s
                if now_s - answer.silent_since(now_s) > limit_s:
                    answer.fail(BrokeMidway("no byte in time") if answer.begun else TimedOut("no answer in time"))

    def lost(self, replica: str) -> None:
        """The replica refuses connections: its silent requests will never be answered, nor those of any other rank
        of its server."""
        server, now_s = Replica(replica).url, self._loop.time()
        for answer in list(self._answers):
            if Replica(answer.replica).url != server:
                continue
            if not answer.begun:
                answer.fail(ReplicaLost("its replica is gone"))
            elif now_s - answer.silent_since(now_s) > LOST_SILENCE_S:
                answer.fail(BrokeMidway("its replica is gone"))

    async def call(
        self, replica: str, method: str, target: str, lines: Sequence[bytes], body: bytes, *, hold: bool
    ) -> Answer:
        """Send a request, and return when its answer has begun; with `hold`, when it is whole or too long to hold.

        `target` is path and query, as the client encoded them; `lines` are header lines without those that belong to
        a connection. `done` must be called with what this returns. Raises a Failure.
        """
        server = self._servers.get(replica)
        if server is None:
            server = self._servers[replica] = Server(Replica(replica).url, self._outbox, lambda: self.tls or _tls())
        rank = Replica(replica).rank if "#" in replica else None
        if rank is not None:
            lines, body = _for_rank(rank, target, lines, body)
        head = b"".join(
            (f"{method} {server.path}{target} HTTP/1.1\r\n".encode("latin-1"), server.host_line, *lines,
             b"content-length: %d\r\n\r\n" % len(body))
        )  # fmt: skip
        answer = Answer(replica, self._loop, hold=hold, hold_bytes_max=self._held_bytes_max)
        self._answers.add(answer)
        try:
            connection = server.free() or await server.connect(self._connect_timeout_s)
            await answer.begin(connection, head, body)
        except BaseException:
            self.done(answer)
            raise
        if answer.status in STATUS_RETRIED or (
            answer.status == 500 and any(mark in answer.head for mark in SHUTTING_DOWN)
        ):
            raise EngineFailed(answer)
        return answer

    def done(self, answer: Answer) -> None:
        """The answer was read, or nobody wants it any more."""
        self._answers.discard(answer)
        answer.close()


@cache
def _tls() -> ssl.SSLContext:
    """One for all: to read the machine's certificates takes 20 ms, and a megabyte."""
    return replica_context("", "", "")


def _for_rank(rank: int, target: str, lines: Sequence[bytes], body: bytes) -> tuple[list[bytes], bytes]:
    """Headers and body that reach one rank of a server; a client's own wish gives way to the placement."""
    name = RANK_HEADER.lower().encode()
    kept = [line for line in lines if line.partition(b":")[0].lower() != name]
    kept.append(f"{RANK_HEADER}: {rank}\r\n".encode())
    is_generate = target.partition("?")[0] == "/generate" and body
    return kept, with_rank(body, rank) if is_generate else body


def _refused(error: OSError) -> bool:
    """A name with several addresses is refused when all are; then there is a message and no number."""
    if error.errno is not None:
        return error.errno == errno.ECONNREFUSED
    said = str(error)
    return said.startswith("Multiple exceptions") and said.count("[Errno") == said.count(
        f"[Errno {errno.ECONNREFUSED}]"
    )
