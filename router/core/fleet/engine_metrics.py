"""An engine's `/metrics` page -> Load.

A full Prometheus parser takes over ten milliseconds for vLLM's 70 KB page; every probe of every replica would stall
the event loop. One compiled expression picks the dozen lines that matter in under one. Names and labels as in vLLM 0.32
and SGLang 0.5.23. Counters and gauges of several engines behind one page (data parallel ranks) are added up,
usages averaged; where each rank is a replica of its own, only its own samples count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

from router.core.facts.replicas import Load

NUMBER_MAX = 2.0**53  # beyond it, as below zero and for NaN, a value is nonsense and counts as absent

# name -> field. Of two spellings an engine has one; SGLang's queues are added up. A request that waits for its pages is
# in one of the last two at a server that decodes, as vLLM counts it among those that wait.
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # vLLM before 0.10
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:prefix_cache_queries_total": "cache_query_tokens_total",
    "vllm:prefix_cache_hits_total": "cache_hit_tokens_total",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_decode_prealloc_queue_reqs": "waiting",
    "sglang:num_decode_transfer_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
    "sglang:prompt_tokens_total": "prompt_tokens_total",
    "sglang:generation_tokens_total": "generation_tokens_total",
    "sglang:realtime_tokens_total": "computed_tokens_total",  # the other two are counted when an answer ends
    "sglang:cached_tokens_total": "cache_hit_tokens_total",
    "sglang:page_size": "block_tokens",
    "sglang:num_pages": "num_pages",
    "sglang:max_total_num_tokens": "kv_tokens_max",
}
_LINE = re.compile("^(" + "|".join(map(re.escape, _GAUGES)) + r")(?:\{([^\n]*)\})? ([^ \n]+)", re.MULTILINE)
# Times at which its process began: that of the counter where there is one, since a rank has its own.
_STARTED = re.compile(r"^(?:vllm:prompt_tokens_created\{([^\n]*)\}|process_start_time_seconds) ([^ \n]+)", re.MULTILINE)
_CONFIG = re.compile(r"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# vLLM's `engine` counts over all servers of a deployment, its ranks within one; SGLang leaves dp_rank out where it has
# one rank, and always out of what its front end counts.
_ENGINE = re.compile(r'^vllm:num_requests_running\{(?:[^\n]*,)?engine="(\d{1,6})"', re.MULTILINE)
_ENGINE_LABEL = re.compile(r'(?:^|,)engine="(\d{1,6})"')
_RANK_LABEL = re.compile(r'(?:^|,)dp_rank="(\d{1,6})"')


def engines(page: str) -> list[int]:
    """The engines that a vLLM page speaks of, in the order of their ranks; none for other pages."""
    return sorted({int(engine) for engine in _ENGINE.findall(page)})


def parse_load(page: str, rank: int | None = None) -> Load:
    """Read what is there; absent or unreadable values are None. Never raises on a malformed page.

    With a `rank`, only its samples: what the page says of the server as a whole is unknown of the rank, except for
    its page size.
    """
    is_ours = _of_rank(page, rank)
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, labels, value in _LINE.findall(page):
        if rank is not None and not (is_ours(labels) or name == "sglang:page_size"):
            continue
        number = _number(value)
        if number is not None:
            sums[_GAUGES[name]] += number
            counts[_GAUGES[name]] += 1
    block_tokens, kv_tokens_max, prefix_caching = _cache_config(page, is_ours)
    if block_tokens is None and sums.get("block_tokens", 0) >= 1:
        block_tokens = int(sums["block_tokens"] / counts["block_tokens"])
    if kv_tokens_max is None and sums.get("kv_tokens_max"):
        kv_tokens_max = int(sums["kv_tokens_max"])
    if kv_tokens_max is None and block_tokens and sums.get("num_pages"):
        kv_tokens_max = int(sums["num_pages"]) * block_tokens
    queries = sums.get("cache_query_tokens_total")
    if queries is None and "cache_hit_tokens_total" in sums:
        queries = sums.get("prompt_tokens_total")  # SGLang counts hits against all prompt tokens
    return Load(
        running=_int(sums.get("running")),
        waiting=_int(sums.get("waiting")),
        kv_usage=sums["kv_usage"] / counts["kv_usage"] if counts.get("kv_usage") else None,
        kv_tokens_max=kv_tokens_max,
        block_tokens=block_tokens,
        prompt_tokens_total=sums.get("prompt_tokens_total"),
        generation_tokens_total=sums.get("generation_tokens_total"),
        cache_query_tokens_total=queries,
        cache_hit_tokens_total=sums.get("cache_hit_tokens_total"),
        prefix_caching=prefix_caching,
        started_s=_started_s(page, is_ours),
        computed_tokens_total=sums.get("computed_tokens_total"),
    )


def _started_s(page: str, is_ours: Callable[[str], bool]) -> float | None:
    """When the engine began, by its counter of prompt tokens (prometheus_client says of each since when it counts), or
    else when the process that answers did; the last one of several."""
    counted, process = list[float](), list[float]()
    for labels, value in _STARTED.findall(page):
        number = _number(value)
        if number is not None and (not labels or is_ours(labels)):
            (counted if labels else process).append(number)
    return max(counted or process, default=None)


def _of_rank(page: str, rank: int | None) -> Callable[[str], bool]:
    """Whether a sample with these labels is one of the rank's."""
    if rank is None:
        return lambda _: True
    known = engines(page)
    wanted = str(known[rank]) if rank < len(known) else None if known else str(rank)
    label = _ENGINE_LABEL if known else _RANK_LABEL

    def is_ours(labels: str) -> bool:
        found = label.search(labels)
        return found is not None and found[1] == wanted

    return is_ours


def _cache_config(page: str, is_ours: Callable[[str], bool]) -> tuple[int | None, int | None, bool | None]:
    """vLLM's cache_config_info: block size, pool size in tokens (ranks added up), whether prefixes are cached."""
    block_tokens: int | None = None
    caching: bool | None = None
    total = 0
    for labels in filter(is_ours, _CONFIG.findall(page)):
        values = dict(_LABEL.findall(labels))
        block = _number(values.get("block_size", ""))
        blocks = _number(values.get("num_gpu_blocks", ""))
        caching = {"True": True, "False": False}.get(values.get("enable_prefix_caching", ""), caching)
        if block and block >= 1:
            block_tokens = int(block)
            total += int(block) * int(blocks or 0)
    return block_tokens, total or None, caching


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= NUMBER_MAX else None


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
