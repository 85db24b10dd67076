from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from router.core.admission.hold_back import HELD_MAX, TRIES_MAX, DeferredQueue

HOLD_S = 10.0
TENANTS = "xyz"


class HeldBack(RuleBasedStateMachine):
    """Against a plain dict: who is held, since when, and who goes first."""

    @initialize()
    def begin(self) -> None:
        """Nobody is held."""
        self.holding: DeferredQueue[int] = DeferredQueue()
        self.since_s: dict[int, float] = {}
        self.tenants: dict[int, str] = {}
        self.now_s, self.next = 100.0, 0

    @precondition(lambda self: not self.holding.full)
    @rule(count=st.integers(1, 9), tenant=st.sampled_from(TENANTS), waited_s=st.sampled_from([0.0, 0.0, 4.0]))
    def add(self, count: int, tenant: str, waited_s: float) -> None:
        """Some come, or come again."""
        for _ in range(min(count, HELD_MAX - len(self.since_s))):
            self.holding.add(self.next, self.now_s - waited_s, tenant)
            self.since_s[self.next], self.tenants[self.next] = self.now_s - waited_s, tenant
            self.next += 1

    @rule(which=st.integers(0, 1_000))
    def remove(self, which: int) -> None:
        """One goes, if it is held."""
        who = which % (self.next + 1)
        assert self.holding.remove(who) == (self.since_s.pop(who, None) is not None)

    @rule(passes_s=st.floats(0, 5))
    def wait(self, passes_s: float) -> None:
        """Time goes by."""
        self.now_s += passes_s

    @rule()
    def ask(self) -> None:
        """Whose time is over is said, oldest first; and of each tenant that is tried the oldest are tried first."""
        over = self.holding.over(self.now_s, HOLD_S)
        assert set(over) == {who for who, at_s in self.since_s.items() if at_s <= self.now_s - HOLD_S}
        assert [self.since_s[who] for who in over] == sorted(self.since_s[who] for who in over)
        few = self.holding.next_few()
        assert len(set(few)) == len(few) == min(TRIES_MAX, len(self.since_s))
        for tenant in TENANTS:
            tried = [self.since_s[who] for who in few if self.tenants[who] == tenant]
            waiting = sorted(at_s for who, at_s in self.since_s.items() if self.tenants[who] == tenant)
            assert tried == waiting[: len(tried)]
        assert len(self.holding) == len(self.since_s)
        assert set(self.holding) == set(self.since_s)


TestHeldBack = HeldBack.TestCase


def test_the_oldest_goes_first() -> None:
    """Whoever has been held longest is tried at every call, until it is held no longer."""
    holding: DeferredQueue[int] = DeferredQueue()
    for who in range(50):
        holding.add(who, float(who))
    for _ in range(3):
        assert holding.next_few() == list(range(TRIES_MAX))
    holding.remove(0)
    assert holding.next_few()[0] == 1


def test_tenants_have_turns() -> None:
    """A tenant with a hundred prompts held, all of them older, does not keep another one's from being tried."""
    holding: DeferredQueue[int] = DeferredQueue()
    for who in range(100):
        holding.add(who, 0.0, "many")
    holding.add(100, 5.0, "one")
    assert 100 in holding.next_few()


def test_one_that_comes_again_keeps_its_seniority() -> None:
    """It is tried before those that came while it was away."""
    holding: DeferredQueue[int] = DeferredQueue()
    for who in range(TRIES_MAX):
        holding.add(who, 10.0)
    holding.add(99, 3.0)
    assert holding.next_few()[0] == 99
