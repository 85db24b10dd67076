"""`/metrics` page of the simulated replica: the names and labels of vLLM 0.32 that a router or a load test reads.

Times are simulated seconds. Token counters follow vLLM. Hits and queries are counted when a request is admitted, prompt
tokens when its first token is generated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.zoo.member import DENSE, Member

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": "External prefix cache queries, in terms of number of queried tokens.",
    "external_prefix_cache_hits": "External prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}


class Histogram:
    """Counts by upper bound, in constant memory."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Yield the exposition lines, cumulative."""
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}",{labels}}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


@dataclass(frozen=True, slots=True)
class Moment:
    """State of a replica that the engine model does not have."""

    started_s: float
    """Unix time at which the answering process began."""
    share: float = 1.0
    """Share of all counts that this process has counted."""
    asleep: int | None = None
    """Level of vLLM's sleep mode; None: awake."""
    parked_n: int = 0
    """Requests that wait for the engine to wake up."""


def moment_of(member: Member, started_s: float, scrape: int, *, asleep: int | None = None, parked_n: int = 0) -> Moment:
    """Return the state that a scrape observes. With several API servers, scrapes reach them in rotation.

    Each server started a second later, and has smaller counts, than the one before it.
    """
    servers = member.api_servers
    number = scrape % servers
    return Moment(started_s + number, 2 * (servers - number) / (servers * (servers + 1)), asleep, parked_n)


def values_of(model: EngineModel) -> dict[str, float]:
    """Return gauges and counters by vLLM's names, without prefix and suffix."""
    counters = model.counters
    return {
        "num_requests_running": model.running_n,
        "num_requests_waiting": model.waiting_n,
        "kv_cache_usage_perc": model.kv_usage,
        "prefix_cache_queries": counters.queried_tokens,
        "prefix_cache_hits": counters.hit_tokens,
        "external_prefix_cache_queries": counters.tier_queried_tokens,
        "external_prefix_cache_hits": counters.tier_hit_tokens,
        "num_preemptions": counters.preemptions,
        "prompt_tokens": counters.prompt_tokens,
        "prompt_tokens_cached": counters.prompt_cached_tokens,
        "generation_tokens": counters.generated_tokens,
    }


def render(
    model: EngineModel,
    model_name: str,
    ttft: Histogram,
    e2e: Histogram,
    lag_max_s: float,
    moment: Moment,
    member: Member = DENSE,
) -> str:
    """Return the whole `/metrics` page of a member of the zoo."""
    labels = f'engine="0",model_name="{model_name}"'
    counters, started_s = model.counters, moment.started_s
    values = values_of(model)
    values["num_requests_waiting"] += member.deferred_n + moment.parked_n
    for name in _COUNTERS:
        values[name] = int(values[name] * moment.share)
    lines: list[str] = []
    for name, text in _GAUGES.items():
        lines += [*_head(f"vllm:{name}", text, "gauge"), f"vllm:{name}{{{labels}}} {float(values[name])}"]
    if not member.earlier:
        lines += _waiting_by_reason(model, labels, member, moment)
    lines += _sleep_state(labels, moment.asleep)
    for name, text in _COUNTERS.items():
        if member.earlier and name == "prompt_tokens_cached":
            continue
        lines += [*_head(f"vllm:{name}_total", text, "counter")]
        lines.append(f"vllm:{name}_total{{{labels}}} {float(values[name])}")
    lines += _head("vllm:prompt_tokens_created", _COUNTERS["prompt_tokens"], "gauge")
    lines.append(f"vllm:prompt_tokens_created{{{labels}}} {started_s}")
    lines += _head("vllm:request_success_total", "Count of successfully processed requests.", "counter")
    for reason in ("stop", "length", "abort", "error", "repetition"):
        # A client disconnect does not count as an abort, as measured on vLLM 0.32.
        value = float(int(counters.finished * moment.share) if reason == "length" else 0)
        lines.append(f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {value}')
    for name, text, histogram in (
        ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", ttft),
        ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", e2e),
    ):
        lines += [*_head(name, text, "histogram"), *histogram.lines(name, labels)]
    lines += _cache_config(model, member)
    lines += _head("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", "gauge")
    lines.append(f"process_start_time_seconds {started_s}")
    lines += _head("loadtest:engine_lag_seconds_max", "Wall seconds the latest step came too late.", "gauge")
    lines.append(f"loadtest:engine_lag_seconds_max{{{labels}}} {lag_max_s}")
    return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _waiting_by_reason(model: EngineModel, labels: str, member: Member, moment: Moment) -> list[str]:
    """Return the waiting requests by reason: `capacity` for those that wait for KV blocks, `deferred` for the
    others."""
    deferred = member.deferred_n + model.aside_n
    reasons = {"capacity": model.waiting_n - model.aside_n + moment.parked_n, "deferred": deferred}
    name = "vllm:num_requests_waiting_by_reason"
    samples = [f'{name}{{{labels},reason="{reason}"}} {float(value)}' for reason, value in reasons.items()]
    return [*_head(name, "Number of waiting requests by reason.", "gauge"), *samples]


def _sleep_state(labels: str, asleep: int | None) -> list[str]:
    states = {"awake": asleep is None, "weights_offloaded": asleep == 1, "discard_all": asleep == 2}
    name = "vllm:engine_sleep_state"
    samples = [f'{name}{{{labels},sleep_state="{state}"}} {float(value)}' for state, value in states.items()]
    return [*_head(name, "Engine sleep state; awake = 0 means engine is sleeping.", "gauge"), *samples]


def _cache_config(model: EngineModel, member: Member) -> list[str]:
    """Return vLLM's cache configuration. With one group and no context parallelism, capacity is block size times
    blocks."""
    tokens = model.pool.blocks_n * model.limits.block_tokens
    size, blocks_n = model.limits.block_tokens // member.context_parallel, model.pool.blocks_n
    if member.label is not None:
        size = member.label.block_tokens
        blocks_n = max(1, round(tokens * member.label.blocks / member.label.tokens))
    info = {
        "block_size": size,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": 0,
        "kv_cache_max_concurrency": round(tokens / model.context_tokens_max, 3),
        "kv_cache_size_tokens": tokens,
        "mamba_block_size": next(
            (model.limits.block_tokens // each.parts for each in member.groups if each.kind == "mamba"), None
        ),
        "num_gpu_blocks": blocks_n,
        "prefix_caching_hash_algo": "xxh3_64",
        "sliding_window": None,
    }
    if member.earlier:
        del info["kv_cache_max_concurrency"], info["kv_cache_size_tokens"]
    labels = ",".join(f'{name}="{value}"' for name, value in info.items())
    text = "Information of the LLMEngine CacheConfig"
    return [*_head("vllm:cache_config_info", text, "gauge"), f"vllm:cache_config_info{{{labels}}} 1.0"]
