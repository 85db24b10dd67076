"""Receiver of the KV events of all replicas: sockets -> core/kv_events/stream.py -> an EventSink.

There is one subscription for each replica and data-parallel rank (follower.py). Alternatively, engines connect to one
bound address, and the topic identifies the publisher.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from yarl import URL

from router.core.kv_events.batch_decoder import BATCH_BYTES_MAX
from router.core.kv_events.event_state_codec import EngineState
from router.core.kv_events.sink import EventSink
from router.core.kv_events.stream import StreamLimits
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.kv_events.follower import YIELD_S, EventStreamReader, ReaderContext, StreamStats
from router.engines.kv_events.snapshot_resume import SnapshotResume
from router.engines.kv_events.sockets import Sockets, Subscription, Unreadable
from router.engines.kv_events.sources import EventSourceResolver, Source, same_peer
from router.eventloop import Turns

__all__ = ["EventStreamManager", "StreamStats"]

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 5.0
REFUSED_MAX = 64  # unknown publishers named in the log


class EventStreamManager:
    """Lifecycle: `await start()`, run `watch` for each replica in its own task until cancelled, `await close()` at the
    end.

    - `endpoints`: (endpoint, replay endpoint or "") of replicas that do not state their source.
    - `bind`: address on which to listen for engines that connect, or "".
    - `topics`: replica ids by topic, for topics other than kv@HOST:PORT@MODEL on that address.
    - `handover`: lets streams continue from another process's state.
    """

    def __init__(
        self,
        sink: EventSink,
        *,
        endpoints: Mapping[str, tuple[str, str]],
        bind: str,
        topics: Mapping[str, str],
        api_key: str,
        tls: ssl.SSLContext | None = None,
        poll_s: float,
        limits: StreamLimits,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        handover: SnapshotResume | None = None,
    ) -> None:
        self._sink = sink
        self._endpoints = endpoints
        self._bind = bind
        self._named = {topic.encode(): id_ for topic, id_ in topics.items()}
        self._api_key = api_key
        self._tls = tls
        self._poll_s = poll_s
        self._limits = limits
        self._clock = clock
        self._wall = wall
        self._handover = handover
        self._followers: dict[str, EventStreamReader] = {}
        self._bound: Subscription | None = None
        self._listening: asyncio.Task[None] | None = None
        self._by_topic: dict[bytes, str] = {}
        self._refused: set[bytes] = set()
        self.unknown_publishers = 0  # batches of unknown publishers

    async def start(self) -> None:
        """Prepare to watch replicas. Raises OSError if the router cannot listen on the `bind` address."""
        sockets = Sockets(BATCH_BYTES_MAX)
        port = None
        if self._bind:
            try:
                self._bound = sockets.bound(self._bind)
            except OSError:
                sockets.close()
                raise
            tail = self.address.rpartition(":")[2]
            port = int(tail) if tail.isdigit() else 0
            self._listening = asyncio.create_task(self._listen(self._bound))
        configured = {id_: Source(endpoint, replay) for id_, (endpoint, replay) in self._endpoints.items()}
        timeout_s = min(self._poll_s, FIND_TIMEOUT_S)
        self._shared = ReaderContext(
            sink=self._sink,
            sockets=sockets,
            finder=EventSourceResolver(
                configured=configured, bound_port=port, api_key=self._api_key, timeout_s=timeout_s, tls=self._tls
            ),
            limits=self._limits,
            poll_s=self._poll_s,
            bound=self.address,
            clock=self._clock,
            wall=self._wall,
            handover=self._handover,
        )

    @property
    def address(self) -> str:
        """Address to which engines connect; "" without one."""
        return self._bound.address if self._bound else ""

    async def close(self) -> None:
        """Stop listening. All `watch` tasks must have ended."""
        if self._listening is not None:
            self._listening.cancel()
            with suppress(asyncio.CancelledError):
                await self._listening
        if self._bound is not None:
            self._bound.close()
        await self._shared.finder.close()
        self._shared.sockets.close()

    async def watch(self, replica: Replica) -> None:
        """Follow one replica until cancelled."""
        follower = self._followers[replica.id] = EventStreamReader(self._shared, replica)
        self._by_topic.clear()
        try:
            await follower.run()
        except Exception:  # a bug: the replica's blocks are no longer followed
            why, now_s = "bug: reading its events failed", self._clock()
            self._sink.clear(replica.id, why, now_s)
            self._sink.grade(replica.id, Confidence.ESTIMATED, why, now_s)
            raise
        finally:
            if self._followers.get(replica.id) is follower:
                del self._followers[replica.id]

    def update(self, replica: Replica) -> None:
        """Adopt discovery's new entry for a watched replica, such as another source of events."""
        follower = self._followers.get(replica.id)
        if follower is not None:
            follower.update(replica)

    def resync(self, replica: str, why: str = "distrusted") -> None:
        """Forget the replica's reported blocks, and request them again."""
        follower = self._followers.get(replica)
        if follower is not None and follower.stream is not None:
            follower.stream.resync(why, self._clock())
            follower.wake.set()

    def suspect(self, replica: str, why: str) -> None:
        """Require proof that the stream comes from the same process, after evidence of a restart such as a refused
        connection."""
        follower = self._followers.get(replica)
        if follower is not None and follower.stream is not None:
            follower.stream.verify(why, self._clock())
            follower.wake.set()

    async def state(self, replica: str) -> EngineState | None:
        """Return the state from the replica's events for another process. None if the state is not certain at the
        moment, or if the other process could not prove it."""
        follower = self._followers.get(replica)
        return await follower.state() if follower is not None else None

    def offer_snapshot(self, replica: str, state: EngineState) -> None:
        """Offer another process's state to the replica's stream. It is used once there is a stream, if it is useful."""
        if self._handover is not None:
            self._handover.offers[replica] = state
            follower = self._followers.get(replica)
            if follower is not None:
                follower.wake.set()

    def withdraw(self, replica: str) -> bool:
        """Withdraw that offer. Returns True if it was still waiting."""
        return self._handover is not None and self._handover.offers.pop(replica, None) is not None

    def stat(self, replica: str) -> StreamStats | None:
        """Return the state of one replica's stream; None if it is not watched."""
        follower = self._followers.get(replica)
        return follower.stats() if follower is not None else None

    def stats(self) -> dict[str, StreamStats]:
        """Return the states of all streams, by replica."""
        return {id_: follower.stats() for id_, follower in self._followers.items()}

    def down(self, until_s: float) -> Iterator[tuple[str, float, str]]:
        """Yield (replica, start, reason) of each stream that has had no connection since `until_s` or earlier."""
        for id_, follower in self._followers.items():
            since_s = follower.down_since_s
            if since_s is not None and since_s <= until_s:
                yield id_, since_s, follower.why

    # -- engines that connect to the router ----------------------------------------------------------------------

    async def _listen(self, bound: Subscription) -> None:
        wake = asyncio.Event()
        bound.wakes(wake)
        turns = Turns(asyncio.get_running_loop(), time.perf_counter)
        spent_s = time.perf_counter()
        while True:
            wake.clear()
            while True:
                while (change := bound.change()) is not None:
                    if not change.up:
                        self._on_publisher_disconnected(change.peer)
                heard = bound.receive_from()
                if heard is None:
                    break
                if isinstance(heard, Unreadable):
                    self._unreadable(heard)
                else:
                    self._on_message(*heard)
                if time.perf_counter() - spent_s > YIELD_S:
                    await turns.turn()
                    spent_s = time.perf_counter()
            await wake.wait()
            spent_s = time.perf_counter()

    def _on_message(self, topic: bytes, seq: int, payload: bytes, peer: str) -> None:
        follower = self._followers.get(self._publisher(topic))
        host = "" if topic in self._named else _topic_host(topic)
        if follower is None or not follower.connects or (host and peer and not same_peer(peer, host)):
            self._refuse(
                topic, peer, "no replica has this topic" if follower is None else "the sender is not the replica's host"
            )
        elif follower.stream is not None:
            follower.stream.live(seq, payload, self._clock())
            follower.wake.set()

    def _unreadable(self, message: Unreadable) -> None:
        """Count an unreadable message for the stream of its publisher: the replica of its topic, or else of its
        address."""
        follower = self._followers.get(self._publisher(message.topic)) if message.topic else None
        if follower is None and message.peer:
            bound = [one for one in self._followers.values() if one.connects]
            here = [one for one in bound if same_peer(message.peer, URL(one.replica.url).host or "")]
            follower = here[0] if len(here) == 1 else None
        if follower is None or not follower.connects:
            self._refuse(message.topic, message.peer, message.why)
        elif follower.stream is not None:
            follower.stream.unreadable(message.why)
            follower.wake.set()

    def _refuse(self, topic: bytes, peer: str, why: str) -> None:
        """Drop a message of an unknown publisher. The first message of each topic is logged."""
        self.unknown_publishers += 1
        if topic not in self._refused and len(self._refused) < REFUSED_MAX:
            self._refused.add(topic)
            fields = {"topic": topic[:200].decode(errors="replace"), "peer": peer, "why": why}
            log.warning(
                "KV events of an unknown publisher are discarded",
                extra={"event": "unknown_publisher", "fields": fields},
            )

    def _publisher(self, topic: bytes) -> str:
        """Return the replica that publishes under a topic; "" without one."""
        if not self._by_topic:
            self._by_topic = {_address(one.replica): id_ for id_, one in self._followers.items()} | self._named
        if (known := self._by_topic.get(topic)) is not None:
            return known
        parts = topic.split(b"@", 2)
        return self._by_topic.get(b"kv@" + parts[1], "") if len(parts) > 1 and parts[0] == b"kv" else ""

    def _on_publisher_disconnected(self, peer: str) -> None:
        """Require new proof from every stream that may have used a publisher's connection, after that connection
        closed."""
        bound = [one.replica for one in self._followers.values() if one.connects]
        here = [replica for replica in bound if peer and same_peer(peer, URL(replica.url).host or "")]
        for replica in here or bound:
            self.suspect(replica.id, "the connection of a publisher was closed")


def _address(replica: Replica) -> bytes:
    """Return the conventional beginning of the replica's topic."""
    url = URL(replica.url)
    return f"kv@{url.host}:{url.port}".encode()


def _topic_host(topic: bytes) -> str:
    """Return the host in kv@HOST:PORT@MODEL; "" without one."""
    parts = topic.split(b"@", 2)
    return parts[1].rpartition(b":")[0].decode(errors="replace") if len(parts) > 1 else ""
