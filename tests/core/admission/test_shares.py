"""Places that are kept free for tenants, by what they use."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.admission.shares import KEPT_TIMES, TENANTS_MAX, USE_S, Shares
from tests.core.admission.fleet import Fleet

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0.0, 30.0)), max_size=30)


@given(EVENTS)
def test_what_is_kept_follows_what_others_have_open(events: list[tuple[str, bool, float]]) -> None:
    """Now, or on the mean of about USE_S, as a sum over all steps has it."""
    shares, opened, mean, now_s = Shares(), dict.fromkeys("ab", 0), dict.fromkeys("ab", 0.0), 0.0
    for tenant, opens, gone_s in events:
        shares.note_request(tenant, now_s)
        if opens or not opened[tenant]:
            shares.on_lease_opened(tenant, now_s)
            opened[tenant] += 1
        else:
            shares.on_lease_closed(tenant, now_s)
            opened[tenant] -= 1
        now_s += gone_s
        for name in "ab":
            mean[name] = opened[name] + (mean[name] - opened[name]) * exp(-gone_s / USE_S)
        if all(opened.values()):
            for name, other in ("ab", "ba"):
                kept, lasting = shares.compute_reserved(name, now_s)
                assert lasting == pytest.approx(KEPT_TIMES * mean[other], abs=1e-6)
                assert kept == pytest.approx(KEPT_TIMES * max(mean[other], opened[other]), abs=1e-6)


def test_what_is_remembered_of_tenants_has_a_bound() -> None:
    """Of those that ask and have nothing open the oldest are forgotten."""
    shares = Shares()
    for number in range(2 * TENANTS_MAX):
        shares.note_request(f"t{number}", float(number))
        shares.on_lease_opened(f"t{number}", float(number))
        shares.on_lease_closed(f"t{number}", float(number))
    assert len(shares._uses) <= TENANTS_MAX
    assert shares.has_other_tenants("other", 2.0 * TENANTS_MAX)


def test_a_rare_request_of_another_tenant_costs_a_busy_one_no_places() -> None:
    """While it is open two places are kept beside it; behind that next to none, though its tenant was about within the
    minute."""
    fleet = Fleet(in_flight_max=40, queue_timeout_s=1_000.0)
    (early,) = fleet.ask("b")
    answers = [fleet.ask("a") for _ in range(39)]
    assert [len(each) for each in answers] == [1] * 38 + [0]
    fleet.finish(early)
    assert len(answers[-1]) == 1
    assert len(fleet.ask("a")) == 1
