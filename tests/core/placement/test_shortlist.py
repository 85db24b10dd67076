"""Of many replicas only a few are priced: the choice must be as good as if all were."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.placement import router as routing
from router.core.placement.ring_order import RingOrder
from router.core.placement.router import NEAR
from router.core.placement.scoring import HOLDERS, LEAST_LOADED_COUNT, PRICE_ALL_BELOW
from router.core.types.replicas import Load, ServedModel
from tests.core.placement.placing import MODEL, World, chat, words

REPLICAS = 32
text = lru_cache(maxsize=512)(words)


def busy_world(seed: int) -> World:
    """Many replicas with random work, caches and open answers."""
    rng, world = Random(seed), World([f"http://{n}" for n in range(REPLICAS)])
    for n in range(REPLICAS):
        world.router.observations.observe_load(
            f"http://{n}", Load(kv_usage=rng.random(), kv_tokens_max=200_000), world.now_s
        )
    for n in range(90):
        prefix, tail = text(rng.randrange(8), rng.choice([600, 3_000])), text(1_000 + n % 40, rng.choice([50, 900]))
        lease = world.place(chat(tail, system=prefix), session=str(rng.randrange(40)))
        if rng.random() < 0.7:
            world.first_token(lease, after_s=rng.random() / 50)
    return world


@pytest.mark.inside
@given(seed=st.integers(0, 10_000), prefix=st.integers(0, 9), tokens=st.sampled_from([600, 3_000]))
@example(seed=8, prefix=8, tokens=3_000)  # a replica that looks slow is dearer for its prefill, too
@example(seed=500, prefix=9, tokens=3_000)
@example(seed=341, prefix=3, tokens=600)  # of more holders than are listed, those with least to do
@settings(deadline=None, max_examples=25)
def test_a_few_are_as_good_as_all(seed: int, prefix: int, tokens: int) -> None:
    """Whatever is open and held, what is chosen among the few costs no more than what is chosen among all, beyond the
    tie band, in which no price can be told from another; and the few have one that is as cheap as the cheapest."""
    world = busy_world(seed)
    ask = chat(text(2_000 + seed % 9, 300), system=text(prefix, tokens))
    few = world.place(ask, session="s")
    world.router.finish(few, routing.Outcome(routing.EndReason.FAILED), world.now_s)
    world = busy_world(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "PRICE_ALL_BELOW", REPLICAS)
        whole = world.place(ask, session="s")
    assert len({c.id for c in few.receipt.candidates}) <= PRICE_ALL_BELOW
    prices = [next(c.price_ms for c in lease.receipt.candidates if c.id == lease.replica) for lease in (few, whole)]
    tie_ms, _ = world.router.fleet.members[whole.replica].speeds.units()
    assert prices[0] <= prices[1] + tie_ms
    cheapest = [min(c.price_ms for c in lease.receipt.candidates) for lease in (few, whole)]
    assert cheapest[0] <= cheapest[1] + tie_ms


def test_a_decision_looks_closely_at_a_bounded_number() -> None:
    """However many replicas there are, and however many of them hold the prompt."""
    most = 2 * LEAST_LOADED_COUNT + HOLDERS + NEAR + 1
    world = World([f"http://{n}" for n in range(200)])
    ask = chat(words(1, 2_000))
    for n in range(200):
        lease = world.place(ask, only=f"http://{n}")
        world.first_token(lease)
    seen: list[int] = []
    choose = world.router.policy.choose

    class Counting:
        """As `warm`, and how many it was shown."""

        name, cache_aware = "warm", True

        def near(self, ring_key: str, ids: dict[str, None]) -> list[str]:
            """See policies.base.Near."""
            return sorted(ids)

        def choose(
            self, market: routing.PlacementContext, candidates: list[routing.Candidate]
        ) -> routing.PolicyDecision:
            """See Policy."""
            seen.append(len(candidates))
            assert market.replicas == 200
            return choose(market, candidates)

    counting = Counting()
    world.router.policy, world.router._ring = counting, RingOrder(counting.near)
    world.place(ask, session="another")
    assert seen == [pytest.approx(most, abs=most - 1)]
    assert seen[0] <= most


def test_a_prompt_goes_where_the_context_is_long_enough() -> None:
    """Of replicas whose contexts differ those are asked that can take the prompt; where none can, the engine is to
    refuse it; and what is short goes to all."""
    world = World("ab")
    world.router.observations.observe_models("a", [ServedModel(MODEL, max_model_len_tokens=8_000)])
    world.router.observations.observe_models("b", [ServedModel(MODEL, max_model_len_tokens=32_000)])
    long, longer = words(1, 16_000), words(2, 64_000)
    assert {world.place(chat(long, str(n)), session=str(n)).replica for n in range(20)} == {"b"}
    calm = World("ab")
    calm.router.observations.observe_models("a", [ServedModel(MODEL, max_model_len_tokens=8_000)])
    assert {calm.place(chat(words(n, 100)), session=str(n)).replica for n in range(20)} == {"a", "b"}
    assert world.place(chat(longer)).replica in {"a", "b"}
