from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.estimators import reuse
from router.core.estimators.reuse import BIN_S, BUCKETS, HORIZON_S, PRIOR, ReuseModel

EDGES_S = [0.0, *(2.0**power for power in range(BUCKETS - 1))]


def chance(memory: ReuseModel, idle_s: float, now_s: float) -> float:
    """That what was idle for so long is asked for again."""
    return memory.reuse_probability(now_s)[reuse.bucket(idle_s)]


def bucket(seconds: float) -> int:
    """The last edge that is not beyond."""
    return max(b for b in range(BUCKETS) if seconds >= EDGES_S[b])


def kaplan_meier(reused_s: list[float], censored_s: list[float]) -> list[float]:
    """P(asked again | idle at the start of each bucket), the textbook way, with the prior in the last bucket."""
    odds = []
    for start in range(BUCKETS):
        survive = 1.0
        for b in range(start, BUCKETS):
            events = sum(bucket(gap) == b for gap in reused_s) + (PRIOR if b == BUCKETS - 1 else 0)
            at_risk = sum(bucket(gap) >= b for gap in reused_s + censored_s) + 2 * PRIOR
            survive *= 1 - events / at_risk
        odds.append(1 - survive)
    return odds


def simulate(seed: int, prompts: int) -> tuple[ReuseModel, list[float], list[float], float]:
    """Prompts of which two thirds come back once after gaps of many sizes: the memory, and what really happened."""
    rng, memory = Random(seed), ReuseModel(10_000)
    starts = [rng.uniform(0, 600) for _ in range(prompts)]
    returns = [start + 2 ** rng.uniform(-2, 9) for start in starts]
    arrivals = [(start, n, 0) for n, start in enumerate(starts)]
    arrivals += [(back, n, 1) for n, back in enumerate(returns) if n % 3]
    gaps_s = []
    for now_s, n, turn in sorted(arrivals):
        gap_s = memory.observe([n * 10 + depth for depth in range(2 + turn)], now_s)
        if gap_s is not None:
            gaps_s.append(gap_s)
    end_s = max(arrivals)[0] + BIN_S
    left_s = [back if n % 3 else start for n, (start, back) in enumerate(zip(starts, returns, strict=True))]
    return memory, gaps_s, [end_s - left for left in left_s], end_s


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_kaplan_meiers(seed: int) -> None:
    """On simulated gaps the odds agree with a brute-force Kaplan-Meier estimate, up to the width of a bin."""
    memory, gaps_s, waiting_s, end_s = simulate(seed, 300)
    assert len(gaps_s) == 200
    expected = kaplan_meier(gaps_s, waiting_s)
    got = [chance(memory, edge_s, end_s) for edge_s in EDGES_S]
    assert got == pytest.approx(expected, abs=0.03)


def test_before_anything_is_seen_odds_are_even() -> None:
    """The prior is a reuse and an ending."""
    memory = ReuseModel(10)
    assert chance(memory, 0.0, 0.0) == chance(memory, 1e6, 0.0) == 0.5


def test_what_always_returns_soon_is_worth_keeping_and_then_not() -> None:
    """Prompts that always come back within ten seconds: young ones will, ones idle for minutes will not."""
    memory = ReuseModel(10_000)
    for n in range(300):
        memory.observe([n], n * 10.0)
        memory.observe([n, -n - 1], n * 10.0 + 5.0)
    assert chance(memory, 1.0, 3_000.0) > 0.4
    assert chance(memory, 300.0, 3_000.0) < 0.05


def test_a_gap_is_since_the_deepest_mark() -> None:
    """A prompt reuses the longest past prompt it runs through, and leaves its own mark."""
    memory = ReuseModel(10)
    assert memory.observe([1, 2], 0.0) is None
    assert memory.observe([1, 2, 3, 4], 10.0) == 10.0
    assert memory.observe([1, 2, 3, 4], 11.0) == 1.0
    assert memory.observe([1, 2], 12.0) is None, "the mark at 2 was taken by the second prompt"
    assert memory.observe([1, 2, 3, 4, 5], 13.0) == 2.0
    assert memory.observe([], 14.0) is None


def test_a_mark_too_old_is_an_ending() -> None:
    """Marks idle for longer than the horizon are dropped, and count against reuse."""
    memory = ReuseModel(10_000)
    for n in range(50):
        memory.observe([n], float(n))
    memory.observe([99], HORIZON_S + 100.0)
    assert len(memory) == 1
    assert chance(memory, 0.0, HORIZON_S + 100.0) < 0.1


def test_odds_are_computed_once_a_second() -> None:
    """Asking often is cheap: within a second the answer is the same; afterwards what happened counts."""
    memory = ReuseModel(100)
    before = chance(memory, 0.0, 10.0)
    memory.observe([1], 10.1)
    memory.observe([1], 10.2)
    assert chance(memory, 0.0, 10.9) == before
    assert chance(memory, 0.0, 11.1) > before


STEPS = st.tuples(st.integers(0, 30), st.integers(0, 5), st.floats(0, 2_000))


@given(steps=st.lists(STEPS, max_size=80), marks_max=st.integers(1, 8))
@settings(deadline=None)
def test_memory_is_bounded_and_odds_are_odds(steps: list[tuple[int, int, float]], marks_max: int) -> None:
    """Whatever is asked for: at most `marks_max` marks, bins that add up to them, odds in [0, 1] that fall with
    every second of idleness that no reuse has been seen behind."""
    memory, now_s = ReuseModel(marks_max), 0.0
    for family, depth, gap_s in steps:
        now_s += gap_s
        memory.observe([family * 10 + level for level in range(depth)], now_s)
        assert len(memory) <= marks_max
        assert sum(memory._bins.values()) == len(memory)
        odds = [chance(memory, edge_s, now_s) for edge_s in EDGES_S]
        assert all(0 <= chance <= 1 for chance in odds)
        assert odds == sorted(odds, reverse=True)


def test_a_mark_that_is_withdrawn_says_nothing() -> None:
    """Of a prompt that is known not to return neither a reuse nor an ending is counted, and no mark waits; what it
    reused itself counts."""
    memory, plain = ReuseModel(100), ReuseModel(100)
    for each in (memory, plain):
        each.observe([1, 2], 0.0)
        each.observe([1, 2, 3], 8.0)
    memory.observe([7, 8], 9.0)
    memory.withdraw(8)
    memory.withdraw(8)
    assert memory.observe([1, 2, 3, 4], 10.0, final=True) == plain.observe([1, 2, 3, 4], 10.0) == 2.0
    plain.withdraw(4)
    assert len(memory) == len(plain) == 0
    assert list(memory.reuse_probability(11.0)) == list(plain.reuse_probability(11.0))
