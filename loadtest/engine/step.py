"""What goes into the engine model and comes out of it: limits, a planned step, its outcome, totals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from loadtest.engine.calibration import StepTimes
from loadtest.engine.decoding import Running
from loadtest.engine.kv_pool import KvEvent


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's scheduler limits, with its defaults."""

    block_tokens: int = 16
    batched_tokens_max: int = 8192
    sequences_max: int = 256
    context_tokens_max: int = 131_072
    chunked: bool = True
    """Whether a step may decode and compute parts of prompts. False: whole prompts in steps of their own, before
    anything decodes, as vLLM V0 without chunked prefill and SGLang with `--chunked-prefill-size -1`."""
    prefix_caching: bool = True
    """False: no block is found again."""
    drops_last_block: bool = False
    """Whether the last block that is found is computed again, as vLLM does for EAGLE and MTP."""


@dataclass(slots=True)
class Counters:
    """Totals since the start; tokens where not said otherwise. A request preempted and resumed counts
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
    """What a step brought; ids of requests."""

    tokens: list[tuple[int, int]]
    """(id, how many), in the engine's order; nothing where the model does not record them."""
    first: list[tuple[int, int]]
    """(id, prompt tokens that were found cached): these have their first token, listed in `tokens` as
    well."""
    finished: list[int]
    events: list[KvEvent]


@dataclass(slots=True)
class Step:
    """A planned step; only `EngineModel` looks inside."""

    duration_s: float
    iterations: int
    decodes: int
    """Sequences that get a token in each iteration."""
    context_tokens: int
    """Context tokens of the decodes in the first iteration."""
    work: list[tuple[Running, int]] | None = None
    """The other sequences, and the prompt tokens that each computes. None: pure decode."""
    held_tokens: float = inf
    """Tokens of the KV cache that live requests use when the step begins."""
    idle: bool = False
    """Nothing is computed: all that there is waits for blocks from the tier. An arrival ends it at once."""
    paused: bool = False
    """Sequences that decode get nothing in it."""


def mixed_s(
    times: StepTimes, work: Iterable[tuple[Running, int]], decodes: int, context_tokens: int, held_tokens: float
) -> float:
    """Seconds of one iteration that computes `work` beside the decodes; a single token of a prompt is read as a decode
    is. `held_tokens` as in `StepTimes`."""
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
    """The most decode iterations, at least 1 and at most `longest`, that take no longer than the horizon.
    `held_tokens` as in `StepTimes`."""
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
