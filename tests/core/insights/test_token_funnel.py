"""Where prompt tokens end: in one place each, whatever happened, and each place where it is the true one."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from itertools import chain as joined

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.estimators.tier_load import LoadModel
from router.core.fleet.lease import Lease
from router.core.insights.breakdown import Explainer, default_breakdown, with_actual_usage
from router.core.insights.token_funnel import token_fates
from router.core.kv_events.batch_decoder import Removed, Stored
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain, token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.cache_misses import FUNNEL_STAGES, MissReason, PromptAnalysis, TokenBreakdown, TokenFate
from router.core.types.placements import Confidence, EndReason, ExternalKv, Usage
from router.core.types.replicas import Load
from router.core.types.requests import Prompt, RequestSpec
from router.core.types.tiers import CPU
from tests.core.placement.placing import World, chat, words
from tests.core.placement.tiered_fleet import TOKENS, TieredFleet
from tests.core.ready import router_of

FOUND = (TokenFate.TIER, TokenFate.PULLED, TokenFate.REPLAY, TokenFate.GPU_HIT)
WINDOW_S = 3_600.0
FIRST, SECOND = words(1, 2_000), words(2, 2_000)
counts = st.integers(0, 5_000)
Places = dict[TokenFate, int]


def watched(ids: str = "a", policy: str = "warm", *, blocks_max: int = 4_096) -> World:
    """A World whose Router explains."""
    world = World(ids, policy, blocks_max=blocks_max, explainer=Explainer(100_000, replay_window_s=WINDOW_S))
    for id_ in ids:
        world.router.observations.observe_load(id_, Load(block_tokens=16))
    return world


def ended(lease: Lease, cached_tokens: int | None = None, prompt_tokens: int | None = None) -> Places:
    """Where the tokens of a placement ended; the engine told how many it found, or did not."""
    usage = Usage(lease.prompt_tokens if prompt_tokens is None else prompt_tokens, 1, cached_tokens)
    assert lease.receipt.miss is not None
    return token_fates(with_actual_usage(lease.receipt.miss, usage), replay=lease.receipt.replay)


def test_stages_take_every_place_once() -> None:
    """Every place is lost before one stage or is a hit, and places are in the order of stages."""
    assert [*joined(*FUNNEL_STAGES.values()), *FOUND] == list(TokenFate)


@given(st.dictionaries(st.sampled_from(MissReason), counts), counts, counts, counts, counts, st.booleans())
def test_places_add_up_to_any_breakdown(
    misses: dict[MissReason, int], hit: int, loaded: int, pulled: int, elsewhere: int, replay: bool
) -> None:
    """Places are the breakdown's tokens whatever it says of tiers and other replicas, hits are hits, and a place
    that is named has tokens."""
    miss = TokenBreakdown(
        hit + sum(misses.values()), hit, misses, loaded=loaded, dropped_elsewhere=elsewhere, pulled=pulled
    )
    places = token_fates(miss, replay=replay)
    assert sum(places.values()) == miss.prompt_tokens
    assert sum(places.get(place, 0) for place in FOUND) == hit
    assert all(tokens > 0 for tokens in places.values())
    evicted = places.get(TokenFate.EVICTED_HERE, 0) + places.get(TokenFate.EVICTED_BY_OTHERS, 0)
    assert evicted == misses.get(MissReason.EVICTED, 0)


@given(st.integers(1, 5_000), counts, counts, st.none() | counts, st.booleans())
def test_places_add_up_without_an_observatory(
    prompt: int, predicted: int, tier: int, cached: int | None, replay: bool
) -> None:
    """A request that nobody explained has places, too: hits, and what the router did not read."""
    lease = watched().place(chat("hi"))
    receipt = lease.receipt
    receipt.prompt_tokens, receipt.predicted_cached_tokens, receipt.brought = prompt, predicted, ExternalKv(tier)
    places = token_fates(default_breakdown(receipt, Usage(prompt, 1, cached)), replay=replay)
    assert sum(places.values()) == prompt
    assert set(places) <= {*FOUND, TokenFate.UNSUPPORTED}


# -- any history -----------------------------------------------------------------------------------------------------


@cache
def prompt(conversation: int, turn: int) -> RequestSpec:
    """A turn of a conversation; all begin with a system prompt, and two of them alike."""
    turns = [words(10 * (conversation // 2) + n, 150) for n in range(2 * turn + 1)]
    return chat(*turns, system=words(99, 100)) if conversation else chat(*turns)


asks = st.tuples(
    st.integers(0, 5),  # conversation
    st.integers(0, 3),  # turn
    st.sampled_from(["", "", "a", "b"]),  # the only replica that may take it
    st.none() | st.tuples(st.floats(0, 1.2), st.floats(0.5, 1.5)),  # cached and prompt tokens of the engine, by ours
    st.sampled_from([EndReason.OK, EndReason.OK, EndReason.OK, EndReason.FAILED, EndReason.CLIENT_LEFT]),
    st.none() | st.builds(PromptAnalysis, counts, counts, counts, st.integers(0, 1), turn=st.integers(0, 1)),
)
happenings = st.lists(asks | st.sampled_from(["restart a", "restart b", "leave", "wait"]), max_size=25)


@settings(deadline=None)
@given(happenings, st.sampled_from(["warm", "round_robin"]), st.sampled_from([8, 24, 4_096]))
def test_every_token_of_every_request_ends_once(what: list[object], policy: str, blocks_max: int) -> None:
    """Prompts are asked for again, grow, are pushed out, are lost with replicas, fail, and go astray; engines count as
    they like. Each request's places add up to its prompt, by the engine's count where it tells, and hits are those that
    it found."""
    world = watched("abc", policy, blocks_max=blocks_max)
    for each in what:
        if isinstance(each, str):
            happens(world, each)
            continue
        conversation, turn, only, told, ending, sighting = each  # type: ignore[misc]
        fits = only if only and world.router.fleet.member(only) else None
        lease = world.place(prompt(conversation, turn), only=fits, sighting=sighting)
        total = lease.prompt_tokens
        usage = None if told is None else Usage(int(total * told[1]), 1, int(total * told[0]))
        world.finish(lease, ending, usage)
        assert sum(ended(lease).values()) == total
        if usage is not None:
            places = ended(lease, usage.cached_tokens, usage.prompt_tokens)
            assert sum(places.values()) == usage.prompt_tokens
            hit = min(usage.cached_tokens or 0, usage.prompt_tokens)
            assert sum(places.get(place, 0) for place in FOUND) == hit
            assert all(tokens > 0 for tokens in places.values())


def happens(world: World, what: str) -> None:
    """Something that takes caches away, or time that passes."""
    router = world.router
    if what.startswith("restart") and router.fleet.member(what[-1]):
        router.observations.forget(what[-1])
    elif what == "leave":
        router.replace([m.replica for m in router.members if m.id != "c"])
    world.now_s += 2_000.0


# -- each place ------------------------------------------------------------------------------------------------------


def unread() -> Places:
    """A prompt that no dialect reads."""
    return ended(watched().place(RequestSpec("m"), body_tokens=2_000))


def first() -> Places:
    """A prompt that nobody asked for before."""
    return ended(watched().serve(chat(FIRST)))


def partial_block() -> Places:
    """A prompt of less than a block."""
    return ended(watched().serve(chat("hello")))


def rewritten() -> Places:
    """Texts say that most of the prompt stood in an earlier one, behind something else."""
    return ended(watched().serve(chat(FIRST), sighting=PromptAnalysis(repeated_bytes=7_000)))


def of_another_model() -> Places:
    """Texts say that another model was asked for the same."""
    return ended(watched().serve(chat(FIRST), sighting=PromptAnalysis(identity_bytes=7_000)))


def gone_with_its_replica() -> Places:
    """The only replica restarts in between."""
    world = watched()
    world.serve(chat(FIRST))
    world.router.observations.forget("a")
    return ended(world.serve(chat(FIRST)))


def dropped_here() -> Places:
    """The only replica has room for one such prompt, and the other one came in between."""
    world = watched(blocks_max=16)
    world.serve(chat(FIRST))
    world.serve(chat(SECOND))
    return ended(world.serve(chat(FIRST)))


def dropped_there() -> Places:
    """One replica had the prompt and dropped it for another, and now the second replica is asked for it."""
    world = watched("ab", blocks_max=16)
    world.serve(chat(FIRST), only="a")
    world.serve(chat(SECOND), only="a")
    return ended(world.serve(chat(FIRST), only="b"))


def held_there() -> Places:
    """A policy that does not look sends the prompt to the replica that does not have it; the receipt says who has, and
    why not there."""
    world = watched("ab", "round_robin")
    holder = world.serve(chat(FIRST)).replica
    lease = world.serve(chat(FIRST))
    assert lease.receipt.miss is not None
    assert lease.receipt.miss.held == (holder, "policy")
    return ended(lease)


def said_and_not_found() -> Places:
    """The router believes that the replica has it, and the engine finds nothing."""
    world = watched()
    world.serve(chat(FIRST))
    return ended(world.serve(chat(FIRST, "answer", "more")), cached_tokens=0)


def behind_the_gpu() -> Places:
    """Events say that the prompt is in the CPU's memory, and no longer on the GPU."""
    block, tokens = 16, 2_000
    ids = array("I", range(tokens + 10)).tobytes()
    hashes = list(range(1, tokens // block + 1))
    guesses = {CPU: LoadModel(floor_ms=1.0, per_token_ms=0.001)}
    router = router_of("a", load_guesses=guesses, explainer=Explainer(100_000, replay_window_s=WINDOW_S))
    router.knowledge.set_untokenizable("a", "")
    router.knowledge.grade("a", Confidence.EXACT, "joined", 0.0)
    router.observations.observe_load("a", Load(kv_tokens_max=200_000, block_tokens=block))
    stored = Stored(hashes, None, ids[: 4 * tokens], block, "", b"", None, "GPU", 0, prefix=True)
    copied = Stored(hashes, None, ids[: 4 * tokens], block, "", b"", None, "CPU", 0, prefix=True)
    for event in (stored, copied, Removed(hashes, "GPU", 0)):
        router.knowledge.apply("a", event, 1.0)
    known = TokenPrompt(ids, "", b"", {block: token_chain(ids, block, token_root("", b"", block))})
    ask = RequestSpec("m", Prompt(text=b"", first_user_end=0, skipped_bytes=4 * (tokens + 10)), stream=True)
    lease = router.route(PlacementRequest(ask, "m", Chain([], 0, 1, (), 0), "key", known), 2.0)
    return ended(lease, cached_tokens=tokens)


def sent_by_another() -> Places:
    """Work waits at the only holder, whose memory sends the prompt to another replica."""
    fleet = TieredFleet("ab", explainer=Explainer(100_000, replay_window_s=WINDOW_S))
    for name in "ab":
        fleet.router.set_p2p_address(name, f"{name}:5710")
    fleet.says("a", "GPU", "CPU")
    for seed in range(90, 93):
        fleet.place(seed=seed, only="a")
    return ended(fleet.place(), cached_tokens=TOKENS)


def asked_again() -> Places:
    """The very same prompt, right behind its first answer."""
    world = watched()
    world.serve(chat(FIRST))
    return ended(world.serve(chat(FIRST)))


def next_turn() -> Places:
    """The conversation goes on."""
    world = watched()
    world.serve(chat(FIRST))
    return ended(world.serve(chat(FIRST, "answer", "more")))


HISTORIES: dict[TokenFate, Callable[[], Places]] = {
    TokenFate.UNSUPPORTED: unread,
    TokenFate.NEVER_SEEN: first,
    TokenFate.TAIL: partial_block,
    TokenFate.REWRITTEN: rewritten,
    TokenFate.IDENTITY: of_another_model,
    TokenFate.REPLICA_LOST: gone_with_its_replica,
    TokenFate.EVICTED_HERE: dropped_here,
    TokenFate.EVICTED_BY_OTHERS: dropped_there,
    TokenFate.CACHED_ON_OTHER_REPLICA: held_there,
    TokenFate.MISPREDICTED: said_and_not_found,
    TokenFate.TIER: behind_the_gpu,
    TokenFate.PULLED: sent_by_another,
    TokenFate.REPLAY: asked_again,
    TokenFate.GPU_HIT: next_turn,
}


@pytest.mark.parametrize("place", TokenFate)
def test_each_place_has_a_history(place: TokenFate) -> None:
    """What happened says where most of the prompt's tokens end, and 85 % of them at least end there."""
    places = HISTORIES[place]()
    total = sum(places.values())
    assert places[place] > 0.85 * total, places


def test_what_others_dropped_is_the_same_part_of_what_is_left() -> None:
    """The engine found a part of what the router held for evicted: of the rest as large a part was dropped by others as
    of the whole."""
    miss = TokenBreakdown(1_000, 0, {MissReason.EVICTED: 900, MissReason.TAIL: 100}, dropped_elsewhere=300)
    places = token_fates(with_actual_usage(miss, Usage(1_000, 1, 450)), replay=False)
    assert places == {
        TokenFate.EVICTED_HERE: 300,
        TokenFate.EVICTED_BY_OTHERS: 150,
        TokenFate.TAIL: 100,
        TokenFate.GPU_HIT: 450,
    }
