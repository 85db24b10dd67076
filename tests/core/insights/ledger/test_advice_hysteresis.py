"""What is shown stays for a while, and rows change places only for a reason."""

from __future__ import annotations

from itertools import combinations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.insights.ledger.advice_hysteresis import PASSES_RATIO, ROWS_MAX, STAYS_S, STAYS_SHARE, AdviceHysteresis
from tests.support.examples import examples

LEAST = 0.01
KEYS = "abcdef"


class Showing(RuleBasedStateMachine):
    """A list that is asked for again and again, while shares go up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.of = AdviceHysteresis()
        self.now_s = 0.0
        self.worth_s: dict[str, float] = {}  # when each was worth a line last, or half of one while it was shown
        self.shares: dict[str, float] = dict.fromkeys(KEYS, 0.0)
        self.shown: list[str] = []

    @rule(key=st.sampled_from(KEYS), share=st.floats(0, 3 * LEAST))
    def change(self, key: str, share: float) -> None:
        """A row's share of all tokens is another one."""
        self.shares[key] = share

    @rule(passed_s=st.floats(0, STAYS_S))
    def ask(self, passed_s: float) -> None:
        """Somebody reads the page, some time later."""
        self.now_s += passed_s
        before = set(self.shown)
        for key, share in self.shares.items():
            stays = key in before and share > LEAST * STAYS_SHARE
            if share > LEAST or stays:
                self.worth_s[key] = self.now_s
        wanted = [(key, share) for key, share in self.shares.items() if self.of.wants(key, share, LEAST, self.now_s)]
        self.shown = [str(key) for key in self.of.rank_rows(wanted, self.now_s)]
        assert sorted(self.shown) == sorted(key for key, _ in wanted)

    @invariant()
    def rows_come_when_they_are_worth_it_and_stay_a_while(self) -> None:
        """No row is there that was not worth it within the last minute, and none is missing that was."""
        due = {key for key, worth_s in self.worth_s.items() if self.now_s - worth_s < STAYS_S}
        assert due == set(self.shown) or not self.worth_s

    @rule()
    def look_again(self) -> None:
        """Asked twice at one time, the list is the same."""
        before = self.shown
        self.ask(0.0)
        again = self.shown
        self.ask(0.0)
        assert self.shown == again
        assert set(before) <= set(again)


Showing.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestShowing = Showing.TestCase


def test_costs_that_move_a_little_move_no_row() -> None:
    """Two rows that cost about the same keep their places; one that costs a quarter more passes, all that it must."""
    of = AdviceHysteresis()
    assert of.rank_rows([("a", 10.0), ("b", 9.0), ("c", 8.0)], 0.0) == ["a", "b", "c"]
    assert of.rank_rows([("a", 10.0), ("b", 11.0), ("c", 8.0)], 1.0) == ["a", "b", "c"]
    assert of.rank_rows([("a", 10.0), ("b", 12.6), ("c", 8.0)], 2.0) == ["b", "a", "c"]
    costs = {"a": 10.0, "b": 12.0, "c": 12.7}
    order = of.rank_rows(list(costs.items()), 3.0)
    assert all(costs[str(low)] <= PASSES_RATIO * costs[str(high)] for high, low in combinations(order, 2))


def test_a_new_row_stands_where_its_cost_puts_it() -> None:
    """Only rows that were there keep their places for little."""
    of = AdviceHysteresis()
    of.rank_rows([("a", 10.0), ("b", 5.0)], 0.0)
    assert of.rank_rows([("a", 10.0), ("b", 5.0), ("c", 5.1)], 1.0) == ["a", "c", "b"]


def test_rows_are_bounded() -> None:
    """Whatever comes within a minute."""
    of = AdviceHysteresis()
    for number in range(2 * ROWS_MAX):
        assert of.wants(number, 1.0, LEAST, 0.0)
    assert len(of._worth_s) <= ROWS_MAX
    of.rank_rows([], STAYS_S)
    assert not of._worth_s
