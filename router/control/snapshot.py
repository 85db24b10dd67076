"""Start of a router with earlier knowledge: from its own file, or from a sibling.

The state is restored replica by replica, when each is probed and proves to be the same engine as before
(core/peer_sync/snapshot_import.py). This runs in the background, in small steps. `holding` is True while `/readyz`
should wait for it. Any error in the state costs one line in the log, and the router starts cold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config.schema import SnapshotSettings
from router.control import snapshot_builder
from router.control.snapshot_file import read_chunks, write_chunks
from router.core.kv_events.event_state_codec import UnreadableState
from router.core.kv_events.stream import RESTARTED
from router.core.peer_sync.snapshot_format import StateModels, decode_piece
from router.core.peer_sync.snapshot_import import StatePart, StateParts, import_replica, same_engine, take_models
from router.core.placement.router import Router
from router.engines.kv_events.snapshot_resume import ANOTHER, SnapshotResume
from router.engines.kv_events.subscriber import EventStreamManager
from router.eventloop import CooperativeBudget
from router.telemetry.metrics.samples import SnapshotMetrics

log = logging.getLogger(__name__)

EVENTS_S = 1.0  # longest wait for the event stream, if other evidence already proves that the engine is the same
LOOK_S = 0.02  # interval of the checks for replicas that may be restored
REQUEST_WINDOW_S = 30.0  # time after the start in which siblings are asked
WAIT_S = 60.0  # replicas that have not joined, or not proved to be the same, by then are given up
CLOSE_S = 5.0  # longest time for the file at an orderly end
REASONS_MAX = 8  # reasons in a line of the log


@dataclass(slots=True)
class _Waiting:
    """The part of one replica that is not restored yet."""

    part: StatePart
    at_s: float  # time at which it was captured, by the wall clock


class SnapshotManager:
    """Restores the earlier state of one control plane, and saves its state for a later process. `await load()` before
    replicas are discovered, then `watch()`, and `await save()` at the end."""

    def __init__(
        self,
        router: Router,
        settings: SnapshotSettings,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`name` identifies the file's router to operators."""
        self._router, self._settings, self._name, self._clock, self._wall = router, settings, name, clock, wall
        self.events: EventStreamManager | None = None  # set once the subscriber exists
        self.handover = SnapshotResume(router.knowledge, self._record_event_outcome)
        self._waiting: dict[str, _Waiting] = {}
        self._asked: dict[str, None] = {}  # replicas that must prove the knowledge of another process by their streams
        self._proved: set[str] = set()  # replicas that have proved it by their streams
        self._disproved: dict[str, str] = {}  # replicas with the stream of another engine, and the evidence
        self._models: list[StateModels] = []
        self._outcomes: dict[str, dict[str, Any]] = {}  # outcome of each replica's part, for operators
        self._began_s = clock()
        self._taken_s = float("-inf")  # time at which the waiting parts arrived
        self._handed = False  # a sibling has handed over its state
        self._expected = False  # more may arrive before this router should serve
        self._said = True  # True once the restored state has its line in the log
        self._restored: Counter[str] = Counter(estimate=0, events=0)  # blocks
        self._files: Counter[str] = Counter(ok=0, failed=0)
        self._bytes, self._failing = 0, ""
        self._at_s: float | None = None  # time of the last write, by the wall clock
        self.source = ""  # file or router from which the state was taken
        self.why = ""  # reason why the file was not used
        self.longest_s = 0.0  # longest work without a break, so far

    # -- reading -----------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the file, if there is one."""
        path, began_s = self._settings.path, self._clock()
        self._began_s = began_s
        if not path:
            return
        try:
            pieces = await asyncio.to_thread(read_chunks, Path(path), self._settings.bytes_max)
            parts = await self.parse_snapshot(pieces)
            self.import_replica(parts, path)
        except FileNotFoundError:
            self.why = "no snapshot exists yet"
        except (OSError, UnreadableState) as error:
            self.why = str(error)
            fields = {
                "file": path,
                "why": self.why,
                "next": "none: the router starts with empty state and writes a new snapshot",
            }
            log.warning("saved state is not used", extra={"event": "snapshot_ignored", "fields": fields})

    async def parse_snapshot(self, pieces: Iterable[bytes]) -> StateParts:
        """Decode the parts of a state, which must be complete and young enough. Raises UnreadableState."""
        parts, pace = StateParts(), CooperativeBudget()
        for piece in pieces:
            parts.take(decode_piece(piece))
            await pace.step()
        if not parts.whole or parts.origin is None:
            raise UnreadableState("the end of the file is missing")
        age_s = self._wall() - parts.origin.at_s
        if age_s > self._settings.age_max_s:
            most_s = self._settings.age_max_s
            raise UnreadableState(f"{age_s:.0f} s old, more than {most_s:.0f} s (snapshot.age_max_s)")
        return parts

    def import_replica(self, parts: StateParts, source: str) -> None:
        """Restore these parts as their replicas join. Later parts replace those that still wait."""
        origin = parts.origin
        if origin is None:
            return
        self.source, self._said = source, False
        self._taken_s = self._clock()
        if parts.models is not None:
            self._models = [parts.models]
        for id_, part in parts.parts.items():
            events = part.events()
            if events is not None and self.events is not None:
                self._asked[id_] = None
                self.events.offer_snapshot(id_, events)
            self._proved.discard(id_)
            self._disproved.pop(id_, None)
            self._waiting[id_] = _Waiting(part, origin.at_s)

    # -- restoring ---------------------------------------------------------------------------------------------------

    @property
    def blocks_readiness(self) -> bool:
        """True if a router that has just started should not serve yet."""
        if self._clock() - self._began_s >= self._settings.readiness_wait_s:
            return False
        there = self._router.fleet.member
        return self._expected or any(there(id_) is not None for waits in (self._waiting, self._asked) for id_ in waits)

    # -- between routers (router/peering/interfaces.py, SnapshotSource) ------------------------------------------------

    @property
    def needs_snapshot(self) -> bool:
        """True if this router has just started, and no sibling has handed over its state."""
        return not self._handed and self._clock() - self._began_s < REQUEST_WINDOW_S

    def set_expected(self, *, more: bool) -> None:
        """Record that a sibling's state may still arrive; with `more` False, that it will not."""
        self._expected = more

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Encode all knowledge of this router."""
        return self._pieces(CooperativeBudget())

    async def import_chunks(self, pieces: list[bytes], router: str) -> bool:
        """Restore the state that another router has handed over. Returns True if it can be read."""
        try:
            parts = await self.parse_snapshot(pieces)
        except UnreadableState as error:
            fields = {"router": router, "why": str(error), "next": "none: another router is asked if there is one"}
            log.warning("state from another router is not used", extra={"event": "snapshot_ignored", "fields": fields})
            return False
        self._handed = True
        self.import_replica(parts, router)
        return True

    async def watch(self) -> None:
        """Restore parts as their replicas prove the same, and write the file at each interval, until cancelled."""
        write_s = self._clock() + self._settings.interval_s
        while True:
            await asyncio.sleep(LOOK_S if self._waiting or self._asked or not self._said else 4 * LOOK_S)
            if self._waiting or self._asked:
                await self._look()
            elif not self._said:
                self._say()
            if self._settings.path and self._clock() >= write_s:
                await self.save()
                write_s = self._clock() + self._settings.interval_s

    async def _look(self) -> None:
        """Check each replica that waits."""
        waited_s = self._clock() - self._taken_s
        if waited_s >= WAIT_S:
            self._give_up()
            return
        for id_, waiting in list(self._waiting.items()):
            member = self._router.fleet.member(id_)
            if member is None or not member.health.fit or self._waiting.get(id_) is not waiting:
                continue
            since_s = max(0.0, self._wall() - waiting.at_s)
            same, why = same_engine(waiting.part.replica, member, since_s)
            if id_ in self._disproved:
                same, why = False, self._disproved[id_]
            elif same is None and id_ in self._proved:
                same = True
            if id_ in self._asked and (same is None or (same and waited_s < EVENTS_S)):
                continue
            del self._waiting[id_]
            if same:
                await self._take_over(id_, waiting.part, since_s)
            else:
                self._record_refusal(id_, why)

    async def _take_over(self, id_: str, part: StatePart, since_s: float) -> None:
        member, pace, blocks = self._router.fleet.member(id_), CooperativeBudget(), 0
        if member is None:
            return
        try:
            for models in self._models:
                take_models(self._router, models)
            for new in import_replica(self._router, member, part, since_s, self._clock()):
                blocks += new
                await pace.step()
        except UnreadableState as error:
            self._record_refusal(id_, str(error))
        self.longest_s = max(self.longest_s, pace.longest_s)
        self._restored["estimate"] += blocks
        self._outcome(id_)["estimate_blocks"] += blocks

    def _record_event_outcome(self, id_: str, blocks: int, why: str) -> None:
        """Record the outcome for the blocks that another process had learned from events."""
        self._asked.pop(id_, None)
        outcome = self._outcome(id_)
        if blocks:
            self._restored["events"] += blocks
            self._proved.add(id_)
            outcome["events_blocks"] = blocks
        else:
            outcome["events_why"] = why
        if why.startswith((RESTARTED, ANOTHER)):
            self._disproved[id_] = why

    def _record_refusal(self, id_: str, why: str) -> None:
        self._outcome(id_)["why"] = why
        if id_ in self._asked and self.events is not None and self.events.withdraw(id_):
            del self._asked[id_]

    def _outcome(self, id_: str) -> dict[str, Any]:
        return self._outcomes.setdefault(id_, {"estimate_blocks": 0, "events_blocks": 0, "why": "", "events_why": ""})

    def _give_up(self) -> None:
        for id_ in self._waiting:
            self._record_refusal(
                id_,
                "the replica was not discovered"
                if self._router.fleet.member(id_) is None
                else "its engine could not be verified as the same",
            )
        for id_ in list(self._asked):
            if self.events is not None:
                self.events.withdraw(id_)
            self._record_event_outcome(id_, 0, "its event stream could not be verified as the same")
        self._waiting.clear()

    def _say(self) -> None:
        """Log one line about the restored state."""
        self._said, self._models = True, []
        self._proved.clear()
        self._disproved.clear()
        reasons = Counter(each["why"] or each["events_why"] for each in self._outcomes.values())
        reasons.pop("", None)
        fields = {
            "source": self.source,
            "replicas": self._counts()["restored"],
            "estimate_blocks": self._restored["estimate"],
            "events_blocks": self._restored["events"],
            "refused": dict(reasons.most_common(REASONS_MAX)),
            "seconds": round(self._clock() - self._began_s, 3),
        }
        log.info("saved state is restored", extra={"event": "snapshot_restored", "fields": fields})

    # -- writing -----------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write the file, if one is set. A failure is logged once, and the old file is kept."""
        if not self._settings.path:
            return
        pace = CooperativeBudget()
        try:
            pieces = [piece async for piece in self._pieces(pace)]
            self._bytes = await asyncio.to_thread(write_chunks, Path(self._settings.path), pieces)
        except OSError as error:
            self._files["failed"] += 1
            if not self._failing:
                fields = {
                    "file": self._settings.path,
                    "why": str(error),
                    "next": "check free disk space and permissions",
                }
                log.warning("the state cannot be saved", extra={"event": "snapshot_write_failed", "fields": fields})
            self._failing = str(error)
        else:
            self._files["ok"] += 1
            self._failing, self._at_s = "", self._wall()
        self.longest_s = max(self.longest_s, pace.longest_s)

    def _pieces(self, pace: CooperativeBudget) -> AsyncGenerator[bytes, None]:
        most, clock, wall = self._settings.bytes_max, self._clock, self._wall
        return snapshot_builder.snapshot_chunks(
            self._router, self.events, self._name, bytes_max=most, clock=clock, wall=wall, pace=pace
        )

    async def close(self) -> None:
        """Write the file a last time, within CLOSE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.save()

    # -- status ------------------------------------------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        # A replica with no cached blocks has nothing to restore, and no evidence against it: it counts as restored.
        restored = sum(
            bool(each["estimate_blocks"] or each["events_blocks"]) or not (each["why"] or each["events_why"])
            for each in self._outcomes.values()
        )
        waiting = len(self._waiting.keys() | self._asked.keys())
        return {"restored": restored, "refused": len(self._outcomes) - restored, "waiting": waiting}

    def status(self) -> dict[str, Any]:
        """Return the status for `/admin/index`, under `state`."""
        age_s = None if self._at_s is None else round(self._wall() - self._at_s, 3)
        return {
            "file": self._settings.path,
            "source": self.source,
            "why": self.why,
            "failing": self._failing,
            "written_age_s": age_s,
            "bytes": self._bytes,
            "holding": self.blocks_readiness,
            "replicas": self._counts(),
            "restored": [{"replica": id_, **each} for id_, each in sorted(self._outcomes.items())],
        }

    def figures(self) -> SnapshotMetrics:
        """Return the figures for metrics."""
        age_s = None if self._at_s is None else self._wall() - self._at_s
        return SnapshotMetrics(self._restored, self._counts(), self._files, self._bytes, age_s)
