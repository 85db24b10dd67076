"""Capacity of an engine's KV pool in tokens, from its `/metrics` page and the block size of its KV events.

vLLM publishes the capacity since 0.24 (`kv_cache_size_tokens`, a label of cache_config_info), SGLang as
`max_total_num_tokens`. Otherwise the capacity is computed as number of blocks times block size. That product is wrong,
by up to two orders of magnitude, in two cases:

- Groups of layers (sliding window, state) share the blocks. The block size on the page is then that of the smallest
  group.
- The KV cache of a prompt is spread over several GPUs (decode and prefill context parallel). A block of the scheduler,
  and of its events, then has a multiple of the tokens on the page.

So the product is used only if nothing indicates such groups, and with the block size of the events once that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.core.types.replicas import CapacitySource, Load

NUMBER_MAX = 2.0**53  # a value beyond it, below zero or NaN is invalid and counts as absent
LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*+)"')

_FIGURES = ("kv_cache_size_tokens", "block_size", "num_gpu_blocks")  # labels of `_CONFIG`
_CONFIG = re.compile(r"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)


@dataclass(slots=True)
class Pool:
    """A KV pool as the page describes it; a field without a value on the page is None."""

    tokens_max: int | None = None
    source: CapacitySource | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    prefix_caching: bool | None = None


def capacity(
    page: str,
    is_ours: Callable[[str], bool],
    page_tokens: float | None,
    num_pages: float | None,
    stated: float | None,
) -> Pool:
    """Return the pool of all engines of the page that `is_ours` accepts.

    The last three parameters are SGLang's figures: tokens of a page, number of pages, and the capacity that it states.
    """
    pool = _sum_cache_config(page, is_ours)
    if pool.block_tokens is None and page_tokens and page_tokens >= 1:
        pool.block_tokens = int(page_tokens)
    if pool.blocks is None and num_pages:
        pool.blocks = int(num_pages)
        if pool.block_tokens:
            pool.tokens_max, pool.source = pool.blocks * pool.block_tokens, CapacitySource.PRODUCT
    if stated and pool.source is not CapacitySource.ENGINE:
        pool.tokens_max, pool.source = int(stated), CapacitySource.ENGINE
    return pool


def with_event_block(load: Load, event_block_tokens: int, groups: int) -> Load:
    """Return the load with its capacity corrected by the replica's KV events.

    - `event_block_tokens`: tokens of a block in the events; 0 if unknown.
    - `groups`: number of layer groups that have blocks.
    """
    if load.kv_source is not CapacitySource.PRODUCT or not load.kv_blocks or not load.block_tokens:
        return load
    if groups > 1:
        return replace(load, kv_tokens_max=None, kv_source=None)
    if event_block_tokens <= load.block_tokens or event_block_tokens % load.block_tokens:
        return load
    return replace(load, kv_tokens_max=load.kv_blocks * event_block_tokens, kv_source=CapacitySource.EVENTS)


def number_of(text: str) -> float | None:
    """Parse a count or a time; return None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= NUMBER_MAX else None


def _sum_cache_config(page: str, is_ours: Callable[[str], bool]) -> Pool:
    """Sum vLLM's cache_config_info over the engines, each engine once."""
    pool, by_engine = Pool(), dict[str, dict[str, str]]()
    for labels in filter(is_ours, _CONFIG.findall(page)):
        values = dict(LABEL.findall(labels))
        by_engine[values.get("engine", "")] = values
    tokens, blocks, stated = 0, 0, True
    for values in by_engine.values():
        own, block, number = (int(number_of(values.get(label, "")) or 0) for label in _FIGURES)
        pool.prefix_caching = {"True": True, "False": False}.get(
            values.get("enable_prefix_caching", ""), pool.prefix_caching
        )
        if block:
            pool.block_tokens = block
            blocks += number
        if own:
            tokens += own
        elif block and number and values.get("mamba_block_size", "None") in ("None", ""):
            tokens, stated = tokens + block * number, False
    pool.blocks = blocks or None
    if tokens:
        pool.tokens_max, pool.source = tokens, CapacitySource.ENGINE if stated else CapacitySource.PRODUCT
    return pool
