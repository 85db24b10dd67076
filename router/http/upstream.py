"""Call one engine: connections to it, and one watchdog; what may go wrong is in failures.py.

One watchdog for all calls replaces timers per call and per chunk. It ends calls that are silent for too long, and
those still silent on a replica that is known to be lost (vLLM 0.32 on SIGTERM closes its listener and leaves
requests in flight without a byte or a close).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from router.core.facts.replicas import REST_MAX_S, Replica
from router.http.exchange import EngineAnswer
from router.http.failures import (
    BrokeEarly,
    BrokeMidway,
    EngineFailed,
    EngineShed,
    ReplicaLost,
    ReplicaStuck,
    Stale,
    Stalled,
    TimedOut,
)
from router.http.outbox import Outbox
from router.http.pool import EnginePool, client_tls

WATCH_INTERVAL_S = 0.5
SHUTTING_DOWN = (b"after shutdown", b"EngineCore encountered an issue", b"EngineDeadError")  # vLLM 0.32
STATUS_RETRIED = (502, 503)
STATUS_SHED = (429, 503)
RETRY_AFTER_S = 1.0  # of a 429 that does not say
STALE_S = 1.0  # a used connection that lasts longer had been open: its engine broke while it worked
LOST_SILENCE_S = 2.0  # a begun answer this silent, on a replica where nobody listens, will not go on


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How long engines may take, and how much of an answer is held until it is whole (settings/schema.py: `upstream`,
    `limits.held_answer_bytes_max`)."""

    connect_timeout_s: float
    first_byte_timeout_s: float
    idle_timeout_s: float
    keepalive_s: float
    whole_bytes_max: int


class Upstream:
    """Connections to all engines."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        outbox: Outbox | None = None,
        alive: Callable[[str], None] = lambda _: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Without an `outbox` it has one of its own; without `tls` replicas must be known to the machine. `alive`
        hears, twice a second at most, of each replica whose streams go on.

        `limits` may be replaced, for calls under way too, and `tls` for connections to come."""
        self.limits = limits
        self.tls = tls
        self._alive = alive
        self._answers: set[EngineAnswer] = set()
        self._streaming: set[EngineAnswer] = set()  # begun, and moved when the watchdog looked
        self._pools: dict[str, EnginePool] = {}  # by replica
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox or Outbox(self._loop)

    async def close(self) -> None:
        """Close all connections."""
        for answer in list(self._answers):
            answer.close()
        for pool in self._pools.values():
            pool.close_idle(float("inf"))
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def forget(self, replica: str) -> None:
        """The replica left: its free connections are closed."""
        pool = self._pools.pop(replica, None)
        if pool is not None:
            pool.forget()

    async def watch(self) -> None:
        """The watchdog: runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_s, limits = self._loop.time(), self.limits
            for pool in self._pools.values():
                pool.close_idle(now_s - limits.keepalive_s)
            alive: set[str] = set()
            for answer in list(self._answers):
                limit_s = limits.idle_timeout_s if answer.begun else limits.first_byte_timeout_s
                since_s = answer.silent_since(now_s)
                if since_s == now_s and answer.begun and answer.streams:
                    # Not the first time: a stream of the Responses API begins before there is any work.
                    if answer in self._streaming:
                        alive.add(answer.replica)
                    self._streaming.add(answer)
                if now_s - since_s > limit_s:
                    answer.fail(Stalled("no byte in time") if answer.begun else TimedOut("no answer in time"))
            for replica in alive:
                self._alive(replica)

    def stuck(self, replica: str) -> None:
        """The replica accepts and does not answer: what is silent there is to be tried elsewhere."""
        for answer in list(self._answers):
            if answer.replica == replica and not answer.begun:
                answer.fail(ReplicaStuck("its replica is stuck"))

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
        self, replica: str, method: str, target: str, lines: Sequence[bytes], body: bytes, *, whole: bool
    ) -> EngineAnswer:
        """Send a request, and return when its answer has begun; with `whole`, when it is whole or too long to be held.

        `target` is path and query, as the client encoded them; `lines` are header lines without those that belong to
        a connection. `done` must be called with what this returns. Raises a Failure.
        """
        pool = self._pools.get(replica)
        if pool is None:
            pool = EnginePool(Replica(replica).url, self._outbox, lambda: self.tls or client_tls())
            self._pools[replica] = pool
        head = b"".join(
            (f"{method} {pool.path}{target} HTTP/1.1\r\n".encode("latin-1"), pool.host_line, *lines,
             b"content-length: %d\r\n\r\n" % len(body))
        )  # fmt: skip
        answer = EngineAnswer(replica, self._loop, until_whole=whole, whole_bytes_max=self.limits.whole_bytes_max)
        self._answers.add(answer)
        try:
            await self._send(pool, answer, head, body)
        except BaseException:
            self.done(answer)
            raise
        after_s = _retry_after_s(answer) if answer.status in STATUS_SHED else None
        if after_s is not None:
            self.done(answer)
            raise EngineShed(answer.status, after_s)
        if answer.status in STATUS_RETRIED or (
            answer.status == 500 and any(mark in answer.head for mark in SHUTTING_DOWN)
        ):
            raise EngineFailed(answer)
        return answer

    async def _send(self, pool: EnginePool, answer: EngineAnswer, head: bytes, body: bytes) -> None:
        """Returns when the answer has begun. Raises a Failure."""
        sent_s = self._loop.time()
        used = pool.free(sent_s - self.limits.keepalive_s)
        connection = used or await pool.connect(self.limits.connect_timeout_s)
        try:
            await answer.begin(connection, head, body)
        except BrokeEarly as error:
            if used is None or used.head_bytes or self._loop.time() - sent_s > STALE_S:
                raise
            pool.close_idle(float("inf"))  # the others are no younger
            raise Stale(str(error)) from error

    def done(self, answer: EngineAnswer) -> None:
        """The answer was read, or nobody wants it any more."""
        self._answers.discard(answer)
        self._streaming.discard(answer)
        answer.close()


def _retry_after_s(answer: EngineAnswer) -> float | None:
    """What a refusal for load asks for: seconds or a date (RFC 9110 section 10.2.3). A 503 that asks for nothing that
    can be understood is an engine that fails: None."""
    said = next((line[12:].strip() for line in answer.lines if line[:12].lower() == b"retry-after:"), b"")
    after_s: float | None = RETRY_AFTER_S if answer.status == 429 else None
    if said.isdigit():
        after_s = float(said[:9])
    elif said:
        with suppress(ValueError):
            after_s = parsedate_to_datetime(said.decode("latin-1")).timestamp() - time.time()
    return after_s if after_s is None else min(max(0.0, after_s), REST_MAX_S)
