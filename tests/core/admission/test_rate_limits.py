from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.admission.rate_limits import TenantRateLimits
from router.core.types.placements import Shed


@dataclass
class Tenant:
    """Only its rates."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None


def quotas(**tenants: Tenant) -> TenantRateLimits:
    """With these tenants."""
    it = TenantRateLimits()
    it.configure(tenants)
    return it


@pytest.mark.promise("No tenant gets more than its rate.", "tenants")
@pytest.mark.promise("A tenant over its rate gets the exact time until its next request.", "tenants")
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 500)), max_size=80), st.sampled_from([1, 7, 60, 600]))
@settings(deadline=None)
def test_nobody_gets_more_than_the_rate_and_is_told_exactly_when(steps: list[tuple[int, int]], per_min: int) -> None:
    """Requests let in never exceed one bucket and what the rate has brought since; who is turned away is told the
    moment from which the same request is let in, and not before; being turned away costs nothing."""
    it, now_s, taken = quotas(t=Tenant(requests_per_min=per_min)), 0.0, 0
    for gap, _ in steps:
        now_s += gap / 16
        try:
            it.take("t", 1, now_s)
            taken += 1
        except Shed as shed:
            with pytest.raises(Shed):
                it.take("t", 1, now_s + shed.retry_after_s * 0.99)
            now_s += shed.retry_after_s
            it.take("t", 1, now_s)
            taken += 1
        assert taken <= per_min + now_s * per_min / 60 + 1e-6


@given(st.lists(st.tuples(st.integers(0, 160), st.integers(1, 900), st.integers(0, 900)), max_size=60))
@settings(deadline=None)
def test_tokens_go_into_debt_and_are_paid_back(steps: list[tuple[int, int, int]]) -> None:
    """Whatever prompts were believed to be and answers have cost, tokens used never exceed one bucket, the rate since,
    and the last request; who is in debt waits exactly until it is paid."""
    it, now_s, used = quotas(t=Tenant(tokens_per_min=600)), 0.0, 0
    for gap, believed, more in steps:
        now_s += gap / 16
        assert used <= 600 + now_s * 10 + 1_800
        try:
            it.take("t", believed, now_s)
        except Shed as shed:
            it_waits_s = shed.retry_after_s
            with pytest.raises(Shed):
                it.take("t", believed, now_s + it_waits_s * 0.99)
            now_s += it_waits_s
            it.take("t", believed, now_s)
        assert used <= 600 + now_s * 10
        it.spend("t", more, now_s)
        used += believed + more


def test_both_rates_hold_and_the_longer_wait_is_told() -> None:
    """A request that one bucket would let in and the other would not takes nothing from either."""
    it = quotas(t=Tenant(requests_per_min=2, tokens_per_min=60))
    it.take("t", 120, 0.0)
    for _ in range(3):
        with pytest.raises(Shed, match="tokens") as shed:
            it.take("t", 1, 0.0)
        assert shed.value.retry_after_s == pytest.approx(61.0)
    it.take("t", 1, 61.0)
    it.spend("t", -1_000, 61.0)
    it.take("t", 1, 61.0)
    with pytest.raises(Shed, match="requests") as shed:
        it.take("t", 1, 61.0)
    assert shed.value.code == "rate_limited"
    assert shed.value.retry_after_s == pytest.approx(30.0)


@pytest.mark.promise("Names of tenants cause no unbounded growth.", "tenants")
def test_only_tenants_with_a_rate_are_kept() -> None:
    """Of names without a rate nothing is remembered; a new table keeps the levels of those that stay."""
    it = quotas(t=Tenant(requests_per_min=1), free=Tenant())
    for number in range(100):
        it.take(f"x{number}", 1, 0.0)
    it.take("free", 1, 0.0)
    it.take("t", 1, 0.0)
    assert len(it._buckets) == 1
    assert (it.has_limits("t"), it.has_limits("free"), it.has_limits("x1")) == (True, False, False)
    it.configure({"t": Tenant(requests_per_min=1)})
    with pytest.raises(Shed):
        it.take("t", 1, 0.0)
    it.configure({})
    assert not it._buckets
    it.take("t", 1, 0.0)
