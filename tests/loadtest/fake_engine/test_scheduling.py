"""Engines that schedule otherwise than by default: without chunked prefill, and without prefix caching."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.fake_engine.calibration import LinearTimes
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits, Step

TIMES = LinearTimes(floor_s=0.010, token_s=1e-4, pair_s=1e-7, read_s=1e-6)
SMALL = Limits(block_tokens=4, batched_tokens_max=24, sequences_max=5, context_tokens_max=64)
UNCHUNKED = replace(SMALL, chunked=False)
KV_TOKENS = 80


def ask(number: int, prompt_tokens: int, output_tokens: int, group: int = 0) -> EngineRequest:
    """A prompt that begins as all of its group do."""
    blocks = (prompt_tokens + output_tokens) // 4
    keys = [hash((group, n)) if n < prompt_tokens // 4 else hash((number, n, "answer")) for n in range(blocks)]
    return EngineRequest(number, prompt_tokens, output_tokens, keys)


def steps_of(model: EngineModel, first: dict[int, int] | None = None) -> list[Step]:
    """All steps until there is nothing to do; `first` takes cached tokens by request."""
    steps = []
    while (step := model.begin()) is not None:
        steps.append(step)
        outcome = model.complete(step)
        if first is not None:
            first.update(outcome.first)
    return steps


REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=12)


@given(REQUESTS, st.sampled_from([1, 3]))
def test_prompts_are_whole_and_alone(requests: list[tuple[int, int, int]], at_once: int) -> None:
    """A step has prompts, each whole, or decodes; several prompts are within the budget; and every token comes."""
    model, tokens = EngineModel(TIMES, KV_TOKENS, UNCHUNKED), Counter[int]()
    waiting = [ask(number, *request) for number, request in enumerate(requests)]
    while True:
        for request in waiting[:at_once]:
            model.submit(request)
        del waiting[:at_once]
        step = model.begin()
        if step is None:
            break
        work = step.work or []
        assert bool(work) != bool(step.decodes)
        assert all(sequence.behind == count for sequence, count in work)
        assert len(work) == 1 or sum(count for _, count in work) <= UNCHUNKED.batched_tokens_max
        for number, count in model.complete(step).tokens:
            tokens[number] += count

    assert tokens == {number: output_tokens for number, (_, output_tokens, _) in enumerate(requests)}
    assert model.pool.free_n == model.pool.blocks_n


def test_decodes_pause_for_a_prompt() -> None:
    """A stream gets nothing while another one's prompt is computed, and goes on where it was."""
    model = EngineModel(TIMES, KV_TOKENS, UNCHUNKED)
    model.submit(ask(0, 8, 20))
    for _ in range(2):
        step = model.begin(horizon_s=0.0)
        assert step is not None
        model.complete(step)
    model.submit(ask(1, 40, 4, group=1))

    prefill = model.begin()

    assert prefill is not None
    assert (prefill.paused, prefill.decodes) == (True, 0)
    assert prefill.duration_s == pytest.approx(TIMES.mixed_s(40, 40 * 41 / 2, 0, 0))
    assert model.complete(prefill).tokens == [(1, 1)]
    assert all(step.decodes and not step.work for step in steps_of(model))
    assert model.counters.generated_tokens == 24


@pytest.mark.parametrize("limits", [SMALL, UNCHUNKED])
def test_without_prefix_caching_nothing_is_found(limits: Limits) -> None:
    """The second of two equal prompts finds the first with caching, nothing without; then there are no events, and
    nothing counts as asked of the cache."""
    found = []
    for prefix_caching in (True, False):
        model = EngineModel(TIMES, KV_TOKENS, replace(limits, prefix_caching=prefix_caching), record_events=True)
        first: dict[int, int] = {}
        for number in range(2):
            model.submit(ask(number, 20, 3))
            steps_of(model, first)
        found.append((first[1], model.counters.hit_tokens, model.counters.queried_tokens))
        assert model.counters.prompt_tokens == 40
        assert bool(len(model.pool.drain_events())) is False

    assert found == [(16, 16, 40), (0, 0, 0)]


def test_tiers_go_with_chunked_prefill() -> None:
    """An engine without it has no tier and takes no legs."""
    with pytest.raises(ValueError, match="chunked"):
        EngineModel(TIMES, KV_TOKENS, UNCHUNKED, tier=TierLimits(80))
    with pytest.raises(ValueError, match="chunked"):
        EngineModel(TIMES, KV_TOKENS, UNCHUNKED, legs=True)
