"""Which engines are credited with what was known before (core/peer_sync/snapshot_import.py), and what cannot be
read."""

from __future__ import annotations

import pytest

from router.core.kv_events.event_state_codec import UnreadableState
from router.core.peer_sync.snapshot_format import (
    VERSION,
    StateEnd,
    StateOrigin,
    StateReplica,
    StateTouches,
    decode_piece,
    encode_piece,
)
from router.core.peer_sync.snapshot_import import PROMPT_TOKENS_PER_S_MAX, import_replica, same_engine
from router.core.placement.router import Router
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica
from tests.core.peer_sync.several import Several, keys
from tests.core.peer_sync.stated import parts_of, restored, told

NOW = Load(prompt_tokens_total=5_000.0, started_s=77.5)


def known(load: Load = NOW, instance: str = "", *names: str) -> tuple[Several, str]:
    """A router that has sent one replica a prompt of 20 blocks; these routers have probed it."""
    several = Several("before", "after", replicas=1)
    (id_,) = several.ids
    for name in names or ("before", "after"):
        see(several.router(name), id_, load, instance)
    lease = several.place("before", prompt_tokens=2_560, group=1, now_s=1.0)
    several.router("before").first_token(lease, 1.2)
    several.router("before").finish(lease, Outcome(EndReason.OK, Usage(2_560, 20, None)), 2.0)
    return several, id_


def see(router: Router, id_: str, load: Load, instance: str = "") -> None:
    """Discovery and a probe say this of a replica."""
    router.replace([Replica(id_, instance=instance)])
    router.observations.observe_load(id_, load)


def held(several: Several) -> int:
    """Blocks of that prompt that the router after believes to be held."""
    return max(several.router("after").index.match(keys(1, 20)).values(), default=0)


@pytest.mark.parametrize(
    ("then", "now", "instances", "why"),
    [
        (NOW, NOW, ("", ""), None),
        (NOW, Load(prompt_tokens_total=9_000.0, started_s=77.5), ("", ""), None),
        (Load(), Load(), ("uid/0", "uid/0"), None),
        (Load(), Load(), ("uid/0", "uid/1"), "a different engine has this address"),
        (NOW, Load(prompt_tokens_total=9_000.0, started_s=99.0), ("", ""), "the engine was restarted"),
        (NOW, Load(prompt_tokens_total=9_000.0, started_s=99.0), ("uid/0", "uid/0"), "the engine was restarted"),
        (Load(prompt_tokens_total=5e3), Load(prompt_tokens_total=10.0), ("", ""), "the engine's counters decreased"),
        (Load(), Load(), ("", ""), "the engine could not be verified as the same"),
        (Load(), Load(), ("uid/0", ""), "the engine could not be verified as the same"),
        (Load(prompt_tokens_total=5e3), Load(prompt_tokens_total=6e3), ("", ""), "the engine could not be verified"),
        (Load(prompt_tokens_total=5e9), Load(prompt_tokens_total=6e9), ("", ""), None),
    ],
)
def test_only_the_same_engine_is_credited(then: Load, now: Load, instances: tuple[str, str], why: str | None) -> None:
    """Something has to say that it is the same, and nothing may say that it is not."""
    several, id_ = known(then, instances[0], "before")
    pieces = told(several.router("before"), 3.0)
    see(several.router("after"), id_, now, instances[1])
    refused = restored(several.router("after"), pieces, 50.0, age_s=10.0)
    if why is None:
        assert not refused
        assert held(several) == 20
    else:
        assert refused[id_].startswith(why)
        assert not held(several)


def test_counters_alone_prove_an_engine_that_nobody_can_have_caught_up_with() -> None:
    """What it had counted is more than another engine could have by now, or it says nothing."""
    several, id_ = known(Load(prompt_tokens_total=20 * PROMPT_TOKENS_PER_S_MAX))
    (part,) = parts_of(told(several.router("before"), 3.0)).parts.values()
    member = several.member("after", id_)
    assert same_engine(part.replica, member, 20.0) == (True, "")
    assert same_engine(part.replica, member, 21.0)[0] is None


def test_what_is_restored_is_as_old_as_it_was() -> None:
    """Time goes on while no router runs: what was used a minute before the end is older by the time in between."""
    several, id_ = known()
    pieces = told(several.router("before"), 62.0)
    restored(several.router("after"), pieces, 1_000.0, age_s=10.0)
    oldest = several.router("after").index.holders[id_].recency.oldest()
    assert oldest is not None
    assert oldest.at_s == pytest.approx(1_000.0 - 60.0 - 10.0)


def test_a_cache_that_begins_anew_meanwhile_ends_it() -> None:
    """An engine that restarts while its part is taken over is credited with nothing of the rest."""
    several, id_ = known()
    (part,) = parts_of(told(several.router("before"), 3.0)).parts.values()
    router, member = several.router("after"), several.member("after", id_)
    steps = import_replica(router, member, part, 0.0, 50.0)
    next(steps)
    router.observations.forget(id_)
    assert list(steps) == []
    assert not held(several)
    assert not router.answers.newest(0, 10)


def test_a_small_cache_takes_what_was_used_last() -> None:
    """Where there is no room for all of it, what was used least recently is left out, and nothing is over the limit."""
    several, id_ = known()
    lease = several.place("before", prompt_tokens=2_560, group=2, now_s=5.0)
    several.router("before").finish(lease, Outcome(EndReason.OK), 6.0)
    pieces, after = told(several.router("before"), 7.0), several.router("after")
    after.index.resize(id_, 25)
    restored(after, pieces, 50.0)
    assert after.index.blocks(id_) <= 25
    assert after.index.match(keys(2, 20)) == {id_: 20}


def test_speeds_and_sizes_are_as_before() -> None:
    """A router that starts prices as the one before did: its fits, its means, and the bytes of a token."""
    several, id_ = known()
    before, after = several.router("before"), several.router("after")
    for n in range(30):
        lease = several.place("before", prompt_tokens=4_000 + 100 * n, now_s=10.0 + n)
        before.first_token(lease, 10.4 + n)
        before.finish(lease, Outcome(EndReason.OK, Usage(lease.prompt_tokens, 50, 0)), 10.9 + n)
    before.models.tokens("m").observe(3_000, 1_000)
    restored(after, told(before, 60.0), 100.0)
    was, now = several.member("before", id_), several.member("after", id_)
    assert now.prefill_model.ms(6_000, 0) == pytest.approx(was.prefill_model.ms(6_000, 0), rel=0.1)
    assert now.own_speed.prefill_factor.observations == was.own_speed.prefill_factor.observations > 20
    assert now.own_speed.prefill_factor.value == was.own_speed.prefill_factor.value
    assert now.own_speed.step_factor.value == was.own_speed.step_factor.value
    assert now.speeds.mean_answer_tokens == was.speeds.mean_answer_tokens
    assert after.models.tokens("m").bytes_per_token == before.models.tokens("m").bytes_per_token
    assert after.reuse.counts == before.reuse.counts


def test_own_observations_are_not_replaced() -> None:
    """A router that has learned something itself keeps to that."""
    several, _ = known()
    after = several.router("after")
    after.models.tokens("m").observe(5_000, 1_000)
    own = after.models.tokens("m").bytes_per_token
    several.router("before").models.tokens("m").observe(3_000, 1_000)
    restored(after, told(several.router("before"), 3.0), 50.0)
    assert after.models.tokens("m").bytes_per_token == own


@pytest.mark.parametrize(
    "pieces",
    [
        [StateReplica("a")],
        [StateOrigin(VERSION - 1, "r", 0.0), StateEnd(1)],
        [StateOrigin(VERSION + 1, "r", 0.0), StateEnd(1)],
        [StateOrigin(VERSION, "r", 0.0), StateEnd(7)],
        [StateOrigin(VERSION, "r", 0.0), StateReplica("a"), StateReplica("a")],
        [StateOrigin(VERSION, "r", 0.0), StateTouches([1.0], [1], bytes(8))],
        [StateOrigin(VERSION, "r", 0.0), StateReplica("a"), StateTouches([1.0], [2], bytes(8))],
        [StateOrigin(VERSION, "r", 0.0), StateEnd(1), StateReplica("a")],
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces: list[StateReplica]) -> None:
    """Of another version, out of order, too few or too many: one error, and no other."""
    with pytest.raises(UnreadableState):
        parts_of([encode_piece(piece) for piece in pieces])


@pytest.mark.parametrize("piece", [b"", b"\xff", b"\x91\xa3end", b"\x92\xa5blank\x01", bytes(3 << 20)])
def test_what_nobody_has_told_is_refused(piece: bytes) -> None:
    """Any bytes give a piece, or that error."""
    with pytest.raises(UnreadableState):
        decode_piece(piece)
