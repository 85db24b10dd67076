"""What routers have learned, as told to those that have learned nothing."""

from __future__ import annotations

import pytest

from router.core.facts.placements import Ending, Outcome, Usage
from tests.core.sharing.several import Several

MS_PER_TOKEN = 0.5


def _teach(routers: Several, name: str, answers: int) -> None:
    for n in range(answers):
        at_s = 10.0 * n
        lease = routers.place(name, prompt_tokens=4_096 + 128 * n, now_s=at_s)
        first_s = at_s + MS_PER_TOKEN * lease.uncached_tokens / 1e3
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


def test_whoever_has_learned_keeps_to_what_it_saw() -> None:
    """Another router's figures change nothing there."""
    routers = Several("a", "b")
    _teach(routers, "a", 20)
    _teach(routers, "b", 2)
    before = routers.router("b").fleet.means.common.prefill.model
    routers["b"].hear(routers.say("a", 500.0), 500.0)
    assert routers.router("b").fleet.means.common.prefill.model == before


def test_a_newcomer_is_told_at_once() -> None:
    """What was learned is told every few seconds, and with the next message once somebody new is heard."""
    routers = Several("a", "b")
    _teach(routers, "a", 5)
    assert len(routers.say("a", 500.0)) > 300
    short = len(routers.say("a", 500.5))
    assert short < 200
    routers["a"].hear(routers.say("b", 500.6), 500.6)
    assert len(routers.say("a", 501.0)) > short + 300
