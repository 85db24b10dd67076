"""Parser of an engine's `/metrics` page; its result is a Load.

A full Prometheus parser takes over ten milliseconds for vLLM's page of 70 KB, and every probe of every replica would
block the event loop for that time. One compiled expression finds the dozen relevant lines in less than one millisecond.
Names and labels are those of vLLM 0.32 and SGLang 0.5.23.

The labels of a sample decide how its value is used:

- Counters and gauges of several engines on one page (data parallel ranks) are summed, and usages are averaged. If each
  rank is a replica, only the samples of that rank count.
- Pipeline stages and tensor-parallel ranks of SGLang repeat the same number. The largest counts.
- With priorities a page has a total under `priority=""` in addition to the parts. The total counts; parts without a
  total are summed.
- Of waiting requests only those that wait for KV capacity (`reason="capacity"`) count, if the page has that label.
- Capacity is computed in engine_capacity.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from router.core.fleet.engine_capacity import LABEL, capacity, number_of
from router.core.types.replicas import Load, Sleep

# Metric name -> field of Load. If a metric has two spellings, an engine publishes one of them. SGLang's queues are
# summed: on a decode server, a request that waits for its KV pages is in one of the last two queues, and vLLM counts
# such a request as waiting.
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_waiting_by_reason": "",  # the labels decide, see `_field`
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
    "sglang:realtime_tokens_total": "computed_tokens_total",  # SGLang updates the previous two only when an answer ends
    "sglang:cached_tokens_total": "",
    "sglang:page_size": "page_tokens",
    "sglang:num_pages": "num_pages",
    "sglang:max_total_num_tokens": "kv_tokens_max",
}
# all metrics read
NAMES = (*_GAUGES, "vllm:prompt_tokens_created", "process_start_time_seconds", "vllm:cache_config_info")
_MEANS = ("kv_usage", "page_tokens")  # fields that are averaged over engines; all others are summed
_LINE = re.compile("^(" + "|".join(map(re.escape, _GAUGES)) + r")(?:\{([^\n]*)\})? ([^ \n]+)", re.MULTILINE)
# Start times. The counter's time is preferred to the process's, because each rank has its own counter.
_STARTED = re.compile(r"^(?:vllm:prompt_tokens_created\{([^\n]*)\}|process_start_time_seconds) ([^ \n]+)", re.MULTILINE)
# Labels of SGLang's schedulers of one data-parallel rank, which all report the same requests and the same pool.
_REPEATING = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})
_LOADED = ("host", "storage")  # sources of cached tokens outside the GPU, which vLLM counts in separate metrics
# vLLM's `engine` label numbers the engines of a whole deployment, and a rank is relative to its server. SGLang omits
# dp_rank if it has one rank, and always in metrics of its frontend.
_ENGINE = re.compile(r'^vllm:num_requests_running\{(?:[^\n]*,)?engine="(\d{1,6})"', re.MULTILINE)
_ENGINE_LABEL = re.compile(r'(?:^|,)engine="(\d{1,6})"')
_RANK_LABEL = re.compile(r'(?:^|,)dp_rank="(\d{1,6})"')

# Values of one metric of one engine: (name, labels except the repeating ones) -> priority -> value.
_Values = dict[tuple[str, frozenset[tuple[str, str]]], dict[str, float]]


def engines(page: str) -> list[int]:
    """Return the engine numbers on a vLLM page, in the order of their ranks; empty for other pages."""
    return sorted({int(engine) for engine in _ENGINE.findall(page)})


def parse_load(page: str, rank: int | None = None) -> Load:
    """Parse the page; a field with an absent or unreadable value is None. Never raises on a malformed page.

    With a `rank`, only samples of that rank count. Values that the page gives for the whole server are then unknown,
    except the page size.
    """
    is_ours = _make_rank_filter(page, rank)
    fields = _fields(page, is_ours, rank)
    pool = capacity(page, is_ours, fields.get("page_tokens"), fields.get("num_pages"), fields.get("kv_tokens_max"))
    queries = fields.get("cache_query_tokens_total")
    if queries is None and "cache_hit_tokens_total" in fields:
        queries = fields.get("prompt_tokens_total")  # SGLang counts hits relative to all prompt tokens
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
    """Return one value for each field, combined over all engines of the page that count."""
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
    return {field: _combine_engines(field, found.values()) for field, found in values.items()}


def _combine_engines(field: str, engines: Iterable[dict[str, float]]) -> float:
    """Combine the values of all engines for one field. The total of an engine counts, or the sum of its parts without
    one."""
    totals = [parts[""] if "" in parts else sum(parts.values()) for parts in engines]
    return sum(totals) / len(totals) if field in _MEANS else sum(totals)


def _field(name: str, labels: dict[str, str]) -> str:
    """Return the field of a sample that its labels select; "" if the sample is not used."""
    if name == "vllm:num_requests_waiting_by_reason":
        return "waiting_for_room" if labels.pop("reason", "") == "capacity" else ""
    if name == "vllm:engine_sleep_state":
        return "awake" if labels.pop("sleep_state", "") == "awake" else "sleep_level"
    return "" if labels.get("cache_source", "").startswith(_LOADED) else "cache_hit_tokens_total"


def _sleep(fields: dict[str, float]) -> Sleep | None:
    """Return the engine's sleep state. Engines on one page are put to sleep together."""
    awake = fields.get("awake")
    if awake is None:
        return None
    if awake:
        return Sleep.AWAKE
    return Sleep.ASLEEP if fields.get("sleep_level") else Sleep.PAUSED


def _started_s(page: str, is_ours: Callable[[str], bool]) -> float | None:
    """Return the start time of the engine, or None.

    It is the creation time of the engine's counter of prompt tokens, which prometheus_client publishes with each
    counter; without one, the start time of the process that serves the page. With several times the last one counts.
    """
    counted, process = list[float](), list[float]()
    for labels, value in _STARTED.findall(page):
        number = number_of(value)
        if number is not None and (not labels or is_ours(labels)):
            (counted if labels else process).append(number)
    return max(counted or process, default=None)


def _make_rank_filter(page: str, rank: int | None) -> Callable[[str], bool]:
    """Return a predicate on the labels of a sample: True if the sample belongs to the rank."""
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
