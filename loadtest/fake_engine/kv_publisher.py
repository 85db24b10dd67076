"""KV events of one simulated replica over ZMQ, in the encoding of vLLM 0.24 and later.

A message has three frames:

- The topic.
- The sequence number: 8 bytes, big-endian, from 0.
- A msgpack array `[time, events, rank]`.

Events are maps with a type name. Each removed block is one event, and so is each run of stored blocks.

A ROUTER socket replays the last batches for subscribers that missed some. The response to a request `["", first
number]` is every batch from that number on, then number -1 with an empty payload. (Compared with frames recorded from
vLLM 0.32.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from loadtest.fake_engine.kv_pool import AllBlocksCleared, KvEvent
from loadtest.fake_engine.zoo.kv_encoding import encoding_of
from loadtest.fake_engine.zoo.member import DENSE, Family, Member

BUFFER_BATCHES = 10_000
HWM = 100_000
QUEUE_MAX = 100_000
END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Publisher on loopback by default; port 0 takes a free one. Raises `zmq.ZMQError` if a port is taken."""

    def __init__(
        self,
        block_tokens: int,
        *,
        port: int = 0,
        replay_port: int = 0,
        host: str = "127.0.0.1",
        topic: str = "",
        member: Member = DENSE,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._block_tokens = block_tokens
        self._clears_first = member.family is Family.SGLANG
        self._encoded = encoding_of(member, block_tokens)
        self._topic = topic.encode()
        self._now = now
        self.lose_every = 0
        """Every batch with a multiple of this number is lost, and replays are not answered. 0: none is lost."""
        self._seq = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER_BATCHES)
        # Sending on a PUB socket never blocks, so only the ROUTER is an asyncio socket.
        self._contexts: tuple[zmq.Context[zmq.Socket[bytes]], zmq.asyncio.Context] = (
            zmq.Context(),
            zmq.asyncio.Context(),
        )
        self._pub = self._contexts[0].socket(zmq.PUB)
        self._router = self._contexts[1].socket(zmq.ROUTER)
        try:
            self.endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._router, host, replay_port)
        except zmq.ZMQError:
            self._close()
            raise
        self._replays: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to answer replay requests."""
        self._replays = asyncio.get_running_loop().create_task(self._serve_replays())
        if self._clears_first:
            self.publish([AllBlocksCleared()])

    async def stop(self) -> None:
        """Drop unsent events and close both sockets."""
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)
        for context in self._contexts:
            context.term()

    def sources(self) -> dict[str, Any]:
        """Return the content of `/kv_event_sources`."""
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": BUFFER_BATCHES,
                "hwm": HWM,
                "max_queue_size": QUEUE_MAX,
                "topic": self._topic.decode(),
            }
        }

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch without waiting. A subscriber that is too slow loses batches and can request a replay."""
        seq = self._seq.to_bytes(8, "big")
        self._seq += 1
        payload = msgspec.msgpack.encode([self._now(), [told for event in events for told in self._encoded(event)], 0])
        self._sent.append((seq, payload))
        if self.lose_every and self._seq % self.lose_every == 0:
            return
        self._pub.send_multipart([self._topic, seq, payload])

    async def _serve_replays(self) -> None:
        while True:
            request = await self._router.recv_multipart()
            # Measured on vLLM: a request without the empty delimiter, or with extra frames, gets no response.
            if len(request) != 3 or request[1] or len(request[2]) != 8 or self.lose_every:
                continue
            client, first = request[0], request[2]
            for seq, payload in list(self._sent):
                if seq >= first:
                    await self._router.send_multipart([client, b"", self._topic, seq, payload])
            await self._router.send_multipart([client, b"", b"", END, b""])


def _bind(socket: zmq.SyncSocket | zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.set_hwm(HWM)
    socket.bind(f"tcp://{host}:{port or '*'}")
    return str(socket.get_string(zmq.LAST_ENDPOINT))
