"""Transfer of a router's state to another that has just started, through the store and in the background.

The new router sends its request to the router that has run longest. The request is part of its regular messages, and
also has the number of parcels that it has taken. The other router puts its state into the store, one parcel at a time.
Each parcel has a short lifetime, and at most WINDOW of them wait for the reader. A parcel is removed when it is read.
So the store holds a few megabytes for some seconds, even if a router dies in the middle. If no parcel arrives, another
router is asked, and after that the router starts cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec

from router.peering.frames import PeerFrame
from router.peering.interfaces import SnapshotSource
from router.peering.message_auth import MARK_BYTES, PARCEL, SECRETS_MAX, Seals
from router.peering.peers import PeerRegistry
from router.peering.session import REFUSALS, Session, StoreFailed

log = logging.getLogger(__name__)

PARCEL_BYTES = 256 << 10  # approximate size of a parcel
PARCEL_BYTES_MAX = 4 << 20
BYTES_MAX = 1 << 30  # most bytes that are taken from one router
WINDOW = 32  # parcels that wait in the store: 8 MB
KEPT_S = 20.0  # longest time that a parcel waits there
LOOK_S = 0.01  # interval of the polls for the next parcel
FIRST_S = 4.0  # longest wait for the first parcel, or the next one; then another router is asked
LISTEN_S = 0.4  # time after which a message of every router has been received
RECEIVERS_MAX = 64  # routers that may request at once
NEXT = "none: another router is asked if there is one"
ASKED_MAX = 3  # routers that are asked, one after another

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


class SnapshotTransfer:
    """Both sides of a handover, for one router. `give` and `ask` run in each session, and never return."""

    def __init__(
        self,
        side: SnapshotSource,
        peers: PeerRegistry,
        *,
        name: str,
        origin: int,
        seals: Seals,
        whole: Callable[[], bool],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`whole` returns True if the link is whole, and `wake` makes the next message go out soon."""
        self._side, self._peers, self._name, self._origin, self._seals = side, peers, name, origin, seals
        self._whole, self._wake, self._clock = whole, wake, clock
        self.asks: tuple[str, int] | None = None  # router that is asked, and parcels taken from it so far
        self._askers: dict[int, int] = {}  # routers that request this one's state -> parcels that they have taken
        self._served: set[int] = set()  # requesting routers that received everything, and still ask
        self._asked = asyncio.Event()

    def on_frame(self, origin: int, frame: PeerFrame) -> None:
        """Process a message of another router."""
        if frame.asks is not None and frame.asks[0] == self._name:
            if origin in self._askers or len(self._askers) < RECEIVERS_MAX:
                self._askers[origin] = frame.asks[1]
            if origin not in self._served:
                self._asked.set()
        else:
            self.silent(origin)

    def silent(self, origin: int) -> None:
        """Free the place of a router that is silent, or that no longer requests state."""
        self._askers.pop(origin, None)
        self._served.discard(origin)

    # -- giving ------------------------------------------------------------------------------------------------------

    async def run_sender(self, session: Session) -> None:
        """Hand over this router's state to each router that requests it, one after another. Raises StoreFailed."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            for origin in self._askers.keys() - self._served:
                if origin not in self._askers:  # it fell silent while others had their turn
                    continue
                try:
                    await self._give(session, origin)
                except StoreFailed as failed:
                    if failed.kind not in REFUSALS:
                        raise
                    about = {"event": "state_not_handed", "fields": {"why": failed.text}}
                    log.info("the store does not accept this router's state", extra=about)
                if origin in self._askers:
                    self._served.add(origin)

    async def _give(self, session: Session, to: int) -> None:
        number = 0
        async with aclosing(self._side.pieces()) as pieces, aclosing(_parcels(pieces)) as parcels:
            async for parcel in parcels:
                waited_s = self._clock()
                while self._ahead(to, number) and self._clock() - waited_s <= FIRST_S:  # noqa: ASYNC110 - as below
                    await asyncio.sleep(LOOK_S)
                if to not in self._askers or self._ahead(to, number):
                    return  # the requesting router has enough, is gone, or takes no parcels
                key = _key(to, self._origin, number)
                await session.put(key, self._seal_parcel(key, parcel), KEPT_S)
                number += 1

    def _ahead(self, to: int, number: int) -> bool:
        """True if as many parcels wait in the store as WINDOW allows."""
        return number - self._askers.get(to, number) >= WINDOW

    # -- asking ------------------------------------------------------------------------------------------------------

    async def run_receiver(self, session: Session) -> None:
        """Request the state of other routers, if this router has just started. Raises StoreFailed."""
        try:
            if self._side.needs_snapshot:
                await self._ask(session)
        except StoreFailed as failed:
            if failed.kind not in REFUSALS:
                raise
        finally:
            self.asks = None
        self._side.set_expected(more=False)
        await asyncio.Event().wait()  # a session ends with the first of its tasks

    async def _ask(self, session: Session) -> None:
        while not self._whole():  # noqa: ASYNC110 - a look every so often; the session ends where that never comes
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LISTEN_S)
        # Routers of this fleet are recognized by their replicas, which are known after the first probes.
        began_s = self._clock()
        while not self._peers.has_replicas and self._clock() - began_s < FIRST_S:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(LOOK_S)
        tried = set[int]()
        while len(tried) < ASKED_MAX and (found := self._peers.oldest_peer(tried)) is not None:
            origin, name = found
            tried.add(origin)
            pieces = await self._pieces_of(session, origin, name)
            if pieces is not None and await self._side.import_chunks(pieces, name):
                return

    async def _pieces_of(self, session: Session, origin: int, name: str) -> list[bytes] | None:
        """Receive the state of one router; None if it does not arrive completely."""
        pieces, number, size, since_s = list[bytes](), 0, 0, self._clock()
        self.asks = (name, 0)
        self._wake()
        while size <= BYTES_MAX:
            key = _key(self._origin, origin, number)
            parcel = await session.take(key)
            if parcel is None:
                if self._clock() - since_s > FIRST_S or not self._peers.is_alive(origin):
                    return None
                await asyncio.sleep(LOOK_S)
                continue
            some = self._open_parcel(key, parcel)
            if some is None:
                return None
            if not some:
                return pieces
            pieces += some
            number, size, since_s = number + 1, size + len(parcel), self._clock()
            self.asks = (name, number)
            if not number % (WINDOW // 4):
                self._wake()
        return None

    # -- parcels -----------------------------------------------------------------------------------------------------

    def _seal_parcel(self, key: str, parcel: bytes) -> bytes:
        """Mark a parcel. The marks also cover its key, so they bind it to its receiver, its sender and its position."""
        marks = self._seals.mark(PARCEL, key.encode() + parcel)
        return bytes((len(marks) // MARK_BYTES,)) + marks + parcel if marks else parcel

    def _open_parcel(self, key: str, sealed: bytes) -> list[bytes] | None:
        """Return the pieces in a parcel; the last parcel has no pieces. None if no router of this fleet has made it."""
        if len(sealed) > PARCEL_BYTES_MAX + SECRETS_MAX * MARK_BYTES:
            return None
        if not self._seals:
            return decode_parcel(sealed)
        begin = 1 + sealed[0] * MARK_BYTES
        parcel = sealed[begin:]
        if self._seals.holds(PARCEL, key.encode() + parcel, sealed[1:begin]):
            return decode_parcel(parcel)
        log.warning(
            "the received state is not from a router of this fleet",
            extra={"event": "state_ignored", "fields": {"why": "its signature is from another secret", "next": NEXT}},
        )
        return None


def _key(to: int, origin: int, number: int) -> str:
    return f"state:{to:x}:{origin:x}:{number}"


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
