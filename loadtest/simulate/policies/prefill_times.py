"""Prefill time on an otherwise idle engine, by its calibration, in steps of its token budget."""

from __future__ import annotations

from loadtest.fake_engine.calibration import StepTimes
from loadtest.fake_engine.step import Limits

STEP_TOKENS = Limits().batched_tokens_max


def prefill_s(times: StepTimes, uncached_tokens: int, cached_tokens: int) -> float:
    """Return seconds for `uncached_tokens` after `cached_tokens`."""
    seconds, context = 0.0, cached_tokens
    while uncached_tokens > 0:
        count = min(STEP_TOKENS, uncached_tokens)
        seconds += times.mixed_s(count, count * (context + (count + 1) / 2), 0, 0)
        uncached_tokens -= count
        context += count
    return seconds
