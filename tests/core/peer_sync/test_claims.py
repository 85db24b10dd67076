"""Exact placement: blocks of the engine's own size that another router's prompt is about to make."""

from __future__ import annotations

import pytest

from router.core.cache_state.event_index import SETTLE_S
from router.core.kv_events.batch_decoder import Stored
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, EndReason, Outcome, Usage
from tests.core.cache_state.known import BLOCK, prompt_of
from tests.core.peer_sync.several import Several

TOKENS = 4_096


def _following() -> Several:
    """Two routers that follow the events of every replica."""
    routers = Several("a", "b")
    for name in ("a", "b"):
        knowledge = routers.router(name).knowledge
        for number, id_ in enumerate(routers.ids):
            knowledge.set_untokenizable(id_, "")
            knowledge.grade(id_, Confidence.EXACT, "joined at a clear", 0.0)
            knowledge.apply(id_, _stored(number + 1), 0.0)
    return routers


def _stored(hash_: int) -> Stored:
    return Stored([hash_], None, bytes([hash_]) * 4 * BLOCK, BLOCK, "", b"", None, "GPU", 0, prefix=True)


def _held(routers: Several, name: str, prompt: TokenPrompt, now_s: float) -> dict[str, int]:
    knowledge = routers.router(name).knowledge
    knowledge.tick(now_s)
    return {id_: said.tokens for id_, said in knowledge.find_stored(prompt, now_s).items() if said.tokens}


def test_blocks_that_another_router_has_computed_count_as_stored() -> None:
    """From its message on, until events confirm them."""
    routers, prompt = _following(), prompt_of(TOKENS)
    lease = routers.place("a", prompt_tokens=TOKENS, now_s=1.0, tokens=prompt)
    routers.tell_all(1.0)
    assert _held(routers, "b", prompt, 1.0) == {lease.replica: TOKENS}


@pytest.mark.parametrize(("ending", "after_s"), [(EndReason.FAILED, 0.0), (EndReason.OK, SETTLE_S + 0.1)])
def test_blocks_that_do_not_come_are_given_up(ending: EndReason, after_s: float) -> None:
    """At once where the placement failed, and where it ended well after the time that events may take."""
    routers, prompt = _following(), prompt_of(TOKENS)
    lease = routers.place("a", prompt_tokens=TOKENS, now_s=1.0, tokens=prompt)
    routers.tell_all(1.0)
    usage = Usage(TOKENS, 10, 0) if ending is EndReason.OK else None
    if usage is not None:
        routers.router("a").first_token(lease, 1.5)
    routers.router("a").finish(lease, Outcome(ending, usage), 2.0)
    routers.tell_all(2.0)
    assert _held(routers, "b", prompt, 2.0 + after_s) == {}
    assert routers.router("b").knowledge.masks.held == len(routers.ids)


def test_what_is_computed_within_the_tie_band_is_not_told() -> None:
    """A few tokens are no news: prices cannot tell them apart."""
    routers, prompt = _following(), prompt_of(900)
    routers.place("a", prompt_tokens=900, now_s=1.0, tokens=prompt)
    routers.tell_all(1.0)
    assert _held(routers, "b", prompt, 1.0) == {}
