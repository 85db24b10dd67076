"""Receiver of one replica's events: finds the source, drives the KvStream, and passes the results to an EventSink.

Connection changes are read before batches, and batches one at a time, so that a batch of a new process is never taken
for one of the old process. Applying events yields to the event loop by elapsed time. A replay of ten thousand batches,
or one batch of ten thousand blocks, must not delay the requests that are relayed at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from router.core.cache_state.event_lag import EventLag
from router.core.fleet.flap_filter import FlapFilter, FlapPhase
from router.core.kv_events.batch_decoder import Removed, Stored, slices
from router.core.kv_events.event_state_codec import EngineState, UnreadableState
from router.core.kv_events.sink import EventSink, dispatch
from router.core.kv_events.stream import KvStream
from router.core.kv_events.stream_steps import (
    Apply,
    Clear,
    RequestReplay,
    Resume,
    SetConfidence,
    StreamCounts,
    StreamLimits,
    Suspend,
)
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.kv_events.addresses import Addresses
from router.engines.kv_events.snapshot_resume import SnapshotResume, import_state, state_of, why_not_resumable
from router.engines.kv_events.sockets import Replay, Sockets, Subscription, Unreadable
from router.engines.kv_events.sources import EventsDisabled, EventSourceResolver, NoAnswer, Source
from router.eventloop import CooperativeBudget, Turns

log = logging.getLogger(__name__)

YIELD_S = 0.0005  # work in one step, before the stream waits for its turn of the event loop
SLICE_BLOCKS = 256  # blocks applied in one step: about half a millisecond
WHYS_MAX = 6  # reasons for the same grade within ten minutes from which they are no longer logged one by one
FIND_AGAIN_S = 1.0  # pause after a replica did not state the source of its events


@dataclass(slots=True)
class StreamStats:
    """State of one replica's stream, for metrics and pages."""

    state: str
    grade: Confidence
    why: str
    endpoint: str = ""
    last_seq: int = -1  # number of the last batch of which all events are applied
    lag_s: float | None = None  # lag of the last batch: the router's wall clock minus the engine's
    events: int = 0
    blocks: int = 0  # blocks stored and removed so far
    counts: StreamCounts = field(default_factory=StreamCounts)


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """Dependencies that all followers share. `clock` is monotonic, `wall` returns Unix time."""

    sink: EventSink
    sockets: Sockets
    finder: EventSourceResolver
    limits: StreamLimits
    poll_s: float
    bound: str  # the address to which engines connect
    clock: Callable[[], float]
    wall: Callable[[], float]
    handover: SnapshotResume | None = None  # None: no stream continues from another process's state


class EventStreamReader:
    """Receives and applies one replica's events."""

    def __init__(self, shared: ReaderContext, replica: Replica) -> None:
        self._shared = shared
        self.replica = replica
        self.stream: KvStream | None = None
        self.connects = False  # True if the engine connects to the router
        self.wake = asyncio.Event()
        self._found: Source | EventsDisabled | None = None
        self._addresses, self._replays = Addresses(""), Addresses("")
        self._replay: Replay | None = None
        self._token = 0
        self._spent_s = 0.0
        self._look = asyncio.Event()  # set to query the replica for its source again
        self._events = self._blocks = 0
        self._why, self._graded = "not requested yet", Confidence.ESTIMATED
        self._whys = FlapFilter(WHYS_MAX)
        self._lag_s: float | None = None  # lag of the last batch when it was received
        self._lateness = EventLag()
        self._turns: Turns | None = None  # turns of the stream that is followed
        self._share_s = YIELD_S  # limit of work in the current turn
        self._applying = asyncio.Lock()  # held while a batch is applied, and while the whole state is copied
        self._applying_seq: int | None = None  # number of the batch of which only a part is applied
        self._unproven = 0  # blocks from another process that the stream has not proved yet
        self.down_since_s: float | None = None  # start of the failed connection attempts; None without any

    def stats(self) -> StreamStats:
        """Return the current state of the stream."""
        stream = self.stream
        if stream is None:
            return StreamStats("off", Confidence.ESTIMATED, self._why, events=self._events, blocks=self._blocks)
        endpoint = self._found.endpoint or self._shared.bound if isinstance(self._found, Source) else ""
        return StreamStats(
            state=stream.phase.value,
            grade=stream.grade,
            why=stream.why,
            endpoint=endpoint,
            last_seq=stream.handed_out_seq if self._applying_seq is None else self._applying_seq - 1,
            lag_s=self._lag_s,
            events=self._events,
            blocks=self._blocks,
            counts=stream.counts,
        )

    @property
    def why(self) -> str:
        """Reason for the grade."""
        return self._why

    def update(self, replica: Replica) -> None:
        """Adopt discovery's new entry for the replica."""
        self.replica = replica
        self._look.set()

    async def state(self) -> EngineState | None:
        """Return the state from the replica's events so far; None if it is not certain at the moment, or not useful."""
        stream, handover = self.stream, self._shared.handover
        if stream is None or handover is None or not stream.replays:
            return None
        async with self._applying:
            return (
                await state_of(stream, handover.state_sink, self.replica.id, CooperativeBudget())
                if self.stream is stream
                else None
            )

    async def run(self) -> None:
        """Find the source and follow it, again whenever the source changes, until cancelled."""
        finding = asyncio.create_task(self._find())
        try:
            while True:
                found = self._found
                if isinstance(found, Source):
                    await self._follow(found)
                    self._grade(Confidence.ESTIMATED, "the address of its KV events changed")
                else:
                    if isinstance(found, EventsDisabled):
                        self._grade(Confidence.ESTIMATED, found.why)
                    await self.wake.wait()
                    self.wake.clear()
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)

    async def _find(self) -> None:
        """Query the source: at first, every `poll_s`, and after a reconnection, because flags may have changed."""
        while True:
            wait_s = self._shared.poll_s * random.uniform(0.9, 1.1)  # noqa: S311 - spread, not secrets
            self._look.clear()
            try:
                found = await self._shared.finder.find(self.replica)
            except NoAnswer as silent:
                wait_s = min(wait_s, FIND_AGAIN_S)
                if self._found is None:
                    self._grade(Confidence.ESTIMATED, f"does not report the address of its KV events: {silent}")
            except Exception:  # a bug in a page's reader must not end the loop
                log.exception(
                    "bug: search for KV events failed", extra={"event": "bug", "fields": {"replica": self.replica.id}}
                )
            else:
                if found != self._found:
                    self._found = found
                    self.wake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._look.wait()

    async def _follow(self, source: Source) -> None:
        self.connects = not source.endpoint
        subscription, finder = None, self._shared.finder
        self._addresses = Addresses(source.endpoint, finder.address)
        self._replays = Addresses(source.replay, finder.address)
        try:
            if not self.connects:
                subscription = await self._shared.sockets.subscribe(self._addresses, source.topic)
                subscription.wakes(self.wake)
                self.down_since_s = self._shared.clock()
        except ValueError as error:
            # not tried again before the replica or the settings give another address
            self._found = EventsDisabled(f"cannot subscribe to {error}")
            return
        if not self.connects:
            self._grade(Confidence.ESTIMATED, f"not connected to {source.endpoint} yet")
        self.stream, self._applying_seq = KvStream(bool(source.replay), self._shared.limits), None
        try:
            if subscription is None:
                self.stream.on_connected(self._shared.clock())
            await self._drive(self.stream, source, subscription)
        finally:
            self.connects, self.stream, self.down_since_s = False, None, None
            self._stop_replay()
            if subscription is not None:
                subscription.close()
        self._report_proof("publishes at another address, or not at all")
        self._shared.sink.clear(self.replica.id, "publishes at another address, or not at all", self._shared.clock())

    async def _drive(self, stream: KvStream, source: Source, subscription: Subscription | None) -> None:
        """Receive and apply events until the source changes."""
        clock, was_up = self._shared.clock, False
        self._turns = Turns(asyncio.get_running_loop(), time.perf_counter)
        self._spent_s, self._share_s = time.perf_counter(), YIELD_S
        while self._found == source:
            self.wake.clear()
            stream.tick(clock())
            await self._resume_from_snapshot(stream)
            busy = True
            while busy:
                if subscription is not None:
                    was_up = self._apply_connection_changes(stream, subscription, was_up)
                    heard = subscription.receive()
                    if isinstance(heard, Unreadable):
                        stream.unreadable(heard.why)
                    elif heard is not None:
                        stream.live(heard[1], heard[2], clock())
                    busy = heard is not None
                else:
                    busy = False
                busy |= self._answer(stream)
                await self._perform(stream)
                await self._yield_if_due()  # batches that wait for a replay take time too, and can be many
            self._log_if_steady()
            if not self.wake.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_wait_s(stream, clock())):
                        await self.wake.wait()
            self._spent_s = time.perf_counter()

    async def _resume_from_snapshot(self, stream: KvStream) -> None:
        """Continue from another process's state, if one is offered and useful."""
        handover, id_ = self._shared.handover, self.replica.id
        state = handover.offers.get(id_) if handover is not None else None
        if handover is None or state is None or (against := why_not_resumable(stream, state)) is None:
            return
        del handover.offers[id_]
        if against:
            handover.told(id_, 0, against)
            return
        clock, told = self._shared.clock, state.stream
        stream.rewind("resumed from another process's state", clock())
        await self._perform(stream)
        try:
            await import_state(state, handover.state_sink, id_, CooperativeBudget())
        except UnreadableState as error:
            handover.told(id_, 0, str(error))
            stream.resync(f"the other process's state is invalid: {error}", clock())
            return
        self._unproven = max(1, state.blocks)
        grade = Confidence.EXACT if told.exact else Confidence.CATCHING_UP
        stream.adopt_state(told.seq, int.from_bytes(told.digest, "big"), grade, told.why, clock())

    def _report_proof(self, why: str) -> None:
        """Report to the handover that another process's state was proved, or was rejected for the reason `why`."""
        if self._unproven and self._shared.handover is not None:
            self._shared.handover.told(self.replica.id, 0 if why else self._unproven, why)
        self._unproven = 0

    def _apply_connection_changes(self, stream: KvStream, subscription: Subscription, was_up: bool) -> bool:
        """Process changes of the connection, and skip unread batches of an older one. Returns True if a connection was
        ever up."""
        while (change := subscription.change()) is not None:
            if not change.up:
                if self.down_since_s is None:
                    self.down_since_s = self._shared.clock()
                stream.on_disconnected("event connection lost", self._shared.clock())
            elif was_up:  # all unread batches are old, or are contained in the replay that is requested now
                while subscription.receive() is not None:
                    pass
            if change.up:
                self.down_since_s = None
                stream.on_connected(self._shared.clock())
                if was_up:
                    self._look.set()
                was_up = True
        return was_up

    def _answer(self, stream: KvStream) -> bool:
        """Process the next answer to a replay. Returns False without one."""
        if self._replay is None:
            return False
        heard = self._replay.receive()
        stream.counts.malformed += self._replay.unreadable
        self._replay.unreadable = 0
        if heard is None:
            return False
        self._replays.works()
        seq, payload = heard
        if seq < 0:
            self._stop_replay()
            stream.replay_ended(self._token, self._shared.clock())
        else:
            stream.on_replay_batch(self._token, seq, payload, self._shared.clock())
        return True

    async def _perform(self, stream: KvStream) -> None:
        clock = self._shared.clock
        while (step := stream.next(clock())) is not None or stream.busy:
            if step is None:
                await self._yield_if_due()
                continue
            if isinstance(step, Apply):
                self._applying_seq = step.seq
                async with self._applying:
                    await self._apply(step)
                self._applying_seq = None
            elif isinstance(step, RequestReplay):
                await self._ask(step)
            else:
                self._do(step)
            await self._yield_if_due()

    async def _apply(self, step: Apply) -> None:
        clock, sink, id_ = self._shared.clock, self._shared.sink, self.replica.id
        at_s, came_s = step.batch.at_s, clock()
        self._lag_s = None if at_s is None else self._shared.wall() - at_s
        for event in step.batch.events:
            for part in slices(event, SLICE_BLOCKS):
                sink.apply(id_, part, clock())
                self._events += 1
                self._blocks += len(part.hashes) if isinstance(part, (Stored, Removed)) else 0
                await self._yield_if_due()
        if self._lag_s is not None:
            sink.advance_watermark(id_, came_s - self._lateness.late_s(self._lag_s, came_s))

    async def _ask(self, step: RequestReplay) -> None:
        self._stop_replay()
        self._token = step.token
        followed = self._addresses.address if self._replays.host == self._addresses.host else ""
        with suppress(ValueError):  # an invalid address never answers
            self._replay = self._shared.sockets.ask(await self._replays.next(sure=followed), step.first)
            self._replay.wakes(self.wake)

    def _do(self, step: Clear | Suspend | Resume | SetConfidence) -> None:
        if isinstance(step, SetConfidence):
            self._grade(step.grade, step.why)
        else:
            dispatch(step, self._shared.sink, self.replica.id, self._shared.clock())
            if isinstance(step, Clear):
                self._report_proof(step.why)
            elif isinstance(step, Resume):
                self._report_proof("")

    def _grade(self, grade: Confidence, why: str) -> None:
        if why != self._why:
            if grade is self._graded:  # the sink logs a changed grade
                self._log_why(grade, why)
            self._why, self._graded = why, grade
            self._shared.sink.grade(self.replica.id, grade, why, self._shared.clock())

    def _log_why(self, grade: Confidence, why: str) -> None:
        """Log another reason for the same grade. Reasons that change repeatedly have one line."""
        fields = {"replica": self.replica.id, "grade": grade.value, "why": why}
        minor = grade is Confidence.CATCHING_UP
        phase = FlapPhase.LASTS if minor else self._whys.note_change(self._shared.clock())
        if phase is FlapPhase.BEGINS:
            text = "KV event stream changes repeatedly; further changes are logged at debug level"
            log.info(text, extra={"event": "event_stream_flaps", "fields": fields})
        level = logging.INFO if phase is FlapPhase.NONE else logging.DEBUG
        log.log(level, "event stream", extra={"event": "event_stream", "fields": fields})

    def _log_if_steady(self) -> None:
        if self._whys.end_if_steady(self._shared.clock()):
            fields = {"replica": self.replica.id, "grade": self._graded.value, "why": self._why}
            log.info("KV event stream is steady again", extra={"event": "event_stream_steady", "fields": fields})

    def _stop_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    async def _yield_if_due(self) -> None:
        if self._turns is not None and time.perf_counter() - self._spent_s > self._share_s:
            await self._turns.turn()
            self._spent_s, self._share_s = time.perf_counter(), max(YIELD_S, self._turns.share_s)


def _wait_s(stream: KvStream, now_s: float) -> float | None:
    wake_s = stream.wake_s - now_s
    return None if wake_s == float("inf") else max(0.0, wake_s)
