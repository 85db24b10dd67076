"""One process: a hub, which knows the replicas, and the frontends that `listen.face` names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from router.core.facts.misses import Template
from router.core.placement.router import Router
from router.edge.edge import Edge
from router.http.body_budget import BodyBudget
from router.hub.hub import Hub
from router.loop import closed_on_error
from router.placer import Edges
from router.reading.desk import Desk
from router.settings.schema import Settings
from router.telemetry import logs

if TYPE_CHECKING:
    from router.gateway.gateway import Gateway  # an optional dependency: imported only if needed


class App:
    """A running router: `async with App(settings) as app`."""

    edge: Edge  # present only with this frontend
    gateway: Gateway  # the same

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._faces: list[Edge | Gateway] = []
        self.hub = Hub(settings)

    async def __aenter__(self) -> Self:
        """Start listening. Replicas are discovered in the background; `/readyz` reports when one is ready."""
        settings = self._settings
        async with closed_on_error(self._stack):
            await self._stack.enter_async_context(self.hub)
            self._desk = Desk(settings, self.hub.placer, shared_prompts=self.hub.prompts)
            await self._stack.enter_async_context(self._desk)
            bodies = BodyBudget(asyncio.get_running_loop(), settings.limits.bodies_bytes_max)
            if settings.listen.face != "picker":
                self.edge = Edge(settings, self.hub.placer, desk=self._desk, bodies=bodies)
                self._faces.append(self.edge)
            if settings.listen.face != "edge":
                from router.gateway.gateway import Gateway

                self.gateway = Gateway(settings, self.hub.placer, self._desk, bodies)
                self._faces.append(self.gateway)
            self.hub.serve(Faces(self._desk, self._faces))
            for face in self._faces:
                await self._stack.enter_async_context(face)
        return self

    @property
    def url(self) -> str:
        """URL of the main listener; of the picker if there is no main listener."""
        return self._faces[0].url

    @property
    def admin_url(self) -> str:
        """URL of the admin listener."""
        return self.hub.admin_url

    @property
    def router(self) -> Router:
        """Router that places requests."""
        return self.hub.router

    def lame_duck(self) -> None:
        """Make `/readyz` return 503 and each answer end its connection. All other functions continue."""
        self.hub.drain()
        for face in self._faces:
            face.lame_duck()

    def reload(self, settings: Settings) -> None:
        """Apply the settings that may change at run time. Raises SettingsError, and then the old settings stay."""
        for face in self._faces:
            face.reload(settings)
        self.hub.reload(settings)
        logs.configure(settings.log.level, requests=settings.log.requests)
        self._settings = settings

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain: `/readyz` fails at once, running answers finish within `listen.drain_s`, then everything is closed. If
        the block was cancelled, running answers are cut at once."""
        self.hub.drain()
        await self._stack.__aexit__(kind, error, trace)


class Faces:
    """All frontends of this process, with their shared request handling, as the hub sees them (placer.Edges)."""

    def __init__(self, desk: Desk, faces: list[Edge | Gateway]) -> None:
        self._desk = desk
        self._faces: list[Edges] = list(faces)

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return sum(face.in_flight for face in self._faces)

    def figures(self) -> Mapping[str, int]:
        """Return the totals of all frontends, and of their shared request handling."""
        figures = Counter(self._desk.figures())
        for face in self._faces:
            figures.update(face.figures())
        return figures

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """Return templates that this process saw, new or changed since the last call."""
        return self._desk.templates()

    def lost(self, replica: str) -> None:
        """Notify the frontends."""
        for face in self._faces:
            face.lost(replica)

    def stuck(self, replica: str) -> None:
        """Notify the frontends."""
        for face in self._faces:
            face.stuck(replica)

    def working(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Notify the frontends."""
        for face in self._faces:
            face.working(moving, uncounted)

    def left(self, replica: str) -> None:
        """Notify the frontends."""
        for face in self._faces:
            face.left(replica)

    def ready(self, replica: str) -> None:
        """Notify the frontends."""
        for face in self._faces:
            face.ready(replica)
