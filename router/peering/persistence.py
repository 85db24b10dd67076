"""Data of one router in the store: its state, and the owners of the stored responses that it made.

Owners that the store has lost are written again. Each router first writes the owners that it made. A little later it
writes those of other routers that are still missing, because their routers may be gone. An entry has a mark
(message_auth.py): entries of other routers count if their mark is valid.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from router.peering.message_auth import OWNER, Seals, owner_bytes
from router.peering.message_receiver import STATE_EVERY_S
from router.peering.session import ZERO_ID, Entry, ResponseOwnerEntry, Session

STATE_LIFE_S = 5.0  # lifetime of a state in the store
WRITTEN_MAX = 64  # owners in one write: a busy router must be able to send it, and read the answer, in time
REWRITE_S = 30.0  # shortest time between two writes of all that the store has lost
# Others' owners are written this time after the own ones, in turns of STATE_EVERY_S.
FILL_S, FILL_TURNS = 2 * STATE_EVERY_S, 4
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
        state: Callable[[], bytes],
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """`state` encodes this router's state. `counts` are the link's."""
        self._owners, self._refusals, self._seals, self._state = owners, refusals, seals, state
        self._name, self._origin, self._owners_max, self._clock = name, origin, owners_max, clock
        self._counts = counts
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

    async def put_state(self, session: Session) -> None:
        """Write this router's state, and note if the store has lost the one before. Raises StoreFailed."""
        new = await session.put_state(self._name, self._state(), STATE_LIFE_S)
        self._lost = self._lost or (self._present and new)
        self._present, now_s = True, self._clock()
        if self._lost and now_s - self._rewritten_s >= REWRITE_S:
            self._lost, self._rewritten_s = False, now_s
            self._unwritten.clear()
            self._unwritten.extend(self._made)
            self._fill_s = now_s + FILL_S + self._origin % FILL_TURNS * STATE_EVERY_S

    async def keep(self, session: Session) -> None:
        """Maintain this router's data in the store, until cancelled. Raises StoreFailed."""
        due_s = self._clock() + STATE_EVERY_S
        while True:
            self._write.clear()
            await self._write_owners(session)
            if (now_s := self._clock()) >= due_s:
                due_s = now_s + STATE_EVERY_S
                await self.put_state(session)
            if now_s >= self._fill_s:
                self._fill_s = float("inf")
                await self._fill(session)
            if not self._unwritten:
                try:
                    async with asyncio.timeout(due_s - self._clock()):
                        await self._write.wait()
                except TimeoutError:
                    pass

    async def _write_owners(self, session: Session) -> None:
        while self._unwritten:
            some = [self._unwritten[n] for n in range(min(WRITTEN_MAX, len(self._unwritten)))]
            entries = [(each, self._seals.mark(OWNER, owner_bytes(*each))) for each in some]
            await session.write_owners(entries, self._owners_max)
            for each in some:  # the oldest may have been dropped for newer ones in the meantime
                if self._unwritten and self._unwritten[0] is each:
                    self._unwritten.popleft()
            self._counts["written"] += len(some)

    def take_owners(self, entries: Iterable[Entry]) -> set[str]:
        """Process owners that were read from the store. Returns the ids of their responses."""
        proved = self._filter_authentic(entries)
        self._owners.load_owners(proved)
        return {owner[0] for owner in proved}

    async def _fill(self, session: Session) -> None:
        """Queue owners of other routers that the store has lost."""
        there, at = set[str](), ZERO_ID
        for _ in range(self._owners_max):  # a store that returns more pages would never end
            page = await session.read_owners(at)
            if page.owners_at == at:
                break
            there |= self.take_owners(page.owners)
            at = page.owners_at
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
