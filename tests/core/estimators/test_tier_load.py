from __future__ import annotations

from random import Random

import pytest

from router.core.estimators.tier_load import (
    GUESSES,
    LEARN_TOKENS_MIN,
    OUTLIER,
    PRIOR_WEIGHT,
    LoadFit,
    LoadFits,
    LoadModel,
    guess,
)
from router.core.types.tiers import CPU, LEG, PEER, SHARED, TIERS

TRUTH = LoadModel(floor_ms=3.0, per_token_ms=0.021)


def taught(observations: int, *, noise: float = 0.1, seed: int = 1) -> LoadFit:
    """A fit that saw loads of many sizes on a link that is four times slower than the guess."""
    fit, rng = LoadFit(), Random(seed)
    for _ in range(observations):
        tokens = rng.randrange(1_000, 40_000)
        fit.observe(tokens, TRUTH.ms(tokens) * (1 + rng.gauss(0, noise)), GUESSES[CPU], PRIOR_WEIGHT)
    return fit


@pytest.mark.parametrize("seed", range(5))
def test_a_known_link_is_recovered(seed: int) -> None:
    """After 200 loads with 10 % noise, predictions are within 10 % of the truth, for short and for long loads."""
    fit = taught(200, seed=seed)
    for tokens in (2_000, 8_000, 32_000):
        assert fit.model.ms(tokens) == pytest.approx(TRUTH.ms(tokens), rel=0.1)


def test_a_pause_is_no_load() -> None:
    """A load of a minute moves the model no further than one of a few times its usual length."""
    fit = taught(50)
    fit.observe(10_000, 60_000.0, GUESSES[CPU], PRIOR_WEIGHT)
    assert fit.model.ms(10_000) < (1 + OUTLIER / 10) * TRUTH.ms(10_000)


def test_short_loads_teach_nothing() -> None:
    """They are lost in the engine's steps."""
    fit = LoadFit()
    fit.observe(LEARN_TOKENS_MIN - 1, 500.0, GUESSES[CPU], PRIOR_WEIGHT)
    assert fit.observations == 0


def test_the_guess_is_bytes_over_speed() -> None:
    """256 KiB a token at 54 GB/s are 5 us, whatever else; a slower link takes longer, and a tier has a guess always, as
    have pulls, and what a prefill leg sends."""
    assert guess(10.0, 262_144, 54.0).ms(10_000) == pytest.approx(10 + 48.5, rel=0.01)
    assert guess(0.0, 131_072, 2.0).per_token_ms == pytest.approx(0.0655, rel=0.01)
    assert set(GUESSES) == {*TIERS, PEER, LEG}
    assert GUESSES[CPU].ms(8_000) < GUESSES[SHARED].ms(8_000)


def test_a_new_replica_is_believed_as_quick_as_its_peers() -> None:
    """Until it has shown its own speed; then it is believed to have that, and its peers theirs."""
    fits, quick, slow = LoadFits(), LoadFit(), LoadFit()
    assert fits.model(CPU, quick) == GUESSES[CPU]
    for _ in range(50):
        fits.observe(CPU, quick, 10_000, TRUTH.ms(10_000))
    assert fits.model(CPU, slow).ms(10_000) == pytest.approx(TRUTH.ms(10_000), rel=0.1)
    for _ in range(50):
        fits.observe(CPU, slow, 10_000, 3 * TRUTH.ms(10_000))
    assert fits.model(CPU, slow).ms(10_000) == pytest.approx(3 * TRUTH.ms(10_000), rel=0.1)
    assert fits.model(CPU, quick).ms(10_000) == pytest.approx(TRUTH.ms(10_000), rel=0.1)
