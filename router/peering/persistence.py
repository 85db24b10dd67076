"""Data of one router in the store: its presence, and the owners of the stored responses that it made.

A refused write is tried again and logged once. Data that the store has lost is written again. Each router first writes
the owners that it made. A little later it writes those of other routers that are still missing, because their routers
may be gone. An entry has a mark (message_auth.py): entries of other routers count if their mark is valid.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from router.peering.message_auth import OWNER, Seals, owner_bytes
from router.peering.session import REFUSALS, Entry, ResponseOwnerEntry, Session, StoreFailed

log = logging.getLogger(__name__)

PERSIST_INTERVAL_S = 1.0  # between two writes of this router's presence
PRESENCE_S = 5.0  # lifetime of presence in the store
OVERLAP_MS = 5_000  # owners are read again from this time before the last whole moment
WRITTEN_MAX = 64  # owners in one write: a busy router must be able to send it, and read the answer, in time
REWRITE_S = 30.0  # shortest time between two writes of all that the store has lost
# Time after a session's beginning at which owners are read a second time. Another router may have sent an owner's
# message before this router listened, and written the entry since.
SECOND_READ_S = PERSIST_INTERVAL_S
READ_EVERY_S = REWRITE_S  # between two later reads: lost data may be written again at any time
FILL_S, FILL_TURNS = (
    2 * PERSIST_INTERVAL_S,
    4,
)  # others' owners are written this time after the own ones, in turns of PERSIST_INTERVAL_S
FILL_SLICE = 256  # owners that are examined without a pause


class Owners(Protocol):
    """Owners of stored responses, as known to this router (interfaces.py)."""

    def load_owners(self, owners: Sequence[ResponseOwnerEntry]) -> None:
        """Take owners that other routers have written."""

    def list_response_ids(self) -> list[str]:
        """Return the ids of all responses with known owners."""

    def owner(self, response_id: str) -> ResponseOwnerEntry | None:
        """Return the entry of a response; None if it is no longer known."""


class Refusals(Protocol):
    """Counter of data that is not of this fleet (message_receiver.py)."""

    def refuse(self, kind: str, why: str, now_s: float) -> None:
        """Count an entry."""


class Keeping:
    """Keeps the data of one router in the store, in one session after another."""

    def __init__(
        self,
        owners: Owners,
        refusals: Refusals,
        seals: Seals,
        *,
        name: str,
        origin: int,
        owners_max: int,
        counts: Counter[str],
        failures: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """`counts` and `failures` are the link's."""
        self._owners, self._refusals, self._seals = owners, refusals, seals
        self._name, self._origin, self._owners_max, self._clock = name, origin, owners_max, clock
        self._counts, self._failures = counts, failures
        self.refusal = ""  # the store's error text if it answers and refuses writes
        self._unwritten: deque[ResponseOwnerEntry] = deque(maxlen=owners_max)  # owners that are not in the store yet
        self._made: deque[ResponseOwnerEntry] = deque(maxlen=owners_max)  # all owners that this router has published
        self._lost = False  # True if the store has lost data of this router
        self._present, self._rewritten_s = False, float("-inf")
        self._fill_s = float("inf")  # time at which others' owners are written that the store has lost
        self._write = asyncio.Event()

    def queue_owner(self, owner: ResponseOwnerEntry) -> None:
        """Queue the owner of a new stored response. It is written soon."""
        self._unwritten.append(owner)
        self._made.append(owner)
        self._write.set()

    def on_secrets_changed(self) -> None:
        """The secrets have changed: write this router's owners again, with marks that are valid now."""
        self._unwritten.clear()
        self._unwritten.extend(self._made)
        self._write.set()

    async def keep(self, session: Session, last_s: float | None) -> None:
        """Maintain this router's data in the store, until cancelled. `last_s` is the time of the last message from
        other routers. Raises StoreFailed if the store does not answer."""
        due_s, reads = self._clock(), 0
        while True:
            try:
                if (now_s := self._clock()) >= due_s:
                    await self._read(session, last_s)
                    last_s, due_s, reads = now_s, now_s + (READ_EVERY_S if reads else SECOND_READ_S), reads + 1
                if now_s >= self._fill_s:
                    await self._fill(session)
                    self._fill_s = float("inf")
                await self._write_pending(session)
            except StoreFailed as failed:
                if failed.kind not in REFUSALS:
                    raise
                self._on_write_refused(failed)
            else:
                self._on_write_accepted()
            await self._next_write()

    async def _next_write(self) -> None:
        """Wait for the next write: an owner or the next presence. After a refusal, wait for half of
        PERSIST_INTERVAL_S."""
        if self.refusal:
            await asyncio.sleep(PERSIST_INTERVAL_S / 2)
            return
        self._write.clear()
        if not self._unwritten:
            try:
                async with asyncio.timeout(PERSIST_INTERVAL_S):
                    await self._write.wait()
            except TimeoutError:
                pass

    async def _write_pending(self, session: Session) -> None:
        """Write presence and the queued owners, and earlier owners again if the store has lost them."""
        there = await session.set_presence(self._name, b"%d" % self._origin, PRESENCE_S)
        self._lost = self._lost or (self._present and not there)
        self._present, now_s = True, self._clock()
        if self._lost and now_s - self._rewritten_s >= REWRITE_S:
            self._lost, self._rewritten_s = False, now_s
            self._unwritten.clear()
            self._unwritten.extend(self._made)
            self._fill_s = now_s + FILL_S + self._origin % FILL_TURNS * PERSIST_INTERVAL_S
        while self._unwritten:
            some = [self._unwritten[n] for n in range(min(WRITTEN_MAX, len(self._unwritten)))]
            entries = [(each, self._seals.mark(OWNER, owner_bytes(*each))) for each in some]
            await session.write(entries, self._owners_max)
            for each in some:  # the oldest may have been dropped for newer ones in the meantime
                if self._unwritten and self._unwritten[0] is each:
                    self._unwritten.popleft()
            self._counts["written"] += len(some)

    async def _read(self, session: Session, last_s: float | None) -> None:
        """Read owners that were written since this router last received from others; all of them at its start."""
        since_ms = 0
        if last_s is not None:
            away_ms = int((self._clock() - last_s) * 1_000)
            since_ms = max(0, await session.fetch_time_ms() - away_ms - OVERLAP_MS)
        async for entries in session.read(since_ms, self._owners_max):
            self._owners.load_owners(self._filter_authentic(entries))
            await asyncio.sleep(0)

    async def _fill(self, session: Session) -> None:
        """Queue owners of other routers that the store has lost."""
        there = set[str]()
        async for entries in session.read(0, self._owners_max):
            proved = self._filter_authentic(entries)
            self._owners.load_owners(proved)
            there.update(owner[0] for owner in proved)
            await asyncio.sleep(0)
        for number, id_ in enumerate(self._owners.list_response_ids()):
            if id_ not in there and (owner := self._owners.owner(id_)) is not None:
                self._unwritten.append(owner)
            if number % FILL_SLICE == FILL_SLICE - 1:
                await asyncio.sleep(0)

    def _filter_authentic(self, entries: Iterable[Entry]) -> list[ResponseOwnerEntry]:
        """Return the owners that routers of this fleet have written."""
        found = list[ResponseOwnerEntry]()
        for owner, mark in entries:
            if self._seals.holds(OWNER, owner_bytes(*owner), mark):
                found.append(owner)
            else:
                self._refusals.refuse("unauthenticated", "the owner of a stored response is not signed", self._clock())
        return found

    def _on_write_refused(self, failed: StoreFailed) -> None:
        self._failures[failed.kind] += 1
        text = f"{failed.kind}: {failed.text}"
        if not self.refusal:
            fields = {
                "why": text,
                "next": "give the store memory or write permission; messages between routers are not affected",
            }
            log.warning("the shared store accepts no writes", extra={"event": "sharing_refused", "fields": fields})
        self.refusal = text

    def _on_write_accepted(self) -> None:
        if self.refusal:
            log.info("the shared store accepts writes again", extra={"event": "sharing_accepted"})
        self.refusal = ""
