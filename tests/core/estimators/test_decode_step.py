from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.estimators.decode_step import DecodeClock, StepFit, StepModel
from router.core.estimators.output_length import GUESS_TOKENS, OutputLength
from router.core.types.placements import Usage
from tests.core.placement.placing import World, chat, words
from tests.support.examples import examples

TRUE = StepModel(12.0, 0.4, 2e-4)


def learned(true: StepModel, answers: int, seed: int, noise: float = 0.0) -> StepFit:
    """What is known after so many answers of random company."""
    rng, fit = Random(seed), StepFit()
    for _ in range(answers):
        streams = rng.randint(1, 60)
        context = streams * rng.randint(500, 8_000)
        step_ms = true.ms(streams, context) * (1 + noise * rng.uniform(-1, 1))
        fit.observe(streams, context, step_ms)
    return fit


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_step_is_learned(noise: float) -> None:
    """After a hundred answers, in company that varies, a step is known within 5 %, wherever it was seen."""
    model = learned(TRUE, 100, 1, noise).model
    for streams, context in ((2, 4_000), (20, 60_000), (50, 300_000)):
        assert model.ms(streams, context) == pytest.approx(TRUE.ms(streams, context), rel=0.05)


def test_an_engine_whose_step_costs_the_same_for_all_is_learned_as_one() -> None:
    """Where sixteen streams take as long as one, nothing is believed to be gained by spreading them."""
    model = learned(StepModel(80.0, 0.0, 0.0), 60, 2).model
    assert model.ms(16, 30_000) == pytest.approx(model.ms(1, 2_000), rel=0.03)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slower", [0.25, 1.0, 4.0])
def test_answers_alike_never_say_that_a_stream_costs_nothing(seed: int, slower: float) -> None:
    """Where all answers had nearly the same company and times vary by a fifth, as when streams pile up on a fresh
    fleet, one more stream costs as much as by the first guess, times how slow the engine is, give or take half."""
    rng, guess, fit = Random(seed), StepModel(), StepFit()
    for _ in range(40):
        streams = rng.uniform(90, 100)
        context, seen = streams * 6_400, rng.uniform(0.8, 1.2)
        fit.observe(streams, context, slower * guess.ms(streams, context) * seen)
    costs_ms = slower * (guess.ms(96, 96 * 6_400) - guess.ms(95, 95 * 6_400))
    one_more_ms = fit.model.ms(96, 96 * 6_400) - fit.model.ms(95, 95 * 6_400)
    assert one_more_ms == pytest.approx(costs_ms, rel=0.5)


@given(
    seen=st.lists(st.tuples(st.floats(0.1, 500), st.floats(0, 5e6), st.floats(-10, 1e7, allow_nan=False)), max_size=60)
)
@settings(deadline=None, max_examples=examples(60))
def test_no_coefficient_is_ever_negative(seen: list[tuple[float, float, float]]) -> None:
    """Whatever is observed, a step takes time, and no less for more streams or more context."""
    fit = StepFit()
    for streams, context, step_ms in seen:
        fit.observe(streams, context, step_ms)
    model = fit.model
    assert min(model.floor_ms, model.per_stream_ms, model.per_context_token_ms) >= 0
    assert model.ms(8, 80_000) >= model.ms(1, 1_000) >= 0


def test_a_pause_is_no_step() -> None:
    """One answer that stood still for a minute moves the model by less than half of itself."""
    fit = learned(TRUE, 50, 3)
    before_ms = fit.model.ms(20, 60_000)
    fit.observe(20, 60_000, 60_000.0)
    assert fit.model.ms(20, 60_000) < 1.5 * before_ms


def test_company_is_the_mean_over_an_answer() -> None:
    """An answer of ten seconds that had one other stream beside it for half of the time had 1.5 on the mean, and the
    context of both likewise."""
    clock = DecodeClock()
    one = clock.join(1_000, 0.0, 100.0)
    other = clock.join(3_000, 0.0, 105.0)
    stretch = clock.leave(1_000, one, 110.0, 0.0)
    assert (stretch.ms, stretch.streams, stretch.context_tokens) == (10_000.0, 1.5, 2_500.0)
    assert clock.leave(3_000, other, 115.0, 0.0).streams == 1.5
    assert (clock.streams, clock.context_tokens, clock.running_s(200.0)) == (0, 0.0, 0.0)


def test_prefills_that_interrupt_are_no_steps() -> None:
    """Of ten seconds with two seconds of another's prefill, eight are steps; an answer's own prefill is before it. What
    the model of prefill cannot know does not make a step free."""
    clock = DecodeClock()
    mark = clock.join(1_000, 7_000.0, 0.0)
    clock.join(1_000, 20_000.0, 5.0)
    stretch = clock.leave(1_000, mark, 10.0, 0.0)
    assert stretch.prefill_tokens == 20_000.0
    assert stretch.step_ms(100, 0.1) == 80.0
    stretch.prefill_tokens = 1e9
    assert stretch.step_ms(100, 0.1) > 0


def test_prefills_take_what_is_known_in_the_end() -> None:
    """Prefills that were believed to take twice as long when they began take away no more of a stream's time than they
    did, once answers have taught how long they take: the steps learned from the first answers are not too short."""
    world = World("a")
    first = world.place(chat(words(1, 4_000)))
    world.first_token(first, after_s=0.2)
    for seed in range(2, 22):  # each interrupts the first by 0.2 s, of which the first guess makes 0.4 s
        lease = world.place(chat(words(seed, 4_000)))
        world.first_token(lease, after_s=0.2)
    world.now_s += 4.0
    world.finish(first, usage=Usage(4_000, 200, 0))
    member = world.router.fleet.member("a")
    assert member is not None
    took_ms = member.step_model.ms(20, 84_000)
    assert took_ms == pytest.approx(20.0, rel=0.25)  # 4 s for 200 tokens


def test_answers_under_way_count() -> None:
    """While only the shortest answers have ended, the mean is not theirs; once all have, it is everybody's."""
    answers = OutputLength()
    assert answers.mean == GUESS_TOKENS
    answers.note_length(1)
    answers.under_way_tokens = 20 * 150.0
    assert answers.mean > 1_000
    answers.under_way_tokens = 0.0
    for _ in range(100):
        answers.note_length(600)
    assert answers.mean == pytest.approx(600, rel=0.03)


@given(st.floats(0, 500), st.floats(0, 5e6), st.floats(1 / 64, 64))
def test_a_replica_that_takes_times_as_long_does_so_in_any_company(
    streams: float, context: float, factor: float
) -> None:
    """A factor scales every term alike."""
    assert TRUE.times(factor).ms(streams, context) == pytest.approx(factor * TRUE.ms(streams, context))


def test_sums_from_before_are_taken_by_a_fit_that_has_none() -> None:
    """A fit that begins with another one's sums has its model; one that has observed anything keeps to that."""
    before, after, own = learned(TRUE, 30, 1), StepFit(), learned(StepModel(), 3, 2)
    after.adopt(before.sums.xx, before.sums.xy, before.observations)
    assert (after.model, after.observations) == (before.model, 30)
    after.observe(1, 2_000, 100.0)
    assert before.model == learned(TRUE, 30, 1).model
    known = own.model
    own.adopt(before.sums.xx, before.sums.xy, before.observations)
    assert (own.model, own.observations) == (known, 3)


def test_sums_of_other_routers_count_as_observed_here() -> None:
    """A fit without answers of its own has the model of another router's sums; those of a router that is gone count no
    more with the next answer."""
    fit, other = StepFit(), learned(TRUE, 30, 1)
    fit.tell("other", other.sums.xx, other.sums.xy)
    assert fit.model.ms(20, 60_000) == pytest.approx(other.model.ms(20, 60_000))
    assert fit.observations == 0
    fit.forget("other")
    fit.observe(20, 60_000, TRUE.ms(20, 60_000))
    alone = StepFit()
    alone.observe(20, 60_000, TRUE.ms(20, 60_000))
    assert fit.model == alone.model
