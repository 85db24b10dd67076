"""An API server in memory, in simulated time, with everything that can go wrong between it and us.

What recovery means here. The API server answers again, and at once. A watch whose connection was dead is either reset,
or brings what was held up, or stays dead: then it has recovered when we give it up, which `heal_s` allows for. A watch
that lost events has recovered when it has ended, since nothing tells us before; `heal_s` likewise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from router.engines.discovery import informer
from router.engines.discovery.api_client import CONNECT_S
from router.engines.discovery.informer import Gone, WatchFailed
from tests.support.podstore import Gone as Compacted
from tests.support.podstore import Pod, PodStore, expired, pod

SELECTOR = "app=vllm"
NAMESPACES = ("one", "two")
ADDRESSES = [f"10.0.0.{number}" for number in range(1, 7)]
TICK_S = 0.001  # loops wake up a little early
WATCH_MAX_S = informer.WATCH_S + informer.SPREAD_S


@dataclass
class Asked:
    """What is asked for: pods by a selector, or one pool; implements `informer.Api`."""

    api: MemoryApi
    store: PodStore
    selector: str = ""
    name: str = ""  # of a pool

    async def list(self, namespace: str, limit: int, token: str) -> bytes:
        """One page: of the moment it was asked for, or of the one it is answered in."""
        return await self.api.list(self, namespace, limit, token)

    def watch(self, namespace: str, version: str, seconds: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Events."""
        return self.api.watch(self, namespace, version, seconds)

    def key(self, namespace: str) -> str:
        """One word for what is asked for there."""
        return f"{namespace}/{self.selector}{self.name}"


@dataclass
class Watch:
    """One that is connected."""

    of: Asked
    namespace: str
    behind: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    dropping: bool = False  # changes are not told
    stalled: bool = False  # half-open
    told: list[dict[str, Any]] = field(default_factory=list)
    end: bool = False  # by the server, as it should
    broken: bool = False


@dataclass
class MemoryApi:
    """Implements `informer.Apis`. `poke` after every change of anything."""

    store: PodStore
    random: Random
    pools: PodStore = field(default_factory=PodStore)
    mode: str = "well"  # or "refused", "blackhole", "5xx", "429", "401", "403", "stalled"
    slow_s: float = 0.0  # of lists
    repeating: float = 0.0  # chance of an event that it is told again, or an old one
    bookmark_s: float = 5.0
    asked: int = 0  # lists and watches that reached it or tried to
    watches: list[Watch] = field(default_factory=list)
    recovered: asyncio.Event = field(default_factory=asyncio.Event)
    dear: set[str] = field(default_factory=set)  # what took so long to list that the next list is put off
    lost: set[str] = field(default_factory=set)  # of what something was dropped since it was listed

    def poke(self) -> None:
        """Watches look whether there is something to tell."""
        for watch in self.watches:
            watch.wake.set()

    def recover(self) -> float:
        """Everything is well again; returns in how many seconds the last connection that nobody can know to be dead
        will have been given up."""
        self.mode, self.slow_s, self.repeating = "well", 0.0, 0.0
        self.recovered.set()
        self.recovered = asyncio.Event()
        dead, deaf = False, set(self.lost)
        for watch in self.watches:
            watch.dropping = False
            fate = self.random.choice(["reset", "buffered", "dead"])
            key = watch.of.key(watch.namespace)
            if key in self.lost and fate == "reset":
                watch.broken = True
                deaf.discard(key)
            if not watch.stalled:
                continue
            watch.stalled, watch.broken = fate == "dead", fate == "reset"
            dead |= watch.stalled
        self.poke()
        return WATCH_MAX_S if dead or deaf else 0.0

    def pods(self, selector: str) -> Asked:
        """Pods with these labels."""
        return Asked(self, self.store, selector)

    def pool(self, name: str) -> Asked:
        """One pool."""
        return Asked(self, self.pools, name=name)

    async def close(self) -> None:
        """Nothing is kept."""

    # -- what discovery asks ---------------------------------------------------------------------------------------

    async def list(self, of: Asked, namespace: str, limit: int, token: str) -> bytes:
        """One page: of the moment it was asked for, or of the one it is answered in."""
        asked_s = asyncio.get_running_loop().time()
        await self._reach()
        early = self._page(of, namespace, limit, token) if self.random.random() < 0.5 else None
        if self.slow_s:
            await self._until_recovered(self.slow_s)
        page = early or self._page(of, namespace, limit, token)
        key = of.key(namespace)
        if '"continue"' not in page.decode():
            self.lost.discard(key)
        took_s = asyncio.get_running_loop().time() - asked_s
        self.dear = self.dear | {key} if took_s >= informer.LIST_COST_FLOOR_S else self.dear - {key}
        return page

    @asynccontextmanager
    async def watch(self, of: Asked, namespace: str, version: str, seconds: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Events; 410 comes as an answer or as an event."""
        await self._reach()
        behind = int(version)
        if behind < of.store.compacted and self.random.random() < 0.5:
            raise Gone
        watch = Watch(of, namespace, behind)
        self.watches.append(watch)
        try:
            yield self._events(watch, asyncio.get_running_loop().time() + seconds)
        finally:
            self.watches.remove(watch)

    def _page(self, of: Asked, namespace: str, limit: int, token: str) -> bytes:
        try:
            page = json.dumps(of.store.list(namespace, of.selector, limit, token, of.name)).encode()
        except Compacted:
            raise Gone from None
        return page

    async def _reach(self) -> None:
        self.asked += 1
        await asyncio.sleep(self.random.choice([0.001, 0.005, 0.02]))
        if self.mode == "blackhole":  # a SYN is lost, and sent again after a second
            await asyncio.sleep(1.0)
            if self.mode == "blackhole":
                await asyncio.sleep(CONNECT_S - 1.0)
                raise WatchFailed("no answer")
        if self.mode == "stalled":
            await self._until_recovered(1e9)
            if self.random.random() < 0.5:
                raise WatchFailed("reset")
        if self.mode == "429":
            raise WatchFailed("429", 1.0)
        if self.mode != "well":
            raise WatchFailed(self.mode, refused=self.mode in ("401", "403"))

    async def _until_recovered(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.recovered.wait()
        except TimeoutError:
            pass

    async def _events(self, watch: Watch, end_s: float) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        bookmark_s = loop.time() + self.bookmark_s
        while True:
            if watch.broken:
                raise WatchFailed("reset")
            watch.wake.clear()  # before news are looked for: what comes while they are told wakes it again
            if not watch.stalled:
                for event in self._news(watch):
                    yield json.dumps(event).encode()
                    if event["type"] == "ERROR":
                        return
                if loop.time() + TICK_S >= bookmark_s:
                    bookmark_s = loop.time() + self.bookmark_s
                    yield json.dumps(watch.of.store.bookmark()).encode()
                if watch.end or loop.time() + TICK_S >= end_s:
                    return
            try:
                async with asyncio.timeout_at(None if watch.stalled else min(bookmark_s, end_s)):
                    await watch.wake.wait()
            except TimeoutError:
                pass

    def _news(self, watch: Watch) -> list[dict[str, Any]]:
        try:
            of = watch.of
            events = list(of.store.events(watch.namespace, of.selector, watch.behind, of.name))
        except Compacted:
            return [{"type": "ERROR", "object": expired(str(watch.behind))}]
        watch.behind = watch.of.store.revision
        if watch.dropping:
            if events:
                self.lost.add(watch.of.key(watch.namespace))
            return []
        news: list[dict[str, Any]] = []
        for event in events:
            news.append(event)
            watch.told.append(event)
            if self.random.random() < self.repeating:
                news.append(self.random.choice(watch.told[-4:]))
        return news


class Pods:
    """Those of a cluster, which come, change and go at random."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.store = PodStore()
        self.began = 0

    def truth(self) -> set[tuple[str, str, str]]:
        """URL, name and run of every replica that there is: written down once more, from whole objects and another
        way round than in pods.py."""
        found: dict[str, Pod] = {}
        for (namespace, _), each in self.store.pods.items():
            ip = each["status"].get("podIP")
            gone = "deletionTimestamp" in each["metadata"] or each["status"]["phase"] in ("Failed", "Succeeded")
            if namespace not in NAMESPACES or ip is None or gone or each["metadata"]["labels"] != {"app": "vllm"}:
                continue
            other = found.get(ip)
            if other is None or other["status"]["startTime"] < each["status"]["startTime"]:
                found[ip] = each
        return {
            (
                f"http://{ip}:{each['spec']['containers'][0]['ports'][0]['containerPort']}",
                f"{each['metadata']['namespace']}/{each['metadata']['name']}",
                f"{each['metadata']['uid']}/{each['status']['containerStatuses'][0]['containerID']}",
            )
            for ip, each in found.items()
            if {"type": "Ready", "status": "True"} in each["status"]["conditions"]
            and each["status"]["phase"] == "Running"
        }

    def create(self) -> None:
        """A pod, perhaps at an address that another one has, or under a name that another one had."""
        self.began += 1
        taken = {name for namespace, name in self.store.pods}
        self.store.create(
            pod(
                self.random.choice([name for name in map(str, range(20)) if name not in taken]),
                namespace=self.random.choice([*NAMESPACES, *NAMESPACES, "other"]),
                ip=self.random.choice([None, *ADDRESSES]),
                ready=self.random.random() < 0.7,
                phase=self.random.choice(["Running", "Running", "Running", "Pending"]),
                port=self.random.choice([8000, 8000, 9000]),
                labels={"app": self.random.choice(["vllm", "vllm", "vllm", "other"])},
                started=f"2026-01-01T00:{self.began // 60:02}:{self.began % 60:02}Z",
            )
        )

    def change(self) -> None:
        """Of one pod."""
        if len(self.store.pods) < 2 or (len(self.store.pods) < 12 and self.random.random() < 0.25):
            self.create()
            return
        namespace, name = self.random.choice(sorted(self.store.pods))
        match self.random.randrange(9):
            case 0 | 1:
                self.store.set_ready(name, self.random.random() < 0.6, namespace)
            case 2:
                self.store.patch(name, {"status": {"podIP": self.random.choice([None, *ADDRESSES])}}, namespace)
            case 3:
                self.store.terminate(name, namespace)
            case 4 | 5:
                self.store.delete(name, namespace)
            case 6:
                self.store.evict(name, namespace)
            case 7:
                self.store.restart(name, namespace)
            case 8:
                labels = {"app": self.random.choice(["vllm", "other"])}
                self.store.patch(name, {"metadata": {"labels": labels}}, namespace)
