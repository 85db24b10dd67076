"""Prefill legs of the simulated engine: handshakes hold there as they hold in life, and break as they break in life."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.fake_engine.peers import PeerLimits
from loadtest.fake_engine.prefill_export import LEASE_S, WAIT_S, EngineCrashed, LegError, NotComputed, PrefillExports
from router.core.types.disagg_types import KvConnector

LINK = PeerLimits(floor_s=0.01, token_s=1e-5)
CONCURRENT = [KvConnector.MOONCAKE, KvConnector.OFFLOADING, KvConnector.SGLANG]


def kind_of(legs: PrefillExports, id_: str, now_s: float) -> str:
    """How a fetch fails."""
    with pytest.raises(LegError) as raised:
        legs.fetch(id_, now_s)
    return raised.value.kind


def prefilled(handshake: KvConnector, now_s: float = 0.0) -> PrefillExports:
    """An engine with one leg `a` of 1,000 tokens, computed at that moment."""
    legs = PrefillExports(LINK)
    legs.begin_prefill(handshake, "a", 1_000, now_s)
    legs.finish_prefill("a", now_s)
    return legs


@pytest.mark.parametrize("handshake", KvConnector)
def test_blocks_are_fetched_once(handshake: KvConnector) -> None:
    """A transfer takes the link's floor and its time for each token, and a second consumer finds nothing."""
    legs = prefilled(handshake)
    assert legs.fetch("a", 1.0) == pytest.approx(0.02)
    assert kind_of(legs, "a", 1.0) == "taken"
    assert (len(legs), legs.fetched, legs.fetched_tokens) == (0, 1, 1_000)


def test_transfers_follow_each_other_on_the_link() -> None:
    """The second transfer of a moment begins when the first is over, and only what is lacking is sent."""
    legs = prefilled(KvConnector.NIXL)
    legs.begin_prefill(KvConnector.NIXL, "b", 1_000, 0.0)
    legs.finish_prefill("b", 0.0)
    assert legs.fetch("a", 0.0, lacking_tokens=500) == pytest.approx(0.015)
    assert legs.fetch("b", 0.0) == pytest.approx(0.035)


@pytest.mark.parametrize("handshake", KvConnector)
def test_a_lease_ends(handshake: KvConnector) -> None:
    """Blocks that nobody fetches are free when their lease is over, and whoever comes later is told so."""
    legs = prefilled(handshake, 5.0)
    assert legs.get_next_expiry_s() == 5.0 + LEASE_S[handshake]
    assert legs.expire(5.0 + LEASE_S[handshake] - 0.1) == []
    assert legs.expire(5.0 + LEASE_S[handshake]) == ["a"]
    assert kind_of(legs, "a", 600.0) == "expired"


def test_heartbeats_renew_a_lease() -> None:
    """NIXL's blocks stay as long as the decoding engine has the request, and are free at once when it drops that."""
    legs = prefilled(KvConnector.NIXL)
    legs.connect(KvConnector.NIXL, "a", 1.0)
    assert legs.expire(1_000.0) == []
    legs.disconnect("a", 1_000.0)
    assert len(legs) == 0
    assert kind_of(legs, "a", 1_000.0) == "taken"


def test_nixl_is_serial() -> None:
    """There is nothing to fetch before the prefill has ended, nor of a leg that nobody began."""
    legs = PrefillExports(LINK)
    assert kind_of(legs, "a", 0.0) == "unknown"
    legs.begin_prefill(KvConnector.NIXL, "a", 10, 0.0)
    assert kind_of(legs, "a", 0.0) == "unknown"


@pytest.mark.parametrize("handshake", CONCURRENT)
def test_either_leg_may_come_first(handshake: KvConnector) -> None:
    """The decoding engine waits for a prefill that begins behind it, for as long as such engines wait."""
    legs = PrefillExports(LINK)
    legs.connect(handshake, "a", 0.0)
    with pytest.raises(NotComputed):
        legs.fetch("a", 1.0)
    legs.begin_prefill(handshake, "a", 10, 2.0)
    assert legs.may_compute("a")
    with pytest.raises(NotComputed):
        legs.fetch("a", 3.0)
    legs.finish_prefill("a", 4.0)
    assert legs.fetch("a", 4.0) > 0
    legs.connect(handshake, "b", 10.0)
    assert kind_of(legs, "b", 10.0 + WAIT_S[handshake]) == "expired"


def test_sglang_computes_nothing_before_both_are_there() -> None:
    """Awaiting SGLang's prefill leg before the decode leg is sent never ends; after 300 s the room has failed."""
    legs = PrefillExports(LINK)
    legs.begin_prefill(KvConnector.SGLANG, "7", 10, 0.0)
    assert not legs.may_compute("7")
    assert legs.expire(299.0) == []
    assert legs.expire(300.0) == ["7"]
    legs.begin_prefill(KvConnector.SGLANG, "8", 10, 300.0)
    legs.connect(KvConnector.SGLANG, "8", 301.0)
    assert legs.may_compute("8")


def test_a_room_in_use_ends_the_process() -> None:
    """SGLang's schedulers die of a room that comes again; one that is over may come again."""
    legs = PrefillExports(LINK)
    legs.begin_prefill(KvConnector.SGLANG, "7", 10, 0.0)
    with pytest.raises(EngineCrashed):
        legs.begin_prefill(KvConnector.SGLANG, "7", 10, 0.0)
    legs.drop("7")
    assert kind_of(legs, "7", 0.0) == "failed"
    legs.begin_prefill(KvConnector.SGLANG, "7", 10, 0.0)
    assert "7" in legs


_acts = st.sampled_from(["begin", "connect", "disconnect", "computed", "drop", "fetch", "wait"])


@given(st.lists(st.tuples(_acts, st.sampled_from("abc"), st.sampled_from(list(KvConnector))), max_size=60))
def test_nothing_stays_for_ever(acts: list[tuple[str, str, KvConnector]]) -> None:
    """Whatever comes in whatever order, blocks are handed out once for each prefill that ended, and once nobody
    computes and nobody sends heartbeats, everything is forgotten."""
    legs, now_s, computed = PrefillExports(LINK), 0.0, 0
    running: set[str] = set()
    for act, id_, handshake in acts:
        now_s += 0.5
        running = {each for each in running if each in legs}
        if act == "begin" and id_ not in legs:
            legs.begin_prefill(handshake, id_, 100, now_s)
            running.add(id_)
        elif act == "connect":
            legs.connect(handshake, id_, now_s)
        elif act == "disconnect":
            legs.disconnect(id_, now_s)
        elif act == "computed" and id_ in running and legs.may_compute(id_):
            legs.finish_prefill(id_, now_s)
            running.discard(id_)
            computed += 1
        elif act == "drop":
            legs.drop(id_)
        elif act == "fetch":
            with suppress(LegError, NotComputed):
                assert legs.fetch(id_, now_s) > 0
        elif act == "wait":
            now_s += 100.0
            legs.expire(now_s)
    assert legs.fetched <= computed
    for id_ in "abc":
        if id_ in running:
            legs.drop(id_)
        legs.disconnect(id_, now_s)
    legs.expire(now_s + 1_000.0)
    assert len(legs) == 0
    assert legs.get_next_expiry_s() is None
