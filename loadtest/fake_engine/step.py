"""Inputs and outputs of the engine model: limits, a planned step, its outcome, totals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from loadtest.fake_engine.calibration import StepTimes
from loadtest.fake_engine.decode_batch import EngineSequence
from loadtest.fake_engine.kv_pool import KvEvent


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's scheduler limits, with its defaults."""

    block_tokens: int = 16
    batched_tokens_max: int = 8192
    sequences_max: int = 256
    context_tokens_max: int = 131_072
    chunked: bool = True
    """True if a step may both decode and compute parts of prompts. False: whole prompts in separate steps, before any
    decode, as in vLLM V0 without chunked prefill and SGLang with `--chunked-prefill-size -1`."""
    prefix_caching: bool = True
    """False: no cached block is ever matched."""
    drops_last_block: bool = False
    """True if the last matched block is recomputed, as vLLM does for EAGLE and MTP."""


@dataclass(slots=True)
class Counters:
    """Totals since the start; in tokens unless stated otherwise. A request that was preempted and resumed counts
    once."""

    prompt_tokens: int = 0
    prompt_cached_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    """Found on the GPU."""
    tier_queried_tokens: int = 0
    tier_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    iterations: int = 0


@dataclass(slots=True)
class Outcome:
    """Outcome of a step; numbers are ids of requests."""

    tokens: list[tuple[int, int]]
    """(id, number of tokens), in the engine's order; empty if the model does not record them."""
    first: list[tuple[int, int]]
    """(id, cached prompt tokens) of requests that have their first token, which is also in `tokens`."""
    finished: list[int]
    events: list[KvEvent]


@dataclass(slots=True)
class Step:
    """A planned step; only `EngineModel` uses its content."""

    duration_s: float
    iterations: int
    decodes: int
    """Sequences that get a token in each iteration."""
    context_tokens: int
    """Context tokens of the decodes in the first iteration."""
    work: list[tuple[EngineSequence, int]] | None = None
    """The other sequences, and the prompt tokens that each computes. None: pure decode."""
    held_tokens: float = inf
    """Tokens of the KV cache that live requests use at the start of the step."""
    idle: bool = False
    """No computation: all sequences wait for blocks from the tier. An arrival ends the step at once."""
    paused: bool = False
    """Decoding sequences get no token in this step."""


def mixed_s(
    times: StepTimes, work: Iterable[tuple[EngineSequence, int]], decodes: int, context_tokens: int, held_tokens: float
) -> float:
    """Return the seconds of one iteration that computes `work` together with the decodes.

    A single prompt token costs the same as a decode. `held_tokens`: see `StepTimes`.
    """
    prefill, pairs = 0, 0.0
    for sequence, count in work:
        if count == 1:
            decodes += 1
            context_tokens += sequence.computed + 1
        else:
            prefill += count
            pairs += count * (sequence.computed + (count + 1) / 2)
    return times.mixed_s(prefill, pairs, decodes, context_tokens, held_tokens)


def iterations_within(
    times: StepTimes, horizon_s: float, decodes: int, context_tokens: int, longest: int, held_tokens: float
) -> int:
    """Return the largest number of decode iterations, from 1 to `longest`, that fits into the horizon.

    `held_tokens`: see `StepTimes`.
    """
    if horizon_s == inf or times.decodes_s(decodes, context_tokens, longest, held_tokens) <= horizon_s:
        return longest
    low, high = 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        if times.decodes_s(decodes, context_tokens, middle, held_tokens) <= horizon_s:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class Admitted:
    """The requests in the batch, for rules that may know an engine's future."""

    prefilling: list[tuple[object, int, int]]
    """(the request's tag, prompt tokens to compute, tokens before them)."""
    decodes: int
    context_tokens: int
    """Context tokens of all decodes."""
    held_tokens: float = inf
    """Tokens of the KV cache that live requests use."""
