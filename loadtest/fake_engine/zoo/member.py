"""A member of the zoo: the deviations of one kind of engine from the dense one, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from loadtest.fake_engine.step import Limits


class Family(StrEnum):
    """The program that a member simulates."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Group:
    """An additional KV cache group: layers of another kind, with their own block hashes in KV events."""

    kind: str
    """vLLM's `kv_cache_spec_kind`."""
    parts: int = 1
    """Blocks of this group in one block of the first group. With 1, both use the same hash for a block."""
    window_tokens: int | None = None
    """vLLM's `kv_cache_spec_sliding_window`."""


@dataclass(frozen=True, slots=True)
class Label:
    """Values of vLLM's `cache_config_info` that are not a product: a capacity of `tokens` has `blocks` blocks."""

    block_tokens: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Member:
    """One kind of engine. Defaults are those of the dense engine."""

    name: str
    text: str
    """The difference, in one line."""
    source: str = ""
    """Source of the difference: project, version, file or public report."""
    family: Family = Family.VLLM
    groups: tuple[Group, ...] = ()
    label: Label | None = None
    context_parallel: int = 1
    """vLLM's decode context parallelism: a block of the scheduler and of events is this many blocks of the label."""
    drops_last_block: bool = False
    """True if the last matched block is recomputed, for the draft head of EAGLE or MTP."""
    deferred_n: int = 0
    """Requests that always wait, for a reason other than KV headroom."""
    sleeps: bool = False
    """True if vLLM's sleep mode is enabled, and the engine is asleep at the start."""
    api_servers: int = 1
    """Processes that share the port, each with its own counters and start time."""
    tp: int = 1
    """Number of tensor parallel schedulers that report on the metrics page (SGLang)."""
    pp: int = 1
    """Number of pipeline stages that report on the metrics page (SGLang)."""
    priorities: tuple[int, ...] = ()
    """Priorities by which gauges are broken down in addition to their total (SGLang)."""
    queued_max: int | None = None
    """Requests in the queue before the next one is refused (SGLang). None: vLLM's limit."""
    streams_reasoning: bool = True
    """True if reasoning is streamed. False: half of a chat's answer is reasoning, sent in one piece when it is
    complete."""
    earlier: bool = False
    """True for the earlier of the two versions of its family: vLLM 0.15.1 or SGLang 0.5.8. Their KV events are arrays,
    and their pages lack some figures of later versions."""
    forces_usage: bool = False
    """True if every stream reports its usage, even if the request does not ask for it."""

    def limits(self, limits: Limits) -> Limits:
        """Return the scheduler's limits of this member, from those of a dense engine. Also usable alone, for example in
        a simulated world."""
        wide = limits.block_tokens * self.context_parallel
        return replace(limits, block_tokens=wide, drops_last_block=self.drops_last_block)


DENSE = Member("vllm-dense", "vLLM 0.32 with one KV cache group, one process, awake: the default")
