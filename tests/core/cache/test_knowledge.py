"""What replicas hold by their own word: grades, suspension, expectation, and the self-check."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from router.core.cache.engine_blocks import BLOCK_BYTES
from router.core.cache.knowledge import DISTRUST_S, HYBRID, SETTLE_S, Held, Knowledge
from router.core.cache.lateness import LATE_S_MAX
from router.core.cache.selfcheck import CHECKS, DRIFT_TOKENS_MIN
from router.core.facts.placements import Grade
from router.core.facts.replicas import Load
from router.core.kv_events.decoding import Cleared, Removed, Stored
from router.core.kv_events.stream import RESTARTED
from router.core.prompts.blocks import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt

BLOCK = 16


@dataclass
class World:
    """A Knowledge whose callbacks are remembered."""

    bytes_max: int = 1 << 30
    grades: list[tuple[str, Grade, str]] = field(default_factory=list)
    resyncs: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.knowledge = Knowledge(
            blocks_max=10_000,
            aside_max=100,
            names_max=100,
            bytes_max=self.bytes_max,
            graded=lambda *news: self.grades.append(news),
            resync=self.resyncs.append,
            restarted=self.restarts.append,
        )

    def join(self, replica: str = "a", grade: Grade = Grade.EXACT) -> None:
        """A stream begins."""
        self.knowledge.untokened(replica, "")
        self.knowledge.grade(replica, grade, "joined", 0.0)

    def store(self, prompt: TokenPrompt, replica: str = "a") -> None:
        """The replica says that it holds the whole prompt."""
        blocks = prompt.tokens // BLOCK
        event = Stored(
            hashes=[hash((prompt.salt, prompt.ids[: 4 * BLOCK * (n + 1)])) & (1 << 64) - 1 for n in range(blocks)],
            parent=None,
            tokens=prompt.ids[: 4 * BLOCK * blocks],
            block_tokens=BLOCK,
            adapter=prompt.adapter,
            salt=prompt.salt,
            extras=None,
            medium="GPU",
            group=0,
            prefix=True,
        )
        self.knowledge.apply(replica, event, 0.0)

    def held(self, prompt: TokenPrompt) -> dict[str, int]:
        """Tokens that each followed replica holds of it."""
        return {name: held.tokens for name, held in self.said(prompt).items()}

    def said(self, prompt: TokenPrompt, now_s: float = 0.0) -> dict[str, Held]:
        """What events say of it, of each followed replica."""
        found = self.knowledge.held(prompt, now_s)
        rest = {name: self.knowledge.empty(name) for name in ("a", "b", "c") if name not in found}
        return found | {name: held for name, held in rest.items() if held is not None}


def prompt_of(tokens: int, *, salt: bytes = b"", adapter: str = "") -> TokenPrompt:
    """Ids from 0, with their keys."""
    ids = array("I", range(tokens)).tobytes()
    return TokenPrompt(ids, adapter, salt, {BLOCK: token_chain(ids, BLOCK, token_root(adapter, salt, BLOCK))})


def test_a_prompt_is_held_by_whoever_says_so() -> None:
    """Only whole blocks, and only under the same salt and adapter."""
    world = World()
    world.join("a")
    world.join("b")
    world.store(prompt_of(100), "a")
    assert world.held(prompt_of(200)) == {"a": 96, "b": 0}
    assert world.held(prompt_of(50)) == {"a": 48, "b": 0}
    assert world.held(prompt_of(200, salt=b"s")) == {"a": 0, "b": 0}
    assert world.held(prompt_of(200, adapter="x")) == {"a": 0, "b": 0}


def test_a_replica_without_a_stream_says_nothing() -> None:
    """It is not in the answer at all, so its estimate counts."""
    world = World()
    world.store(prompt_of(100))
    assert world.held(prompt_of(100)) == {}
    assert world.knowledge.standing("a")[0] is Grade.ESTIMATED
    assert world.knowledge.standing("unheard of")[0] is Grade.ESTIMATED


def test_each_change_of_grade_is_told_once() -> None:
    """Whatever number of times it is said."""
    world = World()
    world.join("a", Grade.CATCHING_UP)
    world.join("a", Grade.CATCHING_UP)
    world.knowledge.grade("a", Grade.EXACT, "joined at a clear", 1.0)
    world.knowledge.untokened("a", "no tokenizer")
    world.knowledge.untokened("a", "no tokenizer")
    told = [(grade, why) for _, grade, why in world.grades]
    assert told == [
        (Grade.CATCHING_UP, "joined"),
        (Grade.EXACT, "joined at a clear"),
        (Grade.ESTIMATED, "no tokenizer"),
    ]


def test_nothing_is_credited_while_a_stream_is_suspended() -> None:
    """Proof of continuity brings all of it back, a clear brings none."""
    world = World()
    world.join()
    world.store(prompt_of(100))
    world.knowledge.suspend("a", "disconnected", 1.0, doubt=True)
    assert world.held(prompt_of(100)) == {"a": 0}
    assert world.knowledge.doubted("a")
    assert world.knowledge.standing("a") == (Grade.CATCHING_UP, "disconnected")
    world.knowledge.resume("a", 2.0)
    assert world.held(prompt_of(100)) == {"a": 96}
    assert world.knowledge.standing("a")[0] is Grade.EXACT
    world.knowledge.suspend("a", "disconnected", 3.0, doubt=True)
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.1)
    assert not world.knowledge.doubted("a")
    assert world.held(prompt_of(100)) == {"a": 0}
    assert world.restarts == ["a"]


def test_a_join_is_no_doubt() -> None:
    """While a history is replayed, which may take long, what it says does not count, and is not held against answers;
    the cache itself is in no doubt, so our own estimate goes on."""
    world = World()
    world.join(grade=Grade.CATCHING_UP)
    world.knowledge.suspend("a", "replay from batch 0", 1.0, doubt=False)
    world.store(prompt_of(100))
    held = world.said(prompt_of(100), 1.0)["a"]
    assert (held.tokens, held.suspended, held.doubted, world.knowledge.doubted("a")) == (0, True, False, False)
    world.knowledge.answered("a", held, 0, 96, 100)
    assert world.knowledge.checks("a") == (0, 0)
    world.knowledge.suspend("a", "disconnected", 2.0, doubt=True)
    assert world.knowledge.doubted("a")
    world.knowledge.resume("a", 3.0)
    assert not world.knowledge.doubted("a")
    assert world.held(prompt_of(100)) == {"a": 96}


def test_what_was_just_routed_counts_as_held_until_it_settles() -> None:
    """For as long as the lease is open and a moment longer; then only what events confirmed is left."""
    world = World()
    world.join()
    world.store(prompt_of(32))
    long = prompt_of(160)
    world.knowledge.expect("a", 7, long, world.said(long, 0.0)["a"])
    assert world.held(long) == {"a": 160}
    world.store(prompt_of(64))
    world.knowledge.settle("a", 7, long, 10.0, computed=True)
    world.knowledge.tick(10.0 + SETTLE_S / 2)
    assert world.held(long) == {"a": 160}
    world.knowledge.tick(10.0 + SETTLE_S)
    assert world.held(long) == {"a": 64}


def test_while_events_are_late_what_was_routed_counts_as_held() -> None:
    """Until one is heard that is younger than the answer, or for as long as an engine may be quiet."""
    world = World()
    world.join()
    world.store(prompt_of(32, salt=b"third"))
    prompt, other = prompt_of(160), prompt_of(160, salt=b"other")
    world.knowledge.told("a", 1.0)
    for lease, asked in ((7, prompt), (8, other)):
        world.knowledge.expect("a", lease, asked, world.said(asked, 0.0)["a"])
        world.knowledge.settle("a", lease, asked, 10.0 + lease, computed=True)
    world.knowledge.tick(19.0)
    assert (world.held(prompt), world.held(other)) == ({"a": 160}, {"a": 160})
    world.knowledge.told("a", 17.5)
    world.knowledge.tick(20.0)
    assert (world.held(prompt), world.held(other)) == ({"a": 0}, {"a": 160})
    world.knowledge.tick(18.0 + LATE_S_MAX)
    assert world.held(other) == {"a": 0}


def test_what_is_waited_for_of_a_replica_that_left_is_let_go() -> None:
    """Its events were late when it left; another life of it is another matter."""
    world = World()
    world.join()
    world.store(prompt_of(32))
    world.knowledge.told("a", 1.0)
    world.knowledge.expect("a", 7, prompt_of(160), world.said(prompt_of(160), 0.0)["a"])
    world.knowledge.settle("a", 7, prompt_of(160), 10.0, computed=True)
    world.knowledge.tick(11.0)
    world.knowledge.forget("a")
    world.knowledge.tick(12.0)
    world.join()
    world.store(prompt_of(32))
    world.knowledge.expect("a", 7, prompt_of(160), world.said(prompt_of(160), 13.0)["a"])
    world.knowledge.tick(100.0)
    assert world.held(prompt_of(160)) == {"a": 160}


def test_a_lease_that_failed_leaves_nothing() -> None:
    """Its blocks will never be computed."""
    world = World()
    world.join()
    prompt = prompt_of(160)
    world.store(prompt_of(32))
    world.knowledge.expect("a", 7, prompt, world.said(prompt, 0.0)["a"])
    assert world.held(prompt) == {"a": 160}
    world.knowledge.settle("a", 7, prompt, 10.0, computed=False)
    assert world.held(prompt) == {"a": 32}


def _answer(world: World, predicted: int, actual: int | None, times: int = 1) -> None:
    for _ in range(times):
        held = world.said(prompt_of(160)).get("a")
        world.knowledge.answered("a", held, predicted, actual, 160)


def test_a_late_joiner_earns_its_grade_by_two_hundred_answers() -> None:
    """And keeps it only as long as 99 % of the last two hundred are equal."""
    world = World()
    world.join("a", Grade.CATCHING_UP)
    world.store(prompt_of(160))
    _answer(world, 144, 144, CHECKS - 1)
    assert world.knowledge.standing("a")[0] is Grade.CATCHING_UP
    _answer(world, 144, 144)
    assert world.knowledge.standing("a")[0] is Grade.EXACT
    _answer(world, 128, 144, 3)
    assert world.knowledge.standing("a")[0] is Grade.CATCHING_UP


def test_predictions_that_drift_cost_the_grade_until_a_clean_replay() -> None:
    """The replay is asked for at once, and after the next drift only after a while."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    _answer(world, 144, 0, 21)
    world.knowledge.checked("a", Load(), 5.0)
    grade, why = world.knowledge.standing("a")
    assert grade is Grade.ESTIMATED
    assert "0 of 21" in why
    assert world.resyncs == ["a"]
    world.knowledge.checked("a", Load(), 6.0)
    assert world.resyncs == ["a"]  # asked once
    world.knowledge.clear("a", "asked to begin anew", 6.0)
    world.knowledge.grade("a", Grade.EXACT, "joined at batch 0", 6.1)
    assert world.knowledge.standing("a")[0] is Grade.EXACT
    world.store(prompt_of(160))
    _answer(world, 144, 0, 21)
    world.knowledge.checked("a", Load(), 7.0)
    world.knowledge.checked("a", Load(), 7.0 + DISTRUST_S - 1)
    assert world.resyncs == ["a"]
    world.knowledge.checked("a", Load(), 7.0 + DISTRUST_S)
    assert world.resyncs == ["a", "a"]


def test_answers_from_before_a_clear_say_nothing_of_what_came_after() -> None:
    """A lease placed on what is no longer believed is not compared."""
    world = World()
    world.join()
    before: Held | None = world.said(prompt_of(160), 0.0)["a"]
    world.knowledge.clear("a", "gap", 1.0)
    world.knowledge.grade("a", Grade.CATCHING_UP, "gap", 1.0)
    world.knowledge.answered("a", before, 144, 0, 160)
    assert world.knowledge.checks("a") == (0, 0)


def test_counters_stand_in_for_silent_answers() -> None:
    """An engine that says nothing in its answers is judged by its sums."""
    world = World()
    world.join()
    world.knowledge.checked("a", Load(cache_query_tokens_total=0, cache_hit_tokens_total=0), 1.0)
    for _ in range(DRIFT_TOKENS_MIN // 160 + 1):
        _answer(world, 144, None)
    load = Load(cache_query_tokens_total=(DRIFT_TOKENS_MIN // 160 + 1) * 160, cache_hit_tokens_total=0)
    world.knowledge.checked("a", load, 2.0)
    assert world.knowledge.standing("a")[0] is Grade.ESTIMATED
    assert "it counted 0" in world.knowledge.standing("a")[1]


def test_more_blocks_than_the_index_may_hold_are_never_exact() -> None:
    """The ledger forgets, so the replica holds more than is known."""
    world = World()
    world.join()
    world.store(prompt_of(BLOCK * 10_001))
    world.knowledge.grade("a", Grade.EXACT, "joined", 1.0)
    assert world.knowledge.standing("a")[0] is Grade.CATCHING_UP


def test_short_pages_are_not_followed() -> None:
    """A key for every token would cost more than it brings; the reason names the remedy."""
    world = World()
    world.join()
    world.knowledge.apply("a", Stored([1, 2], None, b"\0" * 8, 1, "", b"", None, "GPU", 0, True), 0.0)
    world.knowledge.grade("a", Grade.EXACT, "joined", 1.0)
    grade, why = world.knowledge.standing("a")
    assert grade is Grade.ESTIMATED
    assert "pages of 1 tokens" in why


def test_a_replica_that_left_is_gone() -> None:
    """Its blocks are purged, and what comes late is harmless."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    world.knowledge.forget("a")
    assert world.held(prompt_of(160)) == {}
    world.knowledge.settle("a", 1, prompt_of(16), 1.0, computed=False)
    world.knowledge.answered("a", None, 0, 0, 0)
    world.knowledge.checked("a", Load(), 1.0)
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
    world.knowledge.expect("a", 7, first, world.said(first, 0.0)["a"])
    world.knowledge.settle("a", 7, first, 10.0, computed=True, grown_blocks=1)
    assert world.knowledge.behind(second, 10.0)
    assert world.said(second, 10.0)["a"].behind
    assert not world.said(prompt_of(160, salt=b"s"), 10.0)["a"].behind
    world.knowledge.tick(10.0 + SETTLE_S)
    assert not world.said(second, 10.0 + SETTLE_S)["a"].behind
    assert not world.knowledge.behind(second, 10.0 + SETTLE_S)


def test_a_tier_takes_no_room_on_the_gpu() -> None:
    """Of a pool of 4,000 blocks 800 are in use, whatever a tier holds besides; what is left is free. A prompt that only
    the tier has counts as held."""
    world = World()
    world.join()
    prompts = [array("I", [seed, *range(1, 200 * BLOCK)]).tobytes() for seed in range(40)]
    for seed, ids in enumerate(prompts):
        hashes = list(range(1_000 * seed + 1, 1_000 * seed + 201))
        for medium in ("GPU", "CPU"):
            world.knowledge.apply("a", Stored(hashes, None, ids, BLOCK, "", b"", None, medium, 0, True), 0.0)
        if seed < 36:
            world.knowledge.apply("a", Removed(hashes, "GPU", 0), 0.0)
    world.knowledge.checked("a", Load(kv_tokens_max=4_000 * BLOCK, block_tokens=BLOCK), 1.0)
    keys = token_chain(prompts[0], BLOCK, token_root("", b"", BLOCK))
    held = world.said(TokenPrompt(prompts[0], "", b"", {BLOCK: keys}))["a"]
    assert held.free_tokens == 3_200 * BLOCK
    assert held.tokens == 200 * BLOCK


def test_a_hybrid_model_is_exact_only_by_its_answers() -> None:
    """Its sliding-window layers let go of blocks that the prefix needs, so a whole stream proves nothing: 99 % of the
    last two hundred answers do, and only as long as they do. A clear changes nothing in that; another process does."""
    world = World()
    world.join()
    world.store(prompt_of(160))
    assert world.knowledge.standing("a") == (Grade.EXACT, "joined")
    world.knowledge.apply("a", Stored([1, 2], None, b"", 0, "", b"", None, "GPU", 1, False), 1.0)
    world.knowledge.apply("a", Removed([1, 2], "GPU", 1), 1.0)
    assert world.knowledge.standing("a") == (Grade.CATCHING_UP, HYBRID)
    _answer(world, 144, 144, CHECKS)
    assert world.knowledge.standing("a")[0] is Grade.EXACT
    _answer(world, 144, 0, 3)
    assert world.knowledge.standing("a") == (Grade.CATCHING_UP, HYBRID)
    world.knowledge.apply("a", Cleared(), 2.0)
    assert world.knowledge.standing("a") == (Grade.CATCHING_UP, HYBRID)
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.0)
    world.knowledge.grade("a", Grade.EXACT, "joined at batch 0", 3.0)
    assert world.knowledge.standing("a")[0] is Grade.EXACT


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
    assert world.knowledge.standing("a") == (Grade.CATCHING_UP, "it holds more blocks than the index may")
    assert world.knowledge.standing("b")[0] is world.knowledge.standing("c")[0] is Grade.EXACT
    assert world.held(prompt_of(BLOCK * 500, salt=b"more"))["b"] == 500 * BLOCK
    assert 0 < world.held(prompt_of(BLOCK * 2_000, salt=b"a"))["a"] < 2_000 * BLOCK
    assert world.said(prompt_of(16))["a"].free_tokens is None  # what it holds besides is not known
    world.store(prompt_of(BLOCK * 1_000, salt=b"too"), "c")
    assert world.knowledge.standing("b")[0] is world.knowledge.standing("c")[0] is Grade.EXACT
    world.knowledge.forget("b")
    world.knowledge.clear("a", "gap", 1.0)
    world.knowledge.grade("a", Grade.EXACT, "joined at a clear", 1.0)
    assert world.knowledge.standing("a")[0] is Grade.EXACT
    assert world.knowledge.bytes_used == 1_900 * BLOCK_BYTES


def test_who_holds_nothing_costs_nothing() -> None:
    """Of a thousand replicas, each with a stream, those are told that hold some of the prompt. What is said of one that
    holds nothing is made once, and again when its room changes."""
    world = World()
    for n in range(1_000):
        world.join(f"r{n}")
        world.store(prompt_of(64, salt=b"%d" % n), f"r{n}")
        world.knowledge.checked(f"r{n}", Load(kv_tokens_max=1_600), 1.0)
    assert set(world.knowledge.held(prompt_of(160, salt=b"7"), 2.0)) == {"r7"}
    none = world.knowledge.empty("r8")
    assert none == Held(0, BLOCK, Grade.EXACT, none.epoch if none else -1, free_tokens=1_600 - 64)
    assert world.knowledge.empty("r8") is none
    world.store(prompt_of(32, salt=b"x"), "r8")
    changed = world.knowledge.empty("r8")
    assert changed is not None
    assert changed.free_tokens == 1_600 - 96
    assert world.knowledge.empty("unheard of") is None
