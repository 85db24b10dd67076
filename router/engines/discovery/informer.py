"""List and watch of the pods of one namespace, or of a pool, which is a list of one object.

This follows the Kubernetes documentation ("Efficient detection of changes"), with these additions:

- After WATCH_S to WATCH_S + SPREAD_S seconds the next watch begins, and only then is the last one closed. A dead watch
  (a half-open connection) is thereby detected. A live one is kept while the next is refused: an API server that rejects
  reads (429) continues to serve existing watches.
- A watch can lose an event without a sign. Pods are therefore listed before the next watch if that is cheap (one page
  within LIST_COST_FLOOR_S). Otherwise they are listed every `resync_s`, and the next watch continues at the end of the
  last one.
- During a list and the start of the next watch, the last one is not read. The next one repeats its events, and a list
  that is older than an event must not undo it.
- After a watch breaks, pods are listed again. Only if that fails too does the view count as stale.
- A view is replaced only by a complete list. Until there is one, the last view stays in use.

Pauses are at most PAUSE_MAX_S, or REFUSED_PAUSE_S after a refusal, unless the API server requests a longer one. Changes
during its absence are therefore known within two seconds of its return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from random import Random
from typing import Generic, NamedTuple, Protocol

import msgspec

from router.engines.discovery.object_cache import ObjectCache, S

log = logging.getLogger(__name__)

PAGE_PODS = 50  # pods per page: about 500 KB, split into pods in half a millisecond
SLICE_PODS = 16  # pods decoded in one step: about half a millisecond
PODS_MAX = 50_000  # maximum pods of a namespace; a selector that finds more is a mistake
PAGES_MAX = 2 * PODS_MAX // PAGE_PODS  # an API server may return shorter pages than requested
PAGE_S = 10.0  # maximum wait for a page of a list
OPEN_S = 5.0  # maximum wait until a watch has begun
WATCH_S = 15  # time until the next watch begins
SPREAD_S = 5  # so that routers started together do not list together
HELD_S = 300  # maximum lifetime of a watch while no other can be opened
LIST_COST_FLOOR_S = 0.5
SETTLED_S = 1.0  # a watch of this duration ends a series of failures
PAUSE_S = 0.05  # after the first failure; doubled each time
PAUSE_MAX_S = 0.5
# For a refusal by the API server, which only people can change: each attempt is an event of its audit log.
REFUSED_PAUSE_S = 1.9
RETRY_AFTER_MAX_S = 10.0
RELOG_INTERVAL_S = 30.0  # between two log lines on one outage, if its cause has changed
STILL_S = 600.0  # between two log lines on one outage with one cause
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class Gone(Exception):
    """Status 410: the version is too old, and pods must be listed again."""


class WatchFailed(Exception):
    """The API server was not reachable, or did not answer as expected. The message has no secrets."""

    def __init__(self, why: str, retry_after_s: float = 0.0, *, refused: bool = False) -> None:
        """`refused`: the API server understood the request and refused it, so a quick retry is useless."""
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.refused = refused


class Api(Protocol):
    """The verbs `list` and `watch` of an API server, on objects of one kind. Both raise Gone and WatchFailed."""

    async def list(self, namespace: str, limit: int, token: str) -> bytes:
        """Return one page of a list. `token` is the previous page's `continue`."""

    def watch(self, namespace: str, version: str, seconds: int) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Yield the events after a version, one per line; entered once the API server has answered 200. The iterator
        ends only after a regular end of the response."""


class Apis(Protocol):
    """An API server."""

    def pods(self, selector: str) -> Api:
        """Return the API for pods with these labels; for all pods without a selector."""

    def pool(self, name: str) -> Api:
        """Return the API for the one InferencePool of this name, which may not exist."""

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


class _Listed(NamedTuple, Generic[S]):
    sightings: list[S]
    version: str
    cheap: bool


class _Watching:
    """An open watch. A line that is being read is kept while no reader waits, so that it is not lost."""

    def __init__(self, events: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        self._events = events
        self._stack = stack
        self._next: asyncio.Task[bytes] | None = None

    async def line(self, until_s: float) -> bytes | None:
        """Return the next line; b"" after a regular end of the watch, None at that time of the loop's clock. Raises
        Gone and WatchFailed."""
        if self._next is None:
            self._next = asyncio.create_task(self._line())
        if not self._next.done():
            left_s = until_s - asyncio.get_running_loop().time()
            await asyncio.wait((self._next,), timeout=max(0.0, left_s))
            if not self._next.done():
                return None
        task, self._next = self._next, None
        return task.result()

    async def _line(self) -> bytes:
        return await anext(self._events, b"")

    async def leave(self) -> None:
        """Close the watch. Its unread events are dropped."""
        try:
            if self._next is not None:
                self._next.cancel()
                await asyncio.gather(self._next, return_exceptions=True)
        finally:
            await self._stack.aclose()


class Informer(Generic[S]):
    """Follows objects in `run`. `changed` is called after each change of the view, and after the first try."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        view: ObjectCache[S],
        *,
        what: str = "pods",
        resync_s: float,
        changed: Callable[[], None],
        random: Random,
    ) -> None:
        """`what` is the name of the objects in messages."""
        self.view = view
        self._what = what
        self.known = False  # True if pods were listed at least once
        self.tried = False
        self.why = f"{what} are not listed yet"  # reason why the view is stale; "" if it is fresh
        self.stale_since_s = asyncio.get_running_loop().time()
        self.errors = 0
        self._api = api
        self._namespace = namespace
        self._resync_s = resync_s
        self._changed = changed
        self._random = random
        self._listed_s = 0.0
        self._cheap = False  # True if a list is cheap
        self._lost = True  # True if events may have been lost, so that pods must be listed
        self._watching: _Watching | None = None
        self._warned, self._warned_of, self._warned_s = False, "", 0.0
        self._told: dict[str, str] = {}  # problem of an object, as last logged, by name

    async def run(self) -> None:
        """Follow until cancelled. Never raises."""
        try:
            await self._run()
        finally:
            await self._leave()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began_s, pause_s, refused = loop.time(), 0.0, False
            try:
                await self._round()
            except Gone:
                self._lost = True
            except WatchFailed as error:
                self._mark_stale(str(error))
                pause_s, refused = min(error.retry_after_s, RETRY_AFTER_MAX_S), error.refused
            except Exception as error:  # a bug, after which pods must still be followed
                log.exception("bug: discovery failed", extra={"event": "bug", "fields": self._fields()})
                self._mark_stale(f"a bug: {type(error).__name__}")
                self._lost = True
                await self._leave()
            failures = 0 if loop.time() - began_s >= SETTLED_S else failures + 1
            if failures > 1 or pause_s:
                longest_s = REFUSED_PAUSE_S if refused else min(PAUSE_MAX_S, PAUSE_S * 2 ** min(failures, 8))
                least = 0.9 if refused else 0.5
                await self._pause(max(pause_s, longest_s * self._random.uniform(least, 1.0)))

    async def _round(self) -> None:
        """List if that is due, begin the next watch, close the last one, and process events until the next round."""
        loop, listed = asyncio.get_running_loop(), None
        if self._cheap or self._lost or loop.time() - self._listed_s >= self._resync_s:
            listed = await self._list()
            if self._watching is None:
                self._take(listed)  # with the permission to list alone, pods are still followed
        try:
            watching = await self._begin(listed.version if listed is not None else self.view.version)
        except WatchFailed:
            self._lost = self._lost or self._watching is None
            raise
        last, self._watching = self._watching, watching
        if last is not None:
            if listed is not None:
                self._take(listed)
            await last.leave()
        self._mark_fresh()
        await self._listen(loop.time() + WATCH_S + self._random.randint(0, SPREAD_S))

    async def _list(self) -> _Listed[S]:
        """Return all objects. Raises Gone and WatchFailed."""
        loop = asyncio.get_running_loop()
        began_s, pages, token, sightings = loop.time(), 0, "", list[S]()
        while pages < PAGES_MAX:
            try:
                async with asyncio.timeout(PAGE_S):
                    page = _decode_page(await self._api.list(self._namespace, PAGE_PODS, token))
            except TimeoutError:
                raise WatchFailed(f"no list of {self._what} within {PAGE_S:g} s") from None
            except _UNREADABLE as error:
                raise WatchFailed(f"a list of {self._what} is invalid: {error}") from error
            items = page.items or []
            for first in range(0, len(items), SLICE_PODS):
                await asyncio.sleep(0)  # yield to requests between slices
                sightings += self.view.read(items[first : first + SLICE_PODS])
            pages, token = pages + 1, page.metadata.token
            if len(sightings) > PODS_MAX:
                raise WatchFailed(f"the selector matches more than {PODS_MAX} pods: narrow discovery.selector")
            if not token:
                break
        else:
            raise WatchFailed(f"a list of {self._what} has more than {PAGES_MAX} pages")
        if not page.metadata.version:
            raise WatchFailed(f"a list of {self._what} has no resourceVersion")
        return _Listed(sightings, page.metadata.version, pages == 1 and loop.time() - began_s < LIST_COST_FLOOR_S)

    def _take(self, listed: _Listed[S]) -> None:
        """Make the list the view."""
        self.view.replace(listed.sightings, listed.version)
        self._listed_s, self._cheap, self._lost = asyncio.get_running_loop().time(), listed.cheap, False
        self._told = {name: why for name, why in self._told.items() if name in self.view.objects}
        for sighting in listed.sightings:
            self._tell(sighting)
        self.known = self.tried = True
        if not self._warned:
            self.why = ""
        self._changed()

    async def _begin(self, version: str) -> _Watching:
        """Open a watch of the events after a version. Raises Gone and WatchFailed."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(OPEN_S):
                    events = await stack.enter_async_context(self._api.watch(self._namespace, version, HELD_S))
            except TimeoutError:
                raise WatchFailed(f"no watch of {self._what} within {OPEN_S:g} s") from None
            return _Watching(events, stack.pop_all())

    async def _listen(self, until_s: float) -> None:
        """Process the watch until that time of the loop's clock, or until it ends. After one that broke, pods are
        listed again, which shows if the view is stale."""
        while self._watching is not None:
            try:
                line = await self._watching.line(until_s)
                if line is None:
                    return
                if line:
                    self._hear(line)
                    continue
            except Gone:
                self._lost = True
            except WatchFailed as error:
                self._lost = True
                self.errors += 1
                fields = {**self._fields(), "why": str(error)}
                log.info("watch of %s broke", self._what, extra={"event": "watch_broke", "fields": fields})
            await self._leave()

    async def _pause(self, pause_s: float) -> None:
        """Wait without a request, and process the last watch if there is one."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + pause_s
        await self._listen(until_s)
        await asyncio.sleep(max(0.0, until_s - loop.time()))

    async def _leave(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            await watching.leave()

    def _hear(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
            if event.type == "BOOKMARK":
                self.view.version = _decode_versioned(event.object).metadata.version or self.view.version
                return
            status = _decode_status(event.object) if event.type == "ERROR" else None
        except _UNREADABLE as error:
            raise WatchFailed(f"an event is invalid: {error}") from error
        if status is not None:
            if status.code == 410:
                raise Gone
            raise WatchFailed(f"the watch ended with {status.code} {status.reason}: {status.message[:200]}")
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            return
        sighting = self.view.apply_event(event.object, deleted=event.type == "DELETED")
        if sighting is None:
            return
        if len(self.view.objects) > PODS_MAX:
            raise WatchFailed(f"the selector matches more than {PODS_MAX} pods: narrow discovery.selector")
        if event.type == "DELETED":
            self._told.pop(sighting.name, None)
        else:
            self._tell(sighting)
        self._changed()

    # -- logs and state ----------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, str]:
        return {"source": "kubernetes", "namespace": self._namespace}

    def _tell(self, sighting: S) -> None:
        """Log a pod's problem once, and again when it changes. A pool has no problem here: it has its own log lines
        (pool_informer.py)."""
        if sighting.why == self._told.get(sighting.name, ""):
            return
        if sighting.why:
            self._told[sighting.name] = sighting.why
            fields = {**self._fields(), "pod": sighting.name, "why": sighting.why}
            log.warning("pod is not usable", extra={"event": "pod_unusable", "fields": fields})
        else:
            del self._told[sighting.name]

    def _mark_stale(self, why: str) -> None:
        self.errors += 1
        now_s = asyncio.get_running_loop().time()
        if not self.why:
            self.stale_since_s = now_s
        self.why = why
        silent_s = now_s - self._warned_s
        if not self._warned or silent_s >= (RELOG_INTERVAL_S if why != self._warned_of else STILL_S):
            self._warned, self._warned_of, self._warned_s = True, why, now_s
            log.warning(
                "discovery is stale", extra={"event": "discovery_stale", "fields": {**self._fields(), "why": why}}
            )
        if not self.tried:
            self.tried = True
            self._changed()

    def _mark_fresh(self) -> None:
        """Log that pods are listed again, and watched from there."""
        self.why = ""
        if self._warned:
            self._warned = False
            stale_s = round(asyncio.get_running_loop().time() - self.stale_since_s, 3)
            log.info(
                "discovery is current again",
                extra={"event": "discovery_fresh", "fields": {**self._fields(), "stale_s": stale_s}},
            )
