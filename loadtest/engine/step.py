"""What goes into the engine model and comes out of it: limits, a planned step, its outcome, totals."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from loadtest.engine.decoding import Running
from loadtest.engine.kv_pool import KvEvent


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's scheduler limits, with its defaults."""

    block_tokens: int = 16
    batched_tokens_max: int = 8192
    sequences_max: int = 256
    context_tokens_max: int = 131_072


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
