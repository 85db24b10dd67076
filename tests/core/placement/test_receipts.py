"""What is kept of a placement while its answer is under way."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.lease import Lease
from router.core.placement.receipts import KEPT_MAX, NEXT, trim_candidates
from router.core.types.placements import Candidate
from tests.core.placement.placing import World, chat, words

NUMBERS = st.integers(0, 3)


def candidate(n: int, cached: int, price: int, pending: int) -> Candidate:
    """One of many."""
    return Candidate(f"r{n}", cached, 3 - cached, float(pending), 0.0, 0.0, 0.0, 0, price_ms=float(price))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=12), st.integers(0, 11))
def test_those_that_tell_most_are_kept(found: list[tuple[int, int, int]], which: int) -> None:
    """All of a few; of more the chosen, whoever holds most if that is another (of several the soonest) and the three
    next cheapest, each once and in the order in which they were weighed."""
    all_ = [candidate(n, *each) for n, each in enumerate(found)]
    chosen = all_[which % len(all_)]
    told = trim_candidates(all_, chosen)
    assert list(told) == [c for c in all_ if c in told]
    if len(all_) <= KEPT_MAX:
        assert list(told) == all_
        return
    most = max(c.cached_tokens for c in all_)
    holder = min((c for c in all_ if c.cached_tokens == most), key=lambda c: c.pending_ms)
    if chosen.cached_tokens == most:
        holder = chosen
    others = sorted((c for c in all_ if c not in (chosen, holder)), key=lambda c: c.price_ms)
    assert {c.id for c in told} == {c.id for c in (chosen, holder, *others[:NEXT])}


def held_bytes(lease: Lease) -> int:
    """Bytes of what is reachable from a lease, less what is there anyway: names of replicas and models, small numbers,
    and the keys themselves, which the index has."""
    seen, todo, size = set(map(id, lease.prompt.keys)), [lease], 0
    while todo:
        each: Any = todo.pop()
        if id(each) in seen or each is None or isinstance(each, (str, type)) or each in range(-5, 257):
            continue
        seen.add(id(each))
        size += sys.getsizeof(each)
        names = getattr(each, "__struct_fields__", None)
        todo += [getattr(each, name) for name in names] if names else gc.get_referents(each)
    return size


@pytest.mark.parametrize("policy", ["warm", "round_robin"])
def test_an_open_request_keeps_a_few_candidates(policy: str) -> None:
    """Of 256 replicas five at most are kept with a lease, the longest holder among them, and how many there were; all
    of a request for 1,000 tokens is less than 2 KB."""
    world = World([f"http://{n}" for n in range(256)], policy)
    for seed in range(3):
        world.serve(chat(words(seed, 1_000)))
    world.serve(chat(words(1, 1_000), "yes"))
    lease = world.place(chat(words(1, 1_000), "yes", "and?"))
    candidates = {c.id: c for c in lease.receipt.candidates}
    assert lease.replica in candidates
    assert len(candidates) <= KEPT_MAX
    assert lease.receipt.weighed == 256
    assert max(c.cached_tokens for c in candidates.values()) > 800
    assert held_bytes(lease) < 2_048
