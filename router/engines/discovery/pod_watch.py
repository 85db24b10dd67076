"""Follows the pods of one namespace: lists them, watches from there, and lists again when the watch cannot be trusted.

This is what Kubernetes documents for its API ("Efficient detection of changes"), with these additions:

- A watch is asked to end after WATCH_S to WATCH_S + SPREAD_S seconds. One that does not is dead (a half-open
  connection), and is given up LATE_S later.
- A watch may lose an event without a sign. So after its end pods are listed again where that is cheap, one page in
  CHEAP_S; elsewhere every `resync_s`, and the next watch goes on where the last one ended.
- After a watch that breaks, pods are listed again. Only when that fails too does the view count as stale.
- A view is replaced only by a complete list. Until there is one, the last view stays in use.

No pause is longer than PAUSE_MAX_S, or REFUSED_PAUSE_S after a refusal, unless the API server asks for it, so that
changes during its absence are known within two seconds of its return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Protocol

import msgspec

from router.engines.discovery.pods import PodSeen, PodView, Rule

log = logging.getLogger(__name__)

PAGE_PODS = 50  # pods per page: some 500 KB, cut into pods in half a millisecond
SLICE_PODS = 16  # pods read without a break: about half a millisecond
PODS_MAX = 50_000  # pods of a namespace; a selector that finds more is a mistake
PAGES_MAX = 2 * PODS_MAX // PAGE_PODS  # an API server may return shorter pages than it was asked for
PAGE_S = 10.0  # longest wait for a page of a list
OPEN_S = 5.0  # longest wait until a watch has begun
WATCH_S = 15
SPREAD_S = 5  # so that routers started together do not list together
LATE_S = 3.0
CHEAP_S = 0.5
SETTLED_S = 1.0  # a watch that lived so long ends a row of failures
PAUSE_S = 0.05  # after the first failure; doubled each time
PAUSE_MAX_S = 0.5
# Where the API server understood us and says no, which only people change: each try is an event of its audit log.
REFUSED_PAUSE_S = 1.9
RETRY_AFTER_MAX_S = 10.0
TOLD_AGAIN_S = 30.0  # between two log lines on one outage, if its cause has changed
STILL_S = 600.0  # between two log lines on one outage of one cause
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class Gone(Exception):
    """Status 410: the version is too old, and pods must be listed again."""


class WatchFailed(Exception):
    """The API server could not be asked, or did not answer as it should. The message has no secrets."""

    def __init__(self, why: str, retry_after_s: float = 0.0, *, refused: bool = False) -> None:
        """`refused`: the API server understood what was asked and says no, so that asking again soon is of no use."""
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.refused = refused


class Api(Protocol):
    """The verbs `list` and `watch` of an API server, on pods. Both raise Gone and WatchFailed."""

    async def list(self, namespace: str, limit: int, token: str) -> bytes:
        """One page of a PodList; `token` is the previous page's `continue`."""

    def watch(self, namespace: str, version: str, seconds: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Events behind a version, one per line; entered once the API server has answered 200. The iterator ends only
        where the answer ended as it should."""

    async def close(self) -> None:
        """Close all connections."""


class _ListMeta(msgspec.Struct):
    version: str = msgspec.field(default="", name="resourceVersion")
    token: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class _Versioned(msgspec.Struct):
    metadata: _ListMeta


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_status = msgspec.json.Decoder(_Status).decode
_decode_versioned = msgspec.json.Decoder(_Versioned).decode


class PodFollower:
    """Follows pods in `run`; `changed` is called after each change of the view, and after the first try."""

    def __init__(
        self, api: Api, namespace: str, rule: Rule, *, resync_s: float, changed: Callable[[], None], random: Random
    ) -> None:
        self.view = PodView(rule)
        self.known = False  # pods were listed at least once
        self.tried = False
        self.why = "pods are not listed yet"  # why the view is stale; "" if it is not
        self.stale_since_s = asyncio.get_running_loop().time()
        self.errors = 0
        self._api = api
        self._namespace = namespace
        self._resync_s = resync_s
        self._changed = changed
        self._random = random
        self._listed_s = 0.0
        self._cheap = False  # whether listing is cheap
        self._warned, self._warned_of, self._warned_s = False, "", 0.0
        self._told: dict[str, str] = {}  # why a pod is no replica, as last logged, by pod

    async def run(self) -> None:
        """Follow until cancelled; raises nothing."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began_s, pause_s, refused = loop.time(), 0.0, False
            try:
                await self._round()
            except Gone:
                self.view.version = ""
            except WatchFailed as error:
                self._failed(str(error))
                pause_s, refused = min(error.retry_after_s, RETRY_AFTER_MAX_S), error.refused
            except Exception as error:  # a bug, after which pods must still be followed
                log.exception(
                    "bug: discovery failed inside the router", extra={"event": "bug", "fields": self._fields()}
                )
                self._failed(f"a bug: {type(error).__name__}")
            failures = 0 if loop.time() - began_s >= SETTLED_S else failures + 1
            if failures > 1 or pause_s:
                longest_s = REFUSED_PAUSE_S if refused else min(PAUSE_MAX_S, PAUSE_S * 2 ** min(failures, 8))
                least = 0.9 if refused else 0.5
                await asyncio.sleep(max(pause_s, longest_s * self._random.uniform(least, 1.0)))

    async def _round(self) -> None:
        """List if that is due, and watch until the watch ends."""
        listed = asyncio.get_running_loop().time() - self._listed_s < self._resync_s
        if self._cheap or not listed or not self.view.version:
            await self._list()
        await self._watch()

    async def _list(self) -> None:
        loop = asyncio.get_running_loop()
        began_s, pages, token, sightings = loop.time(), 0, "", list[PodSeen]()
        while pages < PAGES_MAX:
            try:
                async with asyncio.timeout(PAGE_S):
                    page = _decode_page(await self._api.list(self._namespace, PAGE_PODS, token))
            except TimeoutError:
                raise WatchFailed(f"a list of pods did not come within {PAGE_S:g} s") from None
            except _UNREADABLE as error:
                raise WatchFailed(f"a list of pods is not as it should be: {error}") from error
            items = page.items or []
            for first in range(0, len(items), SLICE_PODS):
                await asyncio.sleep(0)  # let requests go on after what was read so far
                sightings += self.view.read(items[first : first + SLICE_PODS])
            pages, token = pages + 1, page.metadata.token
            if len(sightings) > PODS_MAX:
                raise WatchFailed(f"the selector matches more than {PODS_MAX} pods: narrow discovery.selector")
            if not token:
                break
        else:
            raise WatchFailed(f"a list of pods has no end after {PAGES_MAX} pages")
        if not page.metadata.version:
            raise WatchFailed("a list of pods has no version")
        self.view.replace(sightings, page.metadata.version)
        self._listed_s = loop.time()
        self._cheap = pages == 1 and self._listed_s - began_s < CHEAP_S
        self._told = {name: why for name, why in self._told.items() if name in self.view.pods}
        for sighting in sightings:
            self._tell(sighting)
        self.known = self.tried = True
        if not self._warned:
            self.why = ""
        self._changed()

    async def _watch(self) -> None:
        """Watch until the watch ends as it should. Raises Gone, and WatchFailed if it could not begin; if it breaks
        later, pods are listed anew, and that shows whether the view is stale."""
        loop, begun = asyncio.get_running_loop(), False
        seconds = WATCH_S + self._random.randint(0, SPREAD_S)
        try:
            async with (
                asyncio.timeout(OPEN_S) as deadline,
                self._api.watch(self._namespace, self.view.version, seconds) as events,
            ):
                deadline.reschedule(loop.time() + seconds + LATE_S)
                begun = True
                self._recovered()
                async for line in events:
                    self._hear(line)
        except TimeoutError:
            self._broken(begun, f"a watch of pods did not begin within {OPEN_S:g} s", "nothing was heard any more")
        except WatchFailed as error:
            if not begun:
                self.view.version = ""
                raise
            self._broken(begun, str(error), str(error))

    def _broken(self, begun: bool, unopened: str, broken: str) -> None:
        self.view.version = ""
        if not begun:
            raise WatchFailed(unopened)
        self.errors += 1
        log.info("watch of pods broke", extra={"event": "watch_broke", "fields": {**self._fields(), "why": broken}})

    def _hear(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
            if event.type == "BOOKMARK":
                self.view.version = _decode_versioned(event.object).metadata.version or self.view.version
                return
            status = _decode_status(event.object) if event.type == "ERROR" else None
        except _UNREADABLE as error:
            raise WatchFailed(f"an event is not as it should be: {error}") from error
        if status is not None:
            if status.code == 410:
                raise Gone
            raise WatchFailed(f"the watch ended with {status.code} {status.reason}: {status.message[:200]}")
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            return
        sighting = self.view.hear(event.object, deleted=event.type == "DELETED")
        if sighting is None:
            return
        if len(self.view.pods) > PODS_MAX:
            raise WatchFailed(f"the selector matches more than {PODS_MAX} pods: narrow discovery.selector")
        if event.type == "DELETED":
            self._told.pop(sighting.name, None)
        else:
            self._tell(sighting)
        self._changed()

    # -- what it says of itself --------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, str]:
        return {"source": "kubernetes", "namespace": self._namespace}

    def _tell(self, sighting: PodSeen) -> None:
        """Log why a pod is no replica, once, and again when the reason changes."""
        if sighting.why == self._told.get(sighting.name, ""):
            return
        if sighting.why:
            self._told[sighting.name] = sighting.why
            log.warning(
                "pod is not usable as it is",
                extra={
                    "event": "pod_unusable",
                    "fields": {**self._fields(), "pod": sighting.name, "why": sighting.why},
                },
            )
        else:
            del self._told[sighting.name]

    def _failed(self, why: str) -> None:
        self.errors += 1
        now_s = asyncio.get_running_loop().time()
        if not self.why:
            self.stale_since_s = now_s
        self.why = why
        silent_s = now_s - self._warned_s
        if not self._warned or silent_s >= (TOLD_AGAIN_S if why != self._warned_of else STILL_S):
            self._warned, self._warned_of, self._warned_s = True, why, now_s
            log.warning(
                "discovery is stale", extra={"event": "discovery_stale", "fields": {**self._fields(), "why": why}}
            )
        if not self.tried:
            self.tried = True
            self._changed()

    def _recovered(self) -> None:
        """Log that pods are listed again, and watched from there."""
        self.why = ""
        if self._warned:
            self._warned = False
            stale_s = round(asyncio.get_running_loop().time() - self.stale_since_s, 3)
            log.info(
                "discovery is fresh again",
                extra={"event": "discovery_fresh", "fields": {**self._fields(), "stale_s": stale_s}},
            )
