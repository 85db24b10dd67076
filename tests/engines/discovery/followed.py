"""A discovery of Kubernetes that is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from router.config.schema import DiscoverySettings
from router.core.types.replicas import Replica
from router.engines.discovery.kubernetes import KubernetesDiscovery
from tests.engines.discovery.cluster import SELECTOR
from tests.support.apiserver import ApiServer


class Followed:
    """`async with Followed(api, folder) as view`: what discovery yields."""

    def __init__(self, api: ApiServer, folder: Path, *, split: bool = False, **settings: Any) -> None:
        self.kubeconfig = api.kubeconfig(folder)
        settings = {"source": "kubernetes", "selector": SELECTOR, "kubeconfig": str(self.kubeconfig)} | settings
        self.discovery = KubernetesDiscovery(DiscoverySettings(**settings), split=split)
        self.sets: list[frozenset[Replica]] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for replicas in self.discovery.watch():
            self.sets.append(replicas)

    @property
    def names(self) -> set[str]:
        """Of the pods in the view that are ready."""
        return {replica.name.partition("/")[2] for replica in self.sets[-1] if replica.ready} if self.sets else set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it, a minute at most."""
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_names(self, *names: str) -> None:
        """Wait until these are the view."""
        await self.until(lambda: bool(self.sets) and self.names == set(names))
