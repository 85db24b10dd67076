"""ZeroMQ sockets for KV events: one that receives batches, and one that requests a replay.

This is the only module that uses pyzmq. All calls return at once, except `Sockets.subscribe`, which resolves a name.
`Subscription.wakes` sets an asyncio.Event if a socket may have input. A ZeroMQ descriptor becomes readable when the
state may have changed, not when there is a message. After a wake the reader must therefore read until no input is left
(zeromq.org, zmq_getsockopt, ZMQ_FD).

ZeroMQ must not reconnect by itself. libzmq up to 4.3.5 ends the process (`Assertion failed: _input_stopped`,
zeromq/libzmq#3937) if a connection is lost while its queue is full, returns, and the queue is read only after that. A
subscription therefore takes a new socket for each connection, and a replay has only one connection.
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
HWM = 1_000  # messages in a ZeroMQ queue; above it TCP makes the engine wait
REPLAY_HWM = 4_096  # messages of a replay; an engine's ROUTER does not wait but drops, which requires another replay
AGAIN_MIN_S, AGAIN_MAX_S = 0.1, 1.0  # pause before the next connection attempt; doubles with each failure
CONNECT_S = 5.0  # limit of a connection attempt: ZeroMQ reports no failure for an unknown name
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 3_000, 9_000  # answered by the peer's I/O thread, to detect a dead host
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED
_NEVER = -1

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]  # the receiving socket, and the monitor of its connections


@dataclass(frozen=True, slots=True)
class ConnectionChange:
    """A connection was established or closed. On a bound socket `peer` is the other end's address, "" if unknown."""

    up: bool
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that is not a batch, because it does not have three frames: topic, number of 8 bytes, payload."""

    why: str
    topic: bytes = b""  # the first frame, if there are others
    peer: str = ""


class Sockets:
    """Factory of sockets. Close it after they are closed."""

    def __init__(self, message_bytes_max: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._message_bytes_max = message_bytes_max

    def close(self) -> None:
        """Close the context. Unsent messages are dropped."""
        self._context.destroy(linger=0)

    async def subscribe(self, addresses: Addresses, topic: str | None) -> Subscription:
        """Return a socket that connects to a publisher, now or when it starts. Raises ValueError for an invalid
        address."""

        def pair(endpoint: str) -> Pair:
            return self._pair(endpoint, topic or "", bind=False)

        return Subscription(pair(await addresses.next()), pair, addresses)

    def bound(self, address: str) -> Subscription:
        """Return a socket to which publishers connect. Raises OSError if it cannot listen there."""
        return Subscription(self._pair(address, "", bind=True))

    def ask(self, endpoint: str, first: int) -> Replay:
        """Request a replay on a separate connection. Raises ValueError for an invalid address."""
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, REPLAY_HWM)
        try:
            _open(dealer, endpoint, bind=False)
        except ValueError:
            dealer.close(linger=0)
            raise
        dealer.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)  # the ROUTER requires the empty frame
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
    """Socket that receives batches: a bound one, or one for each connection to a publisher."""

    def __init__(
        self, pair: Pair, again: Callable[[str], Pair] | None = None, addresses: Addresses | None = None
    ) -> None:
        """`again` returns a new pair that connects to an endpoint from `addresses`."""
        self._sub, self._monitor = pair
        self._again, self._addresses = again, addresses
        self._again_s = AGAIN_MIN_S
        self._timer: asyncio.TimerHandle | None = None  # set while the next connection attempt is scheduled
        self._connecting: asyncio.Task[None] | None = None
        self._event = asyncio.Event()
        self._peers: dict[int, str] = {}  # descriptor of an accepted connection -> address
        self._wake: tuple[asyncio.AbstractEventLoop, list[int]] | None = None

    @property
    def address(self) -> str:
        """Address to which the socket is bound or connected."""
        return self._sub.getsockopt_string(zmq.LAST_ENDPOINT)

    def wakes(self, event: asyncio.Event) -> None:
        """Set the event whenever there may be input. Call this once, in the event loop of the reader."""
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
        """Schedule a new connection, unless one is established before."""
        if self._again is not None and self._wake is not None:
            self._stop_connecting()
            self._timer = self._wake[0].call_later(delay_s, self._connect)

    def _connect(self) -> None:
        self._connecting = asyncio.create_task(self._connect_anew())

    async def _connect_anew(self) -> None:
        """Replace a closed or failed connection by a new one. Its unread messages are dropped."""
        if self._again is None or self._addresses is None:
            return
        endpoint = await self._addresses.next()
        self._connecting = None  # the steps below must not be interrupted
        _unwatch(self._wake)
        try:
            pair = self._again(endpoint)
        except (OSError, ValueError, zmq.ZMQError):  # the process has no free descriptor: later
            self._wake = _watch([self._sub, self._monitor], self._event)
        else:
            _close(self._sub, self._monitor)
            self._sub, self._monitor = pair
            self._wake = _watch([*pair], self._event)
        self._connect_in(CONNECT_S)

    def _schedule_reconnect(self) -> None:
        self._connect_in(self._again_s)
        self._again_s = min(2 * self._again_s, AGAIN_MAX_S)

    def change(self) -> ConnectionChange | None:
        """Return the next change of a connection. Read it before batches: ZeroMQ reports it first."""
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
                return ConnectionChange(up=True)
            elif kind == zmq.EVENT_CLOSED:  # a connection attempt failed
                self._schedule_reconnect()
            elif kind == zmq.EVENT_DISCONNECTED:
                self._schedule_reconnect()
                return ConnectionChange(up=False, peer=self._peers.pop(descriptor, ""))

    def receive(self) -> tuple[bytes, int, bytes] | Unreadable | None:
        """Return the next batch: topic, number, payload."""
        try:
            frames = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) == 3 and len(frames[1]) == 8:
            return frames[0], int.from_bytes(frames[1], "big"), frames[2]
        return _unreadable(frames)

    def receive_from(self) -> tuple[bytes, int, bytes, str] | Unreadable | None:
        """Return the next batch with the address of its publisher, "" if it has none (ipc)."""
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
    """Socket that receives the answers to one replay request."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer
        self.unreadable = 0  # messages that are not batches
        self._wake: tuple[asyncio.AbstractEventLoop, list[int]] | None = None

    def wakes(self, event: asyncio.Event) -> None:
        """Set the event whenever there may be input."""
        self._wake = _watch([self._dealer], event)

    def close(self) -> None:
        """Close the socket."""
        _unwatch(self._wake)
        self._dealer.close(linger=0)

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next batch: number and payload. The number -1 ends the replay."""
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) >= 3 and not frames[0] and len(frames[-2]) == 8:  # vLLM sends the topic since 0.2x
                return (-1 if frames[-2] == END else int.from_bytes(frames[-2], "big")), frames[-1]
            self.unreadable += 1


def _unreadable(frames: Sequence[bytes], count: int = 0, peer: str = "") -> Unreadable:
    """Describe the error in a message of `count` frames; `frames` are the first of them, or all."""
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
    event.set()  # messages that are already there do not trigger the descriptor
    return loop, descriptors


def _unwatch(watched: tuple[asyncio.AbstractEventLoop, list[int]] | None) -> None:
    if watched is not None:
        loop, descriptors = watched
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


def _peer(descriptor: int) -> str:
    """Return the address at the other end of a connection; "" if it is already closed."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""
