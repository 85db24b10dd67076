"""Replica lifecycle: starts probes and event readers for replicas that join, stops them for replicas that leave, and
notifies the frontends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine

from router.core.fleet.breaker import State
from router.core.fleet.flap_filter import FlapFilter, FlapPhase
from router.core.placement.router import Router
from router.core.types.placements import REPLICA_GRADES, Confidence
from router.core.types.replicas import Replica
from router.engines.disagg_probes.kv_connectors import KvConnectorProber
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.p2p_prober import P2pProber
from router.engines.probe import Prober
from router.engines.ranks import RankExpander
from router.eventloop import log_exceptions
from router.placement_api import Frontends
from router.prewarm.warmer import Warmer
from router.telemetry.counters import RequestMetrics

log = logging.getLogger(__name__)

EVENTS_DOWN_S = 60.0  # time without a connection after which a ready replica's event stream is logged
_BREAKER = {  # text and event of a log line, by the new state of a circuit breaker
    State.CLOSED: ("circuit breaker closed", "breaker_closed"),
    State.OPEN: ("circuit breaker opened", "breaker_open"),
}


class ReplicaLifecycle:
    """The replicas of one router, and the tasks that watch each of them."""

    _router: Router
    _metrics: RequestMetrics
    _prober: Prober
    _ranks: RankExpander
    _warmer: Warmer

    def __init__(self, frontends: Frontends) -> None:
        """The other parts follow by `connect`, because they report to this object."""
        self._frontends = frontends
        self._events: EventStreamManager | None = None
        self._peers: P2pProber | None = None
        self._hands: KvConnectorProber | None = None
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}  # tasks that watch a replica, by its id
        self._peer_tasks: dict[str, asyncio.Task[None]] = {}  # replica -> prober of its peer address
        self._hand_tasks: dict[str, asyncio.Task[None]] = {}  # replica -> prober of its KV connector
        self._grades: dict[str, Confidence] = {}  # grades as last logged, by replica
        self._falls: defaultdict[str, FlapFilter] = defaultdict(FlapFilter)  # replica -> falls of its grade
        self._unheard: dict[str, float] = {}  # replica -> time since which its event stream, already logged, is down
        self.discovered = asyncio.Event()  # set once the first complete set of replicas is known

    def connect(
        self,
        router: Router,
        metrics: RequestMetrics,
        *,
        prober: Prober,
        ranks: RankExpander,
        warmer: Warmer,
        events: EventStreamManager | None,
        peers: P2pProber | None,
        hands: KvConnectorProber | None,
    ) -> None:
        """Set the parts that watch replicas. It must be called before the first replica joins.

        - `events`: None means that no replica's KV events are followed.
        - `peers`: None means no P2P KV transfer.
        - `hands`: None means no disaggregated prefill.
        """
        self._router, self._metrics = router, metrics
        self._prober, self._ranks, self._warmer = prober, ranks, warmer
        self._events, self._peers, self._hands = events, peers, hands

    async def follow(self, sets: AsyncIterator[frozenset[Replica]]) -> None:
        """Apply each complete set of replicas that discovery yields, until cancelled."""
        async for replicas in self._ranks.follow(sets):
            self.replace(replicas)
            self.discovered.set()

    async def close(self) -> None:
        """Stop watching all replicas."""
        looking = (*self._peer_tasks.values(), *self._hand_tasks.values())
        tasks = [*looking, *(task for tasks in self._tasks.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def probe_now(self) -> None:
        """Probe every replica once, without waiting for the next round."""
        await self.discovered.wait()
        await asyncio.gather(*(self._prober.probe(member.id, models=True) for member in self._router.members))

    def replace(self, replicas: frozenset[Replica]) -> None:
        """Apply a complete set. Another engine at a known address counts as one replica that left and one that
        joined."""
        if self._hands is not None:
            replicas = frozenset(map(self._hands.with_configured_role, replicas))
        by_id = {replica.id: replica for replica in replicas}
        before = {member.id: member.replica for member in self._router.members}
        joined, left = self._router.replace(by_id[id_] for id_ in sorted(by_id))
        for id_ in left:
            self._on_replica_removed(before[id_])
        for id_ in before.keys() - left:
            if (ready := by_id[id_].ready) != before[id_].ready:
                text = (
                    "replica is ready again according to discovery"
                    if ready
                    else "replica is not ready according to discovery"
                )
                event = "replica_listed_ready" if ready else "replica_listed_not_ready"
                log.info(text, extra={"event": event, "fields": _make_log_fields(by_id[id_])})
                (self.on_ready if ready else self._frontends.on_replica_removed)(id_)
            member = self._router.fleet.member(id_)
            if self._events is not None and member is not None and member.replica != before[id_]:
                self._events.update(member.replica)
            if member is not None and self._peer_moved(before[id_], member.replica):
                self._watch_peer(member.replica)
            if member is not None and self._hand_moved(before[id_], member.replica):
                self._watch_hand(member.replica)
        for id_ in joined:
            self._on_replica_added(by_id[id_])

    def _on_replica_removed(self, replica: Replica) -> None:
        id_ = replica.id
        log.info("replica left", extra={"event": "replica_left", "fields": _make_log_fields(replica)})
        for task in self._tasks.pop(id_):
            task.cancel()
        for looking in (self._peer_tasks, self._hand_tasks):
            if (looked := looking.pop(id_, None)) is not None:
                looked.cancel()
        if self._hands is not None:
            self._hands.forget(id_)
        self._metrics.remove_replica(id_)
        self._prober.forget(id_)
        self._grades.pop(id_, None)
        self._falls.pop(id_, None)
        self._unheard.pop(id_, None)
        self._warmer.on_replica_removed(id_)
        self._frontends.on_replica_removed(id_)

    def _on_replica_added(self, replica: Replica) -> None:
        self._metrics.add_replica(replica.id)
        self._warmer.on_replica_added(replica.id, new=self.discovered.is_set())
        log.info("replica joined", extra={"event": "replica_joined", "fields": _make_log_fields(replica)})
        work: list[Coroutine[None, None, None]] = [self._prober.watch(replica.id)]
        if self._events is not None:
            work.append(self._events.watch(replica))
        self._tasks[replica.id] = [asyncio.create_task(log_exceptions(each)) for each in work]
        self._watch_peer(replica)
        self._watch_hand(replica)

    def _peer_moved(self, before: Replica, now: Replica) -> bool:
        return self._peers is not None and self._peers.address(before) != self._peers.address(now)

    def _watch_peer(self, replica: Replica) -> None:
        """Restart the probe of the address at which the replica's engine should accept commands of its peers."""
        if task := self._peer_tasks.pop(replica.id, None):
            task.cancel()
            self._router.set_p2p_address(replica.id, "")
        if self._peers is not None and self._peers.address(replica):
            self._peer_tasks[replica.id] = asyncio.create_task(log_exceptions(self._peers.watch(replica)))

    def _hand_moved(self, before: Replica, now: Replica) -> bool:
        if self._hands is None:
            return False
        return before.role is not now.role or self._hands.address(before) != self._hands.address(now)

    def _watch_hand(self, replica: Replica) -> None:
        """Restart the probe of the replica's KV connector."""
        if self._hands is None:
            return
        if task := self._hand_tasks.pop(replica.id, None):
            task.cancel()
            self._hands.forget(replica.id)
        self._hand_tasks[replica.id] = asyncio.create_task(log_exceptions(self._hands.watch(replica)))

    def engine_version(self, replica: str) -> str:
        """Return the version of the replica's engine, as the engine reports it; "" before the first report."""
        return self._ranks.version(Replica(replica).url)

    # -- events of a replica -------------------------------------------------------------------------------------

    def on_ready(self, replica: str) -> None:
        """Handle a replica that has become ready."""
        self._warmer.ready(replica)
        self._frontends.on_replica_ready(replica)

    def on_unreachable(self, replica: str) -> None:
        """Handle a replica with a closed port. The server that returns may have another number of ranks."""
        self._frontends.on_replica_unreachable(replica)
        for id_ in self._router.fleet.same_server(replica):
            self._warmer.on_connection_refused(id_)
        self._ranks.invalidate(replica)

    def on_connection_refused(self, replica: str) -> None:
        """Handle a refused connection, reported by a frontend: all ranks of that server are gone at once."""
        for id_ in self._router.fleet.same_server(replica):
            if self._router.fleet.observe_health(id_, False, "connection refused", proof=True):
                self._router.observations.forget(id_)
                self._prober.probe_soon(id_)
                fields = {"replica": id_, "why": "connection refused"}
                log.warning("replica fails its health checks", extra={"event": "replica_down", "fields": fields})
        self.on_unreachable(replica)

    def on_grade_changed(self, replica: str, grade: Confidence, why: str) -> None:
        """Log a change of the replica's grade, with its reason. A fall from `exact` is a warning. A replica that is
        down also loses its grade: that is logged at debug level only. So are changes of a grade that falls repeatedly,
        after one line."""
        before = self._grades.get(replica, Confidence.ESTIMATED)
        self._grades[replica] = grade
        member = self._router.fleet.member(replica)
        level, phase = logging.WARNING if before is Confidence.EXACT else logging.INFO, FlapPhase.NONE
        fields: dict[str, str | int] = {"replica": replica, "grade": grade.value, "before": before.value, "why": why}
        if member is not None and not member.ready and grade is Confidence.ESTIMATED:
            level = logging.DEBUG
        elif member is not None:  # a replica that has left needs no filter
            now_s, falls = time.monotonic(), self._falls[replica]
            fell = REPLICA_GRADES.index(grade) > REPLICA_GRADES.index(before)
            phase = falls.note_change(now_s, flap=fell)
            if fell:
                self._metrics.count_grade_fall(replica)
            if phase is FlapPhase.BEGINS:
                text = "confidence grade of a replica falls repeatedly; further changes are logged at debug level"
                flaps = {**fields, "falls": falls.count(now_s)}
                log.warning(text, extra={"event": "grade_flaps", "fields": flaps})
        if phase is not FlapPhase.NONE:
            level = logging.DEBUG
        log.log(level, "confidence grade of a replica changed", extra={"event": "grade_changed", "fields": fields})

    def count_grade_falls(self, replica: str) -> int:
        """Return how often the replica's grade fell within the last ten minutes, at most KEPT_MAX (flap_filter.py)."""
        falls = self._falls.get(replica)
        return falls.count(time.monotonic()) if falls is not None else 0

    def check(self, now_s: float) -> None:
        """Log lost event streams, and grades that no longer fall repeatedly. Call it every second."""
        self.look_for_lost_events(now_s)
        for replica, falls in self._falls.items():
            if falls.end_if_steady(now_s):
                grade, why = self._router.knowledge.grade_of(replica)
                fields = {"replica": replica, "grade": grade.value, "why": why}
                log.info(
                    "confidence grade of a replica is steady again", extra={"event": "grade_steady", "fields": fields}
                )

    def look_for_lost_events(self, now_s: float) -> None:
        """Log each ready replica with an event stream that has had no connection for a minute, once for each loss."""
        if self._events is None:
            return
        for id_, since_s, why in self._events.down(now_s - EVENTS_DOWN_S):
            member = self._router.fleet.member(id_)
            if member is not None and member.ready and self._unheard.get(id_) != since_s:
                self._unheard[id_] = since_s
                fields = {"replica": id_, "why": why, "for_s": round(now_s - since_s)}
                log.warning("a ready replica has no KV event stream", extra={"event": "events_down", "fields": fields})

    def on_cache_cleared(self, replica: str) -> None:
        """Handle a replica that has lost its cache."""
        self._warmer.on_cache_cleared(replica)

    def replay_events(self, replica: str) -> None:
        """Request a replay of the replica's events from the beginning."""
        if self._events is not None:
            self._events.resync(replica)

    def verify_event_stream(self, replica: str) -> None:
        """Request a proof that the replica's event stream is from the same process, after a refused connection."""
        if self._events is not None:
            self._events.suspect(replica, "connection refused")

    def on_shared_metrics_page(self, replica: str) -> None:
        """Warn of a replica with a metrics page that several processes serve alternately."""
        text = "metrics of the replica alternate between processes, so they cannot show restarts"
        log.warning(text, extra={"event": "metrics_of_several", "fields": {"replica": replica}})

    def on_breaker_changed(self, replica: str, state: State, why: str) -> None:
        """Log a change of the replica's breaker. It reacts to requests, not to health checks."""
        level = logging.INFO if state is State.CLOSED else logging.WARNING
        text, event = _BREAKER[state]
        log.log(level, text, extra={"event": event, "fields": {"replica": replica, "state": state.value, "why": why}})


def _make_log_fields(replica: Replica) -> dict[str, str]:
    """Return the known attributes of the replica, as fields of a log line."""
    facts = {"replica": replica.id, "name": replica.name, "node": replica.node, "instance": replica.instance}
    return {name: fact for name, fact in facts.items() if fact}
