"""What is left of others while the channel is gone, and how it is whole again."""

from __future__ import annotations

import pytest

from router.core.types.replicas import Load
from tests.core.peer_sync.several import TOKENS_A_BLOCK, Several, keys

CAPACITY_TOKENS = 400_000


def probed(routers: Several, name: str, id_: str, prompt_tokens: int, now_s: float) -> None:
    """One of them hears what the engine has counted so far."""
    load = Load(prompt_tokens_total=prompt_tokens, kv_tokens_max=CAPACITY_TOKENS)
    routers.router(name).observations.observe_load(id_, load, now_s)


def test_what_others_sent_during_an_outage_is_not_foreign() -> None:
    """While the channel is gone others' prompts look like a stranger's; back again, its state tells that they
    were not, and the cache is as large again as it was."""
    routers = Several("a", "b", replicas=1)
    (id_,) = routers.ids
    member, index = routers.member("b", id_), routers.router("b").index
    probed(routers, "b", id_, 1, 0.5)
    whole = index.capacity(id_)
    routers.tell_all(0.6)
    routers.place("a", prompt_tokens=100_000, now_s=1.0)
    routers.tell_all(1.0)
    probed(routers, "b", id_, 100_001, 1.1)
    assert member.counters.known_share == 1.0

    routers["b"].on_disconnected(2.0)
    for n in range(4):
        routers.place("a", prompt_tokens=100_000, now_s=2.0 + n / 10)
    probed(routers, "b", id_, 500_001, 3.0)
    assert member.counters.known_share < 0.3
    assert index.capacity(id_) < 0.3 * whole

    routers.restore("a", "b", 4.0)
    probed(routers, "b", id_, 500_002, 4.1)
    assert member.counters.known_share == 1.0
    assert index.capacity(id_) == pytest.approx(whole, rel=0.05)


def test_another_process_counts_from_the_beginning() -> None:
    """A router that was restarted meanwhile counts from 0: what it had sent before is not taken for what it sends."""
    routers = Several("a", "b", replicas=1)
    (id_,) = routers.ids
    routers.tell_all(0.6)
    routers.place("a", prompt_tokens=100_000, now_s=1.0)
    routers.tell_all(1.0)
    told = routers.member("b", id_).counters.peer_prompt_tokens
    routers["b"].on_disconnected(2.0)
    routers.begin_anew("a", 3.0)
    routers.place("a", prompt_tokens=8_000, now_s=3.0)
    routers.tell("a", "b", 4.0, 4.0)
    assert told <= routers.member("b", id_).counters.peer_prompt_tokens <= told + 8_000


@pytest.mark.parametrize("gone", [True, False])
def test_prompts_that_others_have_under_way_are_kept_if_only_the_channel_is_gone(gone: bool) -> None:
    """A router that hears nobody goes on believing that what others sent will be computed. Where one router alone falls
    silent while the channel is there, it is gone, and what it sent just now is not computed."""
    routers = Several("a", "b", replicas=1)
    (id_,) = routers.ids
    routers.place("a", prompt_tokens=64_000, now_s=1.0, group=7)
    routers.tell("a", "b", 1.0, 1.0)
    prompt = keys(7, 64_000 // TOKENS_A_BLOCK)
    assert routers.router("b").index.depth(id_, prompt) == len(prompt)
    if gone:
        routers["b"].on_disconnected(1.5)
    else:
        routers["b"].forget("a", 2.5)
    assert routers.router("b").index.depth(id_, prompt) == (len(prompt) if gone else 0)
