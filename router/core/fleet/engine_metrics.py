"""An engine's `/metrics` page -> Load.

A full Prometheus parser takes over ten milliseconds for vLLM's 70 KB page; every probe of every replica would stall
the event loop. One compiled expression picks the dozen lines that matter in under one. Names and labels as in vLLM 0.32
and SGLang 0.5.23.

A number is read by its labels, not by its name alone:

- Counters and gauges of several engines behind one page (data parallel ranks) are added up, usages averaged; where each
  rank is a replica of its own, only its own samples count.
- Pipeline stages and tensor-parallel ranks of SGLang state the same number once more: the largest counts.
- With priorities a page has a total under `priority=""` beside the parts: the total counts. Parts without a total are
  added up.
- Of requests that wait, those for room (`reason="capacity"`) count if the page tells them from others.
- Capacity is in engine_capacity.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from router.core.facts.replicas import Load, Sleep
from router.core.fleet.engine_capacity import LABEL, capacity, number_of

# name -> field. Of two spellings an engine has one; SGLang's queues are added up. A request that waits for its pages is
# in one of the last two at a server that decodes, as vLLM counts it among those that wait.
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_waiting_by_reason": "",  # by its labels: _field
    "vllm:engine_sleep_state": "",
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
    "sglang:cached_tokens_total": "",
    "sglang:page_size": "page_tokens",
    "sglang:num_pages": "num_pages",
    "sglang:max_total_num_tokens": "kv_tokens_max",
}
NAMES = (*_GAUGES, "vllm:prompt_tokens_created", "process_start_time_seconds", "vllm:cache_config_info")  # all read
_MEANS = ("kv_usage", "page_tokens")  # fields that are averaged over engines; all others are added up
_LINE = re.compile("^(" + "|".join(map(re.escape, _GAUGES)) + r")(?:\{([^\n]*)\})? ([^ \n]+)", re.MULTILINE)
# Times at which its process began: that of the counter where there is one, since a rank has its own.
_STARTED = re.compile(r"^(?:vllm:prompt_tokens_created\{([^\n]*)\}|process_start_time_seconds) ([^ \n]+)", re.MULTILINE)
# SGLang's schedulers of one data-parallel rank, which all report the same requests and the same pool.
_REPEATING = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})
_LOADED = ("host", "storage")  # sources of cached tokens that were not on the GPU; vLLM counts these apart too
# vLLM's `engine` counts over all servers of a deployment, its ranks within one; SGLang leaves dp_rank out where it has
# one rank, and always out of what its front end counts.
_ENGINE = re.compile(r'^vllm:num_requests_running\{(?:[^\n]*,)?engine="(\d{1,6})"', re.MULTILINE)
_ENGINE_LABEL = re.compile(r'(?:^|,)engine="(\d{1,6})"')
_RANK_LABEL = re.compile(r'(?:^|,)dp_rank="(\d{1,6})"')

# One engine's value of one metric: (name, labels but those that repeat it) -> priority -> value.
_Values = dict[tuple[str, frozenset[tuple[str, str]]], dict[str, float]]


def engines(page: str) -> list[int]:
    """The engines that a vLLM page speaks of, in the order of their ranks; none for other pages."""
    return sorted({int(engine) for engine in _ENGINE.findall(page)})


def parse_load(page: str, rank: int | None = None) -> Load:
    """Read what is there; absent or unreadable values are None. Never raises on a malformed page.

    With a `rank`, only its samples: what the page says of the server as a whole is unknown of the rank, except for
    its page size.
    """
    is_ours = _of_rank(page, rank)
    fields = _fields(page, is_ours, rank)
    pool = capacity(page, is_ours, fields.get("page_tokens"), fields.get("num_pages"), fields.get("kv_tokens_max"))
    queries = fields.get("cache_query_tokens_total")
    if queries is None and "cache_hit_tokens_total" in fields:
        queries = fields.get("prompt_tokens_total")  # SGLang counts hits against all prompt tokens
    waiting, for_room = fields.get("waiting"), fields.get("waiting_for_room")
    return Load(
        running=_int(fields.get("running")),
        waiting=_int(waiting if for_room is None else for_room),
        kv_usage=fields.get("kv_usage"),
        kv_tokens_max=pool.tokens_max,
        block_tokens=pool.block_tokens,
        prompt_tokens_total=fields.get("prompt_tokens_total"),
        generation_tokens_total=fields.get("generation_tokens_total"),
        cache_query_tokens_total=queries,
        cache_hit_tokens_total=fields.get("cache_hit_tokens_total"),
        prefix_caching=pool.prefix_caching,
        started_s=_started_s(page, is_ours),
        computed_tokens_total=fields.get("computed_tokens_total"),
        deferred=None if for_room is None else int(max(0.0, (waiting or 0.0) - for_room)),
        kv_source=pool.source,
        kv_blocks=pool.blocks,
        sleep=_sleep(fields),
    )


def _fields(page: str, is_ours: Callable[[str], bool], rank: int | None) -> dict[str, float]:
    """Fields of the page with one value each, over all engines on it that count."""
    values: dict[str, _Values] = {}
    for found in _LINE.finditer(page):  # other threads may run between two lines
        name, text, value = found[1], found[2] or "", found[3]
        if rank is not None and not (is_ours(text) or name == "sglang:page_size"):
            continue
        number = number_of(value)
        labels = dict(LABEL.findall(text)) if text else {}
        field = _GAUGES[name] or _field(name, labels)
        if number is None or not field:
            continue
        priority = labels.pop("priority", "")
        if name.startswith("sglang:"):
            labels = {label: of for label, of in labels.items() if label not in _REPEATING}
        parts = values.setdefault(field, {}).setdefault((name, frozenset(labels.items())), {})
        parts[priority] = max(number, parts.get(priority, 0.0))
    return {field: _joined(field, found.values()) for field, found in values.items()}


def _joined(field: str, engines: Iterable[dict[str, float]]) -> float:
    """The engines' values of a field as one. Of each engine the total counts, and if there is none, its parts."""
    totals = [parts[""] if "" in parts else sum(parts.values()) for parts in engines]
    return sum(totals) / len(totals) if field in _MEANS else sum(totals)


def _field(name: str, labels: dict[str, str]) -> str:
    """The field of a sample whose labels decide; "" for one that is not of interest."""
    if name == "vllm:num_requests_waiting_by_reason":
        return "waiting_for_room" if labels.pop("reason", "") == "capacity" else ""
    if name == "vllm:engine_sleep_state":
        return "awake" if labels.pop("sleep_state", "") == "awake" else "sleep_level"
    return "" if labels.get("cache_source", "").startswith(_LOADED) else "cache_hit_tokens_total"


def _sleep(fields: dict[str, float]) -> Sleep | None:
    """The engine's sleep state. Engines behind one page are put to sleep together."""
    awake = fields.get("awake")
    if awake is None:
        return None
    if awake:
        return Sleep.AWAKE
    return Sleep.ASLEEP if fields.get("sleep_level") else Sleep.PAUSED


def _started_s(page: str, is_ours: Callable[[str], bool]) -> float | None:
    """When the engine began, by its counter of prompt tokens (prometheus_client says of each since when it counts), or
    else when the process that answers did; the last one of several."""
    counted, process = list[float](), list[float]()
    for labels, value in _STARTED.findall(page):
        number = number_of(value)
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


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
