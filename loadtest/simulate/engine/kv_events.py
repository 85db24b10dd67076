"""KV events from simulated replicas to each router's cache index, through the router's own stream machinery.

This module does for the simulation the part of router/engines/kv_events/follower.py for sockets. Batches are numbered
and reach every router after a delay. Each may be lost on its way to each router. A gap, a check or a reconnection
requests a replay, which returns batches from the last BUFFER_BATCHES with a delay each way. Continuity, doubt and
grades are those of router/core/kv_events/stream.py.

A batch travels by reference. Its payload is a name as unique as its bytes would be, with the engine model's own events
attached. They become vLLM's events, token ids included, when a stream reads them. The ledger then hashes those ids
itself and arrives at the keys of the prompt. Ids of answers are made up, because no prompt uses them.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvEvent
from loadtest.simulate.engine.workload import SimRequest
from router.core.kv_events.batch_decoder import Cleared, Event, EventBatch, Removed, Stored
from router.core.kv_events.sink import dispatch
from router.core.kv_events.stream import Apply, KvStream, RequestReplay, Step
from router.core.placement.router import Router

BUFFER_BATCHES = 10_000  # batches that vLLM's publisher keeps for replays (buffer_steps)
KEY_BYTES = 8


class VirtualClock(Protocol):
    """Virtual time."""

    now_s: float

    def call_at(self, when_s: float, act: Callable[[Any], None], argument: Any = None) -> None:  # noqa: ANN401 - of any act
        """Call `act(argument)` at a virtual time."""


class Payload(bytes):
    """Payload of a batch."""

    said: list[KvEvent]


class Publisher:
    """One replica's batches, over all its processes."""

    def __init__(
        self, name: str, block_tokens: int, clock: VirtualClock, *, delay_s: float, loss: float, rng: random.Random
    ) -> None:
        self.name, self.clock, self.delay_s, self.up = name, clock, delay_s, True
        self._block_tokens, self._loss, self._rng = block_tokens, loss, rng
        self._followers: list[Follower] = []
        self._life = self._seq = 0
        self._sent: deque[tuple[int, Payload]] = deque(maxlen=BUFFER_BATCHES)

    def connect(self, follower: Follower) -> None:
        """Connect a follower, from the next batch on."""
        self._followers.append(follower)
        self.call_later(follower.on_connected)

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Publish a batch."""
        payload = Payload(b"%d/%d" % (self._life, self._seq))
        payload.said = [_pack_keys(event) for event in events]
        arrival = (self._seq, payload)
        self._sent.append(arrival)
        self._seq += 1
        for follower in self._followers:
            if not self._loss or self._rng.random() >= self._loss:
                self.call_later(follower.hear, arrival)

    def stop(self) -> None:
        """Stop the process and drop the batches kept for replays."""
        self.up = False
        self._sent.clear()
        for follower in self._followers:
            self.call_later(follower.on_disconnected)

    def start(self) -> None:
        """Start another process, which numbers from 0."""
        self.up, self._seq = True, 0
        self._life += 1
        for follower in self._followers:
            self.call_later(follower.on_connected)

    def list_batches(self, first: int) -> list[tuple[int, Payload]]:
        """Return the batches of a replay from `first`."""
        behind = self._seq - first
        if behind >= len(self._sent):
            return list(self._sent)
        return [self._sent[index] for index in range(-behind, 0)]

    def read(self, payload: bytes) -> EventBatch:
        """Return the batch of a payload, as kv_events.decode would read it from vLLM."""
        said = payload.said if isinstance(payload, Payload) else []
        return EventBatch(None, 0, [_to_vllm_event(event, self._block_tokens) for event in said], 0)

    def call_later(self, act: Callable[[Any], None], argument: object = None) -> None:
        """Call `act` after the delay, when an event here is known to a router."""
        self.clock.call_at(self.clock.now_s + self.delay_s, act, argument)


class Follower:
    """One router's stream of one replica."""

    def __init__(self, publisher: Publisher, router: Router) -> None:
        self._publisher, self._router, self._name = publisher, router, publisher.name
        self._clock = publisher.clock
        self.stream = KvStream(replays=True, read=publisher.read)
        self._due_s = float("inf")

    def on_connected(self, _: None) -> None:
        """Begin with a new connection to a process."""
        self.stream.on_connected(self._clock.now_s)
        self._perform(None)

    def on_disconnected(self, _: None) -> None:
        """Record the loss of the connection."""
        self.stream.on_disconnected("event connection lost", self._clock.now_s)
        self._perform(None)

    def hear(self, arrival: tuple[int, Payload]) -> None:
        """Take a batch that arrived."""
        self.stream.live(*arrival, self._clock.now_s)
        self._perform(None)

    def suspect(self, why: str) -> None:
        """Doubt the stream (KvStream.verify). Its steps run as the next event, because the router is inside a call
        now."""
        self.stream.verify(why, self._clock.now_s)
        self._clock.call_at(self._clock.now_s, self._perform)

    def resync(self, why: str) -> None:
        """Read the stream anew (KvStream.resync). Its steps run as the next event, as for `suspect`."""
        self.stream.resync(why, self._clock.now_s)
        self._clock.call_at(self._clock.now_s, self._perform)

    def _on_replay_request(self, ask: RequestReplay) -> None:
        """Receive the request for a replay at the replica; a dead one never answers."""
        if self._publisher.up:
            self._publisher.call_later(self._on_replay_response, (ask.token, self._publisher.list_batches(ask.first)))

    def _on_replay_response(self, answer: tuple[int, Sequence[tuple[int, Payload]]]) -> None:
        token, batches = answer
        for seq, payload in batches:
            self.stream.on_replay_batch(token, seq, payload, self._clock.now_s)
            self._perform(None)
        self.stream.replay_ended(token, self._clock.now_s)
        self._perform(None)

    def _tick(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = float("inf")
            self.stream.tick(self._clock.now_s)
            self._perform(None)

    def _perform(self, _: None) -> None:
        """Perform all due steps of the stream, and schedule the next."""
        stream, now_s = self.stream, self._clock.now_s
        while (step := stream.next(now_s)) is not None or stream.busy:
            if step is not None:
                self._do(step, now_s)
        if stream.wake_s < self._due_s:
            self._due_s = max(now_s, stream.wake_s)
            self._clock.call_at(self._due_s, self._tick, self._due_s)

    def _do(self, step: Step, now_s: float) -> None:
        knowledge, name = self._router.knowledge, self._name
        if isinstance(step, Apply):
            for event in step.batch.events:
                knowledge.apply(name, event, now_s)
        elif isinstance(step, RequestReplay):
            self._publisher.call_later(self._on_replay_request, step)
        else:
            dispatch(step, knowledge, name, now_s)


def _pack_keys(event: KvEvent) -> KvEvent:
    """Return the event with its keys in arrays, because a publisher keeps millions of keys for replays."""
    if isinstance(event, BlockStored):
        return BlockStored(event.tag, event.first_block, array("Q", event.keys), event.parent, event.medium)
    return BlocksRemoved(array("Q", event.keys), event.medium) if isinstance(event, BlocksRemoved) else event


def _to_vllm_event(event: KvEvent, block_tokens: int) -> Event:
    """Return the event in vLLM's form, in which one event may name many removed blocks."""
    if isinstance(event, BlocksRemoved):
        return Removed(list(event.keys), event.medium, 0)
    if not isinstance(event, BlockStored):
        return Cleared()
    if not isinstance(event.tag, SimRequest):
        raise TypeError("requests with published events are tagged with their turn")
    keys, first, width = list(event.keys), event.first_block, block_tokens * BYTES_PER_TOKEN
    asked = max(0, min(len(keys), len(event.tag.engine_keys) - first))
    ids = _ids(event.tag)[first * width : (first + asked) * width]
    if asked < len(keys):
        ids += b"".join([key.to_bytes(KEY_BYTES, "little") * (width // KEY_BYTES) for key in keys[asked:]])
    return Stored(keys, event.parent, ids, block_tokens, "", b"", None, event.medium, 0, prefix=True)


@lru_cache(maxsize=256)  # about 15 MB: a prompt is published in chunks, and to several routers
def _ids(turn: SimRequest) -> bytes:
    """Return the token ids of the prompt: a token is four bytes of its text."""
    return turn.text().encode()
