from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from router.core.holding import HELD_MAX, TRIES_MAX, Holding

HOLD_S = 10.0


class HeldBack(RuleBasedStateMachine):
    """Against a plain dict: who is held, since when, and who goes first."""

    @initialize()
    def begin(self) -> None:
        """Nobody is held."""
        self.holding: Holding[int] = Holding()
        self.since_s: dict[int, float] = {}
        self.now_s, self.next = 0.0, 0

    @precondition(lambda self: not self.holding.full)
    @rule(count=st.integers(1, 9))
    def add(self, count: int) -> None:
        """Some come."""
        for _ in range(min(count, HELD_MAX - len(self.since_s))):
            self.holding.add(self.next, self.now_s)
            self.since_s[self.next] = self.now_s
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
        """A few, and who has been held for too long before all others."""
        few = self.holding.next_few(self.now_s, HOLD_S)
        assert len(few) == min(TRIES_MAX, len(self.since_s))
        assert all(held_s == self.now_s - self.since_s[who] for who, held_s in few)
        over = {who for who, at_s in self.since_s.items() if self.now_s - at_s >= HOLD_S}
        asked = {who for who, _ in few}
        assert asked <= over if len(over) >= TRIES_MAX else asked >= over
        assert len(self.holding) == len(self.since_s)
        assert set(self.holding) == set(self.since_s)


TestHeldBack = HeldBack.TestCase


def test_all_have_their_turn() -> None:
    """As many calls as it takes to ask each once, and everybody was asked once; those that have been held for too long,
    and find no place, likewise."""
    holding: Holding[int] = Holding()
    for who in range(5 * TRIES_MAX):
        holding.add(who, 0.0)
    asked = [who for _ in range(5) for who, _ in holding.next_few(1.0, HOLD_S)]
    assert sorted(asked) == list(range(5 * TRIES_MAX))
    late = [who for _ in range(5) for who, _ in holding.next_few(HOLD_S, HOLD_S)]
    assert sorted(late) == sorted(asked)
