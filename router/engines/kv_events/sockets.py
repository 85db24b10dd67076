"""The part of ZeroMQ that KV events need: a socket that receives batches, one that asks for a replay.

The only module that knows pyzmq. All calls return at once, but `Sockets.subscribe`, which resolves a name.
`Subscription.wakes` sets an asyncio.Event when a socket may have something. A ZeroMQ descriptor is readable when the
state may have changed, not when there is a message: after a wake everything must be read until there is nothing more
(zeromq.org, zmq_getsockopt, ZMQ_FD).

ZeroMQ must not connect again by itself: libzmq up to 4.3.5 ends the process (`Assertion failed: _input_stopped`,
zeromq/libzmq#3937) where a connection is lost while its queue is full, comes back, and only then is the queue read. So
a subscription takes a new socket for each connection, and a replay has one connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.engines.kv_events.addresses import Addresses

END = b"\xff" * 8  # number -1: the replay is complete
HWM = 1_000  # messages in a queue of ZeroMQ; beyond this TCP makes the engine wait
REPLAY_HWM = 4_096  # messages of a replay; an engine's ROUTER does not wait but drops, and that takes another replay
AGAIN_MIN_S, AGAIN_MAX_S = 0.1, 1.0  # pause before a connection is tried again; doubles with each that fails
CONNECT_S = 5.0  # a connection that is not up by then is tried again: of a name that is unknown nothing is heard
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 3_000, 9_000  # answered by the peer's I/O thread, so that a dead host is noticed
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED
_NEVER = -1

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]  # what receives, and what tells of its connections


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A connection came up, or is gone. `peer` is the other end's address on a bound socket, "" if unknown."""

    up: bool
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that is no batch, since it has not three frames: topic, number of 8 bytes, payload."""

    why: str
    topic: bytes = b""  # the first frame, if there are others
    peer: str = ""


class Sockets:
    """Makes sockets. Close it once they are closed."""

    def __init__(self, message_bytes_max: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._message_bytes_max = message_bytes_max

    def close(self) -> None:
        """Close the context; what was not sent is dropped."""
        self._context.destroy(linger=0)

    async def subscribe(self, addresses: Addresses, topic: str | None) -> Subscription:
        """A socket connected to a publisher, now or once there is one. Raises ValueError for an invalid address."""

        def pair(endpoint: str) -> Pair:
            return self._pair(endpoint, topic or "", bind=False)

        return Subscription(pair(await addresses.next()), pair, addresses)

    def bound(self, address: str) -> Subscription:
        """A socket that publishers connect to. Raises OSError if it cannot listen there."""
        return Subscription(self._pair(address, "", bind=True))

    def ask(self, endpoint: str, first: int) -> Replay:
        """Ask for a replay on a connection of its own. Raises ValueError for an invalid address."""
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, REPLAY_HWM)
        try:
            _open(dealer, endpoint, bind=False)
        except ValueError:
            dealer.close(linger=0)
            raise
        dealer.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)  # the ROUTER wants the empty frame
        return Replay(dealer)

    def _pair(self, address: str, topic: str, *, bind: bool) -> Pair:
        sub = self._socket(zmq.SUB)
        try:
            sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
            monitor = sub.get_monitor_socket(_EVENTS)
        except zmq.ZMQError:
            sub.close(linger=0)
            raise
        try:
            _open(sub, address, bind=bind)
        except (OSError, ValueError):
            _close(sub, monitor)
            raise
        return sub, monitor

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for option, value in {
            zmq.LINGER: 0,
            zmq.RCVHWM: HWM,
            zmq.MAXMSGSIZE: self._message_bytes_max,
            zmq.RECONNECT_IVL: _NEVER,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.IPV6: 1,
        }.items():
            made.setsockopt(option, value)
        return made


class Subscription:
    """A socket that receives batches: a bound one, or one for each connection to a publisher."""

    def __init__(
        self, pair: Pair, again: Callable[[str], Pair] | None = None, addresses: Addresses | None = None
    ) -> None:
        """`again` makes a new pair that connects to an endpoint, of those that `addresses` gives."""
        self._sub, self._monitor = pair
        self._again, self._addresses = again, addresses
        self._again_s = AGAIN_MIN_S
        self._timer: asyncio.TimerHandle | None = None  # set while the next connection waits for its turn
        self._connecting: asyncio.Task[None] | None = None
        self._event = asyncio.Event()
        self._peers: dict[int, str] = {}  # descriptor of an accepted connection -> address
        self._wake: tuple[asyncio.AbstractEventLoop, list[int]] | None = None

    @property
    def address(self) -> str:
        """The address that the socket is bound or connected to."""
        return self._sub.getsockopt_string(zmq.LAST_ENDPOINT)

    def wakes(self, event: asyncio.Event) -> None:
        """Set the event whenever there may be something to read. To be called once, in the loop that is to read."""
        self._event = event
        self._wake = _watch([self._sub, self._monitor], event)
        self._connect_in(CONNECT_S)

    def close(self) -> None:
        """Close the socket."""
        self._stop_connecting()
        _unwatch(self._wake)
        _close(self._sub, self._monitor)

    def _stop_connecting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _connect_in(self, delay_s: float) -> None:
        """Connect anew by then, unless a connection comes up before."""
        if self._again is not None and self._wake is not None:
            self._stop_connecting()
            self._timer = self._wake[0].call_later(delay_s, self._connect)

    def _connect(self) -> None:
        self._connecting = asyncio.create_task(self._connect_anew())

    async def _connect_anew(self) -> None:
        """Give up the connection that is gone, or did not come, with what was not read of it, for another one."""
        if self._again is None or self._addresses is None:
            return
        endpoint = await self._addresses.next()
        self._connecting = None  # nothing below may be interrupted
        _unwatch(self._wake)
        try:
            pair = self._again(endpoint)
        except (OSError, ValueError, zmq.ZMQError):  # the process has no descriptor left: later
            self._wake = _watch([self._sub, self._monitor], self._event)
        else:
            _close(self._sub, self._monitor)
            self._sub, self._monitor = pair
            self._wake = _watch([*pair], self._event)
        self._connect_in(CONNECT_S)

    def _lost(self) -> None:
        self._connect_in(self._again_s)
        self._again_s = min(2 * self._again_s, AGAIN_MAX_S)

    def change(self) -> PeerChange | None:
        """The next change of a connection. Read it before batches: ZeroMQ reports it first."""
        while True:
            try:
                said = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return None
            kind, descriptor = said["event"], said["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._peers[descriptor] = _peer(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._again_s = AGAIN_MIN_S
                self._stop_connecting()
                if self._addresses is not None:
                    self._addresses.works()
                return PeerChange(up=True)
            elif kind == zmq.EVENT_CLOSED:  # a connection did not come up
                self._lost()
            elif kind == zmq.EVENT_DISCONNECTED:
                self._lost()
                return PeerChange(up=False, peer=self._peers.pop(descriptor, ""))

    def receive(self) -> tuple[bytes, int, bytes] | Unreadable | None:
        """The next batch: topic, number, payload."""
        try:
            frames = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) == 3 and len(frames[1]) == 8:
            return frames[0], int.from_bytes(frames[1], "big"), frames[2]
        return _unreadable(frames)

    def receive_from(self) -> tuple[bytes, int, bytes, str] | Unreadable | None:
        """The next batch with the address that it came from, "" where there is none (ipc)."""
        try:
            frames = self._sub.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        peer = ""
        with suppress(zmq.ZMQError):
            peer = str(frames[-1].get("Peer-Address"))
        if len(frames) == 3 and len(frames[1]) == 8:
            return frames[0].bytes, int.from_bytes(frames[1].bytes, "big"), frames[2].bytes, peer
        return _unreadable([frame.bytes for frame in frames[:2]], len(frames), peer)


class Replay:
    """A socket that receives the answers to one request for a replay."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer
        self.unreadable = 0  # messages that are no batch
        self._wake: tuple[asyncio.AbstractEventLoop, list[int]] | None = None

    def wakes(self, event: asyncio.Event) -> None:
        """Set the event whenever there may be something to read."""
        self._wake = _watch([self._dealer], event)

    def close(self) -> None:
        """Close the socket."""
        _unwatch(self._wake)
        self._dealer.close(linger=0)

    def receive(self) -> tuple[int, bytes] | None:
        """The next batch: number and payload; the number -1 ends the replay."""
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) >= 3 and not frames[0] and len(frames[-2]) == 8:  # the topic came with vLLM 0.2x
                return (-1 if frames[-2] == END else int.from_bytes(frames[-2], "big")), frames[-1]
            self.unreadable += 1


def _unreadable(frames: Sequence[bytes], count: int = 0, peer: str = "") -> Unreadable:
    """What is wrong with a message of `count` frames, of which `frames` are the first, or all."""
    count = count or len(frames)
    if count == 3:
        return Unreadable(f"numbers of {len(frames[1])} bytes, 8 expected", frames[0], peer)
    topic = frames[0] if count > 1 else b""
    return Unreadable(f"messages of {count} frame{'s' * (count != 1)}, 3 expected", topic, peer)


def _close(sub: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    sub.disable_monitor()
    monitor.close(linger=0)
    sub.close(linger=0)


def _open(made: zmq.Socket[bytes], address: str, *, bind: bool) -> None:
    try:
        if bind:
            made.bind(address)
        else:
            made.connect(address)
    except zmq.ZMQError as error:
        raise (OSError if bind else ValueError)(f"{address[:200]}: {error.strerror}") from error


def _watch(watched: list[zmq.Socket[bytes]], event: asyncio.Event) -> tuple[asyncio.AbstractEventLoop, list[int]]:
    loop = asyncio.get_running_loop()
    descriptors = [int(one.getsockopt(zmq.FD)) for one in watched]
    for descriptor in descriptors:
        loop.add_reader(descriptor, event.set)
    event.set()  # messages that are there already give no sign
    return loop, descriptors


def _unwatch(watched: tuple[asyncio.AbstractEventLoop, list[int]] | None) -> None:
    if watched is not None:
        loop, descriptors = watched
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


def _peer(descriptor: int) -> str:
    """The address at the other end of a connection; "" if it is gone already."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""
