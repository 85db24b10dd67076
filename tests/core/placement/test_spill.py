from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.placement.policies.warm.cost import UNWEIGHTED
from router.core.placement.spill import SpillCause, spill
from router.core.types.placements import Candidate, FirstTokenExtras, PlacementReason
from router.core.types.replicas import Replica
from tests.core.placement.placing import World, chat, words

LONG = words(1, 8_000)
MS = st.floats(0, 1e6)


def candidate(id_: str, cached: int, **fields: Any) -> Candidate:
    """One of a prompt of 1,000 tokens, with nothing to do unless `fields` say so."""
    nothing = {"pending_ms": 0.0, "uncached_ms": 1_000.0 - cached, "evicted_ms": 0.0, "kv_wait_ms": 0.0, "in_flight": 0}
    return Candidate(id_, cached, 1_000 - cached, **{**nothing, **fields})


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"pending_ms": 900.0, "evicted_ms": 100.0}, SpillCause.QUEUE),
        ({"kv_wait_ms": 900.0, "pending_ms": 100.0}, SpillCause.KV_SPACE),
        ({"extras": FirstTokenExtras(delay_ms=900.0), "pending_ms": 1.0, "kv_wait_ms": 2.0}, SpillCause.DELAY),
        ({"evicted_ms": 900.0, "pending_ms": 100.0}, SpillCause.EVICTION),
        ({"uncached_ms": 5_000.0, "pending_ms": 100.0}, SpillCause.SPEED),
        ({"pending_ms": 100.0, "decode_ms": 9_000.0}, SpillCause.DECODE_LOAD),
        ({}, SpillCause.POLICY),
    ],
)
def test_the_term_that_is_furthest_behind_is_the_cause(fields: dict[str, float], cause: SpillCause) -> None:
    """Of a holder that is dearer the term says why that sets it back most; if none does, the policy had its reasons."""
    chosen, holder = candidate("a", 100, price_ms=900.0), candidate("b", 700, **fields)
    told = spill(chosen, [chosen, holder], PlacementReason.SPILL, UNWEIGHTED, elsewhere={})
    assert told is not None
    assert (told.cause, told.tokens, told.holder) == (cause, 600, "b")


@pytest.mark.parametrize(
    ("how", "cause"),
    [("exclude", SpillCause.RETRY), ("full", SpillCause.FULL), ("", SpillCause.UNHEALTHY)],
)
def test_who_was_not_asked(how: str, cause: SpillCause) -> None:
    """A holder of more that was no candidate says why it was none."""
    chosen = candidate("a", 100)
    told = spill(
        chosen,
        [chosen],
        PlacementReason.ONLY,
        UNWEIGHTED,
        elsewhere={"b": 400, "c": 50},
        **({how: {"b"}} if how else {}),
    )
    assert told is not None
    assert (told.cause, told.tokens, told.holder) == (cause, 300, "b")


def test_of_equal_holders_the_one_that_owes_least_counts() -> None:
    """Two hold the same: why even the better of them was passed over is what matters."""
    chosen, busy, dear = candidate("a", 0), candidate("b", 500, pending_ms=9e3), candidate("c", 500, evicted_ms=600.0)
    told = spill(chosen, [busy, chosen, dear], PlacementReason.SPILL, UNWEIGHTED, elsewhere={})
    assert told is not None
    assert told.cause is SpillCause.EVICTION


@given(
    st.lists(st.builds(candidate, st.text(), st.integers(0, 1_000), pending_ms=MS, evicted_ms=MS), min_size=1),
    st.dictionaries(st.text(), st.integers(1, 1_000)),
    st.sampled_from(PlacementReason),
)
def test_a_spill_is_never_invented(
    candidates: list[Candidate], elsewhere: dict[str, int], reason: PlacementReason
) -> None:
    """There is one exactly where somebody holds more than the chosen, and its tokens are the most that are lost."""
    told = spill(candidates[0], candidates, reason, UNWEIGHTED, elsewhere=elsewhere)
    lost = max([c.cached_tokens for c in candidates] + [*elsewhere.values()]) - candidates[0].cached_tokens
    assert (told.tokens if told else 0) == lost


@pytest.mark.parametrize("policy", ["warm", "round_robin"])
def test_a_placement_says_why_it_spilled(policy: str) -> None:
    """The router's own receipts: a queue at the holder, or a policy that does not look."""
    world = World("ab", policy)
    home = world.serve(chat(LONG)).replica
    for n in range(8):
        world.place(chat(words(50 + n, 8_000)), only=home)
    receipts = [world.place(chat(LONG, "yes", "and?")).receipt for _ in range(2)]
    receipt = next(each for each in receipts if each.replica != home)
    assert receipt.spill == ("queue" if policy == "warm" else "policy")
    assert receipt.spilled_tokens == pytest.approx(8_000, rel=0.05)


def test_a_holder_that_is_not_ready_is_a_reason() -> None:
    """Who holds the prompt and is out of order, tried before, full or gone: a cause of its own, or none."""
    world = World("abc")
    home = world.serve(chat(LONG)).replica
    again = chat(LONG, "yes", "and?")
    assert world.place(again, exclude=frozenset({home})).receipt.spill == "retry"
    other = next(id_ for id_ in "abc" if id_ != home)
    assert world.place(chat(LONG, "no"), full={home, other}).receipt.spill in {"full", ""}
    world.router.fleet.observe_health(home, ok=False, proof=True)
    world.place(again)
    world.router.replace([Replica(id_) for id_ in "abc" if id_ != home])
    assert not world.place(chat(words(77, 8_000))).receipt.spill
