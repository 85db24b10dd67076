"""Rows above everything that name one replica, one tenant, or a router that has just started."""

from __future__ import annotations

from typing import Any

from tests.browser.admin import opened
from tests.browser.tab import Tab
from tests.support.observatory_page import observatory

UNDER_WAY = {"in_flight": 40, "waiting": 9}


async def test_a_replica_that_differs_from_its_peers_is_named(tab: Tab) -> None:
    """A slow replica, one that gets nothing and one with a cache state that is lost again and again: each is above
    everything with its reason and its share. The table has each replica's rate and times, and the reason of each
    breaker."""
    slow, idle = "prefill takes 5.8 times as long as on its peers", "it got 0 requests in the last minutes"
    breaker = "3 failures in a row; for another 2.0 s"

    def uneven(now_s: float) -> Any:
        page = observatory(now_s)
        page["replicas"][0] |= {"slow": slow, "request_share": 0.01}
        page["replicas"][1] |= {"idle": idle}
        page["replicas"][2] |= {"grade_falls": 5}
        page["replicas"][3] |= {"ready": True, "state": "open", "why": breaker}
        return page | {"timeline": {"step_s": 5, "points": []}, "advice": []}

    async with opened(tab, uneven):
        attention = await tab.text("#attention")
        for words in (f"prod/vllm-3 ({breaker}). 3 of 4 take requests",
                      f"prod/vllm-0 ({slow}; it gets 1 % of all requests)", f"prod/vllm-1 ({idle})",
                      "prod/vllm-2 (5 times; no event stream)"):  # fmt: skip
            assert words in attention, words
        assert "3 of 4 take requests" in await tab.text("#tile-waiting")
        table = await tab.text("#replicas")
        for words in ("3.3", "33 %", "190 ms", "920 ms", slow, idle, breaker, "no event stream"):
            assert words in table, words
    async with opened(tab, lambda now_s: observatory(now_s) | {"timeline": {"step_s": 5, "points": []}}):
        attention = await tab.text("#attention")
        assert "slower" not in attention
        assert "almost no requests" not in attention
        assert "fell repeatedly" not in attention


async def test_one_tenant_and_a_young_router(tab: Tab) -> None:
    """A tenant with most of the work is named while requests wait, and not in a fleet at ease; the time since the start
    stands beside other rows only."""
    words = "Tenant batch causes 91 % of the computed prompt tokens of the last minutes, with 70 % of the requests. "
    words += "It has 40 of 54 requests in flight."
    tenants = [
        {"tenant": "batch", "requests_per_s": 7.0, "request_share": 0.7, "computed_share": 0.91} | UNDER_WAY,
        {"tenant": "acme", "requests_per_s": 3.0, "request_share": 0.3, "computed_share": 0.09} | UNDER_WAY,
    ]
    tenants[1] |= {"in_flight": 14, "waiting": 0}

    def crowded(usage: float, named: list[Any]) -> Any:
        def page(now_s: float) -> Any:
            made = observatory(now_s) | {"timeline": {"step_s": 5, "points": []}, "advice": [], "tenants": named}
            made["replicas"] = [row | {"kv_usage": usage, "window": 1_000} for row in made["replicas"][:3]]
            return made | {"uptime_s": 130.0, "pages": []}

        return page

    async with opened(tab, crowded(0.99, tenants)):
        attention = await tab.text("#attention")
        assert words in attention
        assert "This router started 2 min ago" in attention
        assert (await tab.text("#tenants")).split()[-14:] == ["batch", "40", "9", "7.0", "70", "%", "91", "%", "acme",
                                                              "14", "0", "3.0", "30", "%", "9", "%"][-14:]  # fmt: skip
    async with opened(tab, crowded(0.5, tenants)):
        attention = await tab.text("#attention")
        assert "Tenant" not in attention
        assert "No problems since this router started 2 min ago" in attention
    async with opened(tab, crowded(0.99, tenants[:1])):
        assert "Tenant" not in await tab.text("#attention")


async def test_a_requested_model_without_a_ready_replica_is_named(tab: Tab) -> None:
    """The model is above everything with the readiness of its replicas, and its row of the table counts them."""
    model, why = "llama-70b", "0 of 1 replicas of 'llama-70b' are ready: connection refused"

    def gone(now_s: float) -> Any:
        page = observatory(now_s) | {"unserved_models": [{"model": model, "why": why}]}
        for row in page["replicas"]:
            row["models"] = [model] if not row["ready"] else ["qwen3-32b"]
        return page

    async with opened(tab, gone):
        assert f"Model {model} has no ready replica, and its requests get 503: {why}." in await tab.text("#attention")
        assert "0 of 1" in await tab.text("#models")
    async with opened(tab):
        assert "no ready replica" not in await tab.text("#attention")
