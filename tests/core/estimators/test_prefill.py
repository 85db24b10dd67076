from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.estimators.prefill import LEARN_TOKENS_MIN, OUTLIER, PrefillFit, PrefillModel
from tests.support.examples import examples

H100 = PrefillModel(floor_ms=12.0, per_token_ms=0.055, per_token_context_ms=1.1e-6)
SLOW = PrefillModel(floor_ms=40.0, per_token_ms=0.9, per_token_context_ms=2e-5)
PRIOR = PrefillModel()


def taught(truth: PrefillModel, observations: int, *, noise: float = 0.0, seed: int = 1) -> PrefillFit:
    """A fit that saw prompts of many sizes on an engine that behaves like `truth`."""
    fit, rng = PrefillFit(), Random(seed)
    for _ in range(observations):
        uncached, cached = rng.randrange(1_000, 30_000), rng.choice([0, rng.randrange(60_000)])
        fit.observe(uncached, cached, truth.ms(uncached, cached) * (1 + rng.gauss(0, noise)))
    return fit


@pytest.mark.parametrize("truth", [H100, SLOW])
@pytest.mark.parametrize("seed", range(5))
def test_a_known_engine_is_recovered(truth: PrefillModel, seed: int) -> None:
    """After 200 answers with 10 % noise, predictions are within 10 % of the truth over the range seen."""
    fit = taught(truth, 200, noise=0.1, seed=seed)
    for uncached, cached in [(2_000, 0), (8_000, 0), (8_000, 30_000), (15_000, 0), (25_000, 0), (25_000, 50_000)]:
        assert fit.model.ms(uncached, cached) == pytest.approx(truth.ms(uncached, cached), rel=0.1)


def test_a_few_answers_are_enough_to_be_useful() -> None:
    """Ten answers of a fast engine bring the prior's error of 80 % under 25 %."""
    model = taught(H100, 10).model
    assert model.ms(8_000, 0) == pytest.approx(H100.ms(8_000, 0), rel=0.25)


def test_the_first_answer_outweighs_the_guess() -> None:
    """Before anything was seen the model is the first guess; one answer moves it nearly all of the way."""
    fit = PrefillFit()
    assert fit.model == PRIOR
    fit.observe(8_000, 0, PRIOR.ms(8_000, 0) * 4)
    assert fit.model.ms(8_000, 0) == pytest.approx(PRIOR.ms(8_000, 0) * 4, rel=0.05)


def test_an_engine_that_changes_is_followed() -> None:
    """Old observations are forgotten: three hundred answers after a slow-down the new speed is known."""
    fit, rng = taught(H100, 300), Random(2)
    for _ in range(300):
        uncached = rng.randrange(1_000, 30_000)
        fit.observe(uncached, 0, SLOW.ms(uncached, 0))
    assert fit.model.ms(10_000, 0) == pytest.approx(SLOW.ms(10_000, 0), rel=0.1)


@pytest.mark.parametrize("tokens", [1_500, 4_000, 30_000])
def test_prompts_of_one_size_do_not_make_hits_worthless(tokens: int) -> None:
    """A benchmark's equal prompts say nothing of the floor: time is still taken for tokens, so a hit saves it."""
    fit = PrefillFit()
    for _ in range(50):
        fit.observe(tokens, 0, 1_000.0)
    assert fit.model.ms(tokens, 0) == pytest.approx(1_000.0, rel=0.02)
    assert fit.model.ms(tokens / 10, 0) < 300.0


def test_a_pause_is_not_prefill() -> None:
    """One answer a thousand times too slow, or in no time, counts as OUTLIER times too slow or too fast."""
    fit = taught(H100, 100)
    before = fit.model.ms(8_000, 0)
    none, fast = taught(H100, 100), taught(H100, 100)
    none.observe(8_000, 0, 0.0)
    fast.observe(8_000, 0, before / OUTLIER)
    assert none.model == fast.model
    fit.observe(8_000, 0, before * 1_000)
    assert before < fit.model.ms(8_000, 0) < before * (1 + OUTLIER * 0.1)


def test_small_prompts_and_impossible_times_teach_nothing() -> None:
    """Below the minimum the floor and noise dominate; a time before the request is a clock's fault."""
    fit = PrefillFit()
    fit.observe(LEARN_TOKENS_MIN - 1, 0, 1.0)
    fit.observe(LEARN_TOKENS_MIN, 0, -1.0)
    assert (fit.observations, fit.model) == (0, PRIOR)


OBSERVATIONS = st.tuples(st.integers(0, 200_000), st.integers(0, 1_000_000), st.floats(0, 1e7))


@given(observations=st.lists(OBSERVATIONS, max_size=40))
@example(observations=[(1_000, 0, 5e-324)])  # a time that is 0 as a share of the guess's
@settings(deadline=None, max_examples=examples(50))
def test_no_history_makes_work_free_or_negative(observations: list[tuple[int, int, float]]) -> None:
    """Whatever was seen, coefficients are not negative and more tokens never take less time."""
    fit = PrefillFit()
    for uncached, cached, ms in observations:
        fit.observe(uncached, cached, ms)
    model = fit.model
    assert min(model.floor_ms, model.per_token_ms, model.per_token_context_ms) >= 0
    assert model.ms(16_000, 0) > 0, "the unit of backlogs"
    assert 0 <= model.ms(10, 0) <= model.ms(1_000, 0) <= model.ms(1_000, 5_000) <= model.ms(50_000, 5_000)


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_what_is_held_saves_the_same_before_any_rest(cached: int, rest: int) -> None:
    """What a cached beginning saves is the time of the whole prompt less that of its rest."""
    for model in (H100, SLOW):
        expected = model.ms(cached + rest, 0) - model.ms(rest, cached)
        assert model.saved_ms(cached) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.floats(1 / 64, 64))
def test_a_replica_that_takes_times_as_long_does_so_at_every_size(uncached: int, cached: int, factor: float) -> None:
    """A factor scales every term alike."""
    for model in (H100, SLOW):
        assert model.times(factor).ms(uncached, cached) == pytest.approx(factor * model.ms(uncached, cached))


def test_sums_from_before_are_taken_by_a_fit_that_has_none() -> None:
    """A fit that begins with another one's sums has its model; one that has observed anything keeps to that."""
    before, after, own = taught(SLOW, 30), PrefillFit(), taught(H100, 3)
    after.adopt(before.sums.xx, before.sums.xy, before.observations)
    assert (after.model, after.observations) == (before.model, 30)
    after.observe(8_000, 0, H100.ms(8_000, 0))
    assert before.model == taught(SLOW, 30).model
    known = own.model
    own.adopt(before.sums.xx, before.sums.xy, before.observations)
    assert (own.model, own.observations) == (known, 3)


def test_sums_of_other_routers_count_as_observed_here() -> None:
    """A fit without answers of its own has the model of another router's sums; those of a router that is gone count no
    more with the next answer."""
    fit, other = PrefillFit(), taught(SLOW, 30)
    fit.tell("other", other.sums.xx, other.sums.xy)
    assert fit.model.ms(8_000, 0) == pytest.approx(other.model.ms(8_000, 0))
    assert fit.observations == 0
    fit.forget("other")
    fit.observe(8_000, 0, H100.ms(8_000, 0))
    assert fit.model.ms(8_000, 0) == pytest.approx(H100.ms(8_000, 0), rel=0.05)
