"""What replicas hold by their own word: grades, suspension, expectation, and the self-check."""

from __future__ import annotations

from router.core.cache_state.calibration import CHECKS
from router.core.cache_state.event_index import SETTLE_S
from router.core.cache_state.event_lag import LATE_S_MAX
from router.core.kv_events.stream import RESTARTED
from router.core.types.placements import Confidence
from tests.core.cache_state.known import World, _answer, prompt_of


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
    assert world.knowledge.grade_of("a")[0] is Confidence.ESTIMATED
    assert world.knowledge.grade_of("unheard of")[0] is Confidence.ESTIMATED


def test_each_change_of_grade_is_told_once() -> None:
    """Whatever number of times it is said."""
    world = World()
    world.join("a", Confidence.CATCHING_UP)
    world.join("a", Confidence.CATCHING_UP)
    world.knowledge.grade("a", Confidence.EXACT, "joined at a clear", 1.0)
    world.knowledge.set_untokenizable("a", "no tokenizer")
    world.knowledge.set_untokenizable("a", "no tokenizer")
    told = [(grade, why) for _, grade, why in world.grades]
    assert told == [
        (Confidence.CATCHING_UP, "joined"),
        (Confidence.EXACT, "joined at a clear"),
        (Confidence.ESTIMATED, "no tokenizer"),
    ]


def test_nothing_is_credited_while_a_stream_is_suspended() -> None:
    """Proof of continuity brings all of it back, a clear brings none."""
    world = World()
    world.join()
    world.store(prompt_of(100))
    world.knowledge.suspend("a", "disconnected", 1.0, doubt=True)
    assert world.held(prompt_of(100)) == {"a": 0}
    assert world.knowledge.is_suspended("a")
    assert world.knowledge.grade_of("a") == (Confidence.CATCHING_UP, "disconnected")
    world.knowledge.resume("a", 2.0)
    assert world.held(prompt_of(100)) == {"a": 96}
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    world.knowledge.suspend("a", "disconnected", 3.0, doubt=True)
    world.knowledge.clear("a", f"{RESTARTED}: other bytes", 3.1)
    assert not world.knowledge.is_suspended("a")
    assert world.held(prompt_of(100)) == {"a": 0}
    assert world.restarts == ["a"]


def test_a_join_is_no_doubt() -> None:
    """While a history is replayed, which may take long, what it says does not count, and is not held against answers;
    the cache itself is in no doubt, so our own estimate goes on."""
    world = World()
    world.join(grade=Confidence.CATCHING_UP)
    world.knowledge.suspend("a", "replay from batch 0", 1.0, doubt=False)
    world.store(prompt_of(100))
    held = world.said(prompt_of(100), 1.0)["a"]
    assert (held.tokens, held.suspended, held.doubted, world.knowledge.is_suspended("a")) == (0, True, False, False)
    world.knowledge.check_prediction("a", held, 0, 96, 100)
    assert world.knowledge.checks("a") == (0, 0)
    world.knowledge.suspend("a", "disconnected", 2.0, doubt=True)
    assert world.knowledge.is_suspended("a")
    world.knowledge.resume("a", 3.0)
    assert not world.knowledge.is_suspended("a")
    assert world.held(prompt_of(100)) == {"a": 96}


def test_what_was_just_routed_counts_as_held_until_it_settles() -> None:
    """For as long as the lease is open and a moment longer; then only what events confirmed is left."""
    world = World()
    world.join()
    world.store(prompt_of(32))
    long = prompt_of(160)
    world.knowledge.expect_blocks("a", 7, long, world.said(long, 0.0)["a"])
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
    world.knowledge.advance_watermark("a", 1.0)
    for lease, asked in ((7, prompt), (8, other)):
        world.knowledge.expect_blocks("a", lease, asked, world.said(asked, 0.0)["a"])
        world.knowledge.settle("a", lease, asked, 10.0 + lease, computed=True)
    world.knowledge.tick(19.0)
    assert (world.held(prompt), world.held(other)) == ({"a": 160}, {"a": 160})
    world.knowledge.advance_watermark("a", 17.5)
    world.knowledge.tick(20.0)
    assert (world.held(prompt), world.held(other)) == ({"a": 0}, {"a": 160})
    world.knowledge.tick(18.0 + LATE_S_MAX)
    assert world.held(other) == {"a": 0}


def test_what_is_waited_for_of_a_replica_that_left_is_let_go() -> None:
    """Its events were late when it left; another life of it is another matter."""
    world = World()
    world.join()
    world.store(prompt_of(32))
    world.knowledge.advance_watermark("a", 1.0)
    world.knowledge.expect_blocks("a", 7, prompt_of(160), world.said(prompt_of(160), 0.0)["a"])
    world.knowledge.settle("a", 7, prompt_of(160), 10.0, computed=True)
    world.knowledge.tick(11.0)
    world.knowledge.forget("a")
    world.knowledge.tick(12.0)
    world.join()
    world.store(prompt_of(32))
    world.knowledge.expect_blocks("a", 7, prompt_of(160), world.said(prompt_of(160), 13.0)["a"])
    world.knowledge.tick(100.0)
    assert world.held(prompt_of(160)) == {"a": 160}


def test_a_lease_that_failed_leaves_nothing() -> None:
    """Its blocks will never be computed."""
    world = World()
    world.join()
    prompt = prompt_of(160)
    world.store(prompt_of(32))
    world.knowledge.expect_blocks("a", 7, prompt, world.said(prompt, 0.0)["a"])
    assert world.held(prompt) == {"a": 160}
    world.knowledge.settle("a", 7, prompt, 10.0, computed=False)
    assert world.held(prompt) == {"a": 32}


def test_a_late_joiner_earns_its_grade_by_two_hundred_answers() -> None:
    """And keeps it only as long as 99 % of the last two hundred are equal."""
    world = World()
    world.join("a", Confidence.CATCHING_UP)
    world.store(prompt_of(160))
    _answer(world, 144, 144, CHECKS - 1)
    assert world.knowledge.grade_of("a")[0] is Confidence.CATCHING_UP
    _answer(world, 144, 144)
    assert world.knowledge.grade_of("a")[0] is Confidence.EXACT
    _answer(world, 128, 144, 3)
    assert world.knowledge.grade_of("a")[0] is Confidence.CATCHING_UP
