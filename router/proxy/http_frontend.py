"""Data plane of one process: listener, reader, proxy, connections to replicas. It places requests through a Placer
(placement_api.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from router.config.fd_limits import connections_within, log_connection_limit
from router.config.runtime import RuntimeConfig
from router.config.schema import Settings
from router.eventloop import close_on_error, start_task
from router.http.acceptor import cannot_listen, url_of
from router.http.body_budget import BodyBudget
from router.http.client_timeouts import ClientLimits
from router.http.outbox import Outbox
from router.http.read_fairness import ReadFairness
from router.http.server import Server
from router.http.upstream import Upstream
from router.ingress.context import IngressContext
from router.placement_api import PlacementService
from router.proxy.attempts import Attempts
from router.proxy.disagg_calls.caller import DisaggCaller
from router.proxy.http_proxy import Proxy
from router.proxy.preamble_events import says_full
from router.proxy.retry_budget import RetryBudget
from router.proxy.routes import Routes
from router.proxy.stream_failover import StreamFailover
from router.telemetry.process_totals import BODIES, CLOSED, CONNECTIONS

log = logging.getLogger(__name__)

HAND_OVER_AGAIN_S = 1.0  # interval between attempts to hand over the remaining streams of a leaving replica


class HttpFrontend:
    """`async with HttpFrontend(config, placer, ingress, bodies) as http`; leaving the block drains."""

    def __init__(
        self, config: RuntimeConfig, placer: PlacementService, ingress: IngressContext, bodies: BodyBudget
    ) -> None:
        """`ingress` and `bodies` (the memory budget for bodies) may be shared with another frontend of this process."""
        self._config = config
        self._settings = config.settings
        self._placer = placer
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # timers of leaving replicas, by id
        self._bodies = bodies
        self._ingress = ingress
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with close_on_error(self._stack):
            self._build()
            await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: accept no new connections, let running answers finish within `listen.drain_s`, then close everything.
        A cancelled block is not drained."""
        self._routes.leaving = True
        try:
            if kind is None or not issubclass(kind, asyncio.CancelledError):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.listen.drain_s):
                        await self._server.drain()
                        await self.proxy.idle()
        finally:  # a cancelled drain must close everything too
            for timer in self._leaving.values():
                timer.cancel()
            await self.abort_all("The router stopped before the answer was complete; try again.")
            await self._stack.aclose()

    def lame_duck(self) -> None:
        """Keep serving, but answer 503 on `/readyz` regardless of the control plane, and close each connection after
        its next answer."""
        self._routes.leaving = True
        self._server.lame_duck()

    async def abort_all(self, why: str) -> None:
        """End every answer in flight with an error that gives the client the reason. No replica is marked as failed."""
        self.proxy.cut_why = why
        await self._server.cancel_all()
        await asyncio.sleep(0)  # the outbox writes the last bytes of cut answers at the end of the loop's turn

    def apply(self, config: RuntimeConfig) -> None:
        """Apply settings that may change at run time, and the contents of their files."""
        self._config = config
        self._settings = s = config.settings
        self.upstream.limits = self._attempts.limits = s.upstream
        self.upstream.whole_bytes_max = s.limits.buffered_response_bytes_max
        self.legs.linger_s = s.disagg.prefill_grace_s
        self._continuations.silence_s_max = s.upstream.idle_timeout_s
        self._budget.ratio, self._budget.floor_per_s = s.upstream.retry_ratio, s.upstream.retry_floor_per_s
        self.proxy.receipts = s.api.receipts
        self._routes.configure(s)
        self._server.configure(_client_limits(s))
        self._server.cors = self._routes.cors
        self._server.tls, self.upstream.tls = config.listener_tls, config.replica_tls

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self.proxy.in_flight

    def on_replica_unreachable(self, replica: str) -> None:
        """Note that no process listens at the replica any longer."""
        self.upstream.fail_silent_calls(replica)
        self._ingress.usage.forget(replica)

    def on_replica_stalled(self, replica: str) -> None:
        """Note that the replica is stalled: it accepts connections and does not answer."""
        self.upstream.stuck(replica)

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Note that silent streams at these replicas need not be broken."""
        self.upstream.note_progress(moving, uncounted)

    def on_replica_removed(self, replica: str) -> None:
        """Note that discovery no longer lists the replica, or no longer lists it as ready. Its streams with failover
        are handed over soon."""
        self.upstream.forget(replica)
        self._ingress.usage.forget(replica)
        if replica not in self._leaving:
            upstream, loop = self._settings.upstream, asyncio.get_running_loop()
            begun_s = loop.time() + upstream.drain_migrate_after_s + upstream.first_byte_timeout_s
            self._leaving[replica] = loop.call_later(upstream.drain_migrate_after_s, self._hand_over, replica, begun_s)

    def on_replica_ready(self, replica: str) -> None:
        """Note that the replica is back, so that it keeps its streams."""
        if (timer := self._leaving.pop(replica, None)) is not None:
            timer.cancel()

    def _hand_over(self, replica: str, begun_s: float) -> None:
        """Hand over the replica's streams, and repeat while more may follow. All streams that were placed there have
        begun by `begun_s`."""
        loop = asyncio.get_running_loop()
        if streams := self._continuations.migrate_streams(replica):
            fields = {"replica": replica, "streams": streams}
            log.info("streams migrated", extra={"event": "streams_handed_over", "fields": fields})
        if loop.time() < begun_s or self._continuations.has_streams(replica):
            self._leaving[replica] = loop.call_later(HAND_OVER_AGAIN_S, self._hand_over, replica, begun_s)
        else:
            del self._leaving[replica]

    def counters(self) -> dict[str, int]:
        """Return totals of this frontend for metrics. Open connections and bytes of bodies are gauges."""
        server = self._server
        closed = {CLOSED + why: count for why, count in server.closed.items()}
        return closed | {CONNECTIONS: server.connections, BODIES: server.bodies.held_bytes}

    def _build(self) -> None:
        s = self._settings
        self._outbox, self._pace = Outbox(asyncio.get_running_loop()), ReadFairness(asyncio.get_running_loop())
        self.upstream = Upstream(
            s.upstream,
            whole_bytes_max=s.limits.buffered_response_bytes_max,
            outbox=self._outbox,
            pace=self._pace,
            alive=self._placer.note_progress,
            full=says_full,
            tls=self._config.replica_tls,
        )
        self._stack.push_async_callback(self.upstream.close)
        self.reader, self._callers = self._ingress.reader, self._ingress.callers
        self._budget = RetryBudget.full(s.upstream.retry_ratio, s.upstream.retry_floor_per_s)
        self.legs = DisaggCaller(
            self._placer, self.upstream, clock=time.monotonic, linger_s=s.disagg.prefill_grace_s, hosts=s.disagg.hosts
        )
        self._stack.push_async_callback(self.legs.close)
        self._attempts = Attempts(
            self._placer,
            self.upstream,
            s.upstream,
            pull_timeout_s=s.p2p.timeout_s,
            clock=time.monotonic,
            budget=self._budget,
            legs=self.legs,
            usage=self._ingress.usage,
        )
        self._continuations = StreamFailover(
            self._placer,
            self.upstream,
            clock=time.monotonic,
            budget=self._budget,
            silence_s_max=s.upstream.idle_timeout_s,
        )
        self.proxy = Proxy(
            self._placer,
            self.reader,
            self._attempts,
            self.upstream,
            self._continuations,
            self._ingress.record_request,
            clock=time.monotonic,
            receipts=s.api.receipts,
            tracer=self._ingress.tracer,
            usage=self._ingress.usage,
        )
        self._routes = Routes(self._callers, self.proxy, self._placer, self.upstream, s)
        self._stack.push_async_callback(start_task(self.upstream.watch()))

    async def _listen(self) -> None:
        s = self._settings
        limits = _client_limits(s)
        log_connection_limit(s.listen.connections_max, limits.connections_max)
        self._server = Server(
            self._routes.handle,
            self._routes.refuse,
            limits,
            admit=self._routes.admit,
            tls=self._config.listener_tls,
            outbox=self._outbox,
            pace=self._pace,
            cors=self._routes.cors,
            bodies=self._bodies,
        )
        self._stack.push_async_callback(self._server.close)
        try:
            bound = await self._server.listen(s.listen.host, s.listen.port, reuse_port=s.listen.reuse_port)
        except OSError as error:
            raise cannot_listen(error, s.listen.host, s.listen.port) from error
        self.url = url_of(*bound, tls=self._server.tls is not None)


def _client_limits(settings: Settings) -> ClientLimits:
    listen = settings.listen
    return ClientLimits(
        body_bytes_max=settings.limits.body_bytes_max,
        bodies_bytes_max=settings.limits.total_body_bytes_max,
        bodies_wait_s=settings.limits.body_budget_timeout_s,
        keepalive_s=listen.keepalive_s,
        head_timeout_s=listen.head_timeout_s,
        body_bytes_per_s_min=listen.body_bytes_per_s_min,
        body_timeout_s=listen.body_timeout_s,
        send_timeout_s=listen.send_timeout_s,
        connections_max=connections_within(listen.connections_max, len(settings.replicas)),
        connections_per_client_max=listen.connections_per_client_max,
    )
