"""A stream that goes on from what another process knew: real sockets on loopback
(engines/kv_events/snapshot_resume.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from router.core.cache_state.event_index import EventIndex
from router.core.kv_events.event_state_codec import EngineState
from router.core.kv_events.stream import StreamLimits
from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.engines.kv_events.snapshot_resume import ANOTHER, SnapshotResume
from router.engines.kv_events.subscriber import EventStreamManager
from tests.engines.event_world import LIMITS, SHORT, Publisher, World
from tests.support.waiting import until

SIZE = 16


def prompt(first: int, blocks: int) -> TokenPrompt:
    """Token ids from there on."""
    ids = b"".join(n.to_bytes(4, "little") for n in range(first, first + blocks * SIZE))
    return TokenPrompt(ids, "", b"", {SIZE: token_chain(ids, SIZE, token_root("", b"", SIZE))})


def stored(first: int, blocks: int) -> dict[str, Any]:
    """What an engine says when it has computed that prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": [1_000_000 + first + n for n in range(blocks)],
        "parent_block_hash": None,
        "token_ids": list(range(first, first + blocks * SIZE)),
        "block_size": SIZE,
        "medium": "GPU",
    }


def removed(*hashes: int) -> dict[str, Any]:
    """What it says of blocks that are gone."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


class One:
    """A router as far as events go."""

    def __init__(self, world: World) -> None:
        self._world, self.told = world, list[tuple[int, str]]()
        self.grades, self.restarts = list[tuple[Confidence, str]](), 0
        self.knowledge = EventIndex(
            blocks_max=10_000,
            aside_max=1_000,
            names_max=1_000,
            graded=lambda _, grade, why: self.grades.append((grade, why)),
            resync=lambda _: None,
            restarted=lambda _: self._restarted(),
        )
        self.knowledge.set_untokenizable(world.url, "")
        self.events: EventStreamManager | None = None

    def _restarted(self) -> None:
        self.restarts += 1

    async def follow(self, offer: EngineState | None = None, limits: StreamLimits = LIMITS) -> None:
        """Begin to follow, with what another one knew."""
        handover = SnapshotResume(self.knowledge, lambda _, blocks, why: self.told.append((blocks, why)))
        if offer is not None:
            handover.offers[self._world.url] = offer
        self.events = await self._world.follow(self.knowledge, handover=handover, limits=limits)  # type: ignore[arg-type]  # as an Index

    async def graded(self, grade: Confidence) -> None:
        """Wait for it."""
        await until(lambda: self.knowledge.grade_of(self._world.url)[0] is grade)

    def depth(self, first: int, blocks: int) -> int:
        """Blocks of a prompt that are credited to the engine."""
        found = self.knowledge.find_stored(prompt(first, blocks), time.monotonic()).get(self._world.url)
        return found.tokens // SIZE if found is not None and not found.suspended else 0

    async def state(self) -> EngineState:
        """What it knows, once that is certain."""
        assert self.events is not None
        async with asyncio.timeout(60):
            while (state := await self.events.state(self._world.url)) is None:
                await asyncio.sleep(0.01)
        return state


async def known(world: World, publisher: Publisher, *said: dict[str, Any]) -> EngineState:
    """What a router knows that joined at batch 0 and heard this."""
    world.page.vllm(publisher)
    for each in said:
        await publisher.say(each)
    one = One(world)
    await one.follow()
    await one.graded(Confidence.EXACT)
    return await one.state()


async def test_it_goes_on_where_the_other_one_left_off(world: World) -> None:
    """What came since is replayed, and nothing else is asked for; blocks that are gone since are gone."""
    publisher = world.publisher()
    state = await known(world, publisher, stored(0, 300), stored(50_000, 10))
    assert state.blocks == 310
    publisher.asked.clear()
    await publisher.say(removed(1_000_000 + 299))
    await publisher.say(stored(90_000, 7))
    two = One(world)
    await two.follow(state)
    await two.graded(Confidence.EXACT)
    assert two.told == [(310, "")]
    assert publisher.asked[0] == 1
    assert (two.depth(0, 300), two.depth(50_000, 10), two.depth(90_000, 7)) == (299, 10, 7)
    await publisher.say(removed(*range(1_050_000, 1_050_010)))
    await until(lambda: two.depth(50_000, 10) == 0)
    again = await two.state()
    assert (again.blocks, again.stream.seq, again.stream.exact) == (306, 4, True)


async def test_an_engine_that_was_started_again_is_credited_with_nothing(world: World) -> None:
    """Whether its sequence has passed ours or not, another process has other bytes; nothing was credited before that
    was known."""
    publisher = world.publisher()
    state = await known(world, publisher, stored(0, 300), stored(50_000, 10))
    ports = publisher.ports
    for batches in (1, 5):
        await publisher.stop()
        publisher = world.publisher(*ports)
        for n in range(batches):
            await publisher.say(stored(100_000 + 1_000 * n, 4))
        two = One(world)
        await two.follow(state)
        await two.graded(Confidence.EXACT)
        ((blocks, why),) = two.told
        assert not blocks
        assert why.startswith("restarted")
        assert two.restarts == 1
        assert (two.depth(0, 300), two.depth(50_000, 10), two.depth(100_000, 4)) == (0, 0, 4)


async def test_nothing_is_credited_before_the_replay_has_proved_it(world: World) -> None:
    """An engine that does not answer a replay proves nothing: what another process knew is forgotten in the end."""
    publisher = world.publisher()
    state = await known(world, publisher, stored(0, 300))
    publisher.silent = True
    two = One(world)
    credited = list[int]()
    await two.follow(state, SHORT)

    def looked(done: Callable[[], bool]) -> bool:
        credited.append(two.depth(0, 300))
        return done()

    await until(lambda: looked(lambda: bool(two.told)))
    assert two.told[0][0] == 0
    assert not any(credited)
    assert not two.depth(0, 300)


async def test_a_gap_that_no_replay_fills_is_as_ever(world: World) -> None:
    """Batches that the engine keeps no longer may have named removals: what follows is taken, as after any gap."""
    publisher = world.publisher(buffer=2)
    state = await known(world, publisher, stored(0, 300))
    for n in range(4):
        await publisher.say(stored(100_000 + 1_000 * n, 4))
    two = One(world)
    await two.follow(state)
    await two.graded(Confidence.CATCHING_UP)
    await until(lambda: two.depth(103_000, 4) == 4)
    ((blocks, why),) = two.told
    assert not blocks
    assert why.startswith("batches lost")
    assert (two.depth(0, 300), two.depth(100_000, 4)) == (0, 0)


async def test_without_a_replay_endpoint_nothing_is_taken(world: World) -> None:
    """Numbers prove nothing."""
    publisher = world.publisher()
    state = await known(world, publisher, stored(0, 300))
    world.page.vllm(publisher, replay=False)
    two = One(world)
    await two.follow(state)
    await until(lambda: bool(two.told))
    assert two.told[0][0] == 0
    assert "without a replay endpoint" in two.told[0][1]


async def test_a_late_joiner_becomes_exact_by_what_a_sibling_knows(world: World) -> None:
    """It has heard all batches since, so it takes the sibling's blocks and has those since replayed; what is exact by
    its own events takes nothing."""
    publisher = world.publisher(buffer=4)
    world.page.vllm(publisher)
    await publisher.say(stored(0, 300))
    one = One(world)
    await one.follow()
    await one.graded(Confidence.EXACT)
    for n in range(8):
        await publisher.say(stored(100_000 + 1_000 * n, 4))
    two = One(world)
    await two.follow()
    await two.graded(Confidence.CATCHING_UP)
    await until(lambda: two.depth(107_000, 4) == 4)
    state = await one.state()
    await publisher.say(stored(200_000, 4))
    assert two.events is not None
    assert one.events is not None
    two.events.offer_snapshot(world.url, state)
    await two.graded(Confidence.EXACT)
    assert two.told == [(332, "")]
    await until(lambda: two.depth(200_000, 4) == 4)
    assert (two.depth(0, 300), two.depth(100_000, 4)) == (300, 4)
    one.events.offer_snapshot(world.url, state)
    await until(lambda: bool(one.told))
    assert one.told == [(0, "its own events have already covered the saved state")]


async def test_a_late_joiner_of_another_process_takes_nothing(world: World) -> None:
    """The sibling's word is of the engine before: this one's own batches are others."""
    publisher = world.publisher()
    state = await known(world, publisher, *(stored(1_000 * n, 4) for n in range(6)))
    ports = publisher.ports
    await publisher.stop()
    publisher = world.publisher(*ports, buffer=3)
    for n in range(8):
        await publisher.say(stored(100_000 + 1_000 * n, 4))
    two = One(world)
    await two.follow()
    await two.graded(Confidence.CATCHING_UP)
    await until(lambda: two.depth(107_000, 4) == 4)
    assert two.events is not None
    two.events.offer_snapshot(world.url, state)
    await until(lambda: bool(two.told))
    assert two.told == [(0, ANOTHER)]
    assert (two.depth(1_000, 4), two.depth(107_000, 4)) == (0, 4)
