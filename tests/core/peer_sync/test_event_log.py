"""What routers tell each other once: placements, how they ended, who is whose home."""

from __future__ import annotations

from router.core.fleet.lease import Lease
from router.core.peer_sync.limits import SharingLimits
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.requests import Prompt, RequestSpec
from tests.core.peer_sync.several import MODEL, TOKENS_A_BLOCK, Several, keys

PROMPT = 64 * TOKENS_A_BLOCK


def _copies(routers: int) -> dict[str, int]:
    """Where 24 requests for one cold prefix go that come within 24 ms, and how many of them each replica gets. Messages
    take 5 ms."""
    names = tuple("abcd"[:routers])
    several, late, found = Several(*names, replicas=8), list[tuple[float, str, bytes]](), dict[str, int]()
    for n in range(24):
        now_s = 1.0 + n / 1e3
        for _, sender, message in [each for each in late if each[0] <= now_s]:
            for name in names:
                if name != sender:
                    several.hear(sender, name, message, now_s)
        late = [each for each in late if each[0] > now_s]
        lease = several.place(names[n % routers], prompt_tokens=2 * PROMPT, now_s=now_s, group=1)
        found[lease.replica] = found.get(lease.replica, 0) + 1
        late += [(now_s + 0.005, name, said) for name in names if (said := several[name].say(now_s)) is not None]
    return found


def test_a_cold_burst_makes_no_more_copies_through_four_routers_than_through_one() -> None:
    """Replicas at which a cold prefix is computed are as few as one router would have chosen."""
    assert len(_copies(4)) <= len(_copies(1))


def test_a_cold_prompt_is_worth_a_message_at_once() -> None:
    """Others hear of a long prefill before the next regular message, and count its blocks as held there."""
    routers = Several("a", "b")
    routers.say("a", 0.99)
    lease = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    assert routers.urgent["a"] == 1
    routers.tell("a", "b", 1.0, 1.005)
    member, index = routers.member("b", lease.replica), routers.router("b").index
    assert index.depth(lease.replica, keys(1, 64)) == len(index.holders[lease.replica].unproven.counts()) == 64
    assert member.wait_ms(1.005) > 500


def test_what_failed_is_not_held() -> None:
    """A prompt whose placement failed was never computed, and nobody counts on it."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    routers.tell_all(1.0)
    assert routers.router("b").index.depth(lease.replica, keys(1, 64)) == 64
    routers.router("a").finish(lease, Outcome(EndReason.FAILED), 1.1)
    routers.tell_all(1.2)
    assert routers.router("b").index.depth(lease.replica, keys(1, 64)) == 0


def test_what_was_computed_stays_held() -> None:
    """The end of an answer proves the blocks of its prompt, and its own take room behind them."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    _answer(routers, "a", lease, 1.5)
    routers.tell_all(2.0)
    for name in ("a", "b"):
        holder = routers.router(name).index.holders[lease.replica]
        assert (len(holder.owner), holder.pins, holder.unproven.counts()) == (64 + 4, {}, {})


def test_a_conversation_goes_home_through_another_router() -> None:
    """The next turn quotes an answer that another router brought: it goes where that lies, which is counted once."""
    routers = Several("a", "b", "c", replicas=8)
    lease = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    _answer(routers, "a", lease, 1.5)
    routers.tell_all(2.0)
    end_key, start = (1 << 32) + PROMPT, 4 * PROMPT
    answered = start + 4 * 500
    grown = 64 + 4
    chain = Chain(keys(1, grown), 7, end_key + 1, ((end_key, start, answered),), 1)
    ask = RequestSpec(MODEL, Prompt(text=b"", first_user_end=0, skipped_bytes=answered), stream=True)
    turn = routers.router("b").route(PlacementRequest(ask, MODEL, chain, "1"), 5.0)
    assert turn.replica == lease.replica
    assert turn.prompt.credited_tokens > 300
    routers.tell_all(5.1)
    blocks = [len(routers.router(name).index.holders[lease.replica].owner) for name in ("a", "b", "c")]
    assert len(set(blocks)) == 1, "the answer is counted as part of the prompt by all, and no more by itself"


def test_a_lost_end_is_made_good() -> None:
    """Nobody heard how a lease ended: it ends with the first message or state that says that it is over."""
    routers = Several("a", "b")
    lease = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    routers.tell_all(1.0)
    _answer(routers, "a", lease, 5.0)
    assert routers.say("a", 5.1)  # lost
    routers.place("a", prompt_tokens=TOKENS_A_BLOCK, now_s=5.2, group=2, only=lease.replica)
    routers.tell("a", "b", 5.4, 5.4)
    holder = routers.router("b").index.holders[lease.replica]
    assert (len(holder.pins), holder.unproven.counts()) == (1, {keys(2, 1)[0]: 1})  # of the second prompt
    assert routers.router("b").index.depth(lease.replica, keys(1, 64)) == 64


def test_a_router_that_dies_takes_with_it_what_was_not_computed() -> None:
    """Its clients are gone with it: what should be computed by now is held, the rest is not."""
    routers = Several("a", "b", replicas=1)
    done = routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=1)
    routers.tell_all(1.0)
    routers.place("a", prompt_tokens=40 * PROMPT, now_s=1.9, group=2)
    routers.tell("a", "b", 1.9, 1.9)
    routers["b"].forget("a", 3.0)
    index = routers.router("b").index
    assert index.depth(done.replica, keys(1, 64)) == 64
    assert index.depth(done.replica, keys(2, 64)) == 0


def test_nothing_is_credited_to_an_engine_that_began_anew() -> None:
    """One router saw an engine die; what another tells of it, and has not seen that, is of the cache before."""
    routers = Several("a", "b", replicas=1)
    routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=9)
    routers.tell_all(1.0)
    (id_,) = routers.ids
    routers.router("b").observations.forget(id_)
    routers["b"].say(10.0)
    routers.place("a", prompt_tokens=PROMPT, now_s=10.5, group=1)
    routers.tell("a", "b", 10.5, 10.5)
    assert routers.router("b").index.depth(id_, keys(1, 64)) == 0
    routers.router("a").observations.forget(id_)
    routers.tell("a", "b", 11.0, 11.0)
    routers.place("a", prompt_tokens=PROMPT, now_s=11.1, group=3)
    routers.tell("a", "b", 11.4, 11.4)
    assert routers.router("b").index.depth(id_, keys(3, 64)) == 64


def test_what_does_not_fit_waits_or_is_left_out() -> None:
    """A message has no more keys than it may; the rest comes with the next ones, and what is too much is counted."""
    limits = SharingLimits(keys_max=100, queue_keys_max=200)
    routers = Several("a", "b", limits=limits)
    for group in range(4):
        routers.place("a", prompt_tokens=PROMPT, now_s=1.0, group=group)
    assert routers["a"].left_out["placements"] == 1
    messages = [routers.say("a", 1.0 + n / 100) for n in range(3)]
    assert routers["a"].say(1.03) is None
    assert all(len(message) < 2_000 for message in messages)
    for message in messages:
        routers.hear("a", "b", message, 1.1)
    assert routers["b"].count_remote_leases() == [(3, 3 * 64)]


def _answer(routers: Several, name: str, lease: Lease, at_s: float) -> None:
    router = routers.router(name)
    router.first_token(lease, at_s)
    router.finish(lease, Outcome(EndReason.OK, Usage(PROMPT, 500, 0)), at_s)
