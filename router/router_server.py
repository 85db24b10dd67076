"""A running router: a control plane, which tracks the replicas, and the frontends that `listen.mode` names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from router.config.file_contents import install
from router.config.runtime import RuntimeConfig
from router.config.schema import SettingsError
from router.control.control_plane import ControlPlane
from router.core.placement.router import Router
from router.core.types.cache_misses import Template
from router.eventloop import close_on_error
from router.http.body_budget import BodyBudget
from router.ingress.context import IngressContext
from router.proxy.http_frontend import HttpFrontend
from router.telemetry import logs

if TYPE_CHECKING:
    from router.extproc.frontend import ExtProcFrontend  # an optional dependency: imported only if needed


class RouterServer:
    """A running router: `async with RouterServer(resolve(settings)) as app`."""

    http: HttpFrontend  # present only with this frontend
    extproc: ExtProcFrontend  # the same

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._frontends: list[HttpFrontend | ExtProcFrontend] = []
        self._group = FrontendGroup()
        self.control = ControlPlane(config, self._group)

    async def __aenter__(self) -> Self:
        """Start listening. Replicas are discovered in the background; `/readyz` reports when one is ready."""
        config, settings = self._config, self._config.settings
        async with close_on_error(self._stack):
            await self._stack.enter_async_context(self.control)
            self._ingress = IngressContext(config, self.control.placer, self.control.prompts, self.control.tls)
            await self._stack.enter_async_context(self._ingress)
            bodies = BodyBudget(asyncio.get_running_loop(), settings.limits.total_body_bytes_max)
            if settings.listen.mode != "extproc":
                self.http = HttpFrontend(config, self.control.placer, self._ingress, bodies)
                self._frontends.append(self.http)
            if settings.listen.mode != "proxy":
                from router.extproc.frontend import ExtProcFrontend

                self.extproc = ExtProcFrontend(config, self.control.placer, self._ingress, bodies)
                self._frontends.append(self.extproc)
            self._group.attach(self._ingress, self._frontends)
            for frontend in self._frontends:
                await self._stack.enter_async_context(frontend)
        return self

    @property
    def url(self) -> str:
        """URL of the main listener; of the picker if there is no main listener."""
        return self._frontends[0].url

    @property
    def admin_url(self) -> str:
        """URL of the admin listener."""
        return self.control.admin_url

    @property
    def router(self) -> Router:
        """Router that places requests."""
        return self.control.router

    def lame_duck(self) -> None:
        """Make `/readyz` return 503 and each answer end its connection. All other functions continue."""
        self.control.drain()
        for frontend in self._frontends:
            frontend.lame_duck()

    def apply(self, config: RuntimeConfig) -> None:
        """Apply the settings that may change at run time, and the contents of their files. Raises SettingsError if no
        file descriptor is left for certificates; then nothing has changed."""
        before = install(config.files)
        try:
            self.control.renew_tls(config)
        except OSError as error:
            install(before)
            raise SettingsError([f"certificates for replicas: {error.strerror or error}"]) from error
        self._ingress.apply(config)
        for frontend in self._frontends:
            frontend.apply(config)
        self.control.apply(config)
        log = config.settings.log
        logs.configure(log.level, requests=log.requests)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: `/readyz` fails at once, running answers finish within `listen.drain_s`, then everything is closed. If
        the block was cancelled, running answers are cut at once."""
        self.control.drain()
        await self._stack.__aexit__(kind, error, trace)


class FrontendGroup:
    """All frontends of this process, with their shared request handling, as the control plane sees them
    (placement_api.Frontends). It is empty until `attach`."""

    def __init__(self) -> None:
        self._ingress: IngressContext | None = None
        self._frontends: Sequence[HttpFrontend | ExtProcFrontend] = ()

    def attach(self, ingress: IngressContext, frontends: Sequence[HttpFrontend | ExtProcFrontend]) -> None:
        """Set the frontends, once they are built."""
        self._ingress, self._frontends = ingress, frontends

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return sum(frontend.in_flight for frontend in self._frontends)

    def counters(self) -> Mapping[str, int]:
        """Return the totals of all frontends, and of their shared request handling."""
        figures = Counter(self._ingress.counters() if self._ingress is not None else {})
        for frontend in self._frontends:
            figures.update(frontend.counters())
        return figures

    def templates(self) -> Iterable[Template]:
        """Return templates that this process saw, new or changed since the last call."""
        return self._ingress.templates() if self._ingress is not None else ()

    def on_replica_unreachable(self, replica: str) -> None:
        """Notify the frontends."""
        for frontend in self._frontends:
            frontend.on_replica_unreachable(replica)

    def on_replica_stalled(self, replica: str) -> None:
        """Notify the frontends."""
        for frontend in self._frontends:
            frontend.on_replica_stalled(replica)

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Notify the frontends."""
        for frontend in self._frontends:
            frontend.on_replicas_progress(moving, uncounted)

    def on_replica_removed(self, replica: str) -> None:
        """Notify the frontends."""
        for frontend in self._frontends:
            frontend.on_replica_removed(replica)

    def on_replica_ready(self, replica: str) -> None:
        """Notify the frontends."""
        for frontend in self._frontends:
            frontend.on_replica_ready(replica)
