"""What is one fault, what is none, what evictions are charged to, and what is said of costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights.ledger.advice_hysteresis import STAYS_S
from router.core.insights.ledger.faults import NAMES_MAX, charge, faults_of, heads
from router.core.insights.ledger.lost_tokens import LOSSES_MAX, Losses
from router.core.insights.ledger.totals import Ledger
from router.core.types.cache_misses import DifferenceKind, MissReason, PromptAnalysis, Template
from tests.core.insights.ledger.records import BEGAN_S, difference, ledger, page, record


def differs(
    of: Ledger, template: int, lost: int, change: DifferenceKind = DifferenceKind.TIMESTAMP, **more: Any
) -> None:
    """A request that differed from another one of its template, and lost so many tokens by it."""
    of_record = {name: more.pop(name) for name in ("at_s", "evicted", "appended") if name in more}
    seen = PromptAnalysis(
        template=template, appended=of_record.get("appended", True), difference=difference(change, **more)
    )
    misses = {MissReason.DIVERGED: lost} | (
        {MissReason.EVICTED: of_record["evicted"]} if "evicted" in of_record else {}
    )
    of.observe(record(of_record.get("at_s", 1.0), misses=misses, analysis=seen))


def rows(of: Ledger, at_s: float = 2.0, **more: Any) -> list[tuple[str, int, int, int]]:
    """Change, byte, lost tokens and templates of each row."""
    of.settle(BEGAN_S + at_s)
    return [(row["change"], row["at_bytes"], row["lost_tokens"], row["templates"]) for row in page(of, **more)]


def test_a_fault_of_several_templates_is_one_row() -> None:
    """Within a token the place is the same, whichever digit differs first; elsewhere it is another fault. The text says
    in how many templates it is: those that begin with each other are one, and those that have one of the times none."""
    of = ledger()
    of.know([Template(1, 0, 50, 0), Template(2, 1, 2_000, 0), Template(3, 0, 900, 0)])
    for template, digit in ((1, 21), (2, 24), (7, 23), (3, 24)):
        differs(of, template, 100, at_bytes=digit, token_bytes=6)
    differs(of, 8, 70, at_bytes=900, token_bytes=890)
    assert rows(of) == [("timestamp", 6, 400, 2), ("timestamp", 890, 70, 1)]
    first, second = page(of)
    assert "that changes, at byte 6" in first["text"]
    assert first["text"].endswith("2 templates have this problem.")
    assert "templates" not in second["text"]


def test_words_that_came_with_a_time_are_that_times() -> None:
    """What was first seen as other words, right before the token, is in the token's row; words of a template that has
    nothing to do with it are not."""
    of = ledger()
    for piece in range(3):
        differs(of, 1, 50, DifferenceKind.OTHER, at_bytes=0, piece_hash=piece, appended=False)
        differs(of, 5, 40, DifferenceKind.OTHER, at_bytes=0, piece_hash=piece, appended=False)
    differs(of, 1, 500, at_bytes=130, token_bytes=120)
    assert rows(of) == [("timestamp", 120, 650, 1), ("other", 41 - 41, 120, 1)]


@pytest.mark.parametrize("change", [DifferenceKind.COUNTER, DifferenceKind.OTHER])
def test_what_tells_agents_apart_is_no_fault(change: DifferenceKind) -> None:
    """A few values that begin many conversations are names; where most conversations bring another one, or each changes
    its own, it changes."""
    of = ledger()
    of.know([Template(1, 0, 1_000, 0, conversations=100)])
    for value in range(NAMES_MAX // 2):
        differs(of, 1, 100, change, piece_hash=value)
    assert rows(of) == []
    for value in range(NAMES_MAX // 2, NAMES_MAX + 20):
        differs(of, 1, 100, change, piece_hash=value)
    assert [row[0] for row in rows(of)] == [change]
    of = ledger()
    for value in range(3):
        differs(of, 1, 100, change, piece_hash=value, appended=False)
    assert [row[0] for row in rows(of)] == [change]


def test_evictions_are_their_faults() -> None:
    """Tokens evicted under a template that loses to a difference, or under one that begins with it, are that fault's;
    the number is not said twice, and nobody is told to buy anything."""
    of = ledger()
    of.know([Template(1, 0, 1_000, 0), Template(2, 1, 2_000, 0)])
    differs(of, 1, 400, DifferenceKind.TOOL_ORDER, message=-1, path="tools[0]", evicted=300)
    of.observe(record(1.0, misses={MissReason.EVICTED: 500}, analysis=PromptAnalysis(template=2)))
    of.settle(BEGAN_S + 2)
    (row,) = page(of, kv_tokens=10_000)
    assert (row["change"], row["evicted_tokens"]) == ("tool_order", 800)
    assert row["lost_tokens"] == pytest.approx(1_200, abs=1)
    assert "800 of these tokens were evicted" in row["text"]


def test_evictions_before_a_fault_are_not_its_own() -> None:
    """Memory that was too small before the release is too small: only what is evicted since is charged. A fault that
    costs next to nothing beside what is evicted has not caused that."""
    of = ledger()
    evicted = PromptAnalysis(template=1)
    of.observe(record(1.0, misses={MissReason.EVICTED: 5_000}, analysis=evicted))
    differs(of, 1, 400)
    of.observe(record(2.0, misses={MissReason.EVICTED: 300}, analysis=evicted))
    of.settle(BEGAN_S + 2)
    assert {row["change"]: row["evicted_tokens"] for row in page(of)} == {"timestamp": 300, "evicted": 0}
    of.observe(record(2.0, misses={MissReason.EVICTED: 9_000}, analysis=evicted))
    of.settle(BEGAN_S + 2)
    first, second = page(of)
    assert (first["change"], first["lost_tokens"]) == ("evicted", pytest.approx(14_300, abs=5))
    assert "Fix the rows" not in first["text"]
    assert (second["change"], second["evicted_tokens"]) == ("timestamp", 0)


def test_evictions_of_others_come_behind_the_faults() -> None:
    """Where the difference is not in the template that was evicted, its row says what to do first, whatever it costs;
    where nothing else is wrong, it says that memory is too small."""
    of = ledger()
    differs(of, 1, 400)
    differs(of, 9, 1, DifferenceKind.TOOL_ADDED, message=-1, path="tools")  # worth no line, so it has filled no cache
    of.observe(record(1.0, misses={MissReason.EVICTED: 900}, analysis=PromptAnalysis(template=9)))
    of.settle(BEGAN_S + 2)
    fault, evicted = page(of, kv_tokens=10_000)
    assert (fault["change"], fault["evicted_tokens"]) == ("timestamp", 0)
    assert (evicted["change"], evicted["lost_tokens"]) == ("evicted", 900)
    assert "Fix the rows above first: they fill the caches." in evicted["text"]
    assert "add replicas" not in evicted["text"]
    of = ledger()
    of.observe(record(1.0, misses={MissReason.EVICTED: 900}))
    of.settle(BEGAN_S + 2)
    (row,) = page(of, kv_tokens=10_000)
    assert "add replicas" in row["text"]
    assert "900" not in row["text"]


def test_no_figure_is_made_up_from_seconds() -> None:
    """Below five minutes, or twenty requests, it is said what was lost in the time that there was."""
    of = ledger()
    for number in range(25):
        differs(of, 1, 1_000, at_s=number)
    of.settle(BEGAN_S + 26)
    (row,) = page(of)
    assert (row["cost"], row["lost_tokens_per_h"], row["gpu_s_per_h"]) == ("24.9k tokens in the last 26 s", None, None)
    of.settle(BEGAN_S + 299)
    assert page(of)[0]["cost"] == "23.1k tokens in the last 5 min"
    of.settle(BEGAN_S + 400)
    (row,) = page(of)
    assert row["lost_tokens_per_h"] == pytest.approx(25_000 * 9, rel=0.1)
    assert row["cost"].endswith(" tokens an hour")
    few = ledger()
    for number in range(19):
        differs(few, 1, 1_000, at_s=300 + number)
    few.settle(BEGAN_S + 400)
    (row,) = page(few)
    assert row["lost_tokens_per_h"] is None
    assert row["cost"].endswith(" tokens in the last 7 min")


def test_a_row_that_was_shown_does_not_vanish_within_seconds() -> None:
    """Its share falls below the limit, as other traffic comes: it stays until it has been worth less than half of that
    for a minute, and does not come back for little."""
    of = ledger()
    differs(of, 1, 100, at_s=1.0)
    assert [row[0] for row in rows(of, 2.0)] == ["timestamp"]
    of.observe(record(3.0, hit=300_000))
    assert [row[0] for row in rows(of, 4.0)] == ["timestamp"]
    assert [row[0] for row in rows(of, 2.0 + STAYS_S - 1)] == ["timestamp"]
    assert rows(of, 4.0 + STAYS_S) == []
    differs(of, 1, 100, at_s=70.0)
    assert rows(of, 71.0) == []


differing = st.tuples(
    st.integers(0, 30),
    st.sampled_from(DifferenceKind),
    st.integers(-1, 3),
    st.integers(0, 400),
    st.booleans(),
    st.integers(1, 1_000),
)


@given(st.lists(differing, max_size=60), st.dictionaries(st.integers(0, 40), st.integers(0, 900)))
def test_every_loss_is_in_one_fault(seen: list[tuple[Any, ...]], evicted: dict[int, float]) -> None:
    """Whatever differs where: no token is lost or counted twice, names aside; what is charged is what faults have, and
    never more than what was evicted."""
    of = Losses(excerpts=False)
    for template, change, message, at_bytes, own, tokens in seen:
        role = "system" if message <= 0 else "user"
        what = difference(change, message=message, role=role, at_bytes=at_bytes, piece_hash=at_bytes)
        of.add(template, what, tokens, 1.0, 0.0, own=own)
    parents = {id_: id_ // 2 for id_ in range(41)}
    faults = faults_of(of.all.values(), heads(parents.__getitem__), lambda _: 0)
    kept = sum(fault.loss.tokens for fault in faults)
    spared = sum(
        loss.tokens for loss in of.all.values() if loss.change in (DifferenceKind.COUNTER, DifferenceKind.OTHER)
    )
    everything = sum(loss.tokens for loss in of.all.values())
    assert everything - spared <= kept + 1e-6
    assert kept <= everything + 1e-6
    assert len({fault.key for fault in faults}) == len(faults) <= LOSSES_MAX
    charged = charge(faults, evicted, parents.__getitem__)
    assert charged == pytest.approx(sum(fault.evicted for fault in faults))
    assert charged <= sum(evicted.values()) + 1e-6
