"""Predicted against actual: what earns a grade and what takes it away."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.core.cache_state.calibration import (
    CHECKS,
    DRIFT_TOKENS_MIN,
    EARNED_SHARE,
    HITS,
    HITS_MIN,
    AnswerCheck,
    CounterCheck,
    counters_drift,
)
from router.core.types.replicas import Load
from tests.support.examples import examples

BLOCK = 16


def test_agreement_needs_a_full_window() -> None:
    """Two hundred answers, not fewer, earn trust."""
    check = AnswerCheck()
    for _ in range(CHECKS - 1):
        check.observe(160, 160, BLOCK)
    assert not check.agrees
    check.observe(160, 160, BLOCK)
    assert check.agrees
    assert (check.equal, check.checks) == (CHECKS, CHECKS)


def test_agreement_is_to_the_token_and_forgives_one_in_a_hundred() -> None:
    """Two answers of two hundred may differ by whatever; three may not."""
    check = AnswerCheck()
    for n in range(CHECKS):
        check.observe(160, 160 if n > 1 else 144, BLOCK)
    assert check.agrees
    check.clear()
    for n in range(CHECKS):
        check.observe(160, 160 if n > 2 else 144, BLOCK)
    assert not check.agrees


def test_a_block_more_or_less_is_no_drift() -> None:
    """Late stores cost a block here and there."""
    check = AnswerCheck()
    for n in range(CHECKS):
        check.observe(160, 160 + BLOCK * (-1) ** n, BLOCK)
    assert not check.drifts
    assert not check.agrees


def test_drift_shows_before_the_window_is_full() -> None:
    """Twenty-one answers that are off by more than a block are enough, in either direction."""
    for off in (-2 * BLOCK, 2 * BLOCK):
        check = AnswerCheck()
        for _ in range(20):
            check.observe(160, 160 + off, BLOCK)
        assert not check.drifts
        check.observe(160, 160 + off, BLOCK)
        assert check.drifts


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=CHECKS * 2))
def test_only_the_last_answers_count(answers: list[tuple[int, int]]) -> None:
    """Whatever came before, two hundred right answers agree and do not drift."""
    check = AnswerCheck()
    for predicted, actual in answers:
        check.observe(predicted, actual, BLOCK)
    for _ in range(CHECKS):
        check.observe(64, 64, BLOCK)
    assert check.agrees
    assert not check.drifts


def _load(queries: float, hits: float) -> Load:
    return Load(cache_query_tokens_total=queries, cache_hit_tokens_total=hits)


def test_counters_are_compared_where_answers_are_silent() -> None:
    """Sums of predictions stand against the engine's sums, once enough was looked up."""
    check = CounterCheck()
    assert check.observe(_load(1_000, 100)) is None  # the beginning
    check.note_response(30_000, 40_000, silent=True)
    assert check.observe(_load(41_000, 30_100)) is None  # too little yet
    check.note_response(10_000, 20_000, silent=True)
    assert check.observe(_load(61_000, 30_100)) == (40_000, 30_000)
    assert counters_drift(40_000, 30_000)
    assert not counters_drift(40_000, 39_000)


def test_counters_say_nothing_when_others_use_the_replica() -> None:
    """Prompts that are not ours make the sums incomparable, and so does a restart."""
    check = CounterCheck()
    check.observe(_load(0, 0))
    check.note_response(0, DRIFT_TOKENS_MIN, silent=True)
    assert check.observe(_load(DRIFT_TOKENS_MIN * 2, DRIFT_TOKENS_MIN)) is None
    check.note_response(0, DRIFT_TOKENS_MIN, silent=True)
    assert check.observe(_load(10, 0)) is None  # counters went back


def test_counters_are_left_alone_where_answers_speak() -> None:
    """One answer with a count, or one request placed without events, spoils the window."""
    for predicted, silent in ((100, False), (None, True)):
        check = CounterCheck()
        check.observe(_load(0, 0))
        check.note_response(predicted, DRIFT_TOKENS_MIN, silent=silent)
        assert check.observe(_load(DRIFT_TOKENS_MIN, 0)) is None


def test_counters_that_are_missing_are_no_evidence() -> None:
    """An engine without these metrics is not compared."""
    check = CounterCheck()
    check.note_response(5, DRIFT_TOKENS_MIN, silent=True)
    assert check.observe(Load()) is None


def test_a_block_that_is_always_dropped_is_learned() -> None:
    """From the eighth hit on; it counts for the answers before that too, so the window is as soon full as without. One
    that is dropped no longer is unlearned likewise, and a cache that was emptied changes nothing."""
    check = AnswerCheck()
    for _ in range(HITS_MIN - 1):
        check.observe(160, 144, BLOCK)
    assert (check.dropped_blocks, check.equal) == (0, 0)
    check.observe(160, 144, BLOCK)
    assert (check.dropped_blocks, check.equal) == (1, HITS_MIN)
    for predicted, actual in [(0, 0), (16, 0)] * (CHECKS // 2):
        check.observe(predicted, actual, BLOCK)
    assert check.agrees
    check.clear()
    assert (check.dropped_blocks, check.checks) == (1, 0)
    for _ in range(HITS // 2 + 1):
        check.observe(160, 160, BLOCK)
    assert check.dropped_blocks == 0
    check.forget()
    check.observe(160, 144, BLOCK)
    assert check.dropped_blocks == 0


class DropMachine(RuleBasedStateMachine):
    """Answers of engines that drop a block, do not, find something else, or load from tiers."""

    @initialize()
    def _begin(self) -> None:
        self.check = AnswerCheck()
        self.answers: list[tuple[int, int, bool]] = []
        self.hits: list[int] = []
        self.dropped = 0

    @rule(
        blocks=st.integers(0, 4),
        less=st.sampled_from([0, 1, 1, 3, -1]),
        drops=st.sampled_from([True, True, False]),
        times=st.sampled_from([1, HITS_MIN, CHECKS]),
    )
    def _answered(self, blocks: int, less: int, drops: bool, times: int) -> None:
        predicted, actual = blocks * BLOCK, max(0, blocks - less) * BLOCK
        for _ in range(times):
            self.check.observe(predicted, actual, BLOCK, drops=drops)
            self.answers.append((predicted, actual, drops))
            if predicted and actual and drops:
                self.hits.append(predicted - actual)
                last = self.hits[-HITS:]
                for dropped in (0, 1):
                    if len(last) >= HITS_MIN and 2 * last.count(dropped * BLOCK) > len(last):
                        self.dropped = dropped

    @rule(restart=st.booleans())
    def _over(self, restart: bool) -> None:
        self.answers = []
        if restart:
            self.hits, self.dropped = [], 0
            self.check.forget()
        else:
            self.check.clear()

    @invariant()
    def _is_what_the_answers_say(self) -> None:
        last, check = self.answers[-CHECKS:], self.check
        surplus = [max(0, said - drops * self.dropped * BLOCK) - found for said, found, drops in last]
        assert check.dropped_blocks == self.dropped
        assert (check.equal, check.checks) == (surplus.count(0), len(last))
        assert check.agrees is (len(last) == CHECKS and check.equal >= EARNED_SHARE * CHECKS)
        assert check.drifts is (sum(abs(each) > BLOCK for each in surplus) > 0.1 * CHECKS)


def test_what_is_learned_of_drops_is_what_answers_say() -> None:
    """Against the same found out anew from all answers so far."""
    run_state_machine_as_test(DropMachine, settings=settings(max_examples=examples(40), deadline=None))
