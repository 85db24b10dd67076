"""Gateway frontend of one process: the picker's listener, health, TLS. It places requests through a Placer
(placement_api.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.config.runtime import RuntimeConfig
from router.config.schema import Settings
from router.eventloop import close_on_error, start_task
from router.extproc.certificate import PickerCertificate
from router.extproc.first_message_limit import HeadTurns
from router.extproc.picker_context import ServiceContext
from router.extproc.service import SERVICE, ExtProcService
from router.extproc.stream_messages import MalformedCount
from router.http.body_budget import BodyBudget
from router.ingress.context import IngressContext
from router.placement_api import PlacementService
from router.telemetry.process_totals import BODIES, MALFORMED

log = logging.getLogger(__name__)

REFUSED_MAX = 256  # streams of one connection beyond `extproc.streams_max` that receive a refusal
WINDOW_BYTES = 64 << 10  # bytes of a stream that gRPC buffers unread
HEAD_BYTES = 1 << 20  # bytes of a message in addition to the body
LIVENESS, READINESS = "liveness", "readiness"  # names of health checks
EXTENSION = "inference-extension"  # the upstream's manifests use it for liveness and readiness
READY_S = 0.25  # polling interval of the replicas' readiness
MUST_FAIL_CLOSED = (
    "configure the gateway to refuse requests while no picker answers: failure_mode_allow: false in Envoy's ext_proc, "
    "FailClose in an InferencePool. Otherwise it then serves clients without a key (docs/guide/gateway.md)"
)
_READY, _NOT = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class ExtProcFrontend:
    """`async with ExtProcFrontend(config, placer, ingress, bodies) as extproc`; leaving the block drains."""

    def __init__(
        self, config: RuntimeConfig, placer: PlacementService, ingress: IngressContext, bodies: BodyBudget
    ) -> None:
        """`ingress` and `bodies` (the memory budget for bodies) may be shared with another frontend of this process."""
        self._pem = config.extproc_pem
        self._settings = config.settings
        self._bodies = bodies
        self._placer = placer
        self._ingress = ingress
        self._stack = AsyncExitStack()
        self._leaving = False
        self._built = False  # until then `in_flight` is 0
        self.port = self.health_port = 0

    async def __aenter__(self) -> Self:
        async with close_on_error(self._stack):
            self._build()
            await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain. Health checks fail at once, and no new stream is accepted: after HTTP/2's GOAWAY gateways use another
        picker. Streams in flight may end within `listen.drain_s`, then everything is closed. Streams whose answers
        bypass the picker are released at once. A cancelled block is not drained."""
        self.lame_duck()
        try:
            await self._look()
            if kind is None or not issubclass(kind, asyncio.CancelledError):
                self._picker.release()
                self._ending = asyncio.create_task(self._server.stop(self._settings.listen.drain_s))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.listen.drain_s):
                        await self._picker.idle()
        finally:
            self._parts.cut_why = "The router stopped before the answer was complete; try again."
            await self._stack.aclose()

    def lame_duck(self) -> None:
        """Keep serving, but fail health checks regardless of the control plane."""
        self._leaving = True

    def apply(self, config: RuntimeConfig) -> None:
        """Apply settings that may change at run time, and the contents of their files."""
        self._settings = settings = config.settings
        if config.extproc_pem is not None and self._certificate is not None:
            self._certificate.pem = config.extproc_pem
        self._parts.configure(settings)
        self._parts.bodies.bytes_max = settings.limits.total_body_bytes_max

    @property
    def in_flight(self) -> int:
        """Number of requests with an open stream."""
        return self._picker.in_flight if self._built else 0

    def counters(self) -> dict[str, int]:
        """Return totals of this frontend for metrics. Bytes of bodies are a gauge, which the HTTP frontend reports for
        all frontends if there is one."""
        alone = self._settings.listen.mode == "extproc"
        malformed = self._parts.malformed.total if self._built else 0
        return {BODIES: self._bodies.held_bytes if alone else 0, MALFORMED: malformed}

    def on_replica_unreachable(self, replica: str) -> None:
        """Forget a replica that no longer listens. The gateway detects it, and uses the next endpoint of its list."""
        self._ingress.usage.forget(replica)

    def on_replica_stalled(self, replica: str) -> None:
        """Do nothing about a stalled replica: requests in flight belong to the gateway."""

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Do nothing: silent streams belong to the gateway."""

    def on_replica_removed(self, replica: str) -> None:
        """Forget a replica that discovery no longer lists. The gateway's own discovery drops it too."""
        self._ingress.usage.forget(replica)

    def on_replica_ready(self, replica: str) -> None:
        """Do nothing about a ready replica, since no state of it is kept here."""

    def _build(self) -> None:
        s = self._settings
        heads = HeadTurns(s.limits.total_body_bytes_max, _message_bytes_max(s))
        self._parts = ServiceContext(self._placer, self._ingress, s, self._bodies, MalformedCount(), time.monotonic)
        self._picker = ExtProcService(self._parts, heads)
        self._health = health.aio.HealthServicer()
        self._built = True

    async def _listen(self) -> None:
        s = self._settings.extproc
        await self._look()
        options = _options(self._settings)
        server, checks = grpc.aio.server(options=options), grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._picker.handler(),))
        self._server = server
        for each in (server, checks):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, each)
            self._stack.push_async_callback(each.stop, None)
        self._certificate = PickerCertificate(self._pem) if self._pem is not None else None
        tls = self._certificate.credentials() if self._certificate is not None else None
        if self._ingress.keys is not None:
            fields = {"next": MUST_FAIL_CLOSED}
            log.info("API keys are required", extra={"event": "extproc_must_fail_closed", "fields": fields})
        self.port = _bound(server, s.host, s.port, tls)
        self.health_port = _bound(checks, s.host, s.health_port, None)
        await server.start()
        await checks.start()
        self._stack.push_async_callback(start_task(self._watch()))

    @property
    def url(self) -> str:
        """URL of the picker for gateways."""
        host = self._settings.extproc.host
        return f"grpc://[{host}]:{self.port}" if ":" in host else f"grpc://{host}:{self.port}"

    async def _watch(self) -> None:
        """Copy the state of `/readyz` to the health checks, until cancelled."""
        while True:
            await asyncio.sleep(READY_S)
            await self._look()

    async def _look(self) -> None:
        page = None if self._leaving else await self._placer.page("/readyz")
        ready = page is not None and page.status == 200 and not self._leaving
        self._parts.known = self._parts.known or ready
        await self._health.set(LIVENESS, _READY)
        await self._health.set(EXTENSION, _NOT if self._leaving else _READY)
        for name in (READINESS, SERVICE, ""):
            await self._health.set(name, _READY if ready else _NOT)


def _bound(server: Any, host: str, port: int, tls: Any) -> int:  # noqa: ANN401 - grpc ships no types
    """Bind a server, and return its port. Raises OSError."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(where) if tls is None else server.add_secure_port(where, tls)
    except RuntimeError as error:
        raise OSError(f"the picker cannot listen on {where}: {error}") from error
    if not bound:
        raise OSError(f"the picker cannot listen on {where}")
    return int(bound)


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Return the options of the gRPC servers."""
    keepalive_ms = int(settings.extproc.keepalive_s * 1e3)
    return [
        # The longest body in one message. A longer one is refused by its head or by Envoy's own limit.
        ("grpc.max_receive_message_length", _message_bytes_max(settings)),
        # Bytes buffered of a stream from which no message is read: its window, which must not grow by itself.
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", 2 * settings.limits.body_bytes_max + HEAD_BYTES),
        ("grpc.max_concurrent_streams", settings.extproc.streams_max + REFUSED_MAX),
        ("grpc.max_metadata_size", 64 << 10),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    ]


def _message_bytes_max(settings: Settings) -> int:
    return settings.limits.body_bytes_max + HEAD_BYTES
