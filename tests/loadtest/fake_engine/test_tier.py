"""CPU memory behind the simulated engine's GPU: what is copied, loaded, evicted and told."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.fake_engine import tokens
from loadtest.fake_engine.calibration import LinearTimes
from loadtest.fake_engine.command import settings as settings_of
from loadtest.fake_engine.host_tier import HostTier, TierLimits
from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvEvent
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from loadtest.fake_engine.zoo.kv_encoding import VllmEvents
from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.kv_events.batch_decoder import decode
from tests.loadtest.fake_engine.clock import Clock

BLOCK = 4
TIMES = LinearTimes(floor_s=0.010, token_s=1e-3, pair_s=0.0, read_s=0.0)
LIMITS = Limits(block_tokens=BLOCK, batched_tokens_max=64, sequences_max=5, context_tokens_max=64)
TIER = TierLimits(tokens=40 * BLOCK, floor_s=0.5, token_s=0.01)


class _Driver(Clock):
    """An engine with a tier."""

    def __init__(self, *, kv_tokens: int = 12 * BLOCK, tier: TierLimits | None = TIER) -> None:
        super().__init__(EngineModel(TIMES, kv_tokens, LIMITS, record_events=True, tier=tier))
        self._number = 0

    def ask(self, name: int, blocks: int = 8, outputs: int = 1) -> int:
        """A prompt of so many blocks and a token, whose blocks are its own."""
        self._number += 1
        keys = [name * 100 + n for n in range(1, blocks + 1)]
        tag = tokens.Text(b"".join(b"%016d" % key for key in keys) + b"1234", "")
        self.model.submit(EngineRequest(self._number, blocks * BLOCK + 1, outputs, keys, tag))
        return self._number

    def run_step(self) -> None:
        """One step, if there is anything to do."""
        self.begin()
        if self.step is not None:
            self.finish_step()

    @property
    def tier(self) -> HostTier:
        """What it has behind its GPU."""
        assert self.model.loading is not None
        return self.model.loading.tier


def test_what_the_gpu_evicts_is_loaded_again() -> None:
    """A prompt whose blocks are in the tier alone has its first token after the load and the rest's prefill, not after
    computing it; the engine counts it as cached, and apart from what it found on the GPU."""
    driver = _Driver(kv_tokens=9 * BLOCK)
    for name in (1, 2):  # the pool has room for one of them
        driver.ask(name)
        driver.drain()
    began_s, hits = driver.now_s, driver.model.counters.hit_tokens
    number = driver.ask(1)
    driver.drain()
    assert driver.cached[number] == 8 * BLOCK
    load_s = TIER.load_s(8 * BLOCK)  # the link was idle
    assert abs(driver.first_s[number] - began_s - load_s - TIMES.mixed_s(0, 0, 1, 0)) < 0.02
    assert (driver.tier.loads, driver.model.counters.tier_hit_tokens) == (1, 8 * BLOCK)
    assert driver.model.counters.hit_tokens == hits
    again = driver.ask(1)
    driver.drain()
    assert (driver.cached[again], driver.tier.loads) == (8 * BLOCK, 1)


def test_loads_follow_each_other_and_nobody_else_waits() -> None:
    """Of two requests that load, the second waits for the first one's load; a third, which computes, passes both by."""
    driver = _Driver(kv_tokens=40 * BLOCK, tier=TierLimits(200 * BLOCK, 0.5, 0.01))
    for name in range(1, 9):
        driver.ask(name)
        driver.drain()
    began_s = driver.now_s
    first, second, third = driver.ask(1), driver.ask(2), driver.ask(20, blocks=2)
    driver.drain()
    load_s = TIER.load_s(8 * BLOCK)
    assert driver.first_s[third] - began_s < 0.1
    assert abs(driver.first_s[first] - began_s - load_s) < 0.1
    assert abs(driver.first_s[second] - began_s - 2 * load_s) < 0.1
    assert driver.tier.queued_loads == 1


def test_one_load_serves_all_who_need_it() -> None:
    """A request whose blocks are being loaded waits for that load, and finds them on the GPU."""
    driver = _Driver(kv_tokens=30 * BLOCK)
    for name in (1, 2, 3, 4):
        driver.ask(name)
        driver.drain()
    first, second = driver.ask(1), driver.ask(1)
    driver.drain()
    assert driver.tier.loads == 1
    assert driver.cached[first] == driver.cached[second] == 8 * BLOCK
    assert abs(driver.first_s[second] - driver.first_s[first]) < 0.1


def test_an_arrival_ends_an_idle_wait() -> None:
    """While all wait for a load nothing is computed; whoever arrives then is begun at once."""
    driver = _Driver()
    for name in (1, 2):
        driver.ask(name)
        driver.drain()
    driver.ask(1)
    step = driver.model.begin(math.inf, driver.now_s)
    assert step is not None
    assert step.idle
    driver.model.truncate(step, 0.05)
    assert step.duration_s == 0.05


def test_a_client_that_leaves_ends_its_wait() -> None:
    """Its room is free again, and whoever waited for its load loads for itself."""
    driver = _Driver(kv_tokens=30 * BLOCK)
    for name in (1, 2, 3, 4):
        driver.ask(name)
        driver.drain()
    first, second = driver.ask(1), driver.ask(1)
    driver.run_step()
    assert driver.model.cancel(first)
    driver.drain()
    assert driver.cached[second] == 8 * BLOCK
    assert driver.model.pool.free_n == driver.model.pool.blocks_n
    assert driver.model.waiting_n == 0
    assert not driver.tier.busy(range(10_000))


def test_without_a_tier_nothing_is_told_of_one() -> None:
    """No event has another medium than the GPU, and nothing is loaded."""
    driver = _Driver(tier=None)
    for name in (1, 2, 1):
        driver.ask(name)
        driver.drain()
    assert {getattr(event, "medium", "GPU") for event in driver.events} == {"GPU"}
    assert driver.model.counters.tier_queried_tokens == 0


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(1, 20)),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS, st.integers(0, 30))
def test_events_tell_what_the_engine_holds(operations: list[tuple[str, int]], tier_blocks: int) -> None:
    """Whatever is asked, cancelled and evicted: everybody finishes, and the events, in the very bytes in which they are
    published, leave the router's ledger with what is on the GPU and in the tier."""
    driver = _Driver(kv_tokens=18 * BLOCK, tier=TierLimits(tier_blocks * BLOCK, 0.03, 0.001))
    asked = set[int]()
    for name, value in operations:
        if name == "ask":
            asked.add(driver.ask(value, blocks=6 + value % 3, outputs=1 + value))
        elif name == "cancel":
            if driver.model.cancel(value):
                asked.discard(value)
        else:
            for _ in range(value):
                driver.run_step()
    driver.drain()
    assert asked <= driver.finished_s.keys()
    assert driver.model.pool.free_n == driver.model.pool.blocks_n
    masks = HolderBitmap()
    ledger = EngineBlocks(masks, "r", blocks_max=1_000, aside_max=100, names_max=1_000)
    for event in decode(_published(driver.events)).events:
        ledger.apply(event)
    key_of = {given: key for given, key in [*ledger._held.items(), *ledger._names.items()] if key is not None}
    tier = ledger.tiers.get("cpu")
    in_tier = {given for given, key in key_of.items() if tier is not None and masks.of.get(key, 0) & tier.bit}
    on_gpu = {given for given, key in key_of.items() if masks.of.get(key, 0) & ledger._credit._bit}
    assert on_gpu == set(driver.model.pool._cached)
    assert in_tier == set(driver.tier._keys)
    assert ledger.unknown_removals == 0
    assert ledger.gpu_blocks == len(driver.model.pool._keys)


def _published(events: list[KvEvent]) -> bytes:
    """The events as one batch."""
    encoding = VllmEvents(BLOCK)
    told = [each for event in events for each in encoding.encode_event(event)]
    return msgspec.msgpack.encode([1.0, told, 0])


def test_a_tiers_events_are_those_of_vllms_offloading() -> None:
    """A store is an event for each block, with tokens and without what sets a block apart; an eviction is one event for
    all. Fields and order are those of the GPU's."""
    text = tokens.Text(b"a" * 32, "tenant-1")
    encoding = VllmEvents(BLOCK)
    stored: list[dict[str, Any]] = encoding.encode_event(BlockStored(text, 0, [7, 8], None, "CPU"))
    assert [(each["block_hashes"], each["parent_block_hash"], each["medium"]) for each in stored] == [
        ([7], None, "CPU"),
        ([8], 7, "CPU"),
    ]
    assert [each["extra_keys"] for each in stored] == [None, None]
    assert [len(each["token_ids"]) for each in stored] == [BLOCK, BLOCK]
    on_gpu = encoding.encode_event(BlockStored(text, 0, [7, 8], None))
    assert list(on_gpu[0]) == list(stored[0])
    assert encoding.encode_event(BlocksRemoved([7, 8], "CPU")) == [
        {"type": "BlockRemoved", "block_hashes": [7, 8], "medium": "CPU", "group_idx": 0}
    ]


def test_the_least_recently_used_goes_first() -> None:
    """What a prompt finds on the GPU counts as used in the tier as well; what is being loaded stays, and what finds no
    room is not taken."""
    tier = HostTier(TierLimits(4 * BLOCK), BLOCK)
    assert tier.store([1, 2, 3, 4]) == ([1, 2, 3, 4], [])
    tier.touch([1, 2])
    assert tier.store([5]) == ([5], [3])
    tier.load([4], 0.0)
    assert tier.store([6, 7]) == ([6, 7], [2, 1])
    assert tier.store([8, 9, 10, 11]) == ([], [])
    tier.release_loaded([4])
    assert tier.store([8, 9, 10, 11]) == ([8, 9, 10, 11], [4, 5, 6, 7])
    assert Counter(tier._loading) == Counter()


def test_the_command_line_has_a_tier() -> None:
    """Its size and its link; without a size there is none."""
    chosen = settings_of(["--cpu-tier-tokens", "1000", "--load-us-per-token", "20", "--load-floor-ms", "1"])
    assert chosen.tier == TierLimits(1_000, 1e-3, 2e-5)
    assert settings_of([]).tier is None
