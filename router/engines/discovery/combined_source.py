"""Union of all discoveries: replicas of the settings, those added at run time, and those of one source.

Replicas of the settings do not wait for the source: with any of them the router is ready even without an API server.
Without any, there is no complete set until the source's first. If both know a replica, the source's entry is used, with
its name and its instance. A draining replica is not ready, regardless of its source.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from router.core.types.replicas import Replica
from router.engines.discovery import Discovery, Status

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # pause after a bug in a source


class MergedDiscovery:
    """Yields the union whenever a source's set changes."""

    def __init__(self, listed: Discovery, source: Discovery | None, *, replicas_max: int) -> None:
        """`listed` has no limit, because the operator named each replica. At most `replicas_max` replicas of `source`
        are used; those already in use stay."""
        self._listed, self._source = listed, source
        self._replicas_max = replicas_max
        self._said: dict[str, frozenset[Replica]] = {}  # the last set, by source
        self._bugs: dict[str, tuple[int, str]] = {}  # (bugs so far, the current one or ""), by source
        self._taken: set[str] = set()  # ids of the source's replicas in use
        self._over = 0  # number of found replicas that are not used
        self._draining: set[str] = set()  # URLs of draining replicas
        self._changed = asyncio.Event()

    def drain(self, url: str) -> bool:
        """Send no new requests to a replica from now on. Returns False if no replica with this URL is known."""
        if url not in {replica.url for replica in self._union()}:
            return False
        self._draining.add(url)
        self._changed.set()
        return True

    def undrain(self, url: str) -> bool:
        """End the drain of a replica. Returns False if it was not draining."""
        if url not in self._draining:
            return False
        self._draining.discard(url)
        self._changed.set()
        return True

    def statuses(self) -> dict[str, Status]:
        """Return the state of each discovery's view, by its name."""
        return {each.source: self._status(each) for each in (self._listed, self._source) if each is not None}

    def _status(self, discovery: Discovery) -> Status:
        status = discovery.status()
        bugs, why = self._bugs.get(discovery.source, (0, ""))
        if bugs:
            status = dataclasses.replace(status, errors=status.errors + bugs)
        return dataclasses.replace(status, fresh=False, why=why) if why else status

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again at every change."""
        discoveries = [each for each in (self._listed, self._source) if each is not None]
        following = [asyncio.create_task(self._follow(each)) for each in discoveries]
        given: frozenset[Replica] | None = None
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                union = self._union()
                if union != given and (union or given is not None or self._complete()):
                    given = union
                    yield union
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def _follow(self, discovery: Discovery) -> None:
        """Follow a source until cancelled, even after a bug in it."""
        while True:
            sets, why = discovery.watch(), "it ended"
            try:
                async for said in sets:
                    self._said[discovery.source] = said
                    self._bugs[discovery.source] = (self._count(discovery), "")
                    self._changed.set()
            except Exception as error:
                log.exception(
                    "bug: discovery failed",
                    extra={"event": "bug", "fields": {"source": discovery.source}},
                )
                why = f"bug of the router: {type(error).__name__}"
            finally:
                if isinstance(sets, AsyncGenerator):
                    await sets.aclose()
            self._bugs[discovery.source] = (self._count(discovery) + 1, why)
            await asyncio.sleep(AGAIN_S)

    def _count(self, discovery: Discovery) -> int:
        return self._bugs.get(discovery.source, (0, ""))[0]

    def _complete(self) -> bool:
        """True if each discovery has yielded a set."""
        return len(self._said) == len(self.statuses())

    def _union(self) -> frozenset[Replica]:
        by_id = {replica.id: replica for replica in self._said.get(self._listed.source, ())}
        if self._source is not None and self._source.source in self._said:
            found = self._limit_replicas(self._said[self._source.source])
            by_id |= {id_: replica for id_, replica in found.items() if replica.ready or id_ not in by_id}
        if self._draining:
            self._draining &= {replica.url for replica in by_id.values()}
            return frozenset(
                dataclasses.replace(each, ready=False) if each.url in self._draining else each
                for each in by_id.values()
            )
        return frozenset(by_id.values())

    def _limit_replicas(self, found: frozenset[Replica]) -> dict[str, Replica]:
        """Return at most `replicas_max` of the source's replicas; those already in use have priority."""
        by_id = {replica.id: replica for replica in sorted(found, key=lambda each: (each.id, each.instance))}
        stay = [id_ for id_ in by_id if id_ in self._taken]
        new = [id_ for id_ in by_id if id_ not in self._taken]
        self._taken = {*stay, *new[: max(0, self._replicas_max - len(stay))]}
        over = len(by_id) - len(self._taken)
        if bool(over) != bool(self._over):
            fields = {"found": len(by_id), "taken": len(self._taken), "discovery.replicas_max": self._replicas_max}
            if over:
                log.warning(
                    "more replicas are discovered than allowed", extra={"event": "replicas_over_max", "fields": fields}
                )
            else:
                log.info(
                    "all discovered replicas are used again",
                    extra={"event": "replicas_within_max", "fields": fields},
                )
        self._over = over
        return {id_: by_id[id_] for id_ in self._taken}
