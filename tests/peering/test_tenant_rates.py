"""One rate over all routers, in simulated time: routers that hear each other late, lose each other, and come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.admission.rate_limits import TenantRateLimits
from router.core.types.placements import Shed
from router.peering.frames import TENANTS_MAX, TenantUsage
from router.peering.tenant_rates import DistributedRateLimiter

STEP_S = 0.01


@dataclass
class Tenant:
    """Only its rates."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None


@dataclass
class SimulatedRouter:
    """One router: its buckets, and what it has let in."""

    quotas: TenantRateLimits
    together: DistributedRateLimiter
    let_in: int = 0
    tokens: int = 0
    inbox: deque[tuple[float, int, list[TenantUsage]]] = field(default_factory=deque)
    reachable: bool = True


class Fleet:
    """Routers whose messages take `delay_s`, in steps of STEP_S."""

    def __init__(
        self, count: int, delay_s: float = 0.05, loss: float = 0.0, *, assumed: int = 2, **rates: float
    ) -> None:
        self.now_s, self.delay_s, self.loss, self.random = 0.0, delay_s, loss, Random(7)
        self.tenants = {"acme": Tenant(**rates)}
        self.routers = [self._made(assumed) for _ in range(count)]
        for router in self.routers:
            router.together.on_disconnected()
            router.together.on_connected()

    def _made(self, assumed: int) -> SimulatedRouter:
        quotas = TenantRateLimits()
        quotas.configure(self.tenants)
        together = DistributedRateLimiter(quotas, routers_assumed=assumed, clock=lambda: self.now_s)
        return SimulatedRouter(quotas, together)

    def join(self, assumed: int = 2) -> SimulatedRouter:
        """A router that starts now."""
        router = self._made(assumed)
        self.routers.append(router)
        router.together.on_disconnected()
        router.together.on_connected()
        for other in self.routers:
            other.together.say(everything=True)
        return router

    def cut(self, *routers: SimulatedRouter) -> None:
        """These hear nobody any more, and nobody hears them."""
        for router in routers:
            router.reachable = False
            router.together.on_disconnected()
        for number, router in enumerate(self.routers):
            router.inbox.clear()
            for other in self.routers:
                if not router.reachable and other is not router:
                    other.together.silent(number, left=False)

    def mend(self) -> None:
        """All hear each other again."""
        for router in self.routers:
            if not router.reachable:
                router.reachable = True
                router.together.on_connected()

    def run(self, for_s: float, weights: list[float], per_s: float, tokens: int = 1) -> int:
        """Offer so many requests a second, to the routers by weight. Returns how many were let in."""
        before, end_s, owed = self.let_in, self.now_s + for_s, 0.0
        while self.now_s < end_s:
            owed += per_s * STEP_S
            while owed >= 1:
                owed -= 1
                self._ask(self.random.choices(self.routers, weights)[0], tokens)
            if round(self.now_s / STEP_S) % 5 == 0:
                self._say()
            for router in self.routers:
                while router.inbox and router.inbox[0][0] <= self.now_s:
                    _, origin, said = router.inbox.popleft()
                    router.together.hear(origin, said)
            if round(self.now_s / STEP_S) % 100 == 0:
                for router in self.routers:
                    router.together.tick()
            self.now_s += STEP_S
        return self.let_in - before

    @property
    def let_in(self) -> int:
        """Requests that all have let in."""
        return sum(router.let_in for router in self.routers)

    def _ask(self, router: SimulatedRouter, tokens: int) -> None:
        try:
            router.quotas.take("acme", tokens, self.now_s)
        except Shed:
            return
        router.let_in += 1
        router.tokens += tokens

    def _say(self) -> None:
        for number, router in enumerate(self.routers):
            said = router.together.say()
            for other in self.routers:
                if other is not router and other.reachable and router.reachable and self.random.random() >= self.loss:
                    other.inbox.append((self.now_s + self.delay_s, number, said))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(("delay_s", "loss"), [(0.005, 0.0), (0.2, 0.05)])
def test_a_rate_holds_over_all_routers(count: int, delay_s: float, loss: float) -> None:
    """A tenant that asks for three times its rate gets it, within 5 %, however many routers it asks, and however
    unevenly; a full bucket is given out once, not once by each router."""
    fleet = Fleet(count, delay_s, loss, requests_per_min=600)
    first = fleet.run(60.0, [1.0 + n for n in range(count)], 30)
    assert 0.95 * 1_200 <= first <= 1.05 * 1_200  # the bucket, and what came in a minute
    then = fleet.run(300.0, [1.0] * count, 30)
    assert 0.95 * 3_000 <= then <= 1.05 * 3_000


def test_a_rate_of_tokens_holds_over_all_routers() -> None:
    """Likewise of tokens, whose prompts go into debt."""
    fleet = Fleet(4, tokens_per_min=60_000)
    fleet.run(120.0, [1.0] * 4, 20, tokens=500)
    before = sum(router.tokens for router in fleet.routers)
    fleet.run(300.0, [1.0] * 4, 20, tokens=500)
    used = sum(router.tokens for router in fleet.routers) - before
    assert 0.95 * 300_000 <= used <= 1.05 * 300_000


def test_alone_each_router_has_the_share_that_it_had() -> None:
    """When nobody hears anybody each goes on with its part, by what it had lately: together no more than the rate, and
    nearly all of it; and when all hear each other again nothing is owed and nothing is free."""
    fleet, weights = Fleet(4, requests_per_min=600), [8.0, 4.0, 2.0, 1.0]
    fleet.run(120.0, weights, 8)
    fleet.cut(*fleet.routers)
    parts = [router.quotas.part("acme") for router in fleet.routers]
    assert sum(parts) == pytest.approx(1.0, abs=0.05)
    assert parts[0] > parts[1] > parts[2] > parts[3] > 0
    fleet.run(60.0, weights, 30)  # what was left in the bucket
    let_in = fleet.run(300.0, weights, 30)
    assert 0.9 * 3_000 <= let_in <= 1.05 * 3_000
    fleet.mend()
    assert 0.9 * 600 <= fleet.run(60.0, weights, 30) <= 1.1 * 600
    assert all(router.quotas.part("acme") == 1.0 for router in fleet.routers)


def test_one_that_is_cut_off_keeps_its_part_for_a_minute() -> None:
    """Those that still hear each other leave the part of one that fell silent alone for a minute, as it may be alone
    and not dead; then they have all of it. One that says goodbye leaves it at once."""
    fleet, weights = Fleet(4, requests_per_min=600), [1.0] * 4
    fleet.run(120.0, weights, 30)
    fleet.cut(fleet.routers[3])
    assert 0.9 * 500 <= fleet.run(50.0, weights, 30) <= 1.05 * 500
    fleet.run(20.0, weights, 30)
    assert fleet.routers[0].quotas.part("acme") == 1.0
    fleet.mend()
    fleet.run(1.0, weights, 30)
    for router in fleet.routers[:3]:
        router.together.silent(3, left=True)
        assert router.quotas.part("acme") == 1.0


def test_a_router_that_starts_brings_no_new_bucket() -> None:
    """A tenant that has used up its rate gets nothing more from a router that has just started, once that has heard the
    others; and before it has heard anybody, no more than a part."""
    fleet = Fleet(3, requests_per_min=600)
    fleet.run(120.0, [1.0] * 3, 30)
    late = fleet.join()
    fleet.run(1.0, [1.0, 1.0, 1.0, 0.0], 30)
    assert fleet.run(60.0, [0.0, 0.0, 0.0, 1.0], 30) <= 1.1 * 600
    assert late.let_in <= 1.1 * 600
    never = Fleet(1, requests_per_min=600).join(assumed=4)
    never.together = DistributedRateLimiter(never.quotas, routers_assumed=4, clock=lambda: 0.0)
    never.together.on_disconnected()
    assert never.quotas.part("acme") == 0.25


def test_many_tenants_are_all_told() -> None:
    """However many tenants spend at once, each is told within a few messages, and none of them is too long."""
    quotas, many = TenantRateLimits(), 3 * TENANTS_MAX
    quotas.configure({f"t{n}": Tenant(requests_per_min=60) for n in range(many)})
    together = DistributedRateLimiter(quotas, routers_assumed=1, clock=lambda: 0.0)
    for n in range(many):
        quotas.take(f"t{n}", 1, 0.0)
    told: set[str] = set()
    for _ in range(3):
        said = together.say()
        assert len(said) <= TENANTS_MAX
        told |= {each.tenant for each in said}
    assert len(told) == many


spent = st.builds(
    TenantUsage,
    st.sampled_from(["acme", "nobody"]),
    st.floats(-1e12, 1e12),
    st.floats(-1e12, 1e12),
    st.none() | st.floats(-1e12, 1e12),
    st.none() | st.floats(-1e12, 1e12),
)


@pytest.mark.promise("No request waits for the shared store or fails with it.", "store")
@given(st.lists(st.tuples(st.integers(1, 3), st.lists(spent, max_size=3), st.integers(0, 5)), max_size=30))
@settings(max_examples=100)
def test_whatever_is_heard_a_tenant_is_shut_out_for_a_minute_a_message_at_most(
    heard: list[tuple[int, list[TenantUsage], int]],
) -> None:
    """No message, true or not, takes more from a tenant than one bucket, or gives it more than there may be; and no
    router's messages take more together than its bucket and what has come into it."""
    now_s = 0.0
    quotas = TenantRateLimits()
    quotas.configure({"acme": Tenant(requests_per_min=60, tokens_per_min=600)})
    together = DistributedRateLimiter(quotas, routers_assumed=2, clock=lambda: now_s)
    together.on_disconnected()
    together.on_connected()
    for origin, said, event in heard:
        before = quotas.get_remaining("acme", now_s)
        together.hear(origin, said)
        after = quotas.get_remaining("acme", now_s)
        for was, now, limit in zip(before, after, (60.0, 600.0), strict=True):
            assert was is not None
            assert now is not None
            assert min(was, 0.0) - limit - 1e-6 <= now <= limit
        if event == 0:
            together.silent(origin, left=bool(len(said) % 2))
        elif event == 1:
            together.on_disconnected()
        elif event == 2:
            together.on_connected()
        assert 0 < quotas.part("acme") <= 1
        now_s += event
        together.tick()


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 5)), max_size=40))
def test_many_messages_take_no_more_than_a_bucket_and_what_came_into_it(said: list[tuple[float, float]]) -> None:
    """One router says that more and more was spent: what is taken is what its tenant could have used there."""
    now_s, count, taken = 0.0, 0.0, [0.0, 0.0]
    quotas = TenantRateLimits()
    quotas.configure({"acme": Tenant(requests_per_min=60, tokens_per_min=600)})
    together = DistributedRateLimiter(quotas, routers_assumed=2, clock=lambda: now_s)
    together.on_disconnected()
    together.on_connected()
    together.hear(7, [TenantUsage("acme", 0.0, 0.0, 60.0, 600.0)])  # where counting begins
    for more, wait_s in said:
        count += more
        before = quotas.get_remaining("acme", now_s)
        together.hear(7, [TenantUsage("acme", count, count)])
        after = quotas.get_remaining("acme", now_s)
        for n, (was, now) in enumerate(zip(before, after, strict=True)):
            assert was is not None
            assert now is not None
            taken[n] += was - now
        assert taken[0] <= 60 + now_s + 1e-6
        assert taken[1] <= 600 + 10 * now_s + 1e-6
        now_s += wait_s


def test_a_debt_at_another_router_is_paid_as_its_bucket_is_filled() -> None:
    """Answers of five minutes' worth ended at one router at once: at this one the tenant waits as long as there, and no
    longer."""
    now_s = 0.0
    quotas = TenantRateLimits()
    quotas.configure({"acme": Tenant(tokens_per_min=600)})
    together = DistributedRateLimiter(quotas, routers_assumed=2, clock=lambda: now_s)
    together.on_disconnected()
    together.on_connected()
    together.hear(7, [TenantUsage("acme", 0.0, 0.0, None, 600.0)])
    now_s = 10.0
    while now_s < 400.0:
        together.hear(7, [TenantUsage("acme", 0.0, 3_000.0)])
        left = quotas.get_remaining("acme", now_s)[1]
        assert left is not None
        assert (left > 1.0) == (now_s >= 10.0 + 60.0 * 4 + 1)
        now_s += 1.0
