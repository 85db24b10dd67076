"""What was seen of a slow replica fades alike, whether of its prefills or of its decoding steps."""

from __future__ import annotations

import pytest

from router.core.learned import prefill, steps
from router.core.learned.prefill import FADE_S, PrefillFit, PrefillModel
from router.core.learned.steps import StepFit, StepModel


def fades(fit: PrefillFit | StepFit, first: int, second: int, slow_ms: float, prior: PrefillModel | StepModel) -> float:
    """A fresh fit sees `slow_ms` four times at the same two sizes, which is kept while it is seen, then halved after
    each FADE_S until the prior is all that is left. Returns the time, in seconds."""
    assert steps.FADE_S == FADE_S
    weight = prefill.PRIOR_WEIGHT if isinstance(fit, PrefillFit) else steps.PRIOR_WEIGHT
    now_s = 0.0
    for _ in range(4):
        fit.observe(first, second, slow_ms, prior, weight, now_s)
        now_s += FADE_S / 2
        fit.fade(prior, weight, now_s)
    assert fit.observations == 4
    found_ms = [fit.model.ms(first, second)]
    for left in (2, 1, 0, 0):
        now_s += FADE_S
        fit.fade(prior, weight, now_s)
        assert fit.observations == left
        found_ms.append(fit.model.ms(first, second))
    assert found_ms[0] > found_ms[1] > found_ms[2] > found_ms[3] == found_ms[4]
    assert found_ms[3] == pytest.approx(prior.ms(first, second))
    return now_s
