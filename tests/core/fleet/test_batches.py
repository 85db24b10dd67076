"""Times that a proxy or an engine's clock distorts are no speeds."""

from __future__ import annotations

import pytest

from router.core.estimators.decode_step import StepModel
from router.core.fleet.member import ReplicaState
from router.core.fleet.prefill_batches import BATCH_LEAST_MS, BATCH_MOST_MS
from router.core.types.placements import Usage
from tests.core.placement.placing import World, chat, words


def _answer(world: World, number: int, *, tokens: int, step_s: float) -> ReplicaState:
    lease = world.place(chat(words(number, 400)))
    world.first_token(lease, after_s=0.05)
    world.now_s += tokens * step_s
    world.finish(lease, usage=Usage(400, tokens))
    return world.router.fleet.members[lease.replica]


def test_an_answer_that_a_proxy_gathered_teaches_no_step() -> None:
    """An answer of 200 tokens that comes within 2 ms was gathered on its way: the step stays as it was learned."""
    world = World("a")
    for number in range(8):
        member = _answer(world, number, tokens=200, step_s=0.02)
    before, observations = member.step_model, member.own_speed.step_factor.observations
    for number in range(8, 16):
        member = _answer(world, number, tokens=200, step_s=1e-5)
    assert (member.step_model, member.own_speed.step_factor.observations) == (before, observations)
    assert before.ms(1, 500) == pytest.approx(20, rel=0.2)


def test_an_engine_with_short_steps_is_no_gatherer() -> None:
    """Steps of 0.5 ms, a fortieth of the first guess, are learned where all answers have them."""
    world = World("a")
    for number in range(12):
        member = _answer(world, number, tokens=200, step_s=0.0005)
    assert member.step_model.ms(1, 500) < 2.0


@pytest.mark.parametrize(
    ("floor_ms", "batch_ms"), [(20.0, 10.0), (1.2, 0.6), (0.0, BATCH_LEAST_MS), (400.0, BATCH_MOST_MS)]
)
def test_first_tokens_of_one_batch_are_less_than_half_a_step_apart(floor_ms: float, batch_ms: float) -> None:
    """The gap follows the learned step, for engines with steps of 1 ms and of 400 ms alike."""
    world = World("a")
    member = world.router.fleet.members["a"]
    member.speeds.steps.model = StepModel(floor_ms, 0.0, 0.0)
    assert member.batch_ms == pytest.approx(batch_ms)


def test_slow_first_answers_are_not_believed_for_ever() -> None:
    """After four answers at 200 ms a token, as while kernels compile, 60 at 20 ms bring the step to 12 to 30 ms."""
    world = World("a")
    for number in range(4):
        _answer(world, number, tokens=100, step_s=0.2)
    for number in range(4, 64):
        member = _answer(world, number, tokens=100, step_s=0.02)
    assert 12 < member.step_model.ms(1, 500) < 30
