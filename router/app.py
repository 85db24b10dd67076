"""The composition root for one process: what knows (hub.py) and what faces clients (edge.py), side by side."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from router.core.placement.router import Router
from router.edge.edge import Edge
from router.hub.hub import Hub
from router.settings.schema import Settings
from router.telemetry import logs


class App:
    """A running router: `async with App(settings) as app`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.hub = Hub(
            settings,
            in_flight=lambda: self.edge.in_flight,
            lost=lambda replica: self.edge.lost(replica),
            stuck=lambda replica: self.edge.stuck(replica),
        )

    async def __aenter__(self) -> Self:
        """Start listening; replicas are looked for meanwhile, and `/readyz` says when one is there."""
        await self.hub.__aenter__()
        try:
            self.edge = Edge(self._settings, self.hub.placer, shared_prompts=self.hub.prompts)
            if self.hub.observatory is not None:
                self.hub.observatory.templates_of_edge = self.edge.templates
            self.hub.left = self.edge.left
            self.hub.totals.connections_of_edge, self.hub.totals.spans_of_edge = (
                self.edge.connections,
                self.edge.spans_dropped,
            )
            self.hub.totals.unexplained_of_edge = self.edge.unexplained
            await self.edge.__aenter__()
        except BaseException:
            await self.hub.__aexit__(None, None, None)
            raise
        return self

    @property
    def url(self) -> str:
        """Of the main listener."""
        return self.edge.url

    @property
    def admin_url(self) -> str:
        """Of the admin listener."""
        return self.hub.admin_url

    @property
    def router(self) -> Router:
        """Who places."""
        return self.hub.router

    def lame_duck(self) -> None:
        """`/readyz` says 503 from now on, and answers end their connections; all else goes on."""
        self.hub.drain()
        self.edge.lame_duck()

    def reload(self, settings: Settings) -> None:
        """Take over what may change while it runs. Raises SettingsError, and then the old settings hold."""
        self.edge.reload(settings)
        self.hub.reload(settings)
        logs.configure(settings.log.level, requests=settings.log.requests)
        self._settings = settings

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: not ready at once, running answers finish within `listen.drain_s`, then all is closed. At once if the
        block was cancelled."""
        self.hub.drain()
        try:
            await self.edge.__aexit__(kind, error, trace)
        finally:
            await self.hub.__aexit__(kind, error, trace)
