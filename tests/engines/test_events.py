"""KV events over real ZeroMQ sockets on loopback, from publishers that behave as vLLM's and SGLang's do, or worse."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
import zmq
import zmq.asyncio

from router.core.fleet.flap_filter import STEADY_S
from router.core.kv_events.stream import StreamLimits
from router.core.types.placements import Confidence
from router.engines.kv_events.follower import WHYS_MAX
from router.engines.kv_events.subscriber import EventStreamManager
from tests.engines.event_world import SHORT, Index, Publisher, World, stored
from tests.support.figures import figure
from tests.support.waiting import until


async def joined(world: World, count: int = 3, **settings: Any) -> tuple[Publisher, Index, EventStreamManager]:
    """A vLLM that stored blocks 0 to count - 1, joined from its first batch."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher)
    for name in range(count):
        await publisher.say(stored(name))
    subscriber = await world.follow(index, **settings)
    await index.graded(Confidence.EXACT, "joined at batch 0")
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


async def test_a_batch_counts_when_all_of_it_is_applied(world: World) -> None:
    """Large batches are applied in turns of the event loop: a number that is shown early would hide missing blocks."""
    publisher, index, subscriber = await joined(world)
    seen: dict[int, int] = {}
    for batch in range(3, 6):
        await publisher.say(*(stored(batch * 10_000 + 8 * n, 8) for n in range(1_000)))
    async with asyncio.timeout(60):
        while (seq := world.stats(subscriber).last_seq) < 5:
            seen.setdefault(seq, len(index.held))
            await asyncio.sleep(0)
    seen[seq] = len(index.held)
    assert seen[5] == 3 + 3 * 8_000
    assert all(held >= 3 + max(0, seq - 2) * 8_000 for seq, held in seen.items())
    assert list(seen) == sorted(seen)


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
    seen = [2]
    async with asyncio.timeout(60):
        while index.credited != set(range(6)):
            seen.append(world.stats(subscriber).last_seq)
            await asyncio.sleep(0)
    assert seen == sorted(seen)  # a replay that is requested makes no applied batch uncertain
    assert publisher.asked[:2] == [0, 2]
    assert world.stats(subscriber).counts.gaps == 1
    assert not any(what.startswith("clear") for what in index.story)
    await index.graded(Confidence.EXACT, "joined at batch 0")


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
    await world.follow(index, limits=SHORT)
    await index.graded(Confidence.EXACT, "joined at batch 0")
    assert index.credited == set(range(6))
    assert list(dict.fromkeys(publisher.asked))[:2] == [0, 3]  # it may have looked cut before, too


async def test_a_replay_that_is_too_short_is_a_late_join(world: World) -> None:
    """Then the grade is not exact, until the engine clears its cache."""
    publisher, index = world.publisher(buffer=2), Index()
    world.page.vllm(publisher)
    for name in range(6):
        await publisher.say(stored(name))
    await world.follow(index)
    await index.graded(Confidence.CATCHING_UP, "joined late: the replay begins at batch 4")
    await index.until(lambda: index.credited == {4, 5})
    await publisher.say({"type": "AllBlocksCleared"}, stored(9))
    await index.graded(Confidence.EXACT, "joined at a clear")
    assert index.credited == {9}


async def test_no_replay_endpoint(world: World) -> None:
    """The grade is exact only if the first batch heard is the first there is."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher, replay=False)
    await world.follow(index)
    await index.graded(Confidence.CATCHING_UP, "no replay endpoint")
    while not index.held:  # the subscription takes effect a moment after the connection
        await publisher.say(stored(publisher.seq))
        await asyncio.sleep(0.01)
    first = min(index.held)
    await index.graded(*((Confidence.CATCHING_UP, "joined late") if first else (Confidence.EXACT, "joined at batch 0")))
    publisher.unsent = {publisher.seq}
    await publisher.say(stored(500))
    await publisher.say(stored(501))
    await index.graded(Confidence.CATCHING_UP, "gap: 1 batches")
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
    assert "clear: restarted: batch 2 has different bytes" in index.story
    await index.graded(Confidence.EXACT, "joined at batch 0")


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
    limits = StreamLimits(silence_s=3_600.0, look_s=3_600.0, suspended_max_s=0.5)
    publisher, index, _ = await joined(world, limits=limits)
    at_s = time.perf_counter()
    await publisher.stop()
    await index.until(lambda: not index.credited)
    figure("events: no credit behind the end of a process, s", 0.1, time.perf_counter() - at_s)
    await index.graded(Confidence.ESTIMATED, "event stream lost")
    figure("events: the stream is lost behind the end of a process, s", 2.0, time.perf_counter() - at_s)
    assert not index.held


async def test_a_silent_replay_is_given_up_and_taken_up_again(world: World) -> None:
    """Live batches are followed without it; as soon as it answers, all is known."""
    publisher, index = world.publisher(), Index()
    world.page.vllm(publisher)
    await publisher.say(stored(0))
    publisher.silent = True
    await world.follow(index, limits=StreamLimits(silence_s=0.05, asks_max=2, look_s=0.2))
    await index.graded(Confidence.CATCHING_UP, "no answer to the replay request")
    await publisher.say(stored(1))
    await index.until(lambda: index.credited == {1})
    publisher.silent = False
    await index.graded(Confidence.EXACT, "joined at batch 0")
    assert index.credited == {0, 1}


async def test_resync_forgets_and_replays(world: World) -> None:
    """What the self-check distrusts is told again from the beginning."""
    publisher, index, subscriber = await joined(world)
    index.held.add(77)  # a block the engine does not hold
    subscriber.resync(world.url)
    await index.until(lambda: index.credited == {0, 1, 2})
    await index.graded(Confidence.EXACT, "joined at batch 0")
    assert publisher.asked[:2] == [0, 0]


async def test_messages_of_two_frames_are_counted_and_said(world: World) -> None:
    """By the live socket and in replays, which a publisher of another kind may send as well."""
    publisher, index, subscriber = await joined(world)
    while not world.stats(subscriber).counts.malformed:  # until its subscription has arrived
        await publisher.pub.send_multipart([b"", b"a batch without a number"])
        await asyncio.sleep(0.01)
    await index.graded(Confidence.CATCHING_UP, "messages of 2 frames, 3 expected")
    await publisher.say(stored(3))
    await index.graded(Confidence.EXACT, "joined at batch 0")
    counted = world.stats(subscriber).counts.malformed
    publisher.odd = True
    subscriber.resync(world.url)
    await until(lambda: world.stats(subscriber).counts.malformed > counted)


def of_two_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The name dual.test has these addresses, in this order."""
    loop = asyncio.get_running_loop()
    own = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **kwargs: Any) -> Any:
        if host != "dual.test":
            return await own(host, port, **kwargs)
        return [(0, 0, 0, "", (address, port or 0)) for address in addresses]

    monkeypatch.setattr(type(loop), "getaddrinfo", lambda _loop, *args, **kwargs: getaddrinfo(*args, **kwargs))


@pytest.mark.parametrize("addresses", [("::1", "127.0.0.1"), ("127.0.0.2", "::1", "127.0.0.1"), ("127.0.0.1", "::1")])
async def test_every_address_of_a_name_is_tried(
    world: World, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    """A name of a dual-stack network has addresses at which nobody listens; replays go where the events come from. An
    engine that was restarted is found again."""
    of_two_addresses(monkeypatch, *addresses)
    publisher, index = world.publisher(), Index()
    ports = publisher.ports
    await publisher.say(stored(0))
    endpoints = {world.url: (f"tcp://dual.test:{ports[0]}", f"tcp://dual.test:{ports[1]}")}
    subscriber = await world.follow(index, endpoints=endpoints)
    await index.graded(Confidence.EXACT, "joined at batch 0")
    assert not list(subscriber.down(time.monotonic()))
    await publisher.stop()
    await index.until(lambda: bool(list(subscriber.down(time.monotonic()))))
    again = world.publisher(*ports)
    await again.say(stored(7))
    await index.until(lambda: index.credited == {7})
    await index.graded(Confidence.EXACT, "joined at batch 0")


async def test_an_event_stream_that_flaps_has_one_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that publishes at one unreachable address after another is logged a few times, then once as flapping,
    and once when it has events and has not changed for a while."""
    later_s, index, publisher = [0.0], Index(), world.publisher()

    def lines() -> list[str]:
        events = (getattr(each, "event", "") for each in caplog.records if each.levelno >= logging.INFO)
        return [event for event in events if event.startswith("event_stream")]

    with caplog.at_level(logging.INFO):
        await world.follow(index, poll_s=0.01, clock=lambda: time.monotonic() + later_s[0])
        for number in range(2 * WHYS_MAX):
            known = len(index.grades)
            world.page.vllm(publisher)
            world.page.pages["/kv_event_sources"]["0"]["endpoint"] = f"tcp://127.0.0.1:{number + 1}"
            await index.until(lambda known=known: len(index.grades) > known)  # type: ignore[misc]
        assert lines() == ["event_stream"] * (WHYS_MAX - 1) + ["event_stream_flaps"]
        world.page.vllm(publisher)
        await publisher.say(stored(0))
        await index.graded(Confidence.EXACT, "joined at batch 0")
        later_s[0] = STEADY_S + 1
        await publisher.say(stored(1))
        await index.until(lambda: index.credited == {0, 1})
        await until(lambda: lines()[-1] == "event_stream_steady")
        assert lines().count("event_stream_steady") == 1
