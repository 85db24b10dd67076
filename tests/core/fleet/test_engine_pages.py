"""Metrics pages of engines that are no single dense model (tests/data/metrics, see NOTICE there)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.core.fleet.engine_capacity import with_event_block
from router.core.fleet.engine_metrics import parse_load
from router.core.types.replicas import CapacitySource, Sleep

FOLDER = Path(__file__).parents[2] / "data" / "metrics"
ENGINE, PRODUCT, EVENTS = CapacitySource.ENGINE, CapacitySource.PRODUCT, CapacitySource.EVENTS


def page(name: str) -> str:
    """One page."""
    return (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm_dense", {"running": 8, "waiting": 0, "kv_tokens_max": 8_192, "kv_source": ENGINE, "sleep": Sleep.AWAKE}),
        ("vllm_hybrid", {"kv_tokens_max": 463_459, "kv_source": ENGINE, "block_tokens": 8}),
        ("vllm_hybrid_state", {"kv_tokens_max": 1_663_201, "kv_source": ENGINE}),
        ("vllm_hybrid_before_0_24", {"kv_tokens_max": None, "kv_source": None, "block_tokens": 1_056}),
        ("vllm_dcp_2", {"kv_tokens_max": 131_072, "kv_source": ENGINE, "block_tokens": 16}),
        ("vllm_dcp_2_before_0_24", {"kv_tokens_max": 65_536, "kv_source": PRODUCT, "kv_blocks": 4_096}),
        ("vllm_asleep", {"sleep": Sleep.ASLEEP}),
        ("vllm_deferred", {"waiting": 2, "deferred": 473}),
        (
            "vllm_priorities",
            {"running": 8, "waiting": 0, "prompt_tokens_total": 26_642, "generation_tokens_total": 11_966},
        ),
        ("sglang_pp_2", {"running": 16, "waiting": 10, "kv_tokens_max": 400_000, "kv_source": ENGINE, "kv_usage": 0.5}),
        ("sglang_dp_2_pp_2", {"running": 32, "waiting": 20, "kv_tokens_max": 800_000, "kv_usage": 0.5}),
        ("sglang_priorities", {"running": 16, "waiting": 10, "kv_tokens_max": 400_000, "block_tokens": 16}),
    ],
)
def test_a_number_is_read_by_its_labels(name: str, expected: dict[str, Any]) -> None:
    """Totals, parts and repetitions are told apart, and capacity is taken from where it is right."""
    load = parse_load(page(name))
    assert {field: getattr(load, field) for field in expected} == expected


def test_tensor_parallel_ranks_repeat_a_number() -> None:
    """With metrics of all schedulers every rank reports the same requests; one may be a step behind."""
    stages = page("sglang_pp_2").replace('pp_rank="1",tp_rank="0"', 'pp_rank="0",tp_rank="1"')
    behind = stages.replace('tp_rank="1"} 16.0', 'tp_rank="1"} 15.0')
    assert parse_load(stages) == parse_load(behind) == parse_load(page("sglang_pp_2"))
    processes = stages.replace('tp_rank="0"}', 'tp_rank="0",pid="7"}').replace('tp_rank="1"}', 'tp_rank="1",pid="8"}')
    assert parse_load(processes) == parse_load(stages)


def test_one_rank_of_stages() -> None:
    """A data-parallel rank has its own requests, once for all its stages."""
    load = parse_load(page("sglang_dp_2_pp_2"), 1)
    assert (load.running, load.waiting, load.kv_tokens_max, load.block_tokens) == (16, 10, 400_000, 16)


def test_parts_without_a_total_are_added_up() -> None:
    """A metric by priority need not have a total."""
    parts = "".join(f'vllm:num_requests_running{{engine="0",priority="{n}"}} {n}\n' for n in (1, 2, 4))
    assert parse_load(parts).running == 7
    assert parse_load('vllm:num_requests_running{engine="0"} 9\n' + parts).running == 9


def test_reasons_other_than_room_alone() -> None:
    """Without a sample for `capacity` the page does not tell what waits for room: all that waits counts."""
    load = parse_load(
        'vllm:num_requests_waiting{engine="0"} 5\nvllm:num_requests_waiting_by_reason{engine="0",reason="x"} 5\n'
    )
    assert (load.waiting, load.deferred) == (5, None)


def test_tokens_loaded_from_a_tier_are_no_hits_of_the_gpu() -> None:
    """SGLang counts them as cached, by source; vLLM counts them apart."""
    assert parse_load(page("sglang_pp_2")).cache_hit_tokens_total == 30_200


def test_a_paused_engine_keeps_its_cache() -> None:
    """vLLM's sleep level 0 sets no level beside `awake`."""
    load = parse_load(page("vllm_asleep").replace('"weights_offloaded"} 1.0', '"weights_offloaded"} 0.0'))
    assert load.sleep is Sleep.PAUSED
    assert parse_load(page("vllm_asleep").replace('"weights', '"discard_all"} 1.0\n#"')).sleep is Sleep.ASLEEP
    assert parse_load(page("sglang_pp_2")).sleep is None


def test_one_engine_is_counted_once() -> None:
    """Two lines of one engine's configuration, as a page of several processes may have, are one pool."""
    line = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    assert parse_load(line + line.replace('"100"', '"101"')).kv_tokens_max == 1_616
    assert parse_load(line + line.replace('engine="0"', 'engine="1"')).kv_tokens_max == 3_200


def test_events_correct_a_product() -> None:
    """A block of the events that is several of the page's is that of the pool; several groups make the product void.
    What the engine states is left as it is."""
    load = parse_load(page("vllm_dcp_2_before_0_24"))
    corrected = with_event_block(load, 32, 1)
    assert (corrected.kv_tokens_max, corrected.kv_source) == (131_072, EVENTS)
    assert with_event_block(load, 32, 3).kv_tokens_max is None
    for size in (0, 8, 16, 24):
        assert with_event_block(load, size, 1) is load
    stated = parse_load(page("vllm_dcp_2"))
    assert with_event_block(stated, 32, 3) is stated


def test_sglang_pages_of_several_gpus() -> None:
    """Where SGLang does not state the capacity, pages times page size is a product like any other."""
    load = parse_load('sglang:page_size{tp_rank="0"} 16.0\nsglang:num_pages{tp_rank="0"} 1000.0\n')
    assert (load.kv_tokens_max, load.kv_source) == (16_000, PRODUCT)
    assert with_event_block(load, 64, 1).kv_tokens_max == 64_000
