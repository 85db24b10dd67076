from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.health import FAILURES_MAX, Health
from router.proxy.retry_budget import RetryBudget
from tests.support.examples import examples


def test_a_replica_starts_unfit_and_one_good_check_brings_it_in() -> None:
    """Nothing is sent to a replica that has not answered yet; the flip is reported once."""
    health = Health()
    assert not health.fit
    assert health.observe(ok=True)
    assert health.fit
    assert not health.observe(ok=True)


def test_a_hiccup_does_not_take_a_replica_out() -> None:
    """Fewer than FAILURES_MAX failures in a row leave it in; a good check in between starts the count again."""
    health = Health(fit=True)
    for _ in range(5):
        for _ in range(FAILURES_MAX - 1):
            assert not health.observe(ok=False)
        assert not health.observe(ok=True)
    assert health.fit
    flips = [health.observe(ok=False) for _ in range(FAILURES_MAX + 2)]
    assert flips == [n == FAILURES_MAX - 1 for n in range(FAILURES_MAX + 2)]
    assert not health.fit


def test_proof_takes_a_replica_out_at_once() -> None:
    """A refused connection needs no second look."""
    health = Health(fit=True)
    assert health.observe(ok=False, proof=True)
    assert not health.fit
    assert not health.observe(ok=False, proof=True)


def test_the_floor_allows_retries_without_requests() -> None:
    """Ten retries at once, then as many per second as the floor says."""
    budget = RetryBudget(ratio=0.0, floor_per_s=10.0)
    assert sum(budget.withdraw(0.0) for _ in range(50)) == 10
    assert sum(budget.withdraw(1.0) for _ in range(50)) == 10
    assert sum(budget.withdraw(1.05) for _ in range(50)) == 0


def test_requests_pay_for_retries() -> None:
    """With a ratio of 0.25, four requests pay for one retry."""
    budget = RetryBudget(ratio=0.25, floor_per_s=1.0, tokens=0.0)
    for _ in range(8):
        budget.deposit()
    assert [budget.withdraw(0.0) for _ in range(4)] == [True, True, False, False]


@given(steps=st.lists(st.one_of(st.none(), st.floats(0.0, 30.0)), max_size=200))
@settings(deadline=None)
def test_a_dead_fleet_is_not_hammered(steps: list[float | None]) -> None:
    """Whatever the order of requests and retries: retries <= ratio x requests + floor x (time + what is saved)."""
    budget, now_s, requests, retries = RetryBudget(ratio=0.5, floor_per_s=2.0), 0.0, 0, 0
    for step in steps:
        if step is None:
            budget.deposit()
            requests += 1
        else:
            now_s += step
            retries += budget.withdraw(now_s)
        assert 0 <= budget.tokens <= 2.0 * 10
        assert retries <= 0.5 * requests + 2.0 * now_s + 10 + 1e-6


def test_no_budget_no_retry() -> None:
    """A ratio and floor of zero spend what is saved and nothing more."""
    budget = RetryBudget(ratio=0.0, floor_per_s=0.0, tokens=0.0)
    budget.deposit()
    assert not budget.withdraw(100.0)
    assert budget.tokens == pytest.approx(0.0)


@pytest.mark.promise("Retries are bounded in any state of the fleet.", "faults")
@given(
    began_s=st.floats(0.0, 1e6),
    rate=st.sampled_from([20, 50, 200]),
    ratio=st.sampled_from([0.0, 0.2, 1.0]),
    floor_per_s=st.sampled_from([0.0, 1.0, 10.0]),
)
@settings(deadline=None, max_examples=examples(50))
def test_what_a_dead_fleet_costs(began_s: float, rate: int, ratio: float, floor_per_s: float) -> None:
    """A fleet that is dead for half a minute, from the first request on: each request is tried again as often as it may
    be, and attempts stay below requests x (1 + ratio), the floor and the ten in stock, whatever the clock says."""
    budget, retries, seconds = RetryBudget(ratio, floor_per_s), 0, 30
    for n in range(rate * seconds):
        now_s = began_s + n / rate
        budget.deposit()
        while budget.withdraw(now_s):
            retries += 1
    assert retries <= ratio * rate * seconds + floor_per_s * seconds + 10 + 1e-3
    assert retries >= min(10, ratio * rate * seconds)
