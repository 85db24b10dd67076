"""One process: a hub, which knows the replicas, and an edge, which faces clients, side by side."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from router.core.placement.router import Router
from router.edge.edge import Edge
from router.hub.hub import Hub
from router.loop import closed_on_error
from router.settings.schema import Settings
from router.telemetry import logs


class App:
    """A running router: `async with App(settings) as app`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.hub = Hub(settings)

    async def __aenter__(self) -> Self:
        """Start listening. Replicas are found in the background; `/readyz` says when one is ready."""
        async with closed_on_error(self._stack):
            await self._stack.enter_async_context(self.hub)
            self.edge = Edge(self._settings, self.hub.placer, shared_prompts=self.hub.prompts)
            self.hub.serve(self.edge)
            await self._stack.enter_async_context(self.edge)
        return self

    @property
    def url(self) -> str:
        """URL of the main listener."""
        return self.edge.url

    @property
    def admin_url(self) -> str:
        """URL of the admin listener."""
        return self.hub.admin_url

    @property
    def router(self) -> Router:
        """The Router, which places requests."""
        return self.hub.router

    def lame_duck(self) -> None:
        """From now on `/readyz` says 503 and each answer ends its connection; everything else goes on."""
        self.hub.drain()
        self.edge.lame_duck()

    def reload(self, settings: Settings) -> None:
        """Apply the settings that may change at run time. Raises SettingsError, and then the old settings stay."""
        self.edge.reload(settings)
        self.hub.reload(settings)
        logs.configure(settings.log.level, requests=settings.log.requests)
        self._settings = settings

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: not ready at once, running answers finish within `listen.drain_s`, then everything is closed. If the
        block was cancelled, running answers are cut at once."""
        self.hub.drain()
        await self._stack.__aexit__(kind, error, trace)
