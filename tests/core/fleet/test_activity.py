"""Which replicas are at work, so that silent streams there are let be."""

from __future__ import annotations

from dataclasses import replace

from router.core.fleet.engine_metrics import parse_load
from router.core.types.placements import EndReason, Outcome
from router.core.types.replicas import Load
from tests.core.fleet.test_eligibility import IDS, place, router_of

COUNTED = Load(prompt_tokens_total=5.0, generation_tokens_total=10.0)


def test_who_is_at_work() -> None:
    """Those with requests of ours whose counters or streams move; and those that count nothing while they are well."""
    router = router_of(IDS)
    leases = [place(router, 1.0, only=id_) for id_ in IDS]
    router.observations.observe_load(IDS[0], COUNTED, 2.0)
    router.observations.observe_load(IDS[1], COUNTED, 2.0)
    router.observations.observe_load(IDS[1], replace(COUNTED, generation_tokens_total=11.0), 3.0)
    assert router.list_active(3.0) == ([IDS[1]], [IDS[2]])
    assert router.list_active(3.1) == ([], [IDS[2]])
    router.observations.alive(IDS[0], 4.0)
    assert router.list_active(3.5) == ([IDS[0]], [IDS[2]])
    router.fleet.observe_health(IDS[2], False, "no answer in time", silent=True)
    assert router.list_active(5.0) == ([], [])
    router.fleet.observe_health(IDS[2], True)
    assert router.list_active(5.0) == ([], [IDS[2]])
    router.finish(leases[2], Outcome(EndReason.OK), 5.0)
    assert router.list_active(5.0) == ([], [])


def test_sglang_counts_tokens_as_they_are_computed() -> None:
    """Its other counters move when an answer ends only."""
    page = (
        'sglang:generation_tokens_total{model_name="m"} 7\n'
        'sglang:realtime_tokens_total{model_name="m",mode="prefill_compute"} 20\n'
        'sglang:realtime_tokens_total{model_name="m",mode="decode"} %d\n'
    )
    router = router_of(IDS)
    place(router, 1.0, only=IDS[0])
    router.observations.observe_load(IDS[0], parse_load(page % 3), 2.0)
    assert router.list_active(2.0)[0] == []
    router.observations.observe_load(IDS[0], parse_load(page % 4), 3.0)
    assert router.list_active(3.0)[0] == [IDS[0]]
