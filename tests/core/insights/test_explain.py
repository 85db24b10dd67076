"""Why tokens miss the cache: that it adds up, and each reason where it is the true one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights import breakdown
from router.core.insights.breakdown import Explainer, with_actual_usage
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import BLOCK_BYTES, Chain, chain_of
from router.core.types.cache_misses import MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.placements import Confidence, EndReason, PlacementReason, Receipt, Usage
from router.core.types.replicas import Load
from router.core.types.requests import RequestSpec
from tests.core.placement.placing import World, chat, words

WINDOW_S = 3_600.0
counts = st.integers(0, 5_000)
usages = st.builds(Usage, counts, counts, st.none() | counts)
sightings = st.none() | st.builds(PromptAnalysis, counts, counts, counts, st.integers(0, 1), turn=st.integers(0, 1))


def explainer() -> Explainer:
    """With room for a thousand blocks."""
    return Explainer(1_000, replay_window_s=WINDOW_S)


def adds_up(miss: TokenBreakdown) -> None:
    """Every token is a hit or has one reason, and what is named is something."""
    assert miss.hit >= 0
    assert miss.hit + sum(miss.misses.values()) == miss.prompt_tokens
    assert all(tokens > 0 for tokens in miss.misses.values())


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),  # blocks
            st.integers(0, 3),  # of which prompt
            st.integers(0, 12),  # held by our estimate
            counts,  # predicted
            counts,  # spilled
            st.sampled_from(list(Confidence)),
            st.integers(1, 64),
            st.floats(0.5, 64),
            st.integers(0, 5_000),
            st.booleans(),
            st.integers(1, 4),
            sightings,
            usages,
        ),
        max_size=12,
    )
)
def test_it_adds_up_whatever_is_said(requests: list[tuple[Any, ...]]) -> None:
    """Hits and misses are the prompt's tokens whatever placement, texts and memory say, also where they contradict one
    another; and so they are by whatever count the engine gives, with its own number of hits."""
    it = explainer()
    for now_s, request in enumerate(requests):
        blocks, which, depth, predicted, spilled, grade, block, ratio, prompt, retry, life, seen, usage = request
        chain = Chain([which * 100 + n for n in range(blocks)], 1, which, (), 1)
        receipt = Receipt("a", "warm", PlacementReason.WARM, grade, prompt, predicted, spilled_tokens=spilled)
        held = min(depth, blocks)
        it.explain(
            receipt, chain, ratio, held, life, seen, now_s, block_tokens=block, lives=lambda: {1, 2}, retry=retry
        )
        assert receipt.miss is not None
        assert receipt.miss.prompt_tokens == prompt
        assert receipt.miss.hit == min(predicted, prompt)
        adds_up(receipt.miss)
        final = with_actual_usage(receipt.miss, usage)
        adds_up(final)
        if usage.cached_tokens is not None and usage.prompt_tokens:
            assert final.prompt_tokens == usage.prompt_tokens
            assert final.hit == min(usage.cached_tokens, usage.prompt_tokens)


@given(
    st.dictionaries(st.sampled_from([m for m in MissReason if m is not MissReason.MISPREDICTED]), st.integers(1, 999)),
    counts,
)
def test_an_engine_that_agrees_changes_nothing(misses: dict[MissReason, int], hit: int) -> None:
    """Where the engine counts as was predicted, or says nothing, the breakdown is the same object."""
    miss = TokenBreakdown(hit + sum(misses.values()), hit, misses)
    for usage in (None, Usage(9, 9), Usage(miss.prompt_tokens, 9, hit)):
        assert with_actual_usage(miss, usage) is miss


@given(counts, counts)
def test_hits_beyond_the_prediction_come_off_the_front(hit: int, more: int) -> None:
    """What the engine found besides was spilled before it was evicted, and evicted before it was new."""
    miss = TokenBreakdown(
        hit + 60, hit, {MissReason.EVICTED: 20, MissReason.SPILLED: 10, MissReason.NEW: 25, MissReason.TAIL: 5}
    )
    found = with_actual_usage(miss, Usage(miss.prompt_tokens, 1, min(hit + more, hit + 60))).misses
    sizes = [
        found.get(reason, 0) for reason in (MissReason.SPILLED, MissReason.EVICTED, MissReason.NEW, MissReason.TAIL)
    ]
    whole = [10, 20, 25, 5]
    untouched = next((n for n, size in enumerate(sizes) if size), 4)
    assert sizes[untouched + 1 :] == whole[untouched + 1 :]
    assert sum(sizes) == max(0, 60 - more)


def test_hits_that_do_not_come_true_are_mispredicted() -> None:
    """We said held, the engine says no: so much of the prompt, and no other stretch changes."""
    miss = TokenBreakdown(1_000, 800, {MissReason.NEW: 190, MissReason.TAIL: 10})
    assert with_actual_usage(miss, Usage(1_000, 1, 500)).misses == {
        MissReason.MISPREDICTED: 300,
        MissReason.NEW: 190,
        MissReason.TAIL: 10,
    }


def test_a_prompt_of_another_length_than_ours_is_no_misprediction() -> None:
    """Lengths are learned, so the engine's may be another: where what it found is what we predicted, by our count or
    by that part of its own, nothing was mispredicted."""
    miss = TokenBreakdown(1_000, 800, {MissReason.NEW: 190, MissReason.TAIL: 10})
    for cached in (800, 850, 880):
        final = with_actual_usage(miss, Usage(1_100, 1, cached))
        assert MissReason.MISPREDICTED not in final.misses
        adds_up(final)
    assert with_actual_usage(miss, Usage(1_100, 1, 750)).misses[MissReason.MISPREDICTED] == 50
    assert with_actual_usage(miss, Usage(500, 1, 300)).misses[MissReason.MISPREDICTED] == 100


# -- through a Router ------------------------------------------------------------------------------------------------


class Watched:
    """A World whose Router explains."""

    def __init__(self, ids: str = "a", policy: str = "warm", **more: Any) -> None:
        self.world = World(ids, policy, explainer=explainer(), **more)
        for id_ in ids:
            self.world.router.observations.observe_load(id_, Load(block_tokens=16))

    def miss(self, ask: RequestSpec, **how: Any) -> dict[MissReason, int]:
        """Why the prompt's tokens miss; it is served."""
        miss = self.world.serve(ask, **how).receipt.miss
        assert miss is not None
        adds_up(miss)
        self.hit, self.saved_ms = miss.hit, miss.saved_ms
        return miss.misses


FIRST, SECOND = words(1, 2_000), words(2, 2_000)


def test_what_was_never_seen_is_cold_and_what_follows_it_new() -> None:
    """A first prompt is cold, and the next turn hits it and is new behind it; the last token is always the tail."""
    it = Watched()
    first = it.miss(chat(FIRST))
    assert first[MissReason.COLD] > 1_950
    assert set(first) == {MissReason.COLD, MissReason.TAIL}
    assert 1 <= first[MissReason.TAIL] <= 16
    again = it.miss(chat(FIRST, "answer", SECOND))
    assert set(again) == {MissReason.NEW, MissReason.TAIL}
    assert it.hit > 1_850


def test_what_others_hold_is_spilled() -> None:
    """A policy that does not look at caches goes elsewhere, and so does one that finds the holder busy: the tokens are
    spilled. The second has saved time, the first as a rule none."""
    it = Watched("ab", "round_robin")
    it.miss(chat(FIRST))
    again = it.miss(chat(FIRST))
    assert again[MissReason.SPILLED] > 1_800
    assert not {MissReason.EVICTED, MissReason.COLD, MissReason.NEW} & set(again)
    assert it.saved_ms == 0.0

    it = Watched("ab")
    it.miss(chat(FIRST))
    (holder,) = [m for m in it.world.router.fleet.members.values() if it.world.depth(chat(FIRST), m.id)]
    for n in range(4):
        it.world.place(chat(words(10 + n, 20_000)), only=holder.id)
    assert it.miss(chat(FIRST))[MissReason.SPILLED] > 1_800
    assert it.saved_ms > 1_000


def test_what_made_room_was_evicted() -> None:
    """A prompt that others pushed out of the only replica was evicted, behind what is left of it."""
    it = Watched(blocks_max=16)
    it.miss(chat(FIRST))
    it.miss(chat(SECOND))
    again = it.miss(chat(FIRST))
    assert again[MissReason.EVICTED] > 1_600
    assert not {MissReason.COLD, MissReason.NEW, MissReason.REPLICA_LOST} & set(again)


@pytest.mark.parametrize("how", ["restarted", "left"])
def test_what_is_gone_with_its_holder(how: str) -> None:
    """The prompt's only holder restarted, or is no longer there: nobody evicted anything."""
    it = Watched("ab", "round_robin")
    it.miss(chat(FIRST))
    router = it.world.router
    if how == "restarted":
        router.observations.forget("a")
        router.observations.forget("b")
    else:
        gone = next(m for m in router.fleet.members if it.world.depth(chat(FIRST), m))
        router.replace([m.replica for m in router.fleet.members.values() if m.id != gone])
    again = it.miss(chat(FIRST))
    assert again[MissReason.REPLICA_LOST] > 1_800
    assert not {MissReason.EVICTED, MissReason.COLD, MissReason.NEW} & set(again)


@pytest.mark.inside
def test_a_prompt_of_many_blocks_is_not_looked_up_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its blocks every so many-th says what part of the evicted tokens went with their cache: about a half, where
    that had computed the second half of them."""
    monkeypatch.setattr(breakdown, "LOST_MAX", 16)
    memory: Explainer = Explainer(4_096, replay_window_s=60.0)
    keys = list(range(1, 1_001))
    memory._blocks.put_chain(keys[:500], 0, 0, 1)
    memory._blocks.put_chain(keys, 500, 500, 2)
    looked_up = list[int]()
    known = memory._blocks.get
    monkeypatch.setattr(memory._blocks, "get", lambda key: looked_up.append(key) or known(key))
    lost, elsewhere = memory._count_dropped(1_000, keys, 3, lambda: {1})
    assert lost == pytest.approx(500, abs=70)
    assert elsewhere == pytest.approx(500, abs=70)
    assert len(looked_up) <= 16


def test_what_is_known_under_another_identity() -> None:
    """Equal text that another model, salt or tenant asked for is a miss of identity, unless the own one is known."""
    it = Watched()
    seen = PromptAnalysis(identity_bytes=4_096)
    first = it.miss(chat(FIRST), sighting=seen)
    assert first[MissReason.IDENTITY] == 1_024
    assert first[MissReason.NEW] > 900
    assert MissReason.IDENTITY not in it.miss(chat(FIRST, "answer", SECOND), sighting=seen)


def test_what_an_earlier_prompt_had_behind_a_difference() -> None:
    """Text that is computed again for no other reason than something before it has diverged, whether anything before
    that is held or not."""
    it = Watched()
    first = it.miss(chat(FIRST), sighting=PromptAnalysis(repeated_bytes=4_000))
    assert first[MissReason.DIVERGED] == 1_000
    assert first[MissReason.NEW] > 900
    second = it.miss(chat(FIRST, "answer", SECOND), sighting=PromptAnalysis(known_bytes=8_000, repeated_bytes=2_000))
    assert second[MissReason.DIVERGED] == 500
    assert list(second) == [MissReason.DIVERGED, MissReason.NEW, MissReason.TAIL]


def test_what_has_no_key_is_tail() -> None:
    """Of what an earlier prompt had, less than a block of ours is the tail, and no eviction."""
    it = Watched()
    it.miss(chat(FIRST))
    size = len(chat(FIRST).prompt.text)  # type: ignore[union-attr]
    again = it.miss(chat(FIRST, "answer", SECOND), sighting=PromptAnalysis(known_bytes=size, turn=1))
    assert set(again) == {MissReason.NEW, MissReason.TAIL}
    assert 1 < again[MissReason.TAIL] <= BLOCK_BYTES // 4 + 32


def test_what_only_texts_remember_was_evicted() -> None:
    """Texts know of a prompt that the memory of blocks has forgotten, or never knew: it was computed, and is gone."""
    it = Watched()
    again = it.miss(chat(FIRST), sighting=PromptAnalysis(known_bytes=4_096, turn=1))
    assert again[MissReason.EVICTED] == 1_024


def test_what_cannot_be_read_is_unsupported() -> None:
    """A prompt that nobody can read has one reason, whatever its length; one of no length has none."""
    it = Watched()
    assert it.miss(RequestSpec("m"), body_tokens=100) == {MissReason.UNSUPPORTED: 100}
    assert it.miss(RequestSpec("m")) == {}


def test_a_difference_between_bytes_and_tokens_is_no_eviction() -> None:
    """Where tokens are counted, and not guessed, what is held ends where the engine says: a few hundred bytes of doubt
    about where our blocks end there are not taken for an eviction, and all of the prompt is."""
    it = explainer()
    chain = Chain(list(range(1, 41)), 1, 1, (), 1)

    def explained(predicted: int) -> dict[MissReason, int]:
        receipt = Receipt("a", "warm", PlacementReason.WARM, Confidence.EXACT, 6_000, predicted)
        it.explain(receipt, chain, 4.0, 40, 1, None, 0.0, block_tokens=16, lives=lambda: {1})
        assert receipt.miss is not None
        return receipt.miss.misses

    explained(0)
    assert set(explained(4_500)) == {MissReason.NEW, MissReason.TAIL}
    assert explained(0)[MissReason.EVICTED] == 40 * BLOCK_BYTES // 4


def test_a_second_attempt_does_not_know_the_first() -> None:
    """What the first attempt was to compute was never computed: the retry's misses are those of the request, and it is
    no replay; the next request of the same prompt is."""
    it = Watched("ab")
    first = it.world.place(chat(FIRST))
    it.world.now_s += 0.1
    second = it.world.place(chat(FIRST), exclude=frozenset([first.replica]), sighting=PromptAnalysis())
    it.world.finish(first, EndReason.FAILED)
    it.world.finish(second, usage=Usage(2_000, 1))
    assert second.receipt.miss is not None
    assert set(second.receipt.miss.misses) == {MissReason.COLD, MissReason.TAIL}
    assert not second.receipt.replay
    assert it.world.serve(chat(FIRST)).receipt.replay


@pytest.mark.parametrize("ending", [EndReason.FAILED, EndReason.REFUSED_BY_ENGINE])
@pytest.mark.parametrize("retried", [False, True])
def test_what_came_to_nothing_leaves_no_trace(ending: EndReason, retried: bool) -> None:
    """A prompt that was refused or failed, twice even, is asked for the first time when it is asked for again, though
    its text was seen before; what had been computed of it before still was."""
    it = Watched("ab")
    it.miss(chat(FIRST))
    again, seen = chat(FIRST, "answer", SECOND), PromptAnalysis(known_bytes=len(chat(FIRST).prompt.text))  # type: ignore[union-attr]
    first = it.world.place(again, sighting=seen)
    it.world.now_s += 0.1
    if retried:
        second = it.world.place(again, sighting=seen, exclude=frozenset([first.replica]))
    it.world.finish(first, ending)
    if retried:
        it.world.finish(second, ending)
    last = it.world.serve(again, sighting=PromptAnalysis(known_bytes=len(again.prompt.text), turn=1))  # type: ignore[union-attr]
    assert last.receipt.miss is not None
    assert set(last.receipt.miss.misses) == {MissReason.NEW, MissReason.TAIL}
    assert last.receipt.miss.hit > 1_850
    assert not last.receipt.replay
    assert it.world.serve(again).receipt.replay


def test_what_was_turned_away_was_not_evicted() -> None:
    """A prompt that was never placed is cold when it comes again, whatever texts remember; once it was served, texts
    are believed again."""
    it = Watched(blocks_max=16)
    turned_away = chat(FIRST)
    chain = chain_of(turned_away, "m")
    assert chain is not None
    it.world.router.note_shed(PlacementRequest(turned_away, "m", chain, ""))
    seen = PromptAnalysis(known_bytes=len(turned_away.prompt.text), turn=0)  # type: ignore[union-attr]
    assert set(it.miss(turned_away, sighting=seen)) == {MissReason.COLD, MissReason.TAIL}
    it.miss(chat(SECOND))
    assert it.miss(turned_away, sighting=seen)[MissReason.EVICTED] > 1_600


def test_a_replay_is_the_very_same_prompt_within_the_window() -> None:
    """One more message makes it another prompt, and so does enough time."""
    it = Watched()
    assert not it.world.serve(chat(FIRST)).receipt.replay
    assert it.world.serve(chat(FIRST)).receipt.replay
    assert not it.world.serve(chat(FIRST, "answer", "more")).receipt.replay
    it.world.now_s += WINDOW_S + 1
    assert not it.world.serve(chat(FIRST)).receipt.replay


def test_what_an_isolated_tenant_is_told() -> None:
    """That others asked for the same is not for a tenant who is kept apart: it is cold, with all behind it."""
    miss = TokenBreakdown(100, 0, {MissReason.IDENTITY: 60, MissReason.NEW: 30, MissReason.TAIL: 10})
    assert miss.header() == "identity=60,new=30,tail=10"
    assert miss.header(isolated=True) == "cold=90,tail=10"
    known = TokenBreakdown(100, 50, {MissReason.NEW: 40, MissReason.TAIL: 10})
    assert known.header(isolated=True) == known.header() == "new=40,tail=10"
