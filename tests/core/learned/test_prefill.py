from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.fleet.stuck import LEARNED
from router.core.learned.prefill import (
    FADE_S,
    GUESS_WEIGHT,
    LEARN_TOKENS_MIN,
    OUTLIER,
    PRIOR_WEIGHT,
    PrefillFit,
    PrefillModel,
)
from tests.core.learned.fading import fades
from tests.support.examples import examples

H100 = PrefillModel(floor_ms=12.0, per_token_ms=0.055, per_token_context_ms=1.1e-6)
SLOW = PrefillModel(floor_ms=40.0, per_token_ms=0.9, per_token_context_ms=2e-5)
PRIOR = PrefillModel()


def taught(truth: PrefillModel, observations: int, *, noise: float = 0.0, seed: int = 1) -> PrefillFit:
    """A fit that saw prompts of many sizes on an engine that behaves like `truth`."""
    fit, rng = PrefillFit(), Random(seed)
    for _ in range(observations):
        uncached, cached = rng.randrange(1_000, 30_000), rng.choice([0, rng.randrange(60_000)])
        fit.observe(uncached, cached, truth.ms(uncached, cached) * (1 + rng.gauss(0, noise)), PRIOR, GUESS_WEIGHT)
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


def test_the_prior_speaks_first() -> None:
    """Before anything was seen the model is the default; one observation moves a weighty prior part of the way, and
    a first guess nearly all of it."""
    fit = PrefillFit()
    assert fit.model == PRIOR
    fit.observe(8_000, 0, PRIOR.ms(8_000, 0) * 4, PRIOR, PRIOR_WEIGHT)
    assert PRIOR.ms(8_000, 0) < fit.model.ms(8_000, 0) < PRIOR.ms(8_000, 0) * 4
    fleet = PrefillFit()
    fleet.observe(8_000, 0, PRIOR.ms(8_000, 0) * 4, PRIOR, GUESS_WEIGHT)
    assert fleet.model.ms(8_000, 0) == pytest.approx(PRIOR.ms(8_000, 0) * 4, rel=0.05)


def test_a_replica_starts_from_the_fleet() -> None:
    """A prior that knows the truth already is kept by an observation that confirms it."""
    fit = PrefillFit()
    fit.observe(8_000, 0, SLOW.ms(8_000, 0), SLOW, PRIOR_WEIGHT)
    for uncached, cached in [(1_000, 0), (20_000, 0), (4_000, 40_000)]:
        assert fit.model.ms(uncached, cached) == pytest.approx(SLOW.ms(uncached, cached), rel=0.02)


def test_an_engine_that_changes_is_followed() -> None:
    """Old observations are forgotten: three hundred answers after a slow-down the new speed is known."""
    fit, rng = taught(H100, 300), Random(2)
    for _ in range(300):
        uncached = rng.randrange(1_000, 30_000)
        fit.observe(uncached, 0, SLOW.ms(uncached, 0), PRIOR, GUESS_WEIGHT)
    assert fit.model.ms(10_000, 0) == pytest.approx(SLOW.ms(10_000, 0), rel=0.1)


@pytest.mark.parametrize("tokens", [1_500, 4_000, 30_000])
def test_prompts_of_one_size_do_not_make_hits_worthless(tokens: int) -> None:
    """A benchmark's equal prompts say nothing of the floor: time is still taken for tokens, so a hit saves it."""
    fit = PrefillFit()
    for _ in range(50):
        fit.observe(tokens, 0, 1_000.0, PRIOR, GUESS_WEIGHT)
    assert fit.model.ms(tokens, 0) == pytest.approx(1_000.0, rel=0.02)
    assert fit.model.ms(tokens / 10, 0) < 300.0


def test_a_pause_is_not_prefill() -> None:
    """One answer a thousand times too slow, or in no time, counts as OUTLIER times too slow or too fast."""
    fit = taught(H100, 100)
    before = fit.model.ms(8_000, 0)
    none, fast = taught(H100, 100), taught(H100, 100)
    none.observe(8_000, 0, 0.0, PRIOR, GUESS_WEIGHT)
    fast.observe(8_000, 0, before / OUTLIER, PRIOR, GUESS_WEIGHT)
    assert none.model == fast.model
    fit.observe(8_000, 0, before * 1_000, PRIOR, GUESS_WEIGHT)
    assert before < fit.model.ms(8_000, 0) < before * (1 + OUTLIER * 0.1)


def test_a_first_request_is_no_measure() -> None:
    """Nor is a pause in a replica's first answer: the fleet says what can be."""
    fit, most = PrefillFit(), PrefillFit()
    fit.observe(8_000, 0, H100.ms(8_000, 0) * 1_000, H100, PRIOR_WEIGHT)
    most.observe(8_000, 0, H100.ms(8_000, 0) * OUTLIER, H100, PRIOR_WEIGHT)
    assert fit.model == most.model


def test_what_is_not_seen_again_fades() -> None:
    """Half of what was seen of a replica is forgotten after each FADE_S without it, and the last of it whole."""
    fit = PrefillFit()
    now_s = fades(fit, 8_000, 0, SLOW.ms(8_000, 0), H100)
    again, fresh = (
        (each.observe(8_000, 0, 500.0, H100, PRIOR_WEIGHT, now_s), each.model)[1] for each in (fit, PrefillFit())
    )
    assert again == fresh


def test_what_is_known_of_a_slow_replica_stays_true_while_it_fades() -> None:
    """However much was seen, it is gone in minutes; and where three observations are left they still say how slow."""
    fit, now_s = PrefillFit(), 0.0
    for _ in range(300):
        fit.observe(8_000, 0, SLOW.ms(8_000, 0), H100, PRIOR_WEIGHT, now_s)
    while fit.observations:
        if fit.observations >= LEARNED:
            assert fit.model.ms(8_000, 0) > SLOW.ms(8_000, 0) / 3
        now_s += FADE_S
        fit.fade(H100, PRIOR_WEIGHT, now_s)
    assert now_s <= 240.0


def test_small_prompts_and_impossible_times_teach_nothing() -> None:
    """Below the minimum the floor and noise dominate; a time before the request is a clock's fault."""
    fit = PrefillFit()
    fit.observe(LEARN_TOKENS_MIN - 1, 0, 1.0, PRIOR, PRIOR_WEIGHT)
    fit.observe(LEARN_TOKENS_MIN, 0, -1.0, PRIOR, PRIOR_WEIGHT)
    assert (fit.observations, fit.model) == (0, PRIOR)


OBSERVATIONS = st.tuples(st.integers(0, 200_000), st.integers(0, 1_000_000), st.floats(0, 1e7))


@given(observations=st.lists(OBSERVATIONS, max_size=40), weight=st.sampled_from([GUESS_WEIGHT, PRIOR_WEIGHT]))
@example(observations=[(1_000, 0, 5e-324)], weight=PRIOR_WEIGHT)  # a time that is 0 as a share of the prior's
@settings(deadline=None, max_examples=examples(50))
def test_no_history_makes_work_free_or_negative(observations: list[tuple[int, int, float]], weight: float) -> None:
    """Whatever was seen, coefficients are not negative and more tokens never take less time."""
    fit = PrefillFit()
    for uncached, cached, ms in observations:
        fit.observe(uncached, cached, ms, PRIOR, weight)
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


@pytest.mark.parametrize("times", [6.0, 9.0, 30.0])
@pytest.mark.parametrize("tokens", [3_000, 6_000])
def test_a_faster_newcomer_is_not_taken_for_a_slow_one(times: float, tokens: int) -> None:
    """A replica of several times the fleet's speed is believed to be so after its first answer, within a factor that
    three more of them end, however little the fleet has seen of prompts of that size."""
    slow, fleet, own = PrefillModel(20.0, 0.4, 2e-6), PrefillFit(), PrefillFit()
    for _ in range(60):
        fleet.observe(6_000, 0, slow.ms(6_000, 0), PrefillModel(), GUESS_WEIGHT)
    took_ms = slow.ms(tokens, 0) / times
    for answers in range(4):
        fleet.observe(tokens, 0, took_ms, PrefillModel(), GUESS_WEIGHT)
        own.observe(tokens, 0, took_ms, fleet.model, PRIOR_WEIGHT, float(answers))
        if not answers:
            assert own.model.ms(tokens, 0) < slow.ms(tokens, 0) * 0.8
    assert own.model.ms(tokens, 0) < 2 * took_ms
