"""Traffic by replica and by tenant: what counts, for how long, and what is forgotten."""

from __future__ import annotations

import pytest

from router.core.insights.ledger.decaying_sums import RAISE_WINDOWS
from router.core.insights.ledger.recent_traffic import TRAFFIC_WINDOW_S, RecentTraffic, ReplicaTraffic
from router.core.types.cache_misses import MissReason
from tests.core.insights.ledger.records import BEGAN_S, ledger, record

FAST, SLOW, OTHER = "http://fast", "http://slow", "http://other"


def test_rates_shares_and_times_of_each_replica() -> None:
    """Requests a second, the share of each replica, and percentiles within a bucket of 25 %."""
    traffic = RecentTraffic(0.0)
    for second in range(600):
        traffic.move(float(second))
        for _ in range(3):
            traffic.add(FAST, 0.1)
        traffic.add(SLOW, 2.0 if second % 5 else 8.0)
    traffic.move(600.0)
    fast, slow = (traffic.of_replica(name, traffic.requests) for name in (FAST, SLOW))
    assert fast.requests_per_s == pytest.approx(3.0, rel=0.02)
    assert slow.requests_per_s == pytest.approx(1.0, rel=0.02)
    assert (fast.share, slow.share) == (0.75, 0.25)
    assert fast.ttft_p50_s == pytest.approx(0.1, rel=0.25)
    assert slow.ttft_p50_s == pytest.approx(2.0, rel=0.25)
    assert slow.ttft_p90_s == pytest.approx(8.0, rel=0.25)
    assert traffic.of_replica(OTHER, traffic.requests) == ReplicaTraffic(share=0.0)


def test_the_first_seconds_have_the_same_rate() -> None:
    """A young router shows the rate of its own time, not a part of it."""
    traffic = RecentTraffic(0.0)
    for second in range(10):
        traffic.move(float(second))
        traffic.add(FAST, None)
    traffic.move(10.0)
    own = traffic.of_replica(FAST, traffic.requests)
    assert own.requests_per_s == pytest.approx(1.0, rel=0.1)
    assert (own.ttft_p50_s, own.ttft_p90_s, own.first_tokens) == (None, None, 0.0)


def test_a_replica_that_becomes_fast_again_is_fast_within_minutes() -> None:
    """Older times count less and less."""
    traffic = RecentTraffic(0.0)
    for second in range(600):
        traffic.move(float(second))
        traffic.add(SLOW, 5.0 if second < 400 else 0.1)
    own = traffic.of_replica(SLOW, traffic.requests)
    assert own.ttft_p50_s == pytest.approx(0.1, rel=0.25)


@pytest.mark.parametrize("windows", [10, 2 * RAISE_WINDOWS])
def test_names_that_are_gone_need_no_memory(windows: float) -> None:
    """Any number of replicas that came and went, and of tenants, leave nothing; also when weights begin anew."""
    traffic = RecentTraffic(0.0)
    for number in range(1_000):
        traffic.add(f"http://{number}", 0.1)
        traffic.add_tenant(f"tenant-{number}", 1, 100)
    assert len(traffic) == 2_000
    traffic.move(windows * TRAFFIC_WINDOW_S)
    assert len(traffic) == 0
    assert traffic.of_replica("http://1", traffic.requests) == ReplicaTraffic()


def test_weights_that_begin_anew_change_no_figure() -> None:
    """Sums that are multiplied then stay in proportion."""
    traffic = RecentTraffic(0.0)
    at_s = RAISE_WINDOWS * TRAFFIC_WINDOW_S
    traffic.move(at_s - 1)
    for _ in range(40):
        traffic.add(FAST, 0.1)
    traffic.move(at_s + 1)
    own = traffic.of_replica(FAST, traffic.requests)
    assert own.requests == pytest.approx(40, rel=0.05)
    assert own.ttft_p50_s == pytest.approx(0.1, rel=0.25)


def test_the_tenant_with_the_most_computed_tokens_is_first() -> None:
    """Through the ledger: cached tokens are no work, and a tenant's groups add up."""
    seen = ledger()
    for number in range(30):
        seen.observe(record(number, misses={MissReason.NEW: 900}, tenant="batch", route="/v1/completions"))
        seen.observe(record(number, misses={MissReason.NEW: 900}, tenant="batch", route="/v1/chat/completions"))
        seen.observe(record(number, hit=10_000, misses={MissReason.NEW: 200}, tenant="acme", ttft_s=0.2))
    seen.settle(BEGAN_S + 40)
    first, second = seen.traffic.tenants(5)
    assert (first.tenant, second.tenant) == ("batch", "acme")
    assert first.computed_share == pytest.approx(0.9, rel=0.01)
    assert first.request_share == pytest.approx(2 / 3, rel=0.01)
    assert [each.tenant for each in seen.traffic.tenants(1)] == ["batch"]
    own = seen.traffic.of_replica("http://a", seen.traffic.requests)
    assert own.share == 1.0
    assert own.ttft_p50_s == pytest.approx(0.2, rel=0.25)
