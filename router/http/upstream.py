"""Calls to engines, and their watchdog. The failures of a call are in failures.py.

One watchdog for all calls replaces a timer for each call and each chunk. It ends calls that are silent for too long.
`lost` ends silent calls on a replica that no longer listens: on SIGTERM, vLLM 0.32 closes its listener and leaves
requests in flight without a byte or a close.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime

from router.config.fd_limits import shortage
from router.config.schema import UpstreamSettings
from router.core.types.replicas import REST_MAX_S, Replica
from router.http.engine_connection import UpstreamConnection
from router.http.engine_errors import EngineFailed
from router.http.exchange import UpstreamResponse
from router.http.failures import (
    ClosedBeforeResponse,
    NoDescriptor,
    PullTimeout,
    ReplicaStalled,
    ReplicaUnreachable,
    StaleConnection,
    Stalled,
    StreamInterrupted,
    TimedOut,
    UpstreamError,
    UpstreamOverloaded,
)
from router.http.outbox import Outbox
from router.http.pool import ConnectionPool, client_tls
from router.http.read_fairness import ReadFairness

WATCH_INTERVAL_S = 0.5
# Strings in a 500 of vLLM 0.32 while its engine shuts down.
SHUTTING_DOWN = (b"after shutdown", b"EngineCore encountered an issue", b"EngineDeadError")
STATUS_RETRIED = (502, 503)
STATUS_SHED = (429, 503)
RETRY_AFTER_S = 1.0  # cooldown assumed for a 429 without Retry-After
FULL_S = 1.0  # cooldown of an engine with a full queue: a slot may be free after its next answer
RUNS_S = 60.0  # an engine that gave a good answer within this time does not refuse everything
ASKED_BYTES_MAX = 16 << 10  # longest body of an answer that needs no GPU work
WELL_WAIT_S, WELL_S = 1.0, 1.0  # longest wait for `/health`, and validity of its result
# A used connection that breaks within this time was stale: its engine had closed it as idle. If it lasts longer, it was
# open when the request arrived, so the engine broke while it worked.
STALE_S = 1.0
# A replica counts as at work after the last sign of work for as many seconds as a stream may be silent, within these
# bounds, which leave time for the next sign. A stream that stays silent for longer than HIDDEN_S_MAX is cut in any
# case.
WORK_S_MIN, WORK_S_MAX = 3.0, 30.0
HIDDEN_S_MAX = 3_600.0
LOST_SILENCE_S = 2.0  # an answer that has begun and is silent for longer will not continue, if no process listens there


class Upstream:
    """Connections to all engines."""

    def __init__(
        self,
        limits: UpstreamSettings,
        *,
        whole_bytes_max: int,
        outbox: Outbox | None = None,
        pace: ReadFairness | None = None,
        alive: Callable[[str], None] = lambda _: None,
        full: Callable[[UpstreamResponse], bool | None] = lambda _: False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """The arguments:

        - `limits`: time limits for engines.
        - `whole_bytes_max`: size up to which an answer is buffered whole (`limits.buffered_response_bytes_max`).
        - `outbox`, `pace`: created if None.
        - `tls`: may be replaced, for later connections. If None, replicas' certificates are checked against the
          machine's authorities.
        - `alive(replica)`: called at most twice a second for each replica with streams that make progress.
        - `full`: judges answers of status 503. True for a full queue, None for an error that may mean that.

        `limits` and `whole_bytes_max` may be replaced, also for calls in flight. So may `on_lost`, which is called with
        each replica that is lost."""
        self.limits = limits
        self.whole_bytes_max = whole_bytes_max
        self.tls = tls
        self.on_lost: Callable[[str], None] = lambda _: None
        self._alive, self._full = alive, full
        self._answers: set[UpstreamResponse] = set()
        self._streaming: set[UpstreamResponse] = (
            set()
        )  # answers that had begun and made progress when the watchdog looked
        # start time and outcome of `is_well`, by replica
        self._checks: dict[str, tuple[float, asyncio.Task[bool]]] = {}
        self._worked: dict[str, float] = {}  # time of the last sign that a replica is at work, by its id
        self._well: dict[str, float] = {}  # last time at which a replica without work counters was known to be well
        self._pools: dict[str, ConnectionPool] = {}  # pool of each replica, by its id
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox or Outbox(self._loop)
        self._pace = pace or ReadFairness(self._loop)

    async def close(self) -> None:
        """Close all connections."""
        for answer in list(self._answers):
            answer.close()
        for _, check in self._checks.values():
            check.cancel()
        for pool in self._pools.values():
            pool.close_idle(float("inf"))
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def forget(self, replica: str) -> None:
        """Close the free connections of a replica that left."""
        pool = self._pools.pop(replica, None)
        if pool is not None:
            pool.forget()
        for known in (self._checks, self._worked, self._well):
            known.pop(replica, None)

    async def watch(self) -> None:
        """Run the watchdog until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.look(self._loop.time())

    def look(self, now_s: float) -> None:
        """Examine all answers, as the watchdog does every WATCH_INTERVAL_S."""
        limits, alive = self.limits, set[str]()
        for pool in self._pools.values():
            pool.close_idle(now_s - limits.keepalive_s)
        for answer in list(self._answers):
            since_s, at_work = answer.silent_since(now_s), answer.has_output
            limit_s = limits.idle_timeout_s if at_work else limits.first_byte_timeout_s
            if since_s == now_s and at_work and answer.streams:
                # A stream of a stored response needs no GPU work, so its first progress proves nothing.
                if answer in self._streaming:
                    alive.add(answer.replica)
                self._streaming.add(answer)
            if answer.pull_within_s is not None and not answer.begun and now_s - since_s > answer.pull_within_s:
                answer.fail(PullTimeout("no answer within the time limit of the P2P KV transfer"))
            elif now_s - since_s > limit_s and not (at_work and self._works(answer.replica, since_s, now_s)):
                answer.fail(Stalled("no byte in time") if answer.begun else TimedOut("no answer in time"))
        for replica in alive:
            self._worked[replica] = now_s
            self._alive(replica)

    def note_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Note signs of work: `moving` replicas have shown work, `uncounted` ones have no counters and are well."""
        now_s = self._loop.time()
        self._worked.update(dict.fromkeys(moving, now_s))
        self._well.update(dict.fromkeys(uncounted, now_s))

    def _works(self, replica: str, since_s: float, now_s: float) -> bool:
        """True if a stream that is silent since then may still continue, because its replica works and may hide its
        output. If the replica has no counters, the silence may last up to the time limit of a first byte."""
        silent_s, never_s = now_s - since_s, float("-inf")
        if now_s - self._worked.get(replica, never_s) <= min(max(WORK_S_MIN, self.limits.idle_timeout_s), WORK_S_MAX):
            return silent_s <= HIDDEN_S_MAX
        is_well = now_s - self._well.get(replica, never_s) <= WORK_S_MIN
        return is_well and silent_s <= self.limits.first_byte_timeout_s

    def stuck(self, replica: str) -> None:
        """Fail the silent calls of a replica that accepts connections and does not answer, so that they are retried
        elsewhere. If a client has already received early events, no retry is possible, and its stream ends with an
        error."""
        for answer in list(self._answers):
            if answer.replica == replica and not answer.has_output:
                why = "the replica is stalled"
                answer.fail(Stalled(why) if answer.begun else ReplicaStalled(why))

    def fail_silent_calls(self, replica: str) -> None:
        """Fail the silent calls of a replica that refuses connections, and of every other rank of its server, since
        they will never be answered."""
        server, now_s = Replica(replica).url, self._loop.time()
        self.on_lost(replica)
        for answer in list(self._answers):
            if Replica(answer.replica).url != server:
                continue
            if not answer.begun:
                answer.fail(ReplicaUnreachable("the replica was removed"))
            elif now_s - answer.silent_since(now_s) > LOST_SILENCE_S:
                answer.fail(StreamInterrupted("the replica was removed"))

    async def call(
        self,
        replica: str,
        method: str,
        target: str,
        lines: Sequence[bytes],
        body: bytes,
        *,
        whole: bool = False,
        pull_within_s: float | None = None,
        sent: Callable[[], None] | None = None,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send a request, and return when its answer has begun (UpstreamResponse). `done` must be called with the
        answer. Raises UpstreamError.

        - `target`: path and query, as the client encoded them.
        - `lines`: header lines without hop-by-hop headers.
        - `whole`: return when the answer is whole or too long to be buffered.
        - `pull_within_s`: longest silence before the answer, for a request with a P2P KV transfer.
        - `sent`: called when there is a connection, on which the request is sent at once.
        - `fresh`: use a new connection, which cannot be stale.
        """
        answer = await self._start_call(replica, method, target, lines, body, whole, pull_within_s, sent, fresh)
        after_s = _retry_after_s(answer) if answer.status in STATUS_SHED else None
        if after_s is not None:
            self.done(answer)
            raise UpstreamOverloaded(answer.status, after_s)
        if answer.status == 503 and await self.is_full(answer):
            self.done(answer)
            raise UpstreamOverloaded(answer.status, FULL_S, full=True)
        if answer.status in STATUS_RETRIED or (
            answer.status == 500 and any(mark in answer.head for mark in SHUTTING_DOWN)
        ):
            raise EngineFailed(answer)
        if answer.status < 400 and (pool := self._pools.get(replica)) is not None:
            pool.served_s = self._loop.time()
        return answer

    async def is_full(self, answer: UpstreamResponse) -> bool:
        """True if an answer of status 503, or a stream with such a first event, only means that the engine takes no
        requests at the moment. This is known from its text, or because the engine is well and serves other requests."""
        full, pool = self._full(answer), self._pools.get(answer.replica)
        if full is not None:
            return full
        if pool is None or self._loop.time() - pool.served_s > RUNS_S:
            return False
        try:
            return await self.is_well(answer.replica)
        except BaseException:
            self.done(answer)
            raise

    async def is_well(self, replica: str) -> bool:
        """Return False if the replica, at this moment, accepts no connection or reports on `/health` that it is not
        well. Silence proves nothing: SGLang's `/health` waits for its scheduler."""
        now_s = self._loop.time()
        begun_s, check = self._checks.get(replica, (float("-inf"), None))
        if check is None or now_s - begun_s > WELL_S:
            check = self._loop.create_task(self._check(replica))
            self._checks[replica] = now_s, check
        return await asyncio.shield(check)

    async def _check(self, replica: str) -> bool:
        answer: UpstreamResponse | None = None
        try:
            async with asyncio.timeout(WELL_WAIT_S):
                answer = await self.ask(replica, "GET", "/health", ())
        except TimeoutError:
            return True
        except UpstreamError:
            return False
        self.done(answer)
        return answer.status < 500

    async def ask(self, replica: str, method: str, target: str, lines: Sequence[bytes]) -> UpstreamResponse:
        """Return a small answer that needs no GPU work, on a new connection. If it is `whole`, `head` has all of it.
        The state of the replica is not updated. `done` must be called with the answer. Raises UpstreamError."""
        return await self._start_call(replica, method, target, lines, b"", True, None, None, True, ASKED_BYTES_MAX)

    async def _start_call(
        self,
        replica: str,
        method: str,
        target: str,
        lines: Sequence[bytes],
        body: bytes,
        whole: bool,
        pull_within_s: float | None,
        sent: Callable[[], None] | None,
        fresh: bool,
        whole_bytes_max: int | None = None,
    ) -> UpstreamResponse:
        """Return an answer that has begun, with any status. Raises UpstreamError."""
        whole_bytes_max = self.whole_bytes_max if whole_bytes_max is None else whole_bytes_max
        pool = self._pools.get(replica)
        if pool is None:
            pool = ConnectionPool(Replica(replica).url, self._outbox, self._pace, lambda: self.tls or client_tls())
            self._pools[replica] = pool
        head = b"".join(
            (f"{method} {pool.path}{target} HTTP/1.1\r\n".encode("latin-1"), pool.host_line, *lines,
             b"content-length: %d\r\n\r\n" % len(body))
        )  # fmt: skip
        answer = UpstreamResponse(replica, self._loop, until_whole=whole, whole_bytes_max=whole_bytes_max)
        answer.pull_within_s = pull_within_s
        self._answers.add(answer)
        try:
            await self._send(pool, answer, head, body, sent, fresh=fresh)
        except BaseException:
            self.done(answer)
            raise
        return answer

    async def _send(
        self,
        pool: ConnectionPool,
        answer: UpstreamResponse,
        head: bytes,
        body: bytes,
        sent: Callable[[], None] | None,
        *,
        fresh: bool,
    ) -> None:
        """Send on a free or a new connection, and return when the answer has begun. Raises UpstreamError."""
        sent_s = self._loop.time()
        used = pool.free(sent_s - self.limits.keepalive_s)
        if used is not None and fresh:
            used.abort()  # the new one takes its place, so that the pool does not grow
            used = None
        connection = used or await self._connect(pool)
        if sent is not None:
            sent()
        try:
            await answer.begin(connection, head, body)
        except ClosedBeforeResponse as error:
            if used is None or used.head_bytes or self._loop.time() - sent_s > STALE_S:
                raise
            pool.close_idle(float("inf"))  # the other free connections were idle for longer than this dead one
            raise StaleConnection(str(error)) from error

    async def _connect(self, pool: ConnectionPool) -> UpstreamConnection:
        """Return a new connection. If no descriptor is left, close idle connections first. Raises UpstreamError."""
        with suppress(NoDescriptor):
            return await pool.connect(self.limits.connect_timeout_s)
        for each in self._pools.values():
            each.close_idle(float("inf"))
        await asyncio.sleep(0)  # transports close in the next turn of the loop
        try:
            return await pool.connect(self.limits.connect_timeout_s)
        except NoDescriptor:
            shortage.report_shortage("a connection to a replica")
            raise

    def done(self, answer: UpstreamResponse) -> None:
        """Release an answer that was read or is no longer needed. Its connection is closed unless all was read."""
        self._answers.discard(answer)
        self._streaming.discard(answer)
        answer.close()


def _retry_after_s(answer: UpstreamResponse) -> float | None:
    """Return the cooldown in seconds of an engine that sheds load, from seconds or a date in Retry-After (RFC 9110
    section 10.2.3). None for a 503 without a valid Retry-After: that engine is full, or fails."""
    said = next((line[12:].strip() for line in answer.lines if line[:12].lower() == b"retry-after:"), b"")
    after_s: float | None = RETRY_AFTER_S if answer.status == 429 else None
    if said.isdigit():
        after_s = float(said[:9])
    elif said:
        with suppress(ValueError):
            after_s = parsedate_to_datetime(said.decode("latin-1")).timestamp() - time.time()
    return after_s if after_s is None else min(max(0.0, after_s), REST_MAX_S)
