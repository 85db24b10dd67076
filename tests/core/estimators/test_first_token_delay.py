"""The delay of a replica's first tokens that its work does not explain."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.estimators.first_token_delay import DELAY_MIN_MS, FADE_S, SAMPLES, FirstTokenDelay

MS = st.floats(0, 1e6)


def observed(late_ms: list[float]) -> FirstTokenDelay:
    """A delay that saw these differences, a second apart."""
    delay = FirstTokenDelay()
    for second, each in enumerate(late_ms):
        delay.observe(100.0, 100.0 + each, float(second))
    return delay


@pytest.mark.parametrize("late_ms", [300.0, 700.0, 3_000.0])
def test_a_delay_of_every_first_token_is_found(late_ms: float) -> None:
    """Whatever else some of them waited for; and not before there are enough of them."""
    rng = Random(1)
    noisy = [late_ms + rng.choice([0.0, 5.0, 4_000.0]) for _ in range(4 * SAMPLES)]
    assert observed(noisy).ms == pytest.approx(late_ms, abs=5.0)
    assert observed(noisy[: SAMPLES - 1]).ms == 0.0


def test_one_first_token_in_time_proves_that_there_is_none() -> None:
    """Seven of eight may have waited for work that nobody announced."""
    assert observed([3_000.0] * (SAMPLES - 1) + [0.0]).ms == 0.0
    assert observed([DELAY_MIN_MS - 1.0] * SAMPLES).ms == 0.0


def test_a_delay_that_no_first_token_shows_is_forgotten() -> None:
    """It kept requests away, so nothing else would ever show that it is over."""
    delay = observed([4_000.0] * SAMPLES)
    now_s = SAMPLES - 1.0
    delay.fade(now_s + FADE_S - 0.1)
    assert delay.ms == 4_000.0
    seen = []
    for _ in range(5):
        now_s += FADE_S
        delay.fade(now_s)
        seen.append(delay.ms)
    assert seen == [2_000.0, 1_000.0, 500.0, 250.0, 0.0]


@given(st.lists(st.tuples(MS, MS), max_size=3 * SAMPLES))
def test_it_is_never_more_than_any_recent_first_token_was_late(times: list[tuple[float, float]]) -> None:
    """Nor negative: a replica is not preferred for it."""
    delay = FirstTokenDelay()
    for expected_ms, took_ms in times:
        delay.observe(expected_ms, took_ms, 1.0)
    recent = [took_ms - expected_ms for expected_ms, took_ms in times[-SAMPLES:]]
    assert 0 <= delay.ms <= max(0.0, min(recent, default=0.0))
    delay.reset()
    delay.observe(0.0, 1e6, 1.0)
    assert delay.ms == 0.0, "it begins again"
