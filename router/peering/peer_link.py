"""Link between this router and others, through the store, in the background.

The data of the core and of the store side is added to one stream of messages (publisher.py), and the messages of other
routers are read from it in their order (message_receiver.py). If messages of a router are missing, because it was there
before this one or because the store has lost them, its complete state is read, and then its messages after that state.
A task keeps owners of stored responses in the store (persistence.py). All of it belongs to a session, which ends at its
first failure. The next session is opened at once, then every RETRY_S. No request waits for any of it: the link stores
data from requests in memory, and answers requests from memory.

A router also reads its own messages. While it does, others can receive from it and it can receive from others: the link
is whole. If it has read none for ECHO_TIMEOUT_S, in any state of the store, it is alone. It logs that once, and
continues with its own knowledge.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from router.eventloop import CooperativeBudget
from router.peering.frames import BadFrame
from router.peering.interfaces import CoreSync, SharedStateSync, SnapshotSource
from router.peering.message_auth import Seals
from router.peering.message_receiver import PeerReceiver
from router.peering.peers import PeerRegistry
from router.peering.persistence import Keeping
from router.peering.publisher import PeerPublisher
from router.peering.session import ODD, REFUSALS, ZERO_ID, Open, Session, StoreFailed, StreamId
from router.peering.snapshot_transfer import SnapshotTransfer
from router.peering.store_clock import StoreClock

log = logging.getLogger(__name__)

ECHO_TIMEOUT_S = 0.75  # longest time without a received own message; then this router is alone
WATCH_S = 0.1  # interval of the checks if the link is whole
RETRY_S = 0.1  # between two attempts to open a session
RETRY_ODD_S = 5.0  # longest such time if the peer does not speak the Redis protocol: it may try to cause load
READ_GAP_S = 0.005  # time between two reads in a flood: messages that arrive within this time are read at once
READS_IN_A_ROW = 3  # reads without a pause before that: the timer of a pause costs more than a small read
RESTORE_GAP_S = 0.5  # shortest time between two reads of the states of routers of which messages are missing
TICK_S = 1.0  # between two calls of SharedStateSync.tick
CLOSE_S = 0.3  # longest time for the goodbye


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits of a link."""

    owners_max: int  # owners of stored responses that are kept in the store, and that wait to be written
    peers_max: int = 64  # most other routers
    replicas_in_common: bool = True  # True if a router is of this fleet only with a replica in common


class PeerChannel:
    """Link of one router. `start` begins, `close` ends it. No request ever waits for it."""

    def __init__(
        self,
        open_: Open,
        core: CoreSync,
        side: SharedStateSync,
        *,
        name: str,
        origin: int,
        limits: LinkLimits,
        seals: Seals,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        state: SnapshotSource | None = None,
    ) -> None:
        """Create a link.

        - `name`: name of this router.
        - `origin`: a number of its process that no other process has.
        - `seals`: prove messages.
        - `state`: None means that no state is handed over to routers that start.
        """
        self.name, self.origin = name, origin
        self._open, self._core, self._side, self._limits, self._clock = open_, core, side, limits, clock
        self.connected = False
        self.why = "not connected yet"  # the reason why it is not whole
        self._said_alone = False  # True once this is logged, since the link was last whole
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # counts by kind
        self.delay_s: float | None = None  # time between sending and receiving the last own message
        self.refusal = ""  # the store's error text if it answers and refuses
        store_clock = StoreClock()
        self._peers = PeerRegistry(name, origin, limits.peers_max, in_common=limits.replicas_in_common)
        self._hearing = PeerReceiver(self._peers, core, side, self.counts, origin, seals, store_clock, wall)
        self._saying = PeerPublisher(
            core,
            side,
            self.counts,
            name=name,
            origin=origin,
            routers=lambda: self.routers,
            clock=clock,
            store_clock=store_clock,
            seals=seals,
            wall=wall,
        )
        # the core calls these if it has data to publish
        self.urgent, self.changed = self._saying.urgent, self._saying.on_changed
        self._handing: SnapshotTransfer | None = None
        if state is not None:
            self._handing = SnapshotTransfer(
                state,
                self._peers,
                name=name,
                origin=origin,
                seals=seals,
                whole=lambda: self.connected,
                ask=self._saying.ask,
                clock=clock,
            )
            self._hearing.handing = self._handing
        self._keeping = Keeping(
            side,
            self._hearing,
            seals,
            name=name,
            origin=origin,
            owners_max=limits.owners_max,
            state=self._saying.state,
            counts=self.counts,
            clock=clock,
        )
        # Ids of the last message and of the last owner that were read.
        self._messages_at, self._owners_at = ZERO_ID, ZERO_ID
        self._restored_s = float("-inf")  # time at which states were read
        # Time in which this router's loop has run, in seconds. If the loop blocks for a second, own messages are not
        # late but unread.
        self._awake_s = 0.0
        self._echo_s = float("-inf")  # the same time at the last received own message
        self._session: Session | None = None
        self._elsewhere = asyncio.Event()  # set to end the session, because the next one is with another store
        self._tasks: list[asyncio.Task[None]] = []

    # -- events from the path of requests ----------------------------------------------------------------------------

    def publish_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Write the owner of a new stored response to the store at once, where all routers read it."""
        self._keeping.queue_owner((response_id, replica, tenant))

    # -- status ------------------------------------------------------------------------------------------------------

    @property
    def routers(self) -> int:
        """Number of active routers, this one included."""
        return 1 + self._peers.heard

    def peers(self) -> list[tuple[str, float]]:
        """Return the name of each other active router, and the seconds since its last message."""
        return self._peers.rows(self._clock())

    def strangers(self) -> list[str]:
        """Return the names of routers of other fleets that share this one's store and name."""
        return self._peers.strangers()

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def on_secrets_changed(self) -> None:
        """The secrets have changed (message_auth.py)."""
        self._keeping.on_secrets_changed()

    def reopen(self) -> None:
        """The store's address or password has changed. End the session, which does not count as a failure, and open
        another at once. No goodbye is sent: for others that use the same store this router was not away."""
        self._elsewhere.set()

    def start(self) -> None:
        """Begin, in the background."""
        self._side.on_disconnected()
        self._tasks = [asyncio.create_task(_supervise(work)) for work in (self._run, self._watch)]

    async def close(self) -> None:
        """Notify others that this router leaves, if that takes no time, and end."""
        session = self._session
        if session is not None and self.connected:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._saying.leave(session)
                    await session.leave(self.name)
            except (StoreFailed, TimeoutError):
                text = "other routers could not be notified that this router stops"
                log.debug(text, extra={"event": "peering_leave_failed"})
        await _cancel_tasks(self._tasks, CLOSE_S)

    async def _run(self) -> None:
        """Keep a session open, one after another."""
        retry_s = RETRY_S
        while True:
            began_s = self._clock()
            if self._elsewhere.is_set():
                self._elsewhere.clear()
                self._messages_at = self._owners_at = ZERO_ID  # another store is read from its beginning
            try:
                async with self._open() as session:
                    self._session = session
                    try:
                        await self._serve(session)
                    finally:
                        self._session = None
            except StoreFailed as failed:
                self._record_failure(failed)
                retry_s = min(2 * retry_s, RETRY_ODD_S) if failed.kind == ODD else RETRY_S
            else:
                retry_s = RETRY_S
            await asyncio.sleep(max(RETRY_S / 10, retry_s - (self._clock() - began_s)))

    async def _serve(self, session: Session) -> None:
        """Publish, receive and keep, until one of them fails or the store has moved. Raises StoreFailed."""
        await self._begin(session)
        works = [
            self._follow(session),
            self._saying.run(session),
            self._keeping.keep(session),
            self._watch_own_echo(),
            self._wait_for_reconfigure(),
        ]
        if self._handing is not None:
            works += [self._handing.run_sender(session), self._handing.run_receiver(session)]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            await _cancel_tasks(tasks, CLOSE_S / 10)

    async def _begin(self, session: Session) -> None:
        """Find the place from which messages are read: where the last session ended, or after the states of the others
        and before this router's own first message. Raises StoreFailed."""
        own = await self._saying.begin(session)
        await self._keeping.put_state(session)
        if own <= self._messages_at:  # another store, or one that has lost its data and has an earlier clock
            self._messages_at = ZERO_ID
        if own <= self._owners_at:
            self._owners_at = ZERO_ID
        if self._messages_at == ZERO_ID or not self._peers.any_whole():
            self._messages_at = own[0] - 1, own[1]
        await self._restore(session)

    async def _follow(self, session: Session) -> None:
        """Read messages and owners. Raises StoreFailed."""
        pace, due_s = CooperativeBudget(), self._clock()
        while True:
            page = await session.read(self._messages_at, self._owners_at)
            pace.begin()
            for id_, message in page.messages:
                self._on_message(id_, message)
                await pace.step()
            if page.owners:
                self._keeping.take_owners(page.owners)
            self._messages_at, self._owners_at = page.messages_at, page.owners_at
            if self._peers.is_incomplete() and self._clock() - self._restored_s >= RESTORE_GAP_S:
                await self._restore(session)
            now_s = self._clock()
            due_s = max(due_s, now_s - READS_IN_A_ROW * READ_GAP_S) + READ_GAP_S
            if due_s > now_s:
                await asyncio.sleep(due_s - now_s)

    async def _restore(self, session: Session) -> None:
        """Read the states of all routers, and apply those of which messages are missing. Their messages after the state
        are read next, some of them again. Raises StoreFailed."""
        pace = CooperativeBudget()
        async with aclosing(session.states()) as states:
            async for state in states:
                pace.begin()
                try:
                    for at in self._hearing.restore(state, self._clock()):
                        self._messages_at = min(at, self._messages_at)
                        await pace.step()
                except BadFrame as error:
                    self._on_bad_message(error)
        self._restored_s = self._clock()

    async def _watch_own_echo(self) -> None:
        """Fail if own messages are not received: one of the two directions is cut. Raises StoreFailed."""
        opened_s = self._awake_s
        while (left_s := max(self._echo_s, opened_s) + ECHO_TIMEOUT_S - self._awake_s) > 0:  # noqa: ASYNC110 - mostly one look
            await asyncio.sleep(max(WATCH_S, left_s))
        raise StoreFailed("silent", "this router does not receive its own messages")

    async def _wait_for_reconfigure(self) -> None:
        await self._elsewhere.wait()

    def _record_failure(self, failed: StoreFailed) -> None:
        self.failures[failed.kind] += 1
        self.why = f"{failed.kind}: {failed.text}"
        self.refusal = self.why if failed.kind in REFUSALS else ""

    async def _watch(self) -> None:
        """Detect that the link becomes whole or is no longer whole, and forget silent routers."""
        ticked_s = before_s = self._clock()
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = self._clock()
            self._awake_s += min(now_s - before_s, 2 * WATCH_S)
            before_s = now_s
            if self.connected and self._awake_s - self._echo_s >= ECHO_TIMEOUT_S:
                self.connected = False
                self.counts["interruptions"] += 1
                self._became_alone(now_s)
            elif not self.connected and not self._said_alone and self._awake_s >= ECHO_TIMEOUT_S:
                self._became_alone(now_s)  # the store could not be used from the start
            for origin in self._peers.expire_silent(now_s):
                self._hearing.silent(origin, self._peers.name_of(origin), now_s, left=False)
            self._peers.serve(self._side.replicas())
            self._hearing.forget_lost(now_s)
            self._core.tick(now_s)
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                self._side.tick()

    def _became_alone(self, now_s: float) -> None:
        self._said_alone = True
        self._peers.set_incomplete()
        self._core.on_disconnected(now_s)
        self._side.on_disconnected()
        why = self.why or "this router does not receive its own messages"
        fields = {"why": why, "next": "check that the store runs and is reachable; no restart is necessary"}
        log.warning(
            "this router continues without the other routers", extra={"event": "peering_disconnected", "fields": fields}
        )

    def _became_whole(self) -> None:
        self.connected, self._said_alone = True, False
        self._side.on_connected()
        fields = {"name": self.name, "routers": self.routers}
        log.info(
            "this router receives its own messages through the store",
            extra={"event": "peering_connected", "fields": fields},
        )

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_message(self, id_: StreamId, message: bytes) -> None:
        now_s = self._clock()
        self.counts["heard"] += 1
        self.counts["heard_bytes"] += len(message)
        try:
            own_s = self._hearing.hear(id_, message, now_s)
        except BadFrame as error:
            self._on_bad_message(error)
            return
        if own_s is not None:
            self._echo_s, self.delay_s = self._awake_s, max(0.0, now_s - own_s)
            self.why = self.refusal = ""
            if not self.connected:
                self._became_whole()

    def _on_bad_message(self, error: BadFrame) -> None:
        self.counts["bad"] += 1
        if self.counts["bad"] == 1:
            what = {"why": str(error), "next": "check for other writers to the store's streams"}
            log.warning(
                "a message that is not from a router was received",
                extra={"event": "peering_invalid_message", "fields": what},
            )


async def _cancel_tasks(tasks: Iterable[asyncio.Task[None]], again_s: float) -> None:
    """Cancel these tasks, and wait for their ends. Cancel again after `again_s`: asyncio.wait_for, with which redis-py
    writes, may swallow a cancellation before Python 3.12."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=again_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # only the first error is reported


async def _supervise(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a function forever. A bug in it is logged, and it is started again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("bug: communication between routers failed", extra={"event": "bug"})
        await asyncio.sleep(TICK_S)
