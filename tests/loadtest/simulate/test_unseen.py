"""What a router knows whose answers go past it, as the picker of a gateway does."""

from __future__ import annotations

from statistics import median

import pytest

from loadtest.simulate.engine import placer
from loadtest.simulate.results.race import Changes, PolicyEntry, RaceJob, run_job
from router.extproc.response_tracker import FULL_SAMPLING_UNTIL


def test_as_many_are_shown_as_to_the_picker() -> None:
    """What is seen here is what the picker asks for."""
    assert placer.SHOWN_MIN == FULL_SAMPLING_UNTIL


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["claude_code", "mooncake"])
def test_caches_are_found_though_answers_go_past(scenario: str) -> None:
    """Agents and conversations at what the fleet sustains, with the same seeds: the token hit rate is within 3 % of
    that of a router which sees every answer, and the ninetieth percentile of first tokens within what it differs by
    from one seed to the next."""
    hits, first_tokens = [], []
    for seed in range(1, 6):
        seen, unseen = (
            run_job(RaceJob(scenario, "at", seed, (PolicyEntry("warm"),), Changes((("unseen", past),), 600)))[0]
            for past in (False, True)
        )
        assert (seen.failed, unseen.failed) == (0, 0)
        assert unseen.token_hit_rate != seen.token_hit_rate or unseen.ttft_p90_s != seen.ttft_p90_s
        hits.append((unseen.token_hit_rate or 0) / (seen.token_hit_rate or 1))
        first_tokens.append((unseen.ttft_p90_s or 0) / (seen.ttft_p90_s or 1))
    assert median(hits) >= 0.97
    assert median(first_tokens) <= 1.2  # the same router's figures differ by a quarter from seed to seed
