"""What routers have learned, as told to those that have learned nothing."""

from __future__ import annotations

from math import inf, nan

import pytest

from router.core.peer_sync.learned_models import take_fits
from router.core.peer_sync.messages import BadMessage, SharedFactor, SharedFits, decode_message
from router.core.types.placements import EndReason, Outcome, Usage
from tests.core.peer_sync.several import Several

MS_PER_TOKEN = 0.5


def _teach(
    routers: Several,
    name: str,
    answers: int,
    *,
    ms_per_token: float = MS_PER_TOKEN,
    begin_s: float = 0.0,
    only: str | None = None,
    tokens: int = 200,
) -> None:
    for n in range(answers):
        at_s = begin_s + 20.0 * n
        lease = routers.place(name, prompt_tokens=4_096 + 128 * n, now_s=at_s, only=only)
        first_s = at_s + ms_per_token * lease.uncached_tokens / 1e3
        routers.router(name).first_token(lease, first_s)
        usage = Usage(lease.prompt_tokens, tokens, lease.cached_tokens)
        routers.router(name).finish(lease, Outcome(EndReason.OK, usage), first_s + 5.0)


def test_a_newcomer_begins_with_what_the_others_have_learned() -> None:
    """Its prices are those of routers that have seen answers, before it has seen one."""
    routers = Several("a", "b")
    _teach(routers, "a", 20)
    routers.tell("a", "b", 500.0, 500.0)
    taught, told = (routers.member(name, routers.ids[0]).speeds for name in ("a", "b"))
    assert told.prefill.model.ms(8_000, 0) == pytest.approx(taught.prefill.model.ms(8_000, 0), rel=0.01)
    assert told.prefill.model.ms(8_000, 0) == pytest.approx(8_000 * MS_PER_TOKEN, rel=0.1)
    assert told.steps.model.ms(1, 4_000) == pytest.approx(taught.steps.model.ms(1, 4_000), rel=0.01)
    assert told.answer_tokens.mean == pytest.approx(taught.answer_tokens.mean)
    assert told.mean_decode_ms == taught.mean_decode_ms


def test_what_several_have_seen_is_fitted_together() -> None:
    """A router that saw a few slow prefills, and hears of many fast ones, takes all of them into account; its means
    stay its own."""
    routers = Several("a", "b", replicas=1)
    _teach(routers, "a", 20, ms_per_token=0.2)
    _teach(routers, "b", 5, ms_per_token=0.6)
    speeds = routers.router("b").fleet.members[routers.ids[0]].speeds
    alone_ms, mean_ms = speeds.prefill.model.ms(5_000, 0), speeds.mean_decode_ms
    assert alone_ms == pytest.approx(5_000 * 0.6, rel=0.1)
    message = routers.say("a", 600.0)
    routers.hear("a", "b", message, 600.0)
    assert speeds.mean_decode_ms == mean_ms
    _teach(routers, "b", 1, ms_per_token=0.6, begin_s=601.0)
    together_ms = speeds.prefill.model.ms(5_000, 0)
    assert 5_000 * 0.2 < together_ms < 0.7 * alone_ms
    routers["b"].forget("a", 700.0)
    _teach(routers, "b", 1, ms_per_token=0.6, begin_s=701.0)
    assert speeds.prefill.model.ms(5_000, 0) == pytest.approx(5_000 * 0.6, rel=0.1), "who is gone has no say"


def test_what_was_learned_is_told_every_second_and_is_part_of_a_state() -> None:
    """However idle a router is, others can learn from it."""
    routers = Several("a", "b")
    _teach(routers, "a", 5)
    said = [routers["a"].say(500.0 + 0.3 * n) for n in range(7)]
    told = [message is not None and _has_models(message) for message in said]
    assert told == [True, False, False, False, True, False, False]
    assert _has_models(routers["a"].state(502.0))


def test_how_long_answers_are_is_counted_together() -> None:
    """All routers expect answers of the same length, which is that of all that any of them has seen; who is gone has
    no say."""
    routers = Several("a", "b")
    for name, answers, tokens in (("a", 30, 100), ("b", 10, 500)):
        _teach(routers, name, answers, tokens=tokens)
    expected = [routers.member(name, routers.ids[0]).speeds.answer_tokens for name in ("a", "b")]
    assert expected[0].mean < 200 < 400 < expected[1].mean
    routers.tell_all(900.0)
    assert expected[0].mean == pytest.approx(expected[1].mean, rel=0.01)
    assert expected[0].mean == pytest.approx((30 * 100 + 10 * 500) / 40, rel=0.1)
    routers["b"].forget("a", 910.0)
    assert expected[1].mean > 400


def test_the_speed_of_a_replica_is_learned_together() -> None:
    """The factor of a replica of which another router has observed answers is known here, though nothing was observed
    of it here, and is 1 again when that router is gone."""
    routers = Several("a", "b", replicas=2)
    usual, slow = routers.ids
    for n in range(30):
        for name in "ab":
            _teach(routers, name, 1, begin_s=40.0 * n, only=usual)
        _teach(routers, "a", 1, ms_per_token=4 * MS_PER_TOKEN, begin_s=40.0 * n + 20.0, only=slow)
        routers.tell_all(40.0 * n + 39.0)
    for n in range(3):
        routers.tell("a", "b", 1_300.0 + n, 1_300.0 + n)
    seen, told = routers.member("a", slow), routers.member("b", slow)
    assert told.own_speed.prefill_factor.value == pytest.approx(seen.own_speed.prefill_factor.value)
    assert told.own_speed.prefill_factor.value > 1.5
    assert told.own_speed.prefill_factor.observations == 0
    by_kind = [routers.member("b", id_).prefill_model.ms(8_000, 0) for id_ in (usual, slow)]
    assert by_kind == pytest.approx([8_000 * MS_PER_TOKEN, 8_000 * 4 * MS_PER_TOKEN], rel=0.2)
    routers["b"].forget("a", 1_310.0)
    assert told.prefill_model is told.speeds.prefill.model
    assert not told.own_speed.prefill_factor.is_known


def test_a_replica_s_speed_is_in_a_message_once_a_second() -> None:
    """However many messages there are; a message that has it counts at once, and from however many routers."""
    routers = Several("a", "b", "c", replicas=2)
    for name in "ac":
        _teach(routers, name, 5, only=routers.ids[0])
        _teach(routers, name, 5, only=routers.ids[1], ms_per_token=4 * MS_PER_TOKEN, begin_s=200.0)
    said = [each for n in range(12) if (each := routers["a"].say(500.0 + 0.25 * n)) is not None]
    assert sum(bool(_fits(message)) for message in said) == 3
    there = routers.member("b", routers.ids[1]).own_speed.prefill_factor
    routers.hear("a", "b", said[0], 500.0)
    of_one = there.value
    assert of_one > 1
    routers.tell("c", "b", 500.5, 500.5)
    assert there.value > of_one
    routers["b"].forget("c", 501.4)
    assert there.value == of_one, "of the one that is still there"


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_a_speed_that_is_no_number_is_a_bad_message(number: float) -> None:
    """And nothing of it is taken."""
    routers = Several("a")
    member = routers.member("a", routers.ids[0])
    good = SharedFactor(1.0, 2.0, 3)
    for prefill, steps in (
        (SharedFactor(number, 2.0, 3), good),
        (SharedFactor(1.0, number, 3), good),
        (good, SharedFactor(number, 2.0, 3)),
        (good, SharedFactor(1.0, number, 3)),
    ):
        with pytest.raises(BadMessage):
            take_fits("x", member, SharedFits(0, prefill, steps))
    assert not member.own_speed.prefill_factor.is_known
    assert not member.own_speed.step_factor.is_known


def _fits(message: bytes) -> list[SharedFits]:
    return decode_message(message).fits


def _has_models(message: bytes) -> bool:
    return decode_message(message).models is not None
