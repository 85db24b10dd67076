"""Step times of engines: named calibrations, each with its source.

The forward step of a transformer has four costs:

- It reads all weights once (a floor).
- It computes every new token (linear).
- It attends from every new token to its context (the product of the two). So late tokens of a long prompt cost more.
- It reads the KV cache of every sequence that decodes (linear in their contexts).

Four coefficients describe them:

    step_s = floor_s + token_s * (prefill tokens + decodes)
             + pair_s * sum(prefill tokens x their context) + read_s * sum(decode contexts)

Six coefficients (`SharedTimes`) describe two more effects. A sequence that decodes costs less than a prefill token. If
several sequences share a prefix, its KV is read from memory once and then from the GPU's L2 cache.

All are times of the engine alone. They exclude the share of gateways, tokenizers and HTTP in a published time to first
token. Our router and client add their own such time, so including it here would count it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol


class StepTimes(Protocol):
    """Interface of a calibration for the engine model."""

    def mixed_s(
        self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int, held_tokens: float = inf
    ) -> float:
        """Return the seconds of one step with prefill.

        - `prefill_pairs`: the sum, over the step's prefill tokens, of the tokens that each attends to.
        - `held_tokens`: KV cache tokens that live requests use. Fewer than the sum of all contexts if prefixes are
          shared.
        """
        ...

    def decodes_s(self, decodes: int, context_tokens: int, iterations: int, held_tokens: float = inf) -> float:
        """Return the seconds of `iterations` consecutive decode-only steps; each step adds a token to every context."""
        ...


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """The formula of the module's docstring; seconds."""

    floor_s: float
    token_s: float
    pair_s: float
    read_s: float

    def mixed_s(
        self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int, held_tokens: float = inf
    ) -> float:
        """Return the seconds of a step with prefill (see `StepTimes`)."""
        return (
            self.floor_s
            + self.token_s * (prefill_tokens + decodes)
            + self.pair_s * prefill_pairs
            + self.read_s * context_tokens
        )

    def decodes_s(self, decodes: int, context_tokens: int, iterations: int, held_tokens: float = inf) -> float:
        """Return the seconds of decode-only steps (see `StepTimes`)."""
        grown = decodes * iterations * (iterations - 1) / 2
        one_s = self.floor_s + self.token_s * decodes + self.read_s * context_tokens
        return iterations * one_s + self.read_s * grown


@dataclass(frozen=True, slots=True)
class SharedTimes:
    """Seconds. A context token that several sequences of a step share is read from memory once."""

    floor_s: float
    token_s: float
    """A prefill token."""
    pair_s: float
    stream_s: float
    """A sequence that decodes, without its context."""
    read_s: float
    """A context token of a decode that is read from memory."""
    again_s: float
    """A context token of a decode that another sequence of the step also has; it comes from the L2 cache."""

    def _context_s(self, context_tokens: int, held_tokens: float) -> float:
        distinct = min(context_tokens, held_tokens)
        return self.read_s * distinct + self.again_s * (context_tokens - distinct)

    def mixed_s(
        self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int, held_tokens: float = inf
    ) -> float:
        """Return the seconds of a step with prefill (see `StepTimes`)."""
        return (
            self.floor_s
            + self.token_s * prefill_tokens
            + self.pair_s * prefill_pairs
            + self.stream_s * decodes
            + self._context_s(context_tokens, held_tokens)
        )

    def decodes_s(self, decodes: int, context_tokens: int, iterations: int, held_tokens: float = inf) -> float:
        """Return the seconds of decode-only steps (see `StepTimes`). Tokens added to the contexts are not shared."""
        grown = decodes * iterations * (iterations - 1) / 2
        one_s = self.floor_s + self.stream_s * decodes + self._context_s(context_tokens, held_tokens)
        return iterations * one_s + self.read_s * grown


@dataclass(frozen=True, slots=True)
class MockerTimes:
    """Dynamo's mocker: quadratic in the uncached tokens of a pass, and in the share of KV that decodes use."""

    kv_tokens: int

    def _decode_s(self, context_tokens: int) -> float:
        # The mocker counts a shared prefix once; here it counts once per sequence. Hence the cap.
        share = min(1.0, context_tokens / self.kv_tokens)
        return (-25.74 * share**2 + 54.01 * share + 5.74) / 1e3

    def mixed_s(
        self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int, held_tokens: float = inf
    ) -> float:
        """Return the seconds of a step with prefill (see `StepTimes`)."""
        prefill_s = (4.209989e-7 * prefill_tokens**2 + 1.518344e-2 * prefill_tokens + 16.50) / 1e3
        return (prefill_s if prefill_tokens else 0.0) + (self._decode_s(context_tokens) if decodes else 0.0)

    def decodes_s(self, decodes: int, context_tokens: int, iterations: int, held_tokens: float = inf) -> float:
        """Return the seconds of decode-only steps (see `StepTimes`)."""
        return sum(self._decode_s(context_tokens + decodes * i) for i in range(iterations))


CALIBRATION_OF_2025 = "qwen3-32b-2xh100"
CALIBRATION = "qwen3-32b-2xh100-2026"
"""The default. The calibration of 2025 is kept for figures that were measured with it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """One model on one kind of machine."""

    times: StepTimes
    kv_tokens: int
    """Default size of the KV cache."""
    context_tokens_max: int
    """Maximum length of prompt + answer (vLLM's max_model_len)."""


_MOCKER_KV_TOKENS = 409_600

CALIBRATIONS: dict[str, Calibration] = {
    # Qwen3-32B bf16, two H100: llm-d's guides and its "73-capacity" ladder. Prefill: 15,928 tok/s in one 8,192-token
    # chunk = 0.514 s. Attention takes 64 layers x 64 heads x 128 x 4 = 2.1 MFLOP a pair, at 2 x 989 TFLOP/s x 0.65 =
    # 1.6 ns. 7.2k cold tokens then take 0.45 s (published TTFT 0.42-0.45 s). The published TTFT of the same prompt
    # cached is 0.15 s, ours 0.03 s; the difference is their stack. Decode: 65.6 GB of weights from 2 x 3.35 TB/s at
    # 0.8, all-reduce and launches: 18 ms. KV: 262,144 bytes a token at 0.87 of the same bandwidth: 45 ns. 8 sequences
    # of 7.7k: 21 ms (published ITL p90 22-23 ms at 3 QPS). 90 of them: 54 ms, 1,670 tok/s (published 48-61 ms and
    # 1,310-1,970 tok/s a pod when saturated).
    "qwen3-32b-2xh100": Calibration(LinearTimes(18e-3, 5.40e-5, 1.6e-9, 4.5e-8), 307_328, 131_072),
    # The same with engines of 2026 and measured kernels. Floor: 12.9 ms of kernels (kernels_h100.json), 128 all-reduces
    # of 9 us (sglang #2904: vLLM's on two H100), 0.7 ms for sampling and starting the graph. A sequence: 15.7 us of
    # kernels, 80 ns in each all-reduce. KV from memory: 44 ns measured, 2.98 of 3.35 TB/s. A pair: 1.88 ns measured. A
    # prefill token: the rest of 15,926 tok/s (llm-d #2071), of which kernels take 48 us. KV that another sequence also
    # reads: 23 ns, 5.7 TB/s. This is the only constant that is fitted to the ladder's output tokens/s. The published
    # rate is higher than memory bandwidth allows. 187 sequences of 8.1k tokens would take 59 ms a step at 3.35 TB/s,
    # plus 20 ms for the rest. Answers of 1,000 tokens took 63 s at 60/s (llm-d's guide for precise prefix caches,
    # 2026). So the shared part of the sequences is read from the L2 cache.
    "qwen3-32b-2xh100-2026": Calibration(
        SharedTimes(14.8e-3, 5.33e-5, 1.88e-9, 2.6e-5, 4.4e-8, 2.3e-8), 307_328, 131_072
    ),
    # Llama-3.1-8B bf16, one A100-40GB. Linear part: Vidur's profile of Llama-3-8B on an A100, 9.7 ms for 1 token (there
    # with 2.0 TB/s; here 1.56, hence 12 ms) and 273.6 ms for 4,096. Attention: 32 x 32 x 128 x 4 = 0.52 MFLOP a pair at
    # 312 TFLOP/s x 0.6. KV: 131,072 bytes a token at 0.8 x 1.56 TB/s, (40 x 0.9 - 16 - 2) GB.
    "llama-3.1-8b-a100": Calibration(LinearTimes(12e-3, 6.39e-5, 2.8e-9, 1.05e-7), 137_216, 131_072),
    # Llama-3.1-70B bf16, four H100. Linear part: Vidur's profile of Llama-2-70B TP4, 222.8 ms for 4,096 tokens.
    # Attention: 80 x 64 x 128 x 4 = 2.6 MFLOP a pair at 4 x 989 TFLOP/s x 0.6. KV: 327,680 bytes a token, over 4 GPUs,
    # at 0.85. llm-d's "37-capacity": ITL mean 26 -> 58 ms (their 13 -> 29 were halved by a client bug, inference-perf
    # #566) and 2,320 tok/s a pod. Ours: 25 ms at 20 sequences of 9k, 2,200 tok/s in 61 ms at 134.
    "llama-3.1-70b-4xh100": Calibration(LinearTimes(19e-3, 5.09e-5, 1.1e-9, 2.88e-8), 461_376, 131_072),
    # One 8B-class GPU, as in Dynamo's mocker, which does not name the model. KV: the capacity of an H100-80GB.
    "mocker-8b": Calibration(MockerTimes(_MOCKER_KV_TOKENS), _MOCKER_KV_TOKENS, 131_072),
}
