"""The ladders are llm-d's as published, and their variants ask as much in another order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.simulate.engine.workload import SimRequest, Workload
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.registry import APART, LADDERS
from loadtest.simulate.scenarios.scenario import COMMON_LOADS, Scenario

BLOCK_TOKENS = generated.BLOCK_TOKENS


def _turns(workload: Workload) -> list[SimRequest]:
    return [turn for session in workload.sessions for turn in session]


def _replays(scenario: Scenario) -> int:
    """Requests after the warm-up whose prompt was sent before."""
    seen, found = set(), 0
    for number, turn in enumerate(_turns(scenario.workload)):
        key = turn.request.prompt_key()
        found += number >= scenario.workload.warm_up and key in seen
        seen.add(key)
    return found


def _groups(scenario: Scenario, first: int, end: int) -> list[int]:
    """Groups of these requests, each by the first block of its prompt."""
    return [turn.engine_keys[0] for turn in _turns(scenario.workload)[first:end]]


def test_published_ladder_is_all_replays() -> None:
    """After the warm-up the published ladder asks only what was asked before, the honest one nothing that was."""
    published, honest = generated.ladder_published("below", 1), generated.ladder_honest("below", 1)
    counted = published.workload.request_count - published.workload.warm_up

    assert counted == 760
    assert _replays(published) == counted
    assert _replays(honest) == 0


def test_ladders_in_another_order_ask_as_much() -> None:
    """The one has the groups of the first round in another order, the other those of the stage at random; each asks
    what nobody asked before, at the same times, and each prefix is in the caches when the stage begins."""
    honest = generated.ladder_honest("below", 1)
    for name in ("ladder_reordered", "ladder_random"):
        other = APART[name]("below", 1)
        first, again = _groups(honest, 0, 150), _groups(other, 0, 150)

        assert _replays(other) == 0
        assert [turn.at_s for turn in _turns(other.workload)] == [turn.at_s for turn in _turns(honest.workload)]
        assert set(again) == set(first)
        assert (again == first) is (name == "ladder_random")
        assert _groups(other, 150, 750) == _groups(honest, 150, 750)
        assert (_groups(other, 750, 1510) == _groups(honest, 750, 1510)) is (name == "ladder_reordered")
        assert set(_groups(other, 750, 1510)) <= set(first)


@pytest.mark.parametrize("load", COMMON_LOADS)
def test_ladders_are_as_published(load: str) -> None:
    """A warm-up of 15 requests a second for 50 s, 7,200 tokens each of which 6,000 are a group's, then the stage."""
    scenario = generated.ladder_honest(load, 1)
    turns, warm_up = _turns(scenario.workload), scenario.workload.warm_up
    rate, _ = generated.RACED[load]
    stage = turns[warm_up:]

    assert warm_up == 750
    assert {turn.prompt_tokens for turn in turns} == {7_200}
    shared = [a == b for a, b in zip(turns[0].engine_keys, turns[150].engine_keys, strict=True)]
    assert sum(shared) == 6_000 // BLOCK_TOKENS
    assert scenario.load == rate
    assert len(stage) / (stage[-1].at_s - stage[0].at_s) == pytest.approx(rate, rel=0.15)


def test_whole_ladder_has_all_stages() -> None:
    """16,334 requests after the warm-up; each stage begins when even the timed out of the one before are gone."""
    workload = LADDERS["ladder_full_published"]("at", 1).workload
    times = [turn.at_s for turn in _turns(workload)]

    assert workload.request_count - workload.warm_up == 16_334
    assert sum(b - a > generated.STAGE_GAP_S for a, b in pairwise(times)) == len(generated.STAGES)
