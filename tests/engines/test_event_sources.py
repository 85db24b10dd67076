"""Long replays, engines that connect to us, and where event endpoints come from."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.kv_events.sources import EventsDisabled, EventSourceResolver, Source
from router.eventloop import TURNS, Turns
from tests.engines.event_world import Index, Publisher, World, stored
from tests.support.figures import figure

BATCHES, BATCH_BLOCKS = 10_000, 8  # as many as an engine keeps


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


@pytest.mark.promise("KV events of one engine take at most one turn in eight of those in which others work.", "engines")
@pytest.mark.inside
async def test_a_replay_lets_others_run_between_any_two_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time is allowed at a stretch, a replay goes on, and keeps to it: others get the loop eight times
    as often as there are batches, where no turn counts as empty and none takes time, as on a busy machine they do."""
    for name, value in (
        ("engines.kv_events.follower.YIELD_S", 0.0),
        ("eventloop.SHARE_S", 0.0),
        ("eventloop.EMPTY_S", -1.0),
    ):
        monkeypatch.setattr(f"router.{name}", value)
    monkeypatch.setattr("router.engines.kv_events.follower.Turns", lambda loop, _: Turns(loop, lambda: 0.0))
    index, spent_s, *_ = await replayed(world, 1_000, BATCH_BLOCKS)
    assert len(spent_s) >= TURNS * 1_000
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
        await index.graded(Confidence.EXACT, "joined at batch 0")
        took_s, cpu_s = time.perf_counter() - at_s, time.process_time() - cpu_s
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        return index, spent_s, took_s, cpu_s, world.stats(subscriber).counts.replays
    finally:
        process.terminate()
        await process.wait()


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
    await index.graded(Confidence.EXACT, "joined at batch 0")
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
    await index.until(
        lambda: any("connection of a publisher was closed" in what for what in index.story)
    )  # and it has to prove itself


@pytest.mark.parametrize("frames", [[b"two"], []])
async def test_what_is_no_batch_from_an_engine_that_connects(world: World, frames: list[bytes]) -> None:
    """It is counted at the replica that its topic or its address names, and at the router where it names none."""
    index, topic = Index(), f"kv@{world.url.removeprefix('http://')}@model".encode()
    subscriber = await world.follow(index, bind="tcp://127.0.0.1:*", endpoints={world.url: ("", "")})
    await index.graded(Confidence.CATCHING_UP, "no replay endpoint")
    engine, rogue = Caller(subscriber.address), Caller(subscriber.address)
    try:
        while not world.stats(subscriber).counts.malformed:
            await engine.pub.send_multipart([topic, *frames])
            await asyncio.sleep(0.01)
        await index.graded(Confidence.CATCHING_UP, f"messages of {1 + len(frames)} frame")
        for follower in subscriber._followers.values():
            follower.connects = False
        while not subscriber.unknown_publishers:
            await rogue.pub.send_multipart([b"else", *frames])
            await asyncio.sleep(0.01)
    finally:
        await asyncio.gather(engine.stop(), rogue.stop())


@pytest.mark.promise("A publisher of KV events changes no other replica's entries.", "engines")
async def test_a_topic_of_another_host_is_not_believed(world: World) -> None:
    """By convention the topic names the publisher's address: a connection from elsewhere is not its."""
    index = Index()
    world.url = "http://10.1.2.3:8000"
    subscriber = await world.follow(index, bind="tcp://127.0.0.1:*", endpoints={world.url: ("", "")})
    await index.graded(Confidence.CATCHING_UP, "no replay endpoint")
    rogue = Caller(subscriber.address, topic=b"kv@10.1.2.3:8000@model")
    try:
        while not subscriber.unknown_publishers:
            await rogue.say(stored(666))
            await asyncio.sleep(0.01)
    finally:
        await rogue.stop()
    assert not index.held


@pytest.mark.promise("An engine names ports of its KV events, never hosts.", "engines")
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
        assert isinstance(found, EventsDisabled)
        assert endpoint in found.why
    else:
        assert found == Source(expected, "tcp://127.0.0.1:5558", "t")


async def test_ranks_have_sources_of_their_own(world: World) -> None:
    """vLLM lists them, offset already; SGLang names the first port; a server of several ranks is none of them."""
    listed = {str(rank): {"endpoint": f"tcp://*:{5557 + rank}", "replay_endpoint": None} for rank in (2, 3)}
    world.page.pages["/kv_event_sources"] = listed
    assert await sought(Replica(world.url).select_rank(1)) == Source("tcp://127.0.0.1:5560")
    assert isinstance(await sought(Replica(world.url).select_rank(2)), EventsDisabled)
    assert isinstance(await sought(Replica(world.url)), EventsDisabled)
    del world.page.pages["/kv_event_sources"]
    said = {"publisher": "zmq", "endpoint_host": "::", "endpoint_port_base": 6000, "replay_endpoint_port_base": 6100}
    world.page.pages["/server_info"] = {"kv_events": {**said, "topic": "", "block_size": 16, "dp_size": 2}}
    expected = Source("tcp://127.0.0.1:6001", "tcp://127.0.0.1:6101", "")
    assert await sought(Replica(world.url).select_rank(1)) == expected


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ({}, "does not describe its KV events"),
        ({"/kv_event_sources": {}}, "switched off"),
        ({"/kv_event_sources": {"0": {"publisher": "null", "endpoint": "tcp://*:1"}}}, "not published over ZeroMQ"),
        ({"/kv_event_sources": [1]}, "is invalid"),
        ({"/kv_event_sources": {"0": {"endpoint": 7}}}, "is invalid"),
        ({"/server_info": {"version": "0.5"}}, "switched off"),
    ],
)
async def test_a_replica_without_events_is_estimated(world: World, pages: dict[str, Any], why: str) -> None:
    """The reason says what to do; and as soon as it has events, they are followed."""
    index, publisher = Index(), world.publisher()
    world.page.pages = dict(pages)
    await world.follow(index, poll_s=0.05)
    # On a busy machine a page may not be answered in time at first.
    await index.until(lambda: bool(index.grades) and why in index.grades[-1][1], why)
    assert index.grades[-1][0] is Confidence.ESTIMATED
    world.page.vllm(publisher)
    await index.graded(Confidence.CATCHING_UP, "no batch published yet")
    await publisher.say(stored(0))
    await index.graded(Confidence.EXACT, "joined at batch 0")
    world.page.pages = dict(pages)
    await index.until(lambda: index.grades[-1][0] is Confidence.ESTIMATED and why in index.grades[-1][1])
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
    finder = EventSourceResolver(configured={replica.id: wrote}, bound_port=None, api_key="", timeout_s=5.0)
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
    assert isinstance(off, EventsDisabled)
    assert "the address from discovery" in off.why


async def test_discovery_learns_where_events_are(world: World) -> None:
    """Known later, or elsewhere: looked for at once, and not with the next routine look."""
    index, publisher = Index(), world.publisher()
    subscriber = await world.follow(index, poll_s=3_600.0)
    await index.graded(Confidence.ESTIMATED, "does not describe its KV events")
    events, replay = (f"tcp://127.0.0.1:{port}" for port in publisher.ports)
    subscriber.update(Replica(world.url, events=events, replay=replay))
    await publisher.say(stored(0))
    await index.graded(Confidence.EXACT, "joined at batch 0")
    subscriber.update(Replica("http://nobody:1", events=events))  # who is not watched is nobody's business
    assert world.stats(subscriber).endpoint == events


async def sought(replica: Replica) -> Source | EventsDisabled:
    """What the router makes of what the replica says."""
    finder = EventSourceResolver(configured={}, bound_port=None, api_key="", timeout_s=5.0)
    try:
        return await finder.find(replica)
    finally:
        await finder.close()
