"""KV events over real ZeroMQ sockets on loopback, from publishers that behave as vLLM's and SGLang's do, or worse."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from router.core.facts.placements import Grade
from router.core.facts.replicas import Replica
from router.core.kv_events.decoding import Cleared, Event, Removed, Stored
from router.core.kv_events.stream import Limits
from router.engines.kv_events.sources import Finder, Off, Source
from router.engines.kv_events.subscriber import StreamStats, Subscriber
from tests.support.figures import figure

END = b"\xff" * 8
BATCHES, BATCH_BLOCKS = 10_000, 8  # as many as an engine keeps
LIMITS = Limits(silence_s=0.3, asks_max=3, suspended_max_s=5.0, look_s=10.0)


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
                await self.router.send_multipart([client, b"", self.topic, seq, payload])

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
    grades: list[tuple[Grade, str]] = field(default_factory=list)
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

    def told(self, replica: str, until_s: float) -> None:
        """How far it was said."""
        self.told_s.append(until_s)

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

    def grade(self, replica: str, grade: Grade, why: str, now_s: float) -> None:
        """A new grade."""
        self.grades.append((grade, why))
        self.changed.set()

    def _say(self, what: str) -> None:
        self.story.append(what)
        self.changed.set()

    async def until(self, done: Callable[[], bool], what: str = "") -> None:
        """Wait until something is so."""
        try:
            async with asyncio.timeout(30):
                while not done():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what}: {self.grades} {self.story} {len(self.held)} held") from None

    async def graded(self, grade: Grade, start: str) -> None:
        """Wait for a grade with a reason that begins so."""
        await self.until(lambda: bool(self.grades) and self._is(grade, start), f"{grade} {start}")

    def _is(self, grade: Grade, start: str) -> bool:
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

    async def follow(self, index: Index, **settings: Any) -> Subscriber:
        """A subscriber that watches this engine."""
        kwargs: dict[str, Any] = {"endpoints": {}, "bind": "", "topics": {}, "api_key": "", "poll_s": 5.0}
        subscriber = Subscriber(index, **{"limits": LIMITS, **kwargs, **settings})
        await subscriber.start()
        self._stack.push_async_callback(subscriber.close)
        task = asyncio.create_task(subscriber.watch(Replica(self.url)))

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(stop)
        return subscriber

    def stats(self, subscriber: Subscriber) -> StreamStats:
        """Of the one replica."""
        return subscriber.stats()[self.url]


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(stack)
        await made.serve()
        yield made


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """An engine's HTTP side; publishers are started by the test."""
    async with _world() as made:
        yield made


async def joined(world: World, count: int = 3, **settings: Any) -> tuple[Publisher, Index, Subscriber]:
    """A vLLM that stored blocks 0 to count - 1, joined from its first batch."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher)
    for name in range(count):
        await publisher.say(stored(name))
    subscriber = await world.follow(index, **settings)
    await index.graded(Grade.EXACT, "joined at batch 0")
    assert index.credited == set(range(count))
    return publisher, index, subscriber


async def test_joins_from_batch_zero_and_follows(world: World) -> None:
    """What was said before is replayed, what is said later is heard; both count once."""
    publisher, index, subscriber = await joined(world)
    await publisher.say(stored(3), {"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU"})
    await index.until(lambda: index.credited == {1, 2, 3})
    stats = world.stats(subscriber)
    assert (stats.state, stats.last_seq, stats.blocks, stats.counts.batches) == ("following", 3, 5, 4)
    assert stats.lag_s is not None
    assert 0 <= stats.lag_s < 60


async def test_how_far_it_was_said(world: World) -> None:
    """By the time that a batch bears, whatever the clocks' difference: one that is older than the others were when it
    comes says nothing of since."""
    publisher, index, _ = await joined(world, wall=lambda: time.time() + 1_000.0)
    await publisher.say(stored(3))
    await publisher.say(stored(4), ago_s=100.0)
    await index.until(lambda: len(index.told_s) == 5)
    now_s = time.monotonic()
    assert now_s - 60.0 < index.told_s[3] <= now_s
    assert now_s - 160.0 < index.told_s[4] < now_s - 40.0


async def test_a_gap_is_repaired(world: World) -> None:
    """Batches that did not come are replayed; until then nothing is credited, and nothing is forgotten."""
    publisher, index, subscriber = await joined(world)
    publisher.unsent = {3, 4}
    for name in (3, 4, 5):
        await publisher.say(stored(name))
    await index.until(lambda: index.credited == set(range(6)))
    assert publisher.asked[:2] == [0, 2]
    assert world.stats(subscriber).counts.gaps == 1
    assert not any(what.startswith("clear") for what in index.story)
    await index.graded(Grade.EXACT, "joined at batch 0")


async def test_the_last_batch_lost_is_found_without_another(world: World) -> None:
    """An engine that is silent afterwards is asked whether there was more."""
    publisher, index, _ = await joined(world)
    publisher.unsent = {3}
    await publisher.say(stored(3))
    await index.until(lambda: index.credited == set(range(4)))


async def test_a_cut_replay_is_asked_for_again(world: World) -> None:
    """From where it broke off."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher)
    for name in range(6):
        await publisher.say(stored(name))
    publisher.cut = 4
    await world.follow(index)
    await index.graded(Grade.EXACT, "joined at batch 0")
    assert index.credited == set(range(6))
    assert publisher.asked[:2] == [0, 3]


async def test_a_replay_that_is_too_short_is_a_late_join(world: World) -> None:
    """Then the grade is not exact, until the engine clears its cache."""
    publisher, index = world.publisher(buffer=2), Index()
    world.page.vllm(publisher)
    for name in range(6):
        await publisher.say(stored(name))
    await world.follow(index)
    await index.graded(Grade.CATCHING_UP, "joined late: the replay begins at batch 4")
    await index.until(lambda: index.credited == {4, 5})
    await publisher.say({"type": "AllBlocksCleared"}, stored(9))
    await index.graded(Grade.EXACT, "joined at a clear")
    assert index.credited == {9}


async def test_no_replay_endpoint(world: World) -> None:
    """The grade is exact only if the first batch heard is the first there is."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher, replay=False)
    await world.follow(index)
    await index.graded(Grade.CATCHING_UP, "no replay endpoint")
    while not index.held:  # the subscription takes effect a moment after the connection
        await publisher.say(stored(publisher.seq))
        await asyncio.sleep(0.01)
    first = min(index.held)
    await index.graded(*((Grade.CATCHING_UP, "joined late") if first else (Grade.EXACT, "joined at batch 0")))
    publisher.unsent = {publisher.seq}
    await publisher.say(stored(500))
    await publisher.say(stored(501))
    await index.graded(Grade.CATCHING_UP, "gap: 1 batches")
    await index.until(lambda: index.credited == {501})  # the grade falls before what it was for is forgotten


async def test_restart_in_place_with_a_sequence_that_passed_ours(world: World) -> None:
    """Nothing of the old process is credited from the disconnect on; only bytes tell that it is another one."""
    publisher, index, subscriber = await joined(world)
    ports = publisher.ports
    await publisher.stop()
    await index.until(lambda: index.suspended)
    second = world.publisher(*ports)
    for name in range(100, 110):
        await second.say(stored(name))
    await index.until(lambda: bool(index.credited))
    assert index.credited == set(range(100, 110))
    assert world.stats(subscriber).counts.restarts == 1
    assert "clear: restarted: batch 2 has other bytes" in index.story
    await index.graded(Grade.EXACT, "joined at batch 0")


async def test_restart_with_a_shorter_sequence(world: World) -> None:
    """A replay that ends before our last batch is another process's."""
    publisher, index, _ = await joined(world)
    ports = publisher.ports
    await publisher.stop()
    second = world.publisher(*ports)
    await second.say(stored(100))
    await index.until(lambda: index.credited == {100})
    assert "clear: restarted: its replay ends before batch 2" in index.story


async def test_a_connection_that_comes_back_is_proved(world: World) -> None:
    """The same process, another connection: nothing is forgotten, what was missed is replayed."""
    publisher, index, _ = await joined(world)
    port, _ = publisher.ports
    publisher.pub.unbind(f"tcp://127.0.0.1:{port}")
    publisher.pub.close(linger=0)
    await index.until(lambda: index.suspended)
    publisher.pub = publisher.context.socket(zmq.PUB)
    publisher.unsent = {3}
    await publisher.say(stored(3))
    publisher.pub.bind(f"tcp://127.0.0.1:{port}")
    await index.until(lambda: index.credited == set(range(4)))
    assert not any(what.startswith("clear") for what in index.story)


@pytest.mark.figures
async def test_a_disconnect_suspends_at_once_and_is_lost_in_time(world: World) -> None:
    """The end of a process is heard as the end of its connection, not as its silence, and suspends all credit; after
    the limit the stream is lost."""
    limits = Limits(silence_s=3_600.0, look_s=3_600.0, suspended_max_s=0.5)
    publisher, index, _ = await joined(world, limits=limits)
    at_s = time.perf_counter()
    await publisher.stop()
    await index.until(lambda: not index.credited)
    figure("events: no credit behind the end of a process, s", 0.1, time.perf_counter() - at_s)
    await index.graded(Grade.ESTIMATED, "event stream lost")
    figure("events: the stream is lost behind the end of a process, s", 2.0, time.perf_counter() - at_s)
    assert not index.held


async def test_a_silent_replay_is_given_up_and_taken_up_again(world: World) -> None:
    """Live batches are followed without it; as soon as it answers, all is known."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher)
    await publisher.say(stored(0))
    publisher.silent = True
    await world.follow(index, limits=Limits(silence_s=0.05, asks_max=2, look_s=0.2))
    await index.graded(Grade.CATCHING_UP, "replay is not answered")
    await publisher.say(stored(1))
    await index.until(lambda: index.credited == {1})
    publisher.silent = False
    await index.graded(Grade.EXACT, "joined at batch 0")
    assert index.credited == {0, 1}


async def test_resync_forgets_and_replays(world: World) -> None:
    """What the self-check distrusts is told again from the beginning."""
    publisher, index, subscriber = await joined(world)
    index.held.add(77)  # a block the engine does not hold
    subscriber.resync(world.url)
    await index.until(lambda: index.credited == {0, 1, 2})
    await index.graded(Grade.EXACT, "joined at batch 0")
    assert publisher.asked[:2] == [0, 0]


@pytest.mark.figures
async def test_ten_thousand_batches_leave_the_loop_responsive(world: World) -> None:
    """A replay of all that an engine keeps is no pause for others, and nothing of it is missed, though its ROUTER
    drops what its queue cannot take."""
    index, spent_s, took_s, cpu_s, asked = await replayed(world, BATCHES, BATCH_BLOCKS)
    spent_s.sort()
    print(f"\n{BATCHES:,} batches replayed in {took_s:.2f} s, {cpu_s:.2f} s of CPU, {asked} replays asked for")
    figure("events: a replay holds the loop, p99, ms", 2.0, spent_s[int(len(spent_s) * 0.99)] * 1e3)
    figure("events: a replay holds the loop, longest, ms", 20.0, spent_s[-1] * 1e3)
    assert index.held == left_of(BATCHES, BATCH_BLOCKS)


@pytest.mark.inside
async def test_a_replay_lets_others_run_between_any_two_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time is allowed at a stretch, a replay goes on, and keeps to it: others get the loop at least as
    often as there are batches."""
    monkeypatch.setattr("router.engines.kv_events.follower.YIELD_S", 0.0)
    index, spent_s, *_ = await replayed(world, 1_000, BATCH_BLOCKS)
    assert len(spent_s) >= 1_000
    assert index.held == left_of(1_000, BATCH_BLOCKS)


def left_of(batches: int, blocks: int) -> set[int]:
    """The blocks that are held after so many batches of kv_process."""
    removed = {(seq - 2) * blocks + 1 + i for seq in range(2, batches, 3) for i in range(blocks)}
    return set(range(1, batches * blocks + 1)) - removed


async def replayed(world: World, batches: int, blocks: int) -> tuple[Index, list[float], float, float, int]:
    """What is known after the replay of so many batches, the CPU seconds between any two turns of somebody else on the
    loop, the seconds and CPU seconds that it took, and how often a replay was asked for."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.engines.kv_process", str(batches), str(blocks)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        port, replay_port = map(int, (await process.stdout.readline()).split())
        index = Index()
        spent_s: list[float] = []  # of CPU, by others, between two turns of ours: other processes do not count

        async def turns() -> None:
            while True:
                at_s = time.thread_time()
                await asyncio.sleep(0)
                spent_s.append(time.thread_time() - at_s)

        endpoints = {world.url: (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")}
        at_s, cpu_s = time.perf_counter(), time.process_time()
        subscriber = await world.follow(index, endpoints=endpoints)
        turning = asyncio.create_task(turns())
        await index.graded(Grade.EXACT, "joined at batch 0")
        took_s, cpu_s = time.perf_counter() - at_s, time.process_time() - cpu_s
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        return index, spent_s, took_s, cpu_s, world.stats(subscriber).counts.replays
    finally:
        process.terminate()
        await process.wait()


# --- engines that connect to us ---


class Caller(Publisher):
    """An engine that connects, and whose replays are asked for at its own port."""

    def __init__(self, address: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pub.close(linger=0)
        self.pub = self.context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.connect(address)

    async def heard(self) -> None:
        """Wait until somebody subscribes: a PUB drops what nobody listens to."""
        while not await self.pub.poll(1, zmq.POLLOUT):
            await asyncio.sleep(0)


@pytest.mark.parametrize("convention", [True, False])
async def test_engines_that_connect_to_us(world: World, convention: bool) -> None:
    """The topic says who publishes, by convention or as configured; whoever is not known is dropped and counted."""
    index = Index()
    host_port = world.url.removeprefix("http://")
    topic = f"kv@{host_port}@model" if convention else "one"
    topics = {} if convention else {"one": world.url}
    first = world.publisher()  # for its replay port only
    replay = f"tcp://127.0.0.1:{first.ports[1]}"
    await first.say(stored(0))
    subscriber = await world.follow(index, bind="tcp://127.0.0.1:*", topics=topics, endpoints={world.url: ("", replay)})
    await index.graded(Grade.EXACT, "joined at batch 0")
    rogue = Caller(subscriber.address, topic=b"kv@10.9.8.7:80@model")
    engine = Caller(subscriber.address, topic=topic.encode())
    odd = Caller(subscriber.address, topic=b"\xff\xfe@\x00")
    engine.seq, number = 1, 100
    try:
        while index.credited != {0, 1}:  # until its subscription has arrived
            if engine.seq == 1 or number > 100:
                payload = msgspec.msgpack.encode([0.0, [stored(1)], 0])
                await engine.pub.send_multipart([engine.topic, (1).to_bytes(8, "big"), payload])
            await rogue.say(stored(666))
            await odd.say(stored(667))
            await asyncio.sleep(0.01)
        while subscriber.unknown_publishers < 2:
            await rogue.say(stored(666))
            await asyncio.sleep(0.01)
    finally:
        await asyncio.gather(rogue.stop(), engine.stop(), odd.stop())
    assert index.credited <= {0, 1}
    await index.until(lambda: any("connection ended" in what for what in index.story))  # and it has to prove itself


async def test_a_topic_of_another_host_is_not_believed(world: World) -> None:
    """By convention the topic names the publisher's address: a connection from elsewhere is not its."""
    index = Index()
    world.url = "http://10.1.2.3:8000"
    subscriber = await world.follow(index, bind="tcp://127.0.0.1:*", endpoints={world.url: ("", "")})
    await index.graded(Grade.CATCHING_UP, "no replay endpoint")
    rogue = Caller(subscriber.address, topic=b"kv@10.1.2.3:8000@model")
    try:
        while not subscriber.unknown_publishers:
            await rogue.say(stored(666))
            await asyncio.sleep(0.01)
    finally:
        await rogue.stop()
    assert not index.held


# --- where events are ---


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::ffff:127.0.0.1]:5557", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("ipc:///tmp/kv.ipc", "ipc:///tmp/kv.ipc"),
        ("tcp://192.0.2.1:5557", None),
        ("ipc://relative", None),
        ("ipc://@abstract", None),
        ("inproc://kv", None),
        ("tcp://*:99999", None),
        ("tcp://*:0", None),
        ("pgm://eth0;239.1.1.1:5557", None),
        ("nonsense", None),
    ],
)
async def test_no_host_that_an_engine_names_is_connected_to(world: World, endpoint: str, expected: str | None) -> None:
    """Only a port is taken from it, or a path if it is on this machine; what cannot be followed is said."""
    world.page.pages["/kv_event_sources"] = {
        "0": {"endpoint": endpoint, "replay_endpoint": "tcp://*:5558", "topic": "t"}
    }
    found = await sought(Replica(world.url))
    if expected is None:
        assert isinstance(found, Off)
        assert endpoint in found.why
    else:
        assert found == Source(expected, "tcp://127.0.0.1:5558", "t")


async def test_ranks_have_sources_of_their_own(world: World) -> None:
    """vLLM lists them, offset already; SGLang names the first port; a server of several ranks is none of them."""
    listed = {str(rank): {"endpoint": f"tcp://*:{5557 + rank}", "replay_endpoint": None} for rank in (2, 3)}
    world.page.pages["/kv_event_sources"] = listed
    assert await sought(Replica(world.url).of_rank(1)) == Source("tcp://127.0.0.1:5560")
    assert isinstance(await sought(Replica(world.url).of_rank(2)), Off)
    assert isinstance(await sought(Replica(world.url)), Off)
    del world.page.pages["/kv_event_sources"]
    said = {"publisher": "zmq", "endpoint_host": "::", "endpoint_port_base": 6000, "replay_endpoint_port_base": 6100}
    world.page.pages["/server_info"] = {"kv_events": {**said, "topic": "", "block_size": 16, "dp_size": 2}}
    expected = Source("tcp://127.0.0.1:6001", "tcp://127.0.0.1:6101", "")
    assert await sought(Replica(world.url).of_rank(1)) == expected


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ({}, "says nothing of KV events"),
        ({"/kv_event_sources": {}}, "switched off"),
        ({"/kv_event_sources": {"0": {"publisher": "null", "endpoint": "tcp://*:1"}}}, "not published over ZeroMQ"),
        ({"/kv_event_sources": [1]}, "cannot be read"),
        ({"/kv_event_sources": {"0": {"endpoint": 7}}}, "cannot be read"),
        ({"/server_info": {"version": "0.5"}}, "switched off"),
    ],
)
async def test_a_replica_without_events_is_estimated(world: World, pages: dict[str, Any], why: str) -> None:
    """The reason says what to do; and as soon as it has events, they are followed."""
    index, publisher = Index(), world.publisher()
    world.page.pages = dict(pages)
    await world.follow(index, poll_s=0.05)
    await index.graded(Grade.ESTIMATED, "")
    assert why in index.grades[-1][1]
    world.page.vllm(publisher)
    await index.graded(Grade.CATCHING_UP, "nothing published yet")
    await publisher.say(stored(0))
    await index.graded(Grade.EXACT, "joined at batch 0")
    world.page.pages = dict(pages)
    await index.until(lambda: index.grades[-1][0] is Grade.ESTIMATED and why in index.grades[-1][1])
    assert not index.held


@pytest.mark.parametrize(
    ("replica", "found"),
    [
        (Replica("http://h:1", events="tcp://10.0.0.1:5557"), Source("tcp://10.0.0.1:5557")),
        (
            Replica("http://h:1#dp3", events="tcp://10.0.0.1:5557", replay="tcp://10.0.0.1:6000"),
            Source("tcp://10.0.0.1:5560", "tcp://10.0.0.1:6003"),
        ),
        (Replica("http://h:1#dp1", events="tcp://[fd00::1]:5557"), Source("tcp://[fd00::1]:5558")),
    ],
)
async def test_where_discovery_says(replica: Replica, found: Source) -> None:
    """What discovery knows of a pod is used as it is, and nobody is asked; ranks are behind one another, as engines
    have them. What the operator wrote down goes before."""
    assert await sought(replica) == found
    wrote = Source("tcp://elsewhere:1")
    finder = Finder(configured={replica.id: wrote}, bound_port=None, api_key="", timeout_s=5.0)
    assert await finder.find(replica) == wrote
    await finder.close()


@pytest.mark.parametrize(
    "replica",
    [
        Replica("http://h:1", events="tcp://10.0.0.1"),
        Replica("http://h:1#dp9", events="tcp://10.0.0.1:65530"),
        Replica("http://h:1", events="tcp://10.0.0.1:1", replay="ipc:///x"),
        Replica("http://h:1", events="tcp://:5557"),
    ],
)
async def test_where_discovery_says_nonsense(replica: Replica) -> None:
    """It is no address: the replica has no events, and says why."""
    off = await sought(replica)
    assert isinstance(off, Off)
    assert "where discovery says" in off.why


async def test_discovery_learns_where_events_are(world: World) -> None:
    """Known later, or elsewhere: looked for at once, and not with the next routine look."""
    index, publisher = Index(), world.publisher()
    subscriber = await world.follow(index, poll_s=3_600.0)
    await index.graded(Grade.ESTIMATED, "says nothing of KV events")
    events, replay = (f"tcp://127.0.0.1:{port}" for port in publisher.ports)
    subscriber.update(Replica(world.url, events=events, replay=replay))
    await publisher.say(stored(0))
    await index.graded(Grade.EXACT, "joined at batch 0")
    subscriber.update(Replica("http://nobody:1", events=events))  # who is not watched is nobody's business
    assert world.stats(subscriber).endpoint == events


async def sought(replica: Replica) -> Source | Off:
    """What the router makes of what the replica says."""
    finder = Finder(configured={}, bound_port=None, api_key="", timeout_s=5.0)
    try:
        return await finder.find(replica)
    finally:
        await finder.close()
