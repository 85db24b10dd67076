from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uhashring import HashRing

from router.core.placement import ring as module
from router.core.placement.ring import BOUND, JOINED_MAX, ORDERS_MAX, VNODES, Ring, _hash, under_bound

IDS = [f"http://10.0.0.{n}:8000" for n in range(8)]
KEYS = [f"session-{n}" for n in range(400)]


def test_routers_agree_whatever_they_saw_before() -> None:
    """The place of a key depends on the candidates alone: not on their order, nor on replicas known earlier."""
    fresh, experienced = Ring(), Ring()
    for n in range(3, 9):
        experienced.pick("x", IDS[:n], IDS[:n])
    for key in KEYS:
        here = fresh.pick(key, IDS[1:6], IDS[1:6])
        assert here == experienced.pick(key, set(IDS[5:0:-1]), IDS[:6])


@given(ids=st.lists(st.sampled_from(IDS), min_size=1, unique=True), keys=st.lists(st.text(), max_size=20))
@settings(deadline=None)
def test_the_walk_is_that_of_the_library(ids: list[str], keys: list[str]) -> None:
    """However often a place was walked from before, the order is uhashring's own, less who is no candidate."""
    ring, library = Ring(), HashRing(nodes=sorted(IDS), vnodes=VNODES, hash_fn=_hash)
    ring.walk("", IDS)
    for key in [*keys, *keys]:
        assert ring.walk(key, ids) == [id_ for id_ in library.iterate_nodes(key) if id_ in ids]


def test_places_that_are_remembered_are_bounded() -> None:
    """More keys than there is room for: what is remembered of them is not more, and the order stays the same."""
    ring, many = Ring(), [f"http://10.0.1.{n}:8000" for n in range(40)]
    first = {key: ring.walk(key, many) for key in map(str, range(9_000))}
    assert len(ring._orders) <= ORDERS_MAX
    assert {key: ring.walk(key, many) for key in first} == first


def test_a_departure_moves_only_its_own_keys() -> None:
    """Keys of the replicas that stay do not move; those of the one that left are spread over several."""
    ring = Ring()
    before = {key: ring.pick(key, IDS, IDS) for key in KEYS}
    after = {key: ring.pick(key, IDS[1:], IDS[1:]) for key in KEYS}
    assert all(after[key] == place for key, place in before.items() if place != IDS[0])
    assert len({after[key] for key, place in before.items() if place == IDS[0]}) > 3


def test_an_arrival_takes_only_its_share() -> None:
    """A new replica takes keys for itself and moves none between the others."""
    ring = Ring()
    before = {key: ring.pick(key, IDS[:7], IDS[:7]) for key in KEYS}
    after = {key: ring.pick(key, IDS, IDS) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {IDS[7]}
    assert len(moved) < 2.5 * len(KEYS) / 8


def test_keys_spread() -> None:
    """No replica is preferred by more than twice its share of keys."""
    ring = Ring()
    counts = Counter(ring.pick(key, IDS, IDS) for key in KEYS)
    assert len(counts) == len(IDS)
    assert max(counts.values()) < 2 * len(KEYS) / len(IDS)


@given(loads=st.lists(st.floats(0, 50), min_size=1, max_size=8), more=st.floats(0, 5))
@settings(deadline=None)
def test_the_bound_is_near_the_mean_and_somebody_is_under_it(loads: list[float], more: float) -> None:
    """Whoever is under the bound has less than BOUND x the mean load, the addition included, rounded up."""
    by_id = dict(zip(IDS, loads, strict=False))
    under = under_bound(by_id, more)
    assert all(by_id[id_] < BOUND * (sum(loads) + more) / len(loads) + 1 for id_ in under)
    assert under or not any(loads) or more < 1e-6
    assert all(by_id[id_] >= max([by_id[u] for u in under], default=0.0) for id_ in by_id.keys() - under)


def test_nobody_is_nowhere() -> None:
    """No replicas, nobody under the bound."""
    assert under_bound({}, 1) == set()


@given(under=st.sets(st.sampled_from(IDS), min_size=1), key=st.integers().map(str))
@settings(deadline=None)
def test_whoever_is_over_the_bound_is_passed_by(under: set[str], key: str) -> None:
    """The pick is under the bound; the key's own replica keeps it as long as it is."""
    ring = Ring()
    home = ring.pick(key, IDS, IDS)
    picked = ring.pick(key, IDS, under)
    assert picked in under
    assert picked == home or home not in under


def test_one_key_for_all_still_spreads() -> None:
    """A thousand requests with the same key: no replica gets more than the bound."""
    ring, in_flight = Ring(), dict.fromkeys(IDS, 0)
    for _ in range(1_000):
        in_flight[ring.pick("hot", IDS, under_bound(in_flight, 1))] += 1
    assert max(in_flight.values()) <= BOUND * 1_000 / len(IDS) + 1


def test_when_all_are_full_the_first_serves() -> None:
    """A bound that nobody is under changes nothing: the key's own replica takes it."""
    ring = Ring()
    assert ring.pick("k", IDS, []) == ring.pick("k", IDS, IDS)


def test_no_candidates_is_an_error() -> None:
    """There is nobody to pick."""
    with pytest.raises(ValueError, match="no candidates"):
        Ring().pick("k", [], [])


def test_names_that_come_and_go_are_forgotten() -> None:
    """Pods under ever new names do not fill the ring, and keys still go where a fresh ring sends them."""
    ring, rng = Ring(), Random(1)
    for generation in range(60):
        ids = [f"http://pod-{generation}-{n}:8000" for n in range(3)]
        key = str(rng.random())
        assert ring.pick(key, ids, ids) == Ring().pick(key, ids, ids)
        assert len(ring._known) <= 3 * (JOINED_MAX + 3)
        assert len(ring._names) <= 3 * (JOINED_MAX + 3)


def test_whoever_is_asked_for_now_and_then_stays() -> None:
    """Walks that ask for a few at a time let nobody go who is still asked for, however many join meanwhile."""
    ring, few = Ring(), [set(IDS[n : n + 2]) for n in range(0, 8, 2)]
    for n in range(200):
        ring.walk("k", {f"http://pod-{n}:8000"})
        for ids in few:
            ring.walk("k", ids)
            changes = ring._changes
            ring.walk("k", ids)
            assert ring._changes <= changes + 1, "it left, and had to join again"
        assert ring._known.keys() >= set(IDS)


MOVES = st.lists(st.tuples(st.sets(st.sampled_from(IDS), min_size=1), st.integers(0, 9).map(str)), max_size=30)


@given(moves=MOVES, others=st.integers(0, 60), bits=st.sampled_from([6, 64]))
@settings(deadline=None)
def test_the_order_in_which_ids_come_and_go_changes_nothing(
    moves: list[tuple[set[str], str]], others: int, bits: int
) -> None:
    """Whatever joined and left before, and even where many points are the same, a walk is that of a ring that knows
    nobody else: ids that left leave nothing behind, and those that stay keep their places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_hash", lambda key: _hash(key) % (1 << bits))
        patch.setattr(module, "JOINED_MAX", 2)
        patch.setattr(module, "VNODES", 8)
        ring = Ring()
        for n, (ids, key) in enumerate(moves):
            assert ring.walk(key, ids) == Ring().walk(key, ids)
            for number in range(others // 10):
                ring.walk(key, {f"http://pod-{n}-{number}:8000"})
    assert len(ring._points) == len(ring._owners)


@pytest.mark.inside  # it counts calls of the hash
def test_a_join_is_the_work_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica more on a ring of 300: its own points are hashed and nobody else's, and so for one that leaves."""
    hashed = []

    def counted(key: str) -> int:
        hashed.append(key)
        return _hash(key)

    monkeypatch.setattr(module, "_hash", counted)
    ring, many = Ring(), [f"http://10.0.1.{n}:8000" for n in range(301)]
    ring.walk("k", dict.fromkeys(many[:300]))
    hashed.clear()
    order = ring.walk("k", dict.fromkeys(many[1:]))
    assert len(hashed) == VNODES + 1
    ring._leaving = {many[0]}
    hashed.clear()
    assert ring.walk("k", dict.fromkeys(many[1:])) == order
    assert len(hashed) == VNODES + 1
    assert many[0] not in ring._known


def test_ids_in_a_list_are_not_searched_for_each_that_is_known() -> None:
    """Asked for as a list, 300 of 301 known ids cost no 90,000 comparisons."""
    compared = 0

    class Id(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    ring, many = Ring(), [Id(f"http://10.0.1.{n}:8000") for n in range(301)]
    ring.walk("k", many)
    compared = 0
    assert len(ring.walk("k", [Id(id_) for id_ in many[1:]])) == 300
    assert compared < 3_000
