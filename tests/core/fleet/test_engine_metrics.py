from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.engine_metrics import engines, parse_load
from router.core.types.replicas import CapacitySource, Load

# Lines as vLLM 0.32 prints them, look-alikes included.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 8.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5647058823529412
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 26642.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.795250687284222e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 928.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 77.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 26642.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.795250687284222e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 11966.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 124.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
num_cpu_blocks="None",num_gpu_blocks="19208",sliding_window="None"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 0.25
sglang:cache_hit_rate{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"} 0.9
sglang:prompt_tokens_total{model_name="tiny"} 1000.0
sglang:generation_tokens_total{model_name="tiny"} 200.0
sglang:cached_tokens_total{cache_source="device",model_name="tiny"} 300.0
sglang:page_size{model_name="tiny"} 16.0
sglang:num_pages{model_name="tiny"} 100.0
"""


def test_a_vllm_page() -> None:
    """All that placement asks of vLLM is read, and no line that only looks like one of them."""
    assert parse_load(VLLM) == Load(
        running=8,
        waiting=1,
        kv_usage=0.5647058823529412,
        kv_tokens_max=32 * 19_208,
        block_tokens=32,
        prompt_tokens_total=26_642,
        generation_tokens_total=11_966,
        cache_query_tokens_total=26_642,
        cache_hit_tokens_total=928,
        prefix_caching=True,
        started_s=1795250687.284222,
        deferred=1,
        kv_source=CapacitySource.PRODUCT,
        kv_blocks=19_208,
    )


def test_an_sglang_page() -> None:
    """Capacity is pages times page size; hits count against all prompt tokens."""
    assert parse_load(SGLANG) == Load(
        running=3,
        waiting=4,
        kv_usage=0.25,
        kv_tokens_max=1_600,
        block_tokens=16,
        prompt_tokens_total=1_000,
        generation_tokens_total=200,
        cache_query_tokens_total=1_000,
        cache_hit_tokens_total=300,
        kv_source=CapacitySource.PRODUCT,
        kv_blocks=100,
    )


def test_an_sglang_server_that_decodes_has_three_queues() -> None:
    """Requests that wait for pages of a prefilling server count as waiting, as those of vLLM do."""
    labels = '{engine_type="decode",model_name="tiny",moe_ep_rank="0",pid="29139",pp_rank="0",tp_rank="0"}'
    page = f"""\
sglang:num_running_reqs{labels} 7.0
sglang:num_queue_reqs{labels} 1.0
sglang:num_grammar_queue_reqs{labels} 0.0
sglang:num_prefill_bootstrap_queue_reqs{labels} 0.0
sglang:num_prefill_inflight_queue_reqs{labels} 0.0
sglang:num_decode_prealloc_queue_reqs{labels} 2.0
sglang:num_decode_transfer_queue_reqs{labels} 4.0
"""
    load = parse_load(page)
    assert (load.running, load.waiting) == (7, 7)


def test_sglang_may_state_its_capacity() -> None:
    """A stated capacity goes before pages times page size."""
    page = SGLANG + 'sglang:max_total_num_tokens{model_name="tiny"} 1500.0\n'
    assert parse_load(page).kv_tokens_max == 1_500


def test_ranks_behind_one_page_are_added_up() -> None:
    """Two data-parallel engines: counts and capacity are summed, usage is the mean, the block size stays."""
    second = VLLM.replace('engine="0"', 'engine="1"').replace("0.5647058823529412", "0.0")
    load = parse_load(VLLM + second)
    assert (load.running, load.waiting, load.prompt_tokens_total) == (16, 2, 53_284)
    assert (load.kv_tokens_max, load.block_tokens) == (2 * 32 * 19_208, 32)
    assert load.kv_usage == 0.5647058823529412 / 2


def test_old_names_and_bare_lines() -> None:
    """vLLM before 0.10 says gpu_cache_usage_perc; labels and CRLF do not matter."""
    load = parse_load("vllm:gpu_cache_usage_perc 0.5\r\nvllm:num_requests_running 3\r\n")
    assert (load.kv_usage, load.running) == (0.5, 3)


def test_caching_switched_off_is_seen() -> None:
    """An engine without prefix caching says so; silence says nothing."""
    assert parse_load(VLLM.replace('caching="True"', 'caching="False"')).prefix_caching is False
    assert parse_load(VLLM.replace('enable_prefix_caching="True",', "")).prefix_caching is None


def test_what_cannot_be_read_is_unknown() -> None:
    """NaN, infinity, words, and pools of unknown size are None, and spoil nothing around them."""
    page = (
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc full\n"
        'vllm:prompt_tokens_total{} 5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    )
    assert parse_load(page) == Load(prompt_tokens_total=5, block_tokens=16)
    assert parse_load("") == Load()
    assert parse_load('vllm:cache_config_info{block_size="0",num_gpu_blocks="9"} 1.0\n') == Load()


VALUES = st.sampled_from(["1.0", "NaN", "-3", "1e308", "9e999", "", "x", "0.5", "1.7e308", "-1.7e308"])
LINES = st.sampled_from([*VLLM.splitlines(), *SGLANG.splitlines()])


@given(st.lists(st.tuples(LINES, VALUES, st.integers(0, 200)), max_size=12))
@settings(deadline=None)
def test_no_page_raises(parts: list[tuple[str, str, int]]) -> None:
    """Cut, mixed and senseless pages are read without an exception; what is given is a count or None."""
    page = "\n".join(line.rsplit(" ", 1)[0][:cut] + " " + value for line, value, cut in parts)
    load = parse_load(page + "\n" + page.replace('"32"', '"1e308"').replace("19208", "-1"))
    for number in (load.running, load.waiting, load.kv_tokens_max, load.block_tokens):
        assert number is None or number >= 0


def test_one_rank_of_several() -> None:
    """A rank has its own samples only; vLLM's engines are counted within the server, in hybrid mode from any number."""
    second = VLLM.replace('engine="0"', 'engine="1"').replace(" 8.0", " 5.0").replace("19208", "100")
    for page in (
        VLLM + second,
        (VLLM + second).replace('engine="1"', 'engine="10"').replace('engine="0"', 'engine="9"'),
    ):
        assert parse_load(page, 0) == parse_load(VLLM)
        load = parse_load(page, 1)
        assert (load.running, load.kv_tokens_max, load.block_tokens, load.prefix_caching) == (5, 3_200, 32, True)
        assert parse_load(page, 2) == Load()
    assert engines(VLLM + second) == [0, 1]
    assert engines(SGLANG) == []


def test_one_rank_of_sglang() -> None:
    """What SGLang counts for all ranks together is unknown of one, except for the size of a page."""
    ranks = [
        SGLANG.replace('pp_rank="0"', f'dp_rank="{rank}",pp_rank="0"').replace(" 3.0", f" {rank}.0") for rank in (0, 1)
    ]
    page = "".join(ranks) + 'sglang:max_total_num_tokens{dp_rank="1",model_name="tiny"} 900.0\n'
    assert parse_load(page, 1) == Load(
        running=1,
        waiting=4,
        kv_usage=0.25,
        kv_tokens_max=900,
        block_tokens=16,
        kv_source=CapacitySource.ENGINE,
    )
    assert parse_load(page, 2) == Load(block_tokens=16)


def test_an_engine_says_since_when_it_runs() -> None:
    """Its counter's own time where there is one, the rank's; else that of the process; never nonsense."""
    process = "process_start_time_seconds 1.7e+09\n"
    assert parse_load(process).started_s == 1.7e9
    assert parse_load(process + 'vllm:prompt_tokens_created{engine="0"} 1.8e9\n').started_s == 1.8e9
    assert parse_load("process_start_time_seconds NaN\n").started_s is None
    ranks = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} 1\nvllm:prompt_tokens_created{{engine="{n}"}} {1800000000 + n}\n'
        for n in range(2)
    )
    assert parse_load(ranks, 1).started_s != parse_load(ranks, 0).started_s
