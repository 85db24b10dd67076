"""Metrics pages as pure text, for the HTTP interface and for simulated worlds.

Source for SGLang 0.5.23: srt/observability/metrics_collector.py (names, labels, QueueCount). Source for SGLang 0.5.8:
srt/metrics/collector.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from loadtest.fake_engine.metrics import Histogram, moment_of, render, values_of
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.zoo.member import Family, Member


def page_of(model: EngineModel, model_name: str, member: Member, scrape: int) -> str:
    """Return the `/metrics` page of a member after `scrape` earlier scrapes, without its latencies."""
    if member.family is Family.SGLANG:
        return sglang_page(model, model_name, member)
    none = Histogram(())
    return render(model, model_name, none, none, 0.0, moment_of(member, 0.0, scrape), member)


def sglang_page(model: EngineModel, model_name: str, member: Member) -> str:
    """Return the `/metrics` page: a scheduler's gauges once for each reporting rank, the tokenizer's counters once."""
    values, tokens = values_of(model), model.pool.blocks_n * model.limits.block_tokens
    gauges = {
        "num_running_reqs": values["num_requests_running"],
        "num_queue_reqs": values["num_requests_waiting"],
        "num_grammar_queue_reqs": 0,
        "token_usage": values["kv_cache_usage_perc"],
        "num_used_tokens": model.held_tokens,
        "max_total_num_tokens": tokens,
    }
    if not member.earlier:
        gauges |= {"page_size": model.limits.block_tokens, "num_pages": model.pool.blocks_n}
        gauges["context_len"] = model.context_tokens_max
    lines: list[str] = []
    for name, value in gauges.items():
        lines.append(f"# TYPE sglang:{name} gauge")
        by_priority = member.priorities if name in ("num_running_reqs", "num_queue_reqs") else ()
        for labels in _ranks(model_name, member):
            lines.append(f"sglang:{name}{{{labels}}} {float(value)}")
            parts = _parts(int(value), by_priority)
            for priority, part in parts:
                apart = labels.replace('priority=""', f'priority="{priority}"')
                lines.append(f"sglang:{name}{{{apart}}} {float(part)}")
    counters = {
        'prompt_tokens_total{is_streaming="true",': values["prompt_tokens"],
        'generation_tokens_total{is_streaming="true",': values["generation_tokens"],
        'cached_tokens_total{cache_source="total",': values["prefix_cache_hits"],
    }
    if member.earlier:  # without labels for streaming and for the source of cached tokens
        counters = {f"{name.partition('{')[0]}{{": value for name, value in counters.items()}
    total = ',priority=""' if member.priorities else ""
    labels = f'engine_type="unified",model_name="{model_name}"{total}'
    lines += [f"sglang:{name}{labels}}} {float(value)}" for name, value in counters.items()]
    return "\n".join(lines) + "\n"


def _ranks(model_name: str, member: Member) -> Iterable[str]:
    for stage in range(member.pp):
        for rank in range(member.tp):
            priority = 'priority="",' if member.priorities else ""
            labels = f'engine_type="unified",model_name="{model_name}",moe_ep_rank="0",pp_rank="{stage}",'
            yield f'{labels}{priority}tp_rank="{rank}"'


def _parts(total: int, priorities: tuple[int, ...]) -> list[tuple[int, int]]:
    """Split a total by priority: the first priority gets the remainder of the division."""
    each = total // len(priorities) if priorities else 0
    rest = total - each * len(priorities)
    return [(priority, each + (rest if not number else 0)) for number, priority in enumerate(priorities)]
