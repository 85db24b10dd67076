"""What routers have learned, as told to those that have learned nothing."""

from __future__ import annotations

import pytest

from router.core.facts.placements import Ending, Outcome, Usage
from router.core.sharing.messages import body_of, sender_of
from tests.core.sharing.several import Several

MS_PER_TOKEN = 0.5


def _teach(
    routers: Several, name: str, answers: int, *, ms_per_token: float = MS_PER_TOKEN, begin_s: float = 0.0
) -> None:
    for n in range(answers):
        at_s = begin_s + 20.0 * n
        lease = routers.place(name, prompt_tokens=4_096 + 128 * n, now_s=at_s)
        first_s = at_s + ms_per_token * lease.uncached_tokens / 1e3
        routers.router(name).first_token(lease, first_s)
        usage = Usage(lease.prompt_tokens, 200, lease.cached_tokens)
        routers.router(name).finish(lease, Outcome(Ending.OK, usage), first_s + 5.0)


def test_a_newcomer_begins_with_what_the_others_have_learned() -> None:
    """Its prices are those of routers that have seen answers, before it has seen one."""
    routers = Several("a", "b")
    _teach(routers, "a", 20)
    routers["b"].hear(routers.say("a", 500.0), 500.0)
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
    routers["b"].hear(message, 600.0)
    assert speeds.mean_decode_ms == mean_ms
    _teach(routers, "b", 1, ms_per_token=0.6, begin_s=601.0)
    together_ms = speeds.prefill.model.ms(5_000, 0)
    assert 5_000 * 0.2 < together_ms < 0.7 * alone_ms
    routers["b"].tick(700.0)
    _teach(routers, "b", 1, ms_per_token=0.6, begin_s=701.0)
    assert speeds.prefill.model.ms(5_000, 0) == pytest.approx(5_000 * 0.6, rel=0.1), "who is gone has no say"


def test_a_newcomer_is_told_at_once() -> None:
    """What was learned is told every few seconds, and with the next message once somebody new is heard."""
    routers = Several("a", "b")
    _teach(routers, "a", 5)
    told = [_has_models(routers.say("a", 500.0 + n)) for n in range(7)]
    assert told == [True, False, False, False, False, True, False]
    routers["a"].hear(routers.say("b", 506.5), 506.5)
    assert _has_models(routers.say("a", 507.0))


def _has_models(message: bytes) -> bool:
    sender = sender_of(message)
    assert sender is not None
    return body_of(message, sender[2]).models is not None
