"""What a hit in a tier costs, who is asked then, and what its answer teaches."""

from __future__ import annotations

import pytest

from router.core.cache_state.calibration import HITS_MIN
from router.core.estimators.tier_load import LoadModel
from router.core.fleet import stall_detector
from router.core.fleet.lease import Lease
from router.core.types.replicas import Load
from router.core.types.tiers import CPU
from tests.core.placement.tiered_fleet import BLOCK, GUESS, TOKENS, TieredFleet


def _candidates(lease: Lease) -> dict[str, tuple[int, int, float]]:
    """Cached tokens, those to be loaded, and the time for that, of each candidate."""
    return {c.id: (c.cached_tokens, c.tier_tokens, c.loading_ms) for c in lease.receipt.candidates}


def test_a_hit_in_a_tier_is_told_with_its_load() -> None:
    """It counts as cached, and what the load takes is told apart; the receipt says how many tokens are loaded."""
    fleet = TieredFleet()
    fleet.says("a", "GPU", "CPU")
    fleet.evicts("a")
    fleet.says("a", "GPU", blocks=200)
    lease = fleet.place()
    assert lease.replica == "a"
    assert _candidates(lease)["a"] == (TOKENS, TOKENS - 3_200, pytest.approx(GUESS.ms(TOKENS - 3_200)))
    assert _candidates(lease)["b"] == (0, 0, 0.0)
    assert (lease.receipt.predicted_cached_tokens, lease.receipt.predicted_tier_tokens) == (TOKENS, TOKENS - 3_200)
    assert lease.to_load is not None
    assert lease.to_load.tokens == {CPU: TOKENS - 3_200}


def test_a_hit_on_the_gpu_is_better_than_one_in_a_tier() -> None:
    """Of two replicas that hold as much, the one that need not load is asked."""
    fleet = TieredFleet()
    fleet.says("a", "GPU", "CPU")
    fleet.evicts("a")
    fleet.says("b", "GPU")
    assert fleet.place().replica == "b"


def test_a_load_is_no_reason_to_compute_elsewhere() -> None:
    """Its time is in the predicted time to first token, and not in the price: a load takes nothing of the GPU's time,
    and a second copy would push others out of their tiers (docs/evidence/tiers.md)."""
    predicted_ms = []
    for per_token_ms in (0.001, 0.5):
        fleet = TieredFleet()
        fleet.router.fleet.means.load_guesses[CPU] = LoadModel(10.0, per_token_ms)
        fleet.says("a", "GPU", "CPU")
        fleet.evicts("a")
        lease = fleet.place()
        assert (lease.replica, lease.receipt.spill) == ("a", "")
        predicted_ms.append(lease.expected_ms)
    quick_ms, slow_ms = predicted_ms
    assert slow_ms - quick_ms == pytest.approx(0.499 * TOKENS)


def test_loads_under_way_are_a_queue() -> None:
    """The next load from the same tier waits for those before it, which go on with the clock; one that is over, or
    whose client has left, is waited for no longer."""
    fleet = TieredFleet()
    for seed in range(3):
        fleet.says("a", "GPU", "CPU", seed=seed)
        fleet.evicts("a", seed=seed)
    first = fleet.place(seed=0, only="a")
    load_ms = GUESS.ms(TOKENS)
    assert _candidates(fleet.place(seed=1, only="a"))["a"][2] == pytest.approx(2 * load_ms)
    fleet.now_s += load_ms / 2 / 1e3
    member = fleet.router.fleet.members["a"]
    assert member.links.pending_ms(CPU, fleet.now_s) == pytest.approx(1.5 * load_ms)
    fleet.router.first_token(first, fleet.now_s)
    assert member.links.pending_ms(CPU, fleet.now_s) == pytest.approx(load_ms)
    fleet.now_s += 10.0
    assert member.links.pending_ms(CPU, fleet.now_s) == 0.0


def test_a_second_request_for_what_is_being_loaded_loads_nothing() -> None:
    """It is on the GPU by the time that it is needed."""
    fleet = TieredFleet()
    fleet.says("a", "GPU", "CPU")
    fleet.evicts("a")
    first, second = fleet.place(only="a"), fleet.place(only="a")
    assert first.to_load is not None
    assert first.to_load.tokens == {CPU: TOKENS}
    assert second.to_load is None


def test_what_a_tier_keeps_is_cheap_to_evict() -> None:
    """A full GPU whose blocks are all in a tier as well is evicted at the price of loading them again."""
    prices = []
    for mediums in (("GPU",), ("GPU", "CPU")):
        fleet = TieredFleet()
        for seed in range(12):
            fleet.says("a", *mediums, seed=seed)
        reuse, members = fleet.router.reuse, fleet.router.fleet.members
        index = fleet.router.index
        for seed in range(12):
            index.pin("a", seed, [seed * 1_000 + n for n in range(125)], fleet.now_s)
            index.unpin("a", seed, fleet.now_s)
        members["a"].speeds.mean_prompt_tokens = TOKENS
        assert reuse.reuse_probability(fleet.now_s)[0] > 0
        (candidate,) = [c for c in fleet.place(seed=50).receipt.candidates if c.id == "a"]
        prices.append(candidate.evicted_ms)
    computed, loaded = prices
    assert 0 < loaded < 0.5 * computed


def test_loads_are_learned_from_first_tokens() -> None:
    """What a first token took beyond the modelled prefill is the load's, one behind the other where several are under
    way; 40 answers from a link of a quarter of the guessed speed show it to within 10 %."""
    fleet, truth = TieredFleet(), LoadModel(5.0, 0.04)
    member = fleet.router.fleet.members["a"]
    for turn in range(20):
        leases = []
        for seed in (2 * turn, 2 * turn + 1):
            fleet.says("a", "GPU", "CPU", seed=seed)
            fleet.evicts("a", seed=seed)
            leases.append(fleet.place(seed=seed, only="a"))
        placed_s = fleet.now_s
        for number, lease in enumerate(leases, 1):
            fleet.now_s = placed_s + (number * truth.ms(TOKENS) + lease.prefill_ms) / 1e3
            fleet.router.first_token(lease, fleet.now_s)
        for lease in leases:
            fleet.finish(lease, TOKENS)
        fleet.now_s += 10.0
    model = member.speeds.loads.model(CPU, member.links.get_or_create(CPU).fit)
    assert model.ms(TOKENS) == pytest.approx(truth.ms(TOKENS), rel=0.1)
    assert member.own_speed.prefill_factor.observations == 0  # a load says nothing of prefill


def test_a_replica_that_loads_is_not_late() -> None:
    """Nothing comes from a slow disk for a while: silence means something only after three times what the load, and the
    loads before it, are believed to take."""
    fleet = TieredFleet()
    member = fleet.router.fleet.members["a"]
    member.speeds.prefill.observations, link = 100, member.links.get_or_create(CPU)
    link.fit.model, link.fit.observations = LoadModel(0.0, 0.5), 100
    leases = []
    for seed in range(3):
        fleet.says("a", "GPU", "CPU", seed=seed)
        fleet.evicts("a", seed=seed)
        leases.append(fleet.place(seed=seed, only="a"))
    waits_s = [lease.to_load.modelled_ms / 1e3 for lease in leases if lease.to_load is not None]
    assert waits_s == pytest.approx([8.0, 16.0, 24.0])
    assert not stall_detector.is_late(member, leases[-1], fleet.now_s + 70, 3.0)
    assert stall_detector.is_late(member, leases[-1], fleet.now_s + 90, 3.0)


def test_a_load_that_did_not_come_teaches_nothing() -> None:
    """Where the engine found less than was predicted, its time is not that of the load; nor where a long prompt was
    computed meanwhile."""
    fleet = TieredFleet()
    member = fleet.router.fleet.members["a"]
    for seed, cached in ((0, 1_600), (1, TOKENS)):
        fleet.says("a", "GPU", "CPU", seed=seed)
        fleet.evicts("a", seed=seed)
        lease = fleet.place(seed=seed, only="a")
        if seed:
            other = fleet.place(seed=70, only="a")
            assert other.uncached_tokens == TOKENS + 10
        fleet.answers(lease, 2.0, cached)
        fleet.now_s += 10.0
    assert member.links.get_or_create(CPU).fit.observations == 0


def test_tiers_off_credit_nothing() -> None:
    """With the setting off a prompt that only the tier has is computed like any other."""
    fleet = TieredFleet(tiers=False)
    fleet.says("a", "GPU", "CPU")
    fleet.evicts("a")
    lease = fleet.place()
    assert set(_candidates(lease).values()) == {(0, 0, 0.0)}
    assert lease.to_load is None


def test_a_prompt_that_ends_with_a_block_is_foretold_whole_once_it_was_found_whole() -> None:
    """vLLM loads the block of a prompt's last token, which no GPU gives: an answer that counts it is believed, and what
    is loaded is that block, or all that the GPU lacks. Prompts that go on behind a block are as ever."""
    fleet = TieredFleet("a")
    fleet.says("a", "GPU", "CPU")
    lease = fleet.place(more=0)
    assert (lease.cached_tokens, lease.receipt.predicted_tier_tokens) == (TOKENS - 16, 0)
    fleet.answers(lease, 0.1, TOKENS)
    for number, to_load in enumerate((16, TOKENS), 1):
        lease = fleet.place(more=0)
        assert (lease.cached_tokens, lease.uncached_tokens) == (TOKENS, 0)
        assert lease.receipt.predicted_cached_tokens == TOKENS
        assert lease.receipt.predicted_tier_tokens == to_load
        fleet.answers(lease, 0.1, TOKENS)
        assert fleet.router.knowledge.checks("a") == (number, number + 1)
        fleet.now_s += 10.0
        fleet.router.observations.observe_load("a", Load(kv_tokens_max=200_000, block_tokens=BLOCK))
        fleet.evicts("a")
    assert fleet.place(more=10).cached_tokens == TOKENS


def test_a_block_that_the_engine_drops_is_not_foretold() -> None:
    """EAGLE and MTP compute the last matched block again: of a prompt that ends with a block that is the one before its
    last. Once it is learned, receipts say so, and so they do of a prompt that goes on."""
    fleet = TieredFleet("a")
    fleet.says("a", "GPU")
    for number in range(HITS_MIN + 1):
        lease = fleet.place(more=0)
        assert lease.receipt.predicted_cached_tokens == TOKENS - (16 if number < HITS_MIN else 32)
        fleet.answers(lease, 0.1, TOKENS - 32)
    assert fleet.router.knowledge.checks("a") == (HITS_MIN + 1, HITS_MIN + 1)
    assert fleet.place(more=10).receipt.predicted_cached_tokens == TOKENS - 16
