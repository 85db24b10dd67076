"""Metrics pages, and what follows for what is known of a replica."""

from __future__ import annotations

from router.core.fleet.engine_counters import FOREIGN_PROBES
from router.core.kv_events.batch_decoder import Stored
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.placements import Confidence
from router.core.types.replicas import CapacitySource, Load, Sleep
from tests.core.cache_state.known import prompt_of
from tests.core.placement.placing import MODEL, World, chat, words
from tests.core.ready import ready

LONG = words(1, 2_000)


def several_told(told: list[str]) -> Router:
    """A router that notes which replicas' pages are of several processes."""
    return Router(
        POLICIES["warm"](),
        index_bytes_max=1 << 26,
        remembered_prompts_max=1_000,
        default_cache_blocks=4_096,
        several=told.append,
    )


def known(world: World) -> None:
    """An event stream said that `a` stores a prompt."""
    world.router.knowledge.grade("a", Confidence.EXACT, "joined", 0.0)
    stored = Stored(list(range(10)), None, prompt_of(160).ids, 16, "", b"", None, "GPU", 0, True)
    world.router.knowledge.apply("a", stored, 0.0)


def stored(world: World) -> int:
    """Blocks that `a` stores by its events."""
    engine = world.router.knowledge.engine_blocks("a")
    return engine.blocks if engine is not None else 0


def test_pages_of_several_processes_cost_no_knowledge() -> None:
    """The first change is taken for a restart; from the second on what is known stays, our share is all, and counters
    that saw-tooth are neither a sign of life nor shown."""
    told: list[str] = []
    world = World("a")
    world.router = ready(several_told(told), "a", MODEL)
    member = world.router.fleet.members["a"]
    for n in range(20):
        load = Load(prompt_tokens_total=1e6 * (1 + n % 2), started_s=100.0 + n % 2, kv_tokens_max=100_000)
        world.router.observations.observe_load("a", load, world.now_s + n)
        if n == 2:
            ask = chat("system", LONG)
            world.serve(ask)
            held = world.depth(ask, "a")
    assert world.depth(ask, "a") == held > 0
    assert member.counters.page_source.several
    assert (member.counters.page_source.restarts, member.counters.share, member.counters.are_moving) == (1, 1.0, False)
    assert member.load.prompt_tokens_total is None
    assert told == ["a"]


def test_an_engine_that_slept_has_an_empty_cache() -> None:
    """What was known of it is forgotten, by estimate and by events, when it falls asleep and when it wakes; a paused
    engine keeps its cache."""
    ask = chat("system", LONG)
    for sleep, kept in ((Sleep.PAUSED, True), (Sleep.ASLEEP, False)):
        world = World("a")
        world.router.observations.observe_load("a", Load(sleep=Sleep.AWAKE), 1.0)
        world.serve(ask)
        known(world)
        world.router.observations.observe_load("a", Load(sleep=sleep), 2.0)
        assert bool(world.depth(ask, "a")) is kept
        assert bool(stored(world)) is kept
        known(world)
        world.router.observations.observe_load("a", Load(sleep=Sleep.AWAKE), 3.0)
        assert bool(stored(world)) is kept


def test_events_correct_the_capacity() -> None:
    """A product is taken with the block size that events name, and dropped once they name several groups."""
    world = World("a")
    load = Load(kv_tokens_max=8_000, kv_blocks=1_000, block_tokens=8, kv_source=CapacitySource.PRODUCT)
    world.router.observations.observe_load("a", load, 1.0)
    member = world.router.fleet.members["a"]
    assert member.load.kv_tokens_max == 8_000
    known(world)
    world.router.observations.observe_load("a", load, 2.0)
    assert (member.load.kv_tokens_max, member.load.kv_source) == (16_000, CapacitySource.EVENTS)
    group = Stored([99], None, prompt_of(16).ids, 16, "", b"", None, "GPU", 1, False)
    world.router.knowledge.apply("a", group, 2.0)
    world.router.observations.observe_load("a", load, 3.0)
    assert member.load.kv_tokens_max is None


def test_a_deferred_request_is_not_foreign_work() -> None:
    """What waits for something else than room is neither work of others nor subtracted as blocks on their way."""
    world = World("a")
    member = world.router.fleet.members["a"]
    for _ in range(FOREIGN_PROBES):
        world.router.observations.observe_load("a", Load(running=1, waiting=2, deferred=473), world.now_s)
    assert member.counters.untracked_waiting == 2.0
    assert member.counters.others_max is not None
    assert member.counters.others_max >= 476  # the engine has them, so other routers may have sent them
