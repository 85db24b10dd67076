"""A member of the zoo: the deviations of one kind of engine from the dense one, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from loadtest.engine.step import Limits


class Family(StrEnum):
    """The program that a member resembles."""

    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group beside the first one: layers of another kind, which name their own blocks in KV events."""

    kind: str
    """vLLM's `kv_cache_spec_kind`."""
    parts: int = 1
    """Blocks of this group in one block of the first group. With 1, both name a block by the same hash."""
    window_tokens: int | None = None
    """vLLM's `kv_cache_spec_sliding_window`."""


@dataclass(frozen=True, slots=True)
class Label:
    """Values of vLLM's `cache_config_info` that are no product: a capacity of `tokens` has `blocks` blocks."""

    block_tokens: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Member:
    """One kind of engine. Every default is the dense engine's."""

    name: str
    text: str
    """The difference, in one line."""
    source: str = ""
    """Where the difference was read: project, version, file or public report."""
    family: Family = Family.VLLM
    groups: tuple[Group, ...] = ()
    label: Label | None = None
    context_parallel: int = 1
    """vLLM's decode context parallelism: a block of the scheduler and of events is this many blocks of the label."""
    drops_last_block: bool = False
    """Whether the last block that is found is computed again, for the drafting head of EAGLE or MTP."""
    deferred_n: int = 0
    """Requests that wait for something other than room, at all times."""
    sleeps: bool = False
    """Whether vLLM's sleep mode is on, and the engine asleep at first."""
    api_servers: int = 1
    """Processes that share the port, each with its own counters and time of start."""
    tp: int = 1
    """Tensor parallel schedulers whose samples are on the metrics page (SGLang)."""
    pp: int = 1
    """Pipeline stages whose samples are on the metrics page (SGLang)."""
    priorities: tuple[int, ...] = ()
    """Priorities by which gauges are broken down beside their total (SGLang)."""
    queued_max: int | None = None
    """Requests in the queue before the next one is refused (SGLang). None: vLLM's limit."""
    streams_reasoning: bool = True
    """Whether reasoning is sent as it comes. False: half of a chat's answer is reasoning, sent when it is whole."""
    earlier: bool = False
    """Whether it is the earlier one of two versions of its family that were read: vLLM 0.15.1 or SGLang 0.5.8. Their KV
    events are arrays, and their pages leave out figures that later ones have."""
    forces_usage: bool = False
    """Whether every stream reports its usage, without being asked to."""

    def limits(self, limits: Limits) -> Limits:
        """The scheduler's limits, of those of a dense engine: usable without the rest, as in a simulated world."""
        wide = limits.block_tokens * self.context_parallel
        return replace(limits, block_tokens=wide, drops_last_block=self.drops_last_block)


DENSE = Member("vllm-dense", "vLLM 0.32 with one KV cache group, one process, awake: the default")
