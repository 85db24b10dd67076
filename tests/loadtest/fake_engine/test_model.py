"""The engine model keeps vLLM's bookkeeping exactly and published timings roughly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.fake_engine.calibration import CALIBRATIONS, LinearTimes
from loadtest.fake_engine.kv_pool import AllBlocksCleared, BlocksRemoved, BlockStored
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest, RequestRefused
from loadtest.fake_engine.step import Limits
from tests.loadtest.fake_engine.clock import Clock

TIMES = LinearTimes(floor_s=0.010, token_s=1e-4, pair_s=1e-7, read_s=1e-6)
SMALL = Limits(block_tokens=4, batched_tokens_max=24, sequences_max=5, context_tokens_max=64)
KV_TOKENS = 80


def small_model() -> EngineModel:
    """Twenty blocks of four tokens."""
    return EngineModel(TIMES, KV_TOKENS, SMALL, record_events=True)


def request(request_id: int, path: tuple[int, ...], tail: int, outputs: int) -> EngineRequest:
    """A prompt of whole blocks named by a path in a tree, plus a tail; its answer's blocks are its own."""
    keys = [hash(path[: depth + 1]) for depth in range(len(path))]
    prompt = len(path) * SMALL.block_tokens + tail
    answer_blocks = (prompt + outputs) // SMALL.block_tokens - len(path)
    keys += [hash((path, tail, n)) for n in range(answer_blocks)]
    return EngineRequest(request_id, prompt, outputs, keys)


PATHS = st.lists(st.integers(0, 1), min_size=0, max_size=9).map(tuple)
SHAPES = st.tuples(PATHS, st.integers(1, 4), st.integers(1, 20))


def assert_conserved(model: EngineModel) -> None:
    """Every block is free or held, and known under its key."""
    pool = model.pool
    held = Counter(block for sequence in model._running for block in sequence.blocks)
    assert pool.free_n + len(held) == pool.blocks_n
    assert not held.keys() & pool._free.keys()
    assert pool._shared == {block: holders - 1 for block, holders in held.items() if holders > 1}
    copies = {block: key for key, blocks in pool._copies.items() for block in blocks}
    assert {block: key for key, block in pool._cached.items()} | copies == pool._keys


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), SHAPES),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_blocks_are_conserved_and_everybody_finishes(operations: list[tuple[str, Any]]) -> None:
    """Free and used blocks add up, references equal holders, no step exceeds its budget, all requests finish."""
    model = small_model()
    clock = Clock(model)
    wanted: dict[int, int] = {}
    for index, (name, value) in enumerate(operations):
        if name == "submit":
            model.submit(request(index, *value))
            wanted[index] = value[2]
        elif name == "step":
            clock.begin()
            if clock.step is not None:
                work = clock.step.work or []
                assert sum(n for _, n in work) + clock.step.decodes <= SMALL.batched_tokens_max
                assert len(work) + clock.step.decodes <= SMALL.sequences_max
                clock.finish_step()
        elif name == "cancel":
            clock.begin()  # in the middle of a step as well
            if model.cancel(value):
                del wanted[value]
        else:
            assert model.reset_prefix_cache() == (not model.running_n)
        assert_conserved(model)
    clock.drain()
    assert_conserved(model)
    assert model.kv_usage == 0
    assert {i: n for i, n in clock.tokens.items() if i in wanted} == wanted
    assert wanted.keys() <= clock.finished_s.keys()


@settings(max_examples=150, deadline=None)
@given(st.lists(SHAPES, max_size=25))
def test_hits_are_those_of_a_plain_lru(shapes: list[tuple[tuple[int, ...], int, int]]) -> None:
    """One request after the other finds exactly what a list of blocks, least recently used first, would hold."""
    clock = Clock(small_model())
    lru: list[object] = [None] * (KV_TOKENS // SMALL.block_tokens)
    for index, (path, tail, outputs) in enumerate(shapes):
        new = request(index, path, tail, outputs)
        hits = 0
        while hits < (new.prompt_tokens - 1) // SMALL.block_tokens and new.keys[hits] in lru:
            hits += 1
        for key in new.keys[:hits]:
            lru.remove(key)
        computed = new.prompt_tokens + outputs - 1  # the last token is never fed back
        used = -(-computed // SMALL.block_tokens)
        del lru[: used - hits]
        full = computed // SMALL.block_tokens
        lru += [None] * (used - full) + list(reversed(new.keys[:full]))
        clock.model.submit(new)
        clock.drain()
        assert clock.cached[index] == hits * SMALL.block_tokens


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.2), SHAPES), max_size=12))
def test_jumping_ahead_changes_nothing(arrivals: list[tuple[float, tuple[tuple[int, ...], int, int]]]) -> None:
    """Many iterations in one step give the times, hits and events that single ones give."""
    jumping, single = Clock(small_model()), Clock(small_model(), horizon_s=0.0)
    at_s = 0.0
    for index, (gap_s, (path, tail, outputs)) in enumerate(arrivals):
        at_s += gap_s
        for clock in (jumping, single):
            clock.submit_at(at_s, request(index, path, tail, outputs))
    jumping.drain()
    single.drain()
    assert jumping.first_s == pytest.approx(single.first_s)
    assert jumping.finished_s == pytest.approx(single.finished_s)
    assert jumping.cached == single.cached
    assert jumping.model.counters == single.model.counters


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_events_mirror_the_cache(operations: list[tuple[str, Any]]) -> None:
    """Whoever counts stored and removed copies knows exactly what is cached, and parents come before children."""
    model = small_model()
    clock = Clock(model)
    for index, (name, value) in enumerate(operations):
        if name == "submit":
            model.submit(request(index, *value))
        elif name == "reset":
            model.reset_prefix_cache()
        else:
            clock.begin()
            if clock.step is not None:
                clock.finish_step()
    clock.drain()
    clock.events += model.pool.drain_events()
    copies: Counter[int] = Counter()
    for event in clock.events:
        if isinstance(event, BlockStored):
            assert event.parent is None or copies[event.parent] > 0
            copies.update(event.keys)
        elif isinstance(event, BlocksRemoved):
            copies.subtract(event.keys)
            assert min(copies.values()) >= 0
        else:
            assert isinstance(event, AllBlocksCleared)
            copies.clear()
    assert +copies == Counter(model.pool._keys.values())


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    """What can never run is refused at once, with vLLM's words."""
    with pytest.raises(RequestRefused, match="maximum context length is 64 tokens"):
        small_model().submit(request(0, (0,) * 15, 4, 10))


def test_preempted_requests_finish_with_all_their_tokens() -> None:
    """Two answers that outgrow the cache together both finish; the younger is computed again meanwhile."""
    clock = Clock(small_model())
    clock.model.submit(request(0, (0,) * 8, 2, 25))
    clock.model.submit(request(1, (1,) * 8, 2, 25))
    clock.drain()
    assert clock.tokens == {0: 25, 1: 25}
    assert clock.model.counters.preemptions >= 1
    assert clock.finished_s[0] < clock.finished_s[1]
    assert clock.model.counters.queried_tokens == 68  # counted once each


def test_a_prompt_in_flight_is_shared() -> None:
    """A request in the same step as one with its prefix computes only its own part."""
    clock = Clock(small_model())
    clock.model.submit(request(0, (0, 0, 0), 1, 2))
    clock.model.submit(request(1, (0, 0, 0), 2, 2))
    clock.drain()
    assert clock.cached == {0: 0, 1: 12}
    assert clock.first_s[0] == clock.first_s[1]


# --- calibrations


def engine(name: str) -> Clock:
    """As the calibration has it, with llm-d's block size."""
    calibration = CALIBRATIONS[name]
    return Clock(EngineModel(calibration.times, calibration.kv_tokens, Limits(block_tokens=64)))


def test_qwen3_32b_prefills_as_published() -> None:
    """15,928 tok/s in an 8,192-token chunk; 7.2k tokens cold in 0.42-0.45 s; cached far under the 0.15 s that
    include a gateway."""
    clock = engine("qwen3-32b-2xh100")
    step = CALIBRATIONS["qwen3-32b-2xh100"].times.mixed_s(8192, 8192 * 8193 / 2, 0, 0)
    assert 8192 / step == pytest.approx(15_928, rel=0.02)
    keys = list(range(112))
    clock.model.submit(EngineRequest(0, 7200, 1, keys))
    clock.drain()
    assert 0.42 <= clock.first_s[0] <= 0.455
    cold_s = clock.now_s
    clock.model.submit(EngineRequest(1, 7200, 1, keys))
    clock.drain()
    assert clock.first_s[1] - cold_s < 0.05


def decode(name: str, sequences: int, groups: int, prompt: int, shared: int) -> tuple[float, float]:
    """Inter-token latency in s and tokens/s of that many sequences in the middle of 400-token answers."""
    clock = engine(name)
    for index in range(sequences):
        keys = [(index % groups) * 1000 + block for block in range(shared // 64)]
        clock.model.submit(EngineRequest(index, prompt, 400, keys))
    clock.begin()
    while clock.model.waiting_n or not (clock.step and clock.step.work is None):
        clock.finish_step()
        clock.begin()
    assert clock.step is not None
    step = clock.model._times.decodes_s(sequences, clock.step.context_tokens, 100) / 100
    return step, sequences / step


def test_qwen3_32b_decodes_as_published() -> None:
    """ITL p90 22-23 ms at light load; 48-61 ms and 1,310-1,970 tok/s a pod when saturated."""
    light_s, _ = decode("qwen3-32b-2xh100", sequences=8, groups=8, prompt=7_500, shared=6_000)
    assert light_s == pytest.approx(0.0225, rel=0.1)
    full_s, rate = decode("qwen3-32b-2xh100", sequences=90, groups=19, prompt=7_500, shared=6_000)
    assert 0.048 <= full_s <= 0.061
    assert 1_310 <= rate <= 1_970


def test_held_tokens_are_those_of_live_requests() -> None:
    """Two sequences with a prefix of three blocks in common hold it once; without live requests nothing is held."""
    clock = Clock(small_model())
    clock.model.submit(request(0, (0, 0, 0), 1, 2))
    clock.model.submit(request(1, (0, 0, 0), 2, 2))
    clock.begin()
    assert clock.step is not None
    assert clock.step.held_tokens == clock.model.held_tokens == 5 * clock.model.limits.block_tokens
    clock.finish_step()
    clock.drain()
    assert clock.model.held_tokens == 0


def test_llama_70b_decodes_as_published() -> None:
    """llm-d's 37-capacity: ITL mean 26 ms lightly loaded, 58 ms and about 2,320 tok/s a pod at 20 QPS."""
    light_s, _ = decode("llama-3.1-70b-4xh100", sequences=20, groups=20, prompt=9_000, shared=8_000)
    assert light_s == pytest.approx(0.026, rel=0.1)
    full_s, rate = decode("llama-3.1-70b-4xh100", sequences=134, groups=21, prompt=9_000, shared=8_000)
    assert full_s == pytest.approx(0.058, rel=0.1)
    assert rate == pytest.approx(2_320, rel=0.1)


def test_other_calibrations_follow_their_sources() -> None:
    """Vidur's A100 profile of Llama-3-8B, and the formula of Dynamo's mocker."""
    a100 = CALIBRATIONS["llama-3.1-8b-a100"].times
    assert a100.mixed_s(4096, 0, 0, 0) == pytest.approx(0.2736, rel=0.01)
    mocker = CALIBRATIONS["mocker-8b"].times
    assert mocker.mixed_s(1000, 0, 0, 0) == pytest.approx((0.4209989 + 15.18344 + 16.50) / 1e3)
    half = CALIBRATIONS["mocker-8b"].kv_tokens // 2
    assert mocker.decodes_s(1, half, 1) == pytest.approx((-25.74 / 4 + 54.01 / 2 + 5.74) / 1e3)
    for name, calibration in CALIBRATIONS.items():
        once = sum(calibration.times.decodes_s(7, 70_000 + 7 * i, 1) for i in range(50))
        assert calibration.times.decodes_s(7, 70_000, 50) == pytest.approx(once), name
