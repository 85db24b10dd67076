"""What lowers and restores the grade of a replica, and what budgets share."""

from __future__ import annotations

from array import array

from router.core.cache_state.calibration import CHECKS, DRIFT_TOKENS_MIN
from router.core.cache_state.engine_blocks import BLOCK_BYTES
from router.core.cache_state.event_index import SETTLE_S
from router.core.cache_state.event_state import DISTRUST_S, HYBRID, NO_SALTS, StoredPrefix
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.kv_events.stream import RESTARTED
from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.core.types.replicas import Load
from tests.core.cache_state.known import BLOCK, World, _answer, prompt_of


def test_predictions_that_drift_cost_the_grade_until_a_clean_replay() -> None:
    """The replay is asked for at once, and after the next drift only after a while."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    _answer(world, 144, 0, 21)
    world.knowledge.on_probe("a", Load(), 5.0)
    grade, why = world.knowledge.grade_of("a")
    assert grade is Confidence.ESTIMATED
    assert "0 of 21" in why
    assert world.resyncs == ["a"]
    world.knowledge.on_probe("a", Load(), 6.0)
    assert world.resyncs == ["a"]  # asked once
    world.knowledge.clear("a", "asked to begin anew", 6.0)
    world.knowledge.grade("a", Confidence.EXACT, "joined at batch 0", 6.1)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    world.store(prompt_of(160))
    _answer(world, 144, 0, 21)
    world.knowledge.on_probe("a", Load(), 7.0)
    world.knowledge.on_probe("a", Load(), 7.0 + DISTRUST_S - 1)
    assert world.resyncs == ["a"]
    world.knowledge.on_probe("a", Load(), 7.0 + DISTRUST_S)
    assert world.resyncs == ["a", "a"]


def test_answers_from_before_a_clear_say_nothing_of_what_came_after() -> None:
    """A lease placed on what is no longer believed is not compared."""
    world = World()
    world.join()
    before: StoredPrefix | None = world.said(prompt_of(160), 0.0)["a"]
    world.knowledge.clear("a", "gap", 1.0)
    world.knowledge.grade("a", Confidence.CATCHING_UP, "gap", 1.0)
    world.knowledge.check_prediction("a", before, 144, 0, 160)
    assert world.knowledge.checks("a") == (0, 0)


def test_counters_stand_in_for_silent_answers() -> None:
    """An engine that says nothing in its answers is judged by its sums."""
    world = World()
    world.join()
    world.knowledge.on_probe("a", Load(cache_query_tokens_total=0, cache_hit_tokens_total=0), 1.0)
    for _ in range(DRIFT_TOKENS_MIN // 160 + 1):
        _answer(world, 144, None)
    load = Load(cache_query_tokens_total=(DRIFT_TOKENS_MIN // 160 + 1) * 160, cache_hit_tokens_total=0)
    world.knowledge.on_probe("a", load, 2.0)
    assert world.knowledge.grade_of("a")[0] is Confidence.ESTIMATED
    assert "the engine counted 0" in world.knowledge.grade_of("a")[1]


def test_more_blocks_than_the_index_may_hold_are_never_exact() -> None:
    """The ledger forgets, so the replica holds more than is known."""
    world = World()
    world.join()
    world.store(prompt_of(BLOCK * 10_001))
    world.knowledge.grade("a", Confidence.EXACT, "joined", 1.0)
    assert world.knowledge.grade_of("a")[0] is Confidence.CATCHING_UP


def test_short_pages_are_not_followed() -> None:
    """A key for every token would cost more than it brings; the reason names the remedy."""
    world = World()
    world.join()
    world.knowledge.apply("a", Stored([1, 2], None, b"\0" * 8, 1, "", b"", None, "GPU", 0, True), 0.0)
    world.knowledge.grade("a", Confidence.EXACT, "joined", 1.0)
    grade, why = world.knowledge.grade_of("a")
    assert grade is Confidence.ESTIMATED
    assert "pages of 1 tokens" in why


def test_a_replica_that_left_is_gone() -> None:
    """Its blocks are purged, and what comes late is harmless."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    world.knowledge.forget("a")
    assert world.held(prompt_of(160)) == {}
    world.knowledge.settle("a", 1, prompt_of(16), 1.0, computed=False)
    world.knowledge.check_prediction("a", None, 0, 0, 0)
    world.knowledge.on_probe("a", Load(), 1.0)
    world.knowledge.masks.sweep(1_000)
    assert len(world.knowledge.masks) == 0


def test_removals_are_followed() -> None:
    """The prefix ends where a block is gone."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    gone = hash((b"", prompt_of(160).ids[: 4 * BLOCK * 4])) & (1 << 64) - 1
    world.knowledge.apply("a", Removed([gone], "GPU", 0), 1.0)
    assert world.held(prompt_of(160)) == {"a": 48}


def test_a_prompt_behind_a_late_answer_is_known_to_be_unsure() -> None:
    """The answer ended, the event of its last block did not come yet: the prediction is not called exact."""
    world = World()
    world.join()
    first, second = prompt_of(64), prompt_of(160)
    world.store(first)
    world.knowledge.expect_blocks("a", 7, first, world.said(first, 0.0)["a"])
    world.knowledge.settle("a", 7, first, 10.0, computed=True, grown_blocks=1)
    assert world.knowledge.has_pending_events(second, 10.0)
    assert world.said(second, 10.0)["a"].behind
    assert not world.said(prompt_of(160, salt=b"s"), 10.0)["a"].behind
    world.knowledge.tick(10.0 + SETTLE_S)
    assert not world.said(second, 10.0 + SETTLE_S)["a"].behind
    assert not world.knowledge.has_pending_events(second, 10.0 + SETTLE_S)


def test_a_tier_takes_no_room_on_the_gpu() -> None:
    """Of a pool of 4,000 blocks 800 are in use, whatever a tier holds besides; what is left is free. A prompt that only
    the tier has counts as held, all of it to be loaded. Half of what the GPU has is in the tier as well."""
    world = World()
    world.join()
    prompts = [array("I", [seed, *range(1, 200 * BLOCK)]).tobytes() for seed in range(40)]
    for seed, ids in enumerate(prompts):
        hashes = list(range(1_000 * seed + 1, 1_000 * seed + 201))
        for medium in ("GPU", "CPU"):
            if medium == "GPU" or seed < 38:
                world.knowledge.apply("a", Stored(hashes, None, ids, BLOCK, "", b"", None, medium, 0, True), 0.0)
        if seed < 36:
            world.knowledge.apply("a", Removed(hashes, "GPU", 0), 0.0)
    world.knowledge.on_probe("a", Load(kv_tokens_max=4_000 * BLOCK, block_tokens=BLOCK), 1.0)
    keys = token_chain(prompts[0], BLOCK, token_root("", b"", BLOCK))
    held = world.said(TokenPrompt(prompts[0], "", b"", {BLOCK: keys}))["a"]
    assert held.free_tokens == 3_200 * BLOCK
    assert (held.tokens, held.gpu_tokens, held.tiers) == (200 * BLOCK, 0, {"cpu": 200 * BLOCK})
    assert held.kept_share == 0.5


def test_a_hybrid_model_is_exact_only_by_its_answers() -> None:
    """Its sliding-window layers let go of blocks that the prefix needs, so a whole stream proves nothing: 99 % of the
    last two hundred answers do, and only as long as they do. A clear changes nothing in that; another process does."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    assert world.knowledge.grade_of("a") == (Confidence.EXACT, "joined")
    world.knowledge.apply("a", Stored([1, 2], None, b"", 0, "", b"", None, "GPU", 1, False), 1.0)
    world.knowledge.apply("a", Removed([1, 2], "GPU", 1), 1.0)
    assert world.knowledge.grade_of("a") == (Confidence.CATCHING_UP, HYBRID)
    _answer(world, 144, 144, CHECKS)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    _answer(world, 144, 0, 3)
    assert world.knowledge.grade_of("a") == (Confidence.CATCHING_UP, HYBRID)
    world.knowledge.apply("a", Cleared(), 2.0)
    assert world.knowledge.grade_of("a") == (Confidence.CATCHING_UP, HYBRID)
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.0)
    world.knowledge.grade("a", Confidence.EXACT, "joined at batch 0", 3.0)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT


def test_an_engine_that_drops_the_last_matched_block_earns_its_grade() -> None:
    """As EAGLE and MTP have it: what is found is a block less than what is stored, so predictions are. What was learned
    goes with the process."""
    world = World()
    world.join(grade=Confidence.CATCHING_UP)
    world.store(prompt_of(160))
    _answer(world, 144, 128, CHECKS)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    assert world.knowledge.checks("a") == (CHECKS, CHECKS)
    held = world.said(prompt_of(160))["a"]
    assert (held.tokens, held.dropped) == (160, BLOCK)
    assert world.said(prompt_of(160, salt=b"another"))["a"].tokens == 0
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.0)
    world.knowledge.grade("a", Confidence.CATCHING_UP, "joined late", 3.0)
    world.store(prompt_of(160))
    assert world.said(prompt_of(160))["a"].dropped == 0


def test_all_ledgers_share_one_budget() -> None:
    """Beyond it the one that takes most gives up blocks, its newest, and its grade; the others lose nothing. As long as
    it is not much smaller than they are it gives first, so that of many that are alike one falls, not all."""
    world = World(bytes_max=4_000 * BLOCK_BYTES)
    for name, blocks in (("a", 2_000), ("b", 1_000), ("c", 900)):
        world.join(name)
        world.store(prompt_of(BLOCK * blocks, salt=name.encode()), name)
    assert world.knowledge.bytes_used == 3_900 * BLOCK_BYTES
    world.store(prompt_of(BLOCK * 500, salt=b"more"), "b")
    assert world.knowledge.bytes_used <= 4_000 * BLOCK_BYTES
    assert world.knowledge.grade_of("a") == (Confidence.CATCHING_UP, "it has more blocks than the index may hold")
    assert world.knowledge.grade_of("b")[0] is world.knowledge.grade_of("c")[0] is Confidence.EXACT
    assert world.held(prompt_of(BLOCK * 500, salt=b"more"))["b"] == 500 * BLOCK
    assert 0 < world.held(prompt_of(BLOCK * 2_000, salt=b"a"))["a"] < 2_000 * BLOCK
    assert world.said(prompt_of(16))["a"].free_tokens is None  # what it holds besides is not known
    world.store(prompt_of(BLOCK * 1_000, salt=b"too"), "c")
    assert world.knowledge.grade_of("b")[0] is world.knowledge.grade_of("c")[0] is Confidence.EXACT
    world.knowledge.forget("b")
    world.knowledge.clear("a", "gap", 1.0)
    world.knowledge.grade("a", Confidence.EXACT, "joined at a clear", 1.0)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    assert world.knowledge.bytes_used == 1_900 * BLOCK_BYTES


def test_who_holds_nothing_costs_nothing() -> None:
    """Of a thousand replicas, each with a stream, those are told that hold some of the prompt. What is said of one that
    holds nothing is made once, and again when its room changes."""
    world = World()
    for n in range(1_000):
        world.join(f"r{n}")
        world.store(prompt_of(64, salt=b"%d" % n), f"r{n}")
        world.knowledge.on_probe(f"r{n}", Load(kv_tokens_max=1_600), 1.0)
    assert set(world.knowledge.find_stored(prompt_of(160, salt=b"7"), 2.0)) == {"r7"}
    none = world.knowledge.empty("r8")
    assert none == StoredPrefix(0, BLOCK, Confidence.EXACT, none.epoch if none else -1, free_tokens=1_600 - 64)
    assert world.knowledge.empty("r8") is none
    world.store(prompt_of(32, salt=b"x"), "r8")
    changed = world.knowledge.empty("r8")
    assert changed is not None
    assert changed.free_tokens == 1_600 - 96
    assert world.knowledge.empty("unheard of") is None


def _sent(world: World, prompt: TokenPrompt, lease: int = 1) -> None:
    """A request with this prompt is placed on the replica."""
    stored = world.said(prompt)["a"]
    world.knowledge.expect_blocks("a", lease, prompt, stored)


def test_events_without_salts_count_for_nothing_once_a_salted_prompt_was_sent() -> None:
    """vLLM 0.15 and SGLang 0.5.8 name none, so a plain prompt would count as cached wherever a salted one is, and
    receipts would show its sender that somebody asked the same."""
    world = World()
    world.join()
    world.store(prompt_of(96))
    _sent(world, prompt_of(160))
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT  # plain prompts change nothing
    _sent(world, prompt_of(160, salt=b"acme"), 2)
    assert world.knowledge.grade_of("a") == (Confidence.ESTIMATED, NO_SALTS)
    world.store(prompt_of(160))  # the salted prompt, by such an engine's events
    assert world.held(prompt_of(160)) == {}
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.0)  # perhaps as another release
    world.knowledge.grade("a", Confidence.EXACT, "joined", 3.0)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT


def test_a_salt_in_an_event_brings_the_grade_back_for_good() -> None:
    """Releases that name salts lose it from the first salted prompt to its events, once."""
    world = World()
    world.join()
    salted = prompt_of(160, salt=b"acme")
    _sent(world, salted)
    world.store(salted)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    assert world.held(salted) == {"a": 160}
    assert world.held(prompt_of(160)) == {"a": 0}
    _sent(world, prompt_of(160, salt=b"other"), 2)
    assert [grade for _, grade, _ in world.grades] == [Confidence.EXACT, Confidence.ESTIMATED, Confidence.EXACT]


def test_a_salted_prompt_that_was_not_computed_is_forgotten() -> None:
    """A client that left, or an engine that refused, leaves no event to wait for; the last of several decides."""
    world = World()
    world.join()
    salted = prompt_of(160, salt=b"acme")
    world.store(prompt_of(96))
    for lease in (1, 2):
        world.knowledge.expect_blocks("a", lease, salted, StoredPrefix(0, BLOCK, Confidence.EXACT, 0))
    assert world.knowledge.grade_of("a") == (Confidence.ESTIMATED, NO_SALTS)
    world.knowledge.settle("a", 1, salted, 1.0, computed=False)
    assert world.knowledge.grade_of("a")[0] is Confidence.ESTIMATED
    world.knowledge.settle("a", 2, salted, 2.0, computed=False)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    _sent(world, salted, 3)
    world.knowledge.settle("a", 3, salted, 3.0, computed=True)
    assert world.knowledge.grade_of("a") == (Confidence.ESTIMATED, NO_SALTS)


def test_a_salted_prompt_of_no_whole_block_changes_nothing() -> None:
    """No event will ever come of it."""
    world = World()
    world.join()
    world.store(prompt_of(96))
    _sent(world, prompt_of(BLOCK - 1, salt=b"acme"))
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
