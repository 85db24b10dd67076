"""Templates, groups, advice and excerpts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights.ledger.decaying_sums import REQUESTS
from router.core.insights.ledger.groups import GROUP_TTFT_S
from router.core.insights.ledger.lost_tokens import Losses
from router.core.insights.ledger.template_tree import BODIES_BYTES_MAX, BODY_BYTES_MAX
from router.core.insights.ledger.totals import Ledger
from router.core.types.cache_misses import DifferenceKind, MissReason, PromptAnalysis, Template
from tests.core.insights.ledger.records import BEGAN_S, difference, ledger, page, record, views

CANARY = "the canary sings"


def test_conversations_are_those_told_last() -> None:
    """What is told again counts once."""
    of = ledger()
    of.know([Template(1, 0, 1_000, 0, conversations=2)])
    of.know([Template(1, 0, 1_000, 0, conversations=4)])
    assert views(of).template(1, [])["conversations"] == 4


def test_who_holds_a_longer_prefix_holds_the_shorter_one() -> None:
    """Where nobody is known by the block that ends it."""
    of = ledger()
    of.know([Template(1, 0, 500, 10), Template(2, 1, 1_000, 0), Template(3, 2, 2_000, 30), Template(4, 1, 900, 40)])
    held = {30: {"b"}, 40: {"a"}}
    shown = views(of, holders=lambda key: held.get(key, ()))
    assert [shown.branch(id_)["holders"] for id_ in (1, 2, 3, 4)] == [["a", "b"], ["b"], ["b"], ["a"]]


def test_a_parent_that_was_known_is_the_parent() -> None:
    """A template that is told again without the shorter one is not torn off."""
    of = ledger()
    of.know([Template(1, 0, 500, 0), Template(2, 1, 1_000, 0)])
    of.know([Template(2, 0, 1_000, 0)])
    assert views(of).branch(2)["parent"] == f"{1:016x}"


def test_a_body_is_told_once_and_kept() -> None:
    """What is told later without a body keeps the one that is known; one that is too long is none; all together are
    bounded, and the least used go without."""
    of = ledger(templates_max=256)
    of.know([Template(1, 0, 1_000, 0, body=b"{}")])
    of.know([Template(1, 0, 1_000, 0, label="", conversations=5)])
    of.know([Template(2, 0, 1_000, 0, body=bytes(BODY_BYTES_MAX + 1))])
    assert [each.id for each in of.branches.hottest(9)] == [1]
    assert [views(of).template(id_, [])["can_prewarm"] for id_ in (1, 2)] == [True, False]
    of.observe(record(1.0, hit=10, analysis=PromptAnalysis(template=1)))
    of.settle(BEGAN_S + 1)
    for number in range(100, 200):
        of.know([Template(number, 0, 1_000, 0, body=bytes(BODY_BYTES_MAX))])
    kept = of.branches.hottest(256)
    assert sum(len(each.body) for each in kept) <= BODIES_BYTES_MAX
    assert kept[0].id == 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=120))
def test_the_bytes_of_bodies_are_counted_right(told: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: the count is the sum of the bodies that are there."""
    of = ledger()
    for id_, size in told:
        of.know([Template(id_, 0, 1_000, 0, body=bytes(size))])
        bodies = [branch.facts.body for branch in of.branches.all.values() if branch.facts is not None]
        assert of.branches._body_bytes == sum(map(len, bodies))
        assert len(of.branches.all) <= 16


def test_the_most_used_template_stays() -> None:
    """New ones make room among the least used."""
    of = ledger()
    for number in range(1, 500):
        sighting = PromptAnalysis(template=1 if number % 2 else number)
        of.observe(record(number, hit=100, misses={}, analysis=sighting))
    of.settle(BEGAN_S + 500)
    assert 1 in of.branches.all


def test_a_group_says_what_its_last_requests_were_like() -> None:
    """Requests, rates, medians, times to first token and tool calls, by route, tenant, tools and step."""
    of = ledger()
    for number in range(9):
        seen = PromptAnalysis(tools=True, tool_calls=number % 3, step="plan")
        times: dict[str, Any] = {"ttft_s": (number + 1) / 10}
        replay = number == 8
        of.observe(
            record(number, hit=number * 100, misses={MissReason.NEW: 100}, analysis=seen, replay=replay, **times)
        )
    of.observe(record(9.0, hit=1, tenant="acme"))
    of.settle(BEGAN_S + 10)
    first, second = of.groups.rows(10)
    assert (first["tools"], first["step"], first["requests"], first["tool_calls_mean"]) == (True, "plan", 9, 1.0)
    assert (first["prompt_tokens"], first["prompt_tokens_p50"]) == (4_500, 500)
    assert first["hit_rate"] == pytest.approx(3_600 / 4_500, abs=1e-3)
    assert first["genuine_hit_rate"] == pytest.approx(2_800 / 4_500, abs=1e-3)
    assert (first["ttft_p50_s"], first["ttft_p90_s"]) == (0.5, 0.9)
    assert (second["tenant"], second["tools"], second["step"], second["ttft_p50_s"]) == ("acme", False, "", None)
    (busy, _) = of.groups.all.values()
    assert busy.ttft[: len(GROUP_TTFT_S)] == [1, 1, 3, 4, 0, 0, 0]
    assert busy.ttft[-1] == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("change", "more", "text"),
    [
        (DifferenceKind.TIMESTAMP, {}, "Message 0 (system) contains a date or time that changes, at byte 41"),
        (DifferenceKind.IDENTIFIER, {}, "an identifier (a UUID, a request id) that changes, at byte 41"),
        (DifferenceKind.COUNTER, {}, "a number that changes, at byte 41"),
        (DifferenceKind.TOOL_ORDER, {"message": -1, "path": "tools"}, "The tools have 3 orders."),
        (DifferenceKind.TOOL_ADDED, {"message": -1, "path": "tools"}, "Send the same tools"),
        (DifferenceKind.TOOL_REMOVED, {"message": -1, "path": "tools"}, "Send the same tools"),
        (DifferenceKind.KEY_ORDER, {"message": -1, "path": "tools[2].function.parameters"}, "canonical_tools"),
        (DifferenceKind.WHITESPACE, {}, "only in white space, at byte 41"),
        (DifferenceKind.EDITED_HISTORY, {"message": 4}, "changed at message 4. Append"),
        (
            DifferenceKind.TRUNCATED_HISTORY,
            {"message": 3},
            "Old messages are removed, from message 3 on. Keep the prefix",
        ),
        (DifferenceKind.REORDERED_CONTEXT, {"message": 1, "role": "user"}, "Message 1 (user) has the same passages"),
        (DifferenceKind.OTHER, {"message": -1, "path": ""}, "The beginning of the prompt changes at byte 41"),
    ],
)
def test_each_kind_of_difference_has_its_advice(change: DifferenceKind, more: dict[str, Any], text: str) -> None:
    """Where it is, what it is, and what to do about it."""
    of = ledger()
    for piece in range(3):
        seen = PromptAnalysis(template=7, appended=False, difference=difference(change, piece_hash=piece, **more))
        of.observe(record(1.0, misses={MissReason.DIVERGED: 100}, analysis=seen))
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert text in row["text"]
    assert row["text"].endswith(".")
    assert (row["change"], row["template"], row["lost_tokens"], row["requests"]) == (change, f"{7:016x}", 300, 3)
    assert row["last_at_s"] == pytest.approx(BEGAN_S + 1, abs=1)


def test_every_kind_of_difference_was_tried() -> None:
    """No kind is without advice."""
    marks = test_each_kind_of_difference_has_its_advice.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(DifferenceKind)


def test_advice_is_most_costly_first() -> None:
    """By tokens lost, whatever the reason, but for evictions: the faults that may have caused them come first. What
    costs nothing is not there; a load test is said, last."""
    of = ledger()
    for template, lost in ((1, 500), (2, 2_000), (3, 0)):
        misses = {MissReason.DIVERGED: lost} if lost else {}
        seen = PromptAnalysis(
            template=template, difference=difference(DifferenceKind.TIMESTAMP, at_bytes=500 * template)
        )
        of.observe(record(0.0, hit=10_000, misses=misses, analysis=seen, replay=True))
    misses = {MissReason.EVICTED: 1_000, MissReason.SPILLED: 900, MissReason.NEW: 10_000, MissReason.IDENTITY: 10}
    of.observe(record(0.0, hit=0, misses=misses, saved_ms=500.0))
    of.settle(BEGAN_S)
    rows = page(of, kv_tokens=50_000)
    assert [(row["rank"], row["change"], row["lost_tokens"]) for row in rows] == [
        (1, "timestamp", 2_000),
        (2, "spilled", 900),
        (3, "timestamp", 500),
        (4, "evicted", 1_000),
        (5, "replays", 0),
    ]
    assert "holds 50k tokens, and up to 51k are in use" in rows[3]["text"]
    assert rows[4]["text"].startswith("100% of hits are replays")
    assert [row["change"] for row in page(of, rows_max=2)] == ["timestamp", "replays"]


@pytest.mark.parametrize(
    "miss", [each for each in MissReason if each not in {MissReason.DIVERGED, MissReason.NEW, MissReason.TAIL}]
)
def test_each_reason_that_costs_much_is_explained(miss: MissReason) -> None:
    """Of all that somebody can do something about, and of what nobody can read."""
    of = ledger()
    of.observe(record(1.0, hit=50, misses={miss: 50}))
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert (row["change"], row["lost_tokens"]) == (miss, 50)
    assert row["cost"] == "50 tokens in the last 1 s"
    assert "50" not in row["text"], "the number is said once"


def differs(
    of: Ledger, template: int, lost: int, change: DifferenceKind = DifferenceKind.TIMESTAMP, **more: Any
) -> None:
    """A request that differed from another one of its template, and lost so many tokens by it."""
    seen = PromptAnalysis(template=template, difference=difference(change, **more))
    of.observe(record(1.0, misses={MissReason.DIVERGED: lost}, analysis=seen))


def test_branches_of_a_template_share_its_advice() -> None:
    """What is wrong with the prefix of several templates is one piece of advice, with the tokens of all and the label
    of the one that costs most, or else of what that begins with; what stands elsewhere is another one."""
    of = ledger(excerpts=True)
    of.know([Template(1, 0, 1_000, 0, label="tools"), Template(2, 1, 2_000, 0), Template(3, 2, 3_000, 0)])
    of.know([Template(8, 1, 1_500, 0, label="cousin"), Template(9, 0, 900, 0, label="stranger")])
    for template, lost in ((1, 100), (2, 300), (3, 200), (8, 50)):
        differs(of, template, lost)
    differs(of, 9, 70, at_bytes=900)
    differs(of, 3, 40, message=1, path="messages[1].content")
    of.settle(BEGAN_S + 1)
    rows = [(row["template"], row["label"], row["lost_tokens"], row["requests"], row["message"]) for row in page(of)]
    assert rows == [
        (f"{2:016x}", "tools", 650, 4, 0),
        (f"{9:016x}", "stranger", 70, 1, 0),
        (f"{3:016x}", "tools", 40, 1, 1),
    ]


def test_orders_of_tools_are_counted_together() -> None:
    """Wherever among the tools the first other one is seen, and whatever they begin with: in another order they are
    the beginning of another template."""
    of = ledger()
    for piece in range(6):
        place: dict[str, Any] = {"message": -1, "path": f"tools[{piece % 3}]", "piece_hash": piece}
        differs(of, 1 + piece % 2, 10, DifferenceKind.TOOL_ORDER, **place)
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert row["text"].startswith("The tools have 6 orders.")
    assert row["lost_tokens"] == 60


def test_what_costs_next_to_nothing_is_no_advice() -> None:
    """A list of everything hides what matters: a thousandth of all prompt tokens is the least."""
    of = ledger()
    of.observe(record(1.0, hit=100_000))
    differs(of, 1, 99)
    differs(of, 2, 200, at_bytes=900)
    of.settle(BEGAN_S + 1)
    assert [row["lost_tokens"] for row in page(of)] == [200]


def test_places_in_history_that_differ_by_number_only_are_one() -> None:
    """History moves with every turn: it would fill the list. The first place is named."""
    of = Losses(excerpts=False)
    for message in (9, 5, 7):
        what = difference(DifferenceKind.EDITED_HISTORY, message=message, path=f"messages[{message}].content")
        of.add(1, what, 10, 1.0, BEGAN_S)
    (row,) = of.make_row_lookup(1.0, 9)(1)
    assert (row["message"], row["requests"], row["lost_tokens"]) == (5, 3, 30)


@pytest.mark.parametrize("excerpts", [False, True])
def test_text_is_shown_only_where_excerpts_are_wanted(excerpts: bool) -> None:
    """Whatever a frontend reports, nothing of it is on a page unless the settings allow it."""
    of = ledger(excerpts=excerpts)
    what = difference(DifferenceKind.TIMESTAMP, before=CANARY, after=CANARY, shape="aaa aaaa")
    of.observe(record(1.0, misses={MissReason.DIVERGED: 9}, analysis=PromptAnalysis(template=5, difference=what)))
    of.settle(BEGAN_S + 1)
    rows = [page(of), of.losses.make_row_lookup(of.fading.weight, 9)(5)]
    assert (CANARY.encode() in msgspec.json.encode(rows)) is excerpts


def test_requests_that_were_not_placed_say_nothing() -> None:
    """A 401 or a 404 has no prompt."""
    of = ledger()
    refused = record(1.0)
    refused.receipt = None
    of.observe(refused)
    unread = record(1.0)
    unread.cache.miss = None
    of.observe(unread)
    of.settle(BEGAN_S + 1)
    assert of.totals[REQUESTS] == 1
    assert of.totals_row()["prompt_tokens"] == 0
