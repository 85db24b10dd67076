"""Transfer of a router's snapshot to another that has just started, through the store and in the background.

The new router requests the snapshot of the router that has run longest, with a message. The other router appends it to
a stream for this purpose, one parcel at a time. At most WINDOW parcels wait in the stream, and each one is removed when
it is read. The stream has a short lifetime. So the store holds a few megabytes for some seconds, even if a router dies
in the middle. If no parcel arrives, another router is asked, and after that the router starts cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

import msgspec

from router.peering.frames import PeerFrame
from router.peering.interfaces import SnapshotSource
from router.peering.message_auth import MARK_BYTES, PARCEL, SECRETS_MAX, Seals
from router.peering.peers import PeerRegistry
from router.peering.session import Session

log = logging.getLogger(__name__)

PARCEL_BYTES = 256 << 10  # approximate size of a parcel
PARCEL_BYTES_MAX = 4 << 20
BYTES_MAX = 1 << 30  # most bytes that are taken from one router
WINDOW = 32  # parcels that wait in the store: 8 MB
KEPT_S = 20.0  # lifetime of the stream after the last parcel
LOOK_S = 0.01  # interval of the checks for room for the next parcel
FIRST_S = 4.0  # longest wait for the first parcel, or the next one; then another router is asked
RECEIVERS_MAX = 64  # routers that may request at once
NEXT = "none: another router is asked if there is one"
ASKED_MAX = 3  # routers that are asked, one after another

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


class SnapshotTransfer:
    """Both sides of a handover, for one router. `run_sender` and `run_receiver` run in each session, and never
    return."""

    def __init__(
        self,
        side: SnapshotSource,
        peers: PeerRegistry,
        *,
        name: str,
        origin: int,
        seals: Seals,
        whole: Callable[[], bool],
        ask: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`whole` returns True if the link is whole, and `ask` sends a message to a router that requests its
        snapshot."""
        self._side, self._peers, self._name, self._origin, self._seals = side, peers, name, origin, seals
        self._whole, self._ask_router, self._clock = whole, ask, clock
        self._askers: dict[int, None] = {}  # routers that request this one's snapshot
        self._served: deque[int] = deque(maxlen=RECEIVERS_MAX)  # routers that it was last sent to
        self._asked = asyncio.Event()

    def on_frame(self, origin: int, frame: PeerFrame) -> None:
        """Process a message of another router."""
        if frame.asks != self._name or origin in self._served:  # requests are repeated until the first parcel arrives
            return
        if len(self._askers) < RECEIVERS_MAX:
            self._askers[origin] = None
            self._asked.set()

    def silent(self, origin: int) -> None:
        """Free the place of a router that is silent."""
        self._askers.pop(origin, None)

    # -- giving ------------------------------------------------------------------------------------------------------

    async def run_sender(self, session: Session) -> None:
        """Hand over this router's snapshot to each router that requests it, one after another. Raises StoreFailed."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._askers:
                origin = next(iter(self._askers))
                self._served.append(origin)
                await self._give(session, origin)
                self._askers.pop(origin, None)

    async def _give(self, session: Session, to: int) -> None:
        key, number = _key(to, self._origin), 0
        await session.drop(key)  # parcels of an earlier attempt
        async with aclosing(self._side.pieces()) as pieces, aclosing(_parcels(pieces)) as parcels:
            async for parcel in parcels:
                until_s, sealed = self._clock() + FIRST_S, self._seal_parcel(f"{key}:{number}", parcel)
                while not await session.offer(key, sealed, WINDOW, KEPT_S):
                    if to not in self._askers or self._clock() > until_s:
                        return  # the requesting router is gone, or takes no parcels
                    await asyncio.sleep(LOOK_S)
                number += 1

    # -- asking ------------------------------------------------------------------------------------------------------

    async def run_receiver(self, session: Session) -> None:
        """Request the snapshots of other routers, if this router has just started. Raises StoreFailed."""
        if self._side.needs_snapshot:
            await self._ask(session)
        self._side.set_expected(more=False)
        await asyncio.Event().wait()  # a session ends with the first of its tasks

    async def _ask(self, session: Session) -> None:
        while not self._whole():  # noqa: ASYNC110 - a look every so often; the session ends where that never comes
            await asyncio.sleep(LOOK_S)
        # Routers of this fleet are recognized by their replicas, which are known after the first probes.
        began_s = self._clock()
        while not self._peers.has_replicas and self._clock() - began_s < FIRST_S:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(LOOK_S)
        tried = set[int]()
        while len(tried) < ASKED_MAX and (found := await self._find_router(tried)) is not None:
            origin, name = found
            tried.add(origin)
            pieces = await self._pieces_of(session, origin, name, partial(self._may_send, origin, tried))
            if pieces is not None and await self._side.import_chunks(pieces, name):
                return

    async def _find_router(self, tried: set[int]) -> tuple[int, str] | None:
        """Return the next router to ask; None if there is none. A busy router may be silent for a moment."""
        since_s = self._clock()
        while (found := self._peers.oldest_peer(tried)) is None:
            if not self._peers.may_return(tried) or self._clock() - since_s > FIRST_S:
                return None
            await asyncio.sleep(LOOK_S)
        return found

    def _may_send(self, origin: int, tried: set[int]) -> bool:
        """True if parcels of a router may arrive. One that is silent may be busy; it has died if another is active."""
        return self._peers.is_active(origin) or self._peers.oldest_peer(tried) is None

    async def _pieces_of(
        self, session: Session, origin: int, name: str, may_send: Callable[[], bool]
    ) -> list[bytes] | None:
        """Receive the snapshot of one router; None if it does not arrive completely."""
        key = _key(self._origin, origin)
        pieces, number, size, since_s = list[bytes](), 0, 0, self._clock()
        self._ask_router(name)
        while size <= BYTES_MAX and self._clock() - since_s <= FIRST_S and may_send():
            parcel = await session.take(key, FIRST_S / 8)
            if parcel is None:
                if not number:  # the other router may have had no place for this one yet, and ignored its message
                    self._ask_router(name)
                continue
            some = self._open_parcel(f"{key}:{number}", parcel)
            if some is None:
                return None
            if not some:
                await session.drop(key)
                return pieces
            pieces += some
            number, size, since_s = number + 1, size + len(parcel), self._clock()
        return None

    # -- parcels -----------------------------------------------------------------------------------------------------

    def _seal_parcel(self, place: str, parcel: bytes) -> bytes:
        """Mark a parcel. The marks also cover its place: its receiver, its sender and its number."""
        marks = self._seals.mark(PARCEL, place.encode() + parcel)
        return bytes((len(marks) // MARK_BYTES,)) + marks + parcel if marks else parcel

    def _open_parcel(self, place: str, sealed: bytes) -> list[bytes] | None:
        """Return the pieces in a parcel; the last parcel has no pieces. None if no router of this fleet has made it."""
        if not 0 < len(sealed) <= PARCEL_BYTES_MAX + SECRETS_MAX * MARK_BYTES:
            return None
        if not self._seals:
            return decode_parcel(sealed)
        begin = 1 + sealed[0] * MARK_BYTES
        parcel = sealed[begin:]
        if self._seals.holds(PARCEL, place.encode() + parcel, sealed[1:begin]):
            return decode_parcel(parcel)
        log.warning(
            "the received state is not from a router of this fleet",
            extra={
                "event": "snapshot_ignored",
                "fields": {"why": "its signature is from another secret", "next": NEXT},
            },
        )
        return None


def _key(to: int, origin: int) -> str:
    return f"snapshot:{to:x}:{origin:x}"


def decode_parcel(parcel: bytes) -> list[bytes] | None:
    """Decode the pieces in a parcel; the last parcel has no pieces. None for another format."""
    if len(parcel) > PARCEL_BYTES_MAX:
        return None
    try:
        return _decode(parcel)
    except (msgspec.DecodeError, RecursionError):
        return None


async def _parcels(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    some, size = list[bytes](), 0
    async for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= PARCEL_BYTES:
            yield _encode(some)
            some, size = [], 0
    if some:
        yield _encode(some)
    yield _encode([])
