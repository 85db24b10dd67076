"""A publisher as vLLM's, an index of its blocks, and a router that follows it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from router.core.kv_events.batch_decoder import Cleared, Event, Removed, Stored
from router.core.kv_events.stream import StreamLimits
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.kv_events.subscriber import EventStreamManager, StreamStats

END = b"\xff" * 8


# Nobody is silent because the machine stands still; SHORT is for those who are.
LIMITS = StreamLimits(silence_s=30.0, asks_max=3, suspended_max_s=60.0, look_s=10.0)
SHORT = StreamLimits(silence_s=0.3, asks_max=3, suspended_max_s=5.0, look_s=10.0)


def stored(first: int, count: int = 1) -> dict[str, Any]:
    """A root run of one-token blocks named first, first + 1..."""
    names = list(range(first, first + count))
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": names,
        "block_size": 1,
        "medium": "GPU",
    }


class Publisher:
    """One engine process: what vllm/distributed/kv_events.py does, in one task, with faults to order."""

    def __init__(self, port: int = 0, replay_port: int = 0, *, topic: bytes = b"", buffer: int = 10_000) -> None:
        self.context = zmq.asyncio.Context()
        self.pub: zmq.asyncio.Socket = self.context.socket(zmq.PUB)
        self.router: zmq.asyncio.Socket = self.context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(100_000)
        self.pub.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.topic = topic
        self.seq = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.unsent: set[int] = set()  # numbers that live subscribers do not get
        self.silent = False  # no replay is answered
        self.odd = False  # replays lack the numbers
        self.cut: int | None = None  # messages of the next replay that are sent
        self.asked: list[int] = []
        self.task = asyncio.create_task(self._serve())

    @property
    def ports(self) -> tuple[int, int]:
        """Of batches and replays."""
        pub, router = (str(s.get_string(zmq.LAST_ENDPOINT)) for s in (self.pub, self.router))
        return int(pub.rpartition(":")[2]), int(router.rpartition(":")[2])

    async def say(self, *events: dict[str, Any], ago_s: float = 0.0) -> None:
        """One batch, of some time ago."""
        payload = msgspec.msgpack.encode([time.time() - ago_s, list(events), 0])
        if self.seq not in self.unsent:
            await self.pub.send_multipart([self.topic, self.seq.to_bytes(8, "big"), payload])
        self.buffer.append((self.seq, payload))
        self.seq += 1

    async def _serve(self) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if self.silent:
                continue
            answers = [(seq.to_bytes(8, "big"), payload) for seq, payload in self.buffer if seq >= self.asked[-1]]
            messages = [*answers, (END, b"")][: self.cut]
            self.cut = None
            for seq, payload in messages:
                await self.router.send_multipart([client, b"", *([] if self.odd else [self.topic, seq]), payload])

    async def stop(self) -> None:
        """The process dies."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)


@dataclass
class Index:
    """A Sink that keeps the names of blocks, and what happened when."""

    held: set[int] = field(default_factory=set)
    suspended: bool = False
    grades: list[tuple[Confidence, str]] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def credited(self) -> set[int]:
        """What a prompt would be told."""
        return set() if self.suspended else self.held

    def apply(self, replica: str, event: Event, now_s: float) -> None:
        """One event."""
        if isinstance(event, Stored):
            self.held |= set(event.hashes)
        elif isinstance(event, Removed):
            self.held -= set(event.hashes)
        else:
            assert isinstance(event, Cleared)
            self.held.clear()
        self.changed.set()

    def advance_watermark(self, replica: str, until_s: float) -> None:
        """How far it was said."""
        self.told_s.append(until_s)
        self.changed.set()

    def clear(self, replica: str, why: str, now_s: float) -> None:
        """Nothing is sure."""
        self._say(f"clear: {why}")
        self.held.clear()
        self.suspended = False

    def suspend(self, replica: str, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit nothing."""
        self._say(f"suspend: {why}")
        self.suspended = True

    def resume(self, replica: str, now_s: float) -> None:
        """As before."""
        self._say("resume")
        self.suspended = False

    def grade(self, replica: str, grade: Confidence, why: str, now_s: float) -> None:
        """A new grade."""
        self.grades.append((grade, why))
        self.changed.set()

    def _say(self, what: str) -> None:
        self.story.append(what)
        self.changed.set()

    async def until(self, done: Callable[[], bool], what: str = "") -> None:
        """Wait until something is so."""
        try:
            async with asyncio.timeout(60):
                while not done():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what}: {self.grades} {self.story} {len(self.held)} held") from None

    async def graded(self, grade: Confidence, start: str) -> None:
        """Wait for a grade with a reason that begins so."""
        await self.until(lambda: bool(self.grades) and self._is(grade, start), f"{grade} {start}")

    def _is(self, grade: Confidence, start: str) -> bool:
        return self.grades[-1][0] is grade and self.grades[-1][1].startswith(start)


class Page:
    """The HTTP side of an engine: what it says of its events."""

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}

    async def handle(self, request: web.Request) -> web.Response:
        """404 for whatever is not set."""
        if request.path not in self.pages:
            return web.Response(status=404)
        return web.json_response(self.pages[request.path])

    def vllm(self, publisher: Publisher, *, replay: bool = True, host: str = "*") -> None:
        """As vLLM 0.32 says it."""
        port, replay_port = publisher.ports
        self.pages["/kv_event_sources"] = {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{host}:{port}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay_port}" if replay else None,
                "buffer_steps": 10_000,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": publisher.topic.decode(),
            }
        }


class World:
    """Everything that a test starts, stopped at its end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.page = Page()
        self.url = ""

    async def serve(self) -> None:
        """The engine's HTTP server."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self.page.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def publisher(self, *args: Any, **kwargs: Any) -> Publisher:
        """A process that publishes."""
        made = Publisher(*args, **kwargs)
        self._stack.push_async_callback(made.stop)
        return made

    async def follow(self, index: Index, **settings: Any) -> EventStreamManager:
        """A subscriber that watches this engine."""
        kwargs: dict[str, Any] = {"endpoints": {}, "bind": "", "topics": {}, "api_key": "", "poll_s": 5.0}
        subscriber = EventStreamManager(index, **{"limits": LIMITS, **kwargs, **settings})
        await subscriber.start()
        self._stack.push_async_callback(subscriber.close)
        task = asyncio.create_task(subscriber.watch(Replica(self.url)))

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(stop)
        return subscriber

    def stats(self, subscriber: EventStreamManager) -> StreamStats:
        """Of the one replica."""
        return subscriber.stats()[self.url]


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(stack)
        await made.serve()
        yield made
