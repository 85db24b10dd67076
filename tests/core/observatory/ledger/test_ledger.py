"""The observatory's sums: they add up to what was put in, stay within their bounds, and fade."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.facts.misses import Breakdown, Change, Difference, Miss, Sighting, Template
from router.core.facts.placements import Grade, Reason, Receipt
from router.core.observatory.ledger.branches import BODIES_BYTES_MAX, BODY_BYTES_MAX, Views
from router.core.observatory.ledger.groups import GROUP_TTFT_S, REST
from router.core.observatory.ledger.ledger import KINDS_MAX, WINDOW_S, Ledger
from router.core.observatory.ledger.losses import LOSSES_MAX, Losses
from router.core.observatory.ledger.sums import RAISE_WINDOWS, REQUESTS, TTFT_S, Fading, percentile
from router.core.observatory.ledger.timeline import STEP_S, STEPS, Timeline
from router.telemetry.record import RequestRecord

BEGAN_S = 1_700_000_000.0
CANARY = "the canary sings"


def ledger(**more: Any) -> Ledger:
    """A small one, in which everybody may be named."""
    limits: dict[str, Any] = {"templates_max": 16, "groups_max": 12, "steps_max": 4, "excerpts": False}
    return Ledger(**{**limits, "tenant": str, "now_s": BEGAN_S, **more})


def record(at_s: float = 0.0, hit: int = 0, misses: dict[Miss, int] | None = None, **more: Any) -> RequestRecord:
    """A request that ended so long after the ledger began."""
    misses = misses or {}
    tokens = hit + sum(misses.values())
    receipt = Receipt("http://a", "warm", Reason.WARM, Grade.ESTIMATED, tokens, hit)
    receipt.replay = more.pop("replay", False)
    miss = Breakdown(tokens, hit, misses, more.pop("saved_ms", 0.0))
    fields: dict[str, Any] = {"id": "1", "route": "/v1/completions", "at_s": BEGAN_S + at_s, "model": "m"}
    return RequestRecord(**{**fields, "receipt": receipt, "miss": miss, **more})


def difference(change: Change = Change.OTHER, **more: Any) -> Difference:
    """One in the system prompt."""
    where: dict[str, Any] = {"message": 0, "role": "system", "path": "messages[0].content", "offset_bytes": 60}
    return Difference(change, **{**where, "at_bytes": 41, "lost_bytes": 400, **more})


def page(of: Ledger, rows_max: int = 50, kv_tokens: int = 0) -> list[dict[str, Any]]:
    """Advice, where a token of prefill takes a millisecond."""
    return of.advice(rows_max, ms_per_token=lambda _: 1.0, kv_tokens=kv_tokens)


def views(of: Ledger, holders: Any = lambda _: ()) -> Views:
    """Its templates, at four bytes a token."""
    return Views(of.branches, of.fading.weight, bytes_per_token=lambda _: 4.0, holders=holders)


requests = st.builds(
    record,
    at_s=st.floats(0, 900),
    hit=st.integers(0, 1_000),
    misses=st.dictionaries(st.sampled_from(Miss), st.integers(1, 1_000), max_size=3),
    replay=st.booleans(),
    route=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    tenant=st.sampled_from(["", "acme", "zeta"]),
    ttft_s=st.none() | st.floats(0, 400),
    sighting=st.none()
    | st.builds(
        Sighting,
        template=st.integers(0, 30),
        tools=st.booleans(),
        tool_calls=st.integers(0, 5),
        step=st.sampled_from(["", "plan", "act", "look", "think", "say"]),
        difference=st.none() | st.builds(difference, st.sampled_from(Change), piece_hash=st.integers(0, 99)),
    ),
)


@settings(deadline=None)
@given(st.lists(requests, max_size=150))
def test_everything_adds_up_to_what_was_put_in(seen: list[RequestRecord]) -> None:
    """Totals are the sum of the requests: hits and misses make up the prompts, groups make up the totals, and so do the
    steps of the timeline while no step is ten minutes old."""
    of = ledger()
    for each in sorted(seen, key=lambda each: each.at_s):
        of.observe(each)
    of.settle(BEGAN_S + 900)
    row = of.totals_row()
    assert row["requests"] == len(seen)
    assert row["prompt_tokens"] == sum(each.miss.prompt_tokens for each in seen if each.miss)
    assert row["hit_tokens"] + sum(row["misses"].values()) == row["prompt_tokens"]
    assert row["genuine_tokens"] + row["replay_tokens"] == row["hit_tokens"]
    groups = of.groups.rows(1_000)
    assert sum(group["requests"] for group in groups) == len(seen)
    assert sum(group["prompt_tokens"] for group in groups) == row["prompt_tokens"]
    firsts = sum(sum(group.ttft[:-1]) for group in of.groups.all.values())
    assert firsts == sum(each.ttft_s is not None for each in seen)
    points = of.timeline.points()
    oldest_s = points[0]["at_s"]
    assert sum(point["requests"] for point in points) == sum(each.at_s >= oldest_s for each in seen)
    for point in points:
        assert point["hit_tokens"] + sum(point["misses"].values()) == point["prompt_tokens"]


def test_bounds_hold_whatever_comes() -> None:
    """A hundred thousand requests of as many templates, steps, tenants and differences: nothing is over its bound."""
    chance, of = random.Random(1), ledger()
    for number in range(100_000):
        name = str(chance.random())
        what = difference(message=number % 50, path=name, piece_hash=number) if number % 3 == 0 else None
        seen = Sighting(template=chance.getrandbits(64), step=name * 10, tools=number % 2 == 0, difference=what)
        of.observe(record(number / 50, hit=1, misses={Miss.DIVERGED: 1}, tenant=name, sighting=seen))
        assert len(of._kinds) <= KINDS_MAX
    of.settle(BEGAN_S + 2_000)
    assert len(of.branches.all) <= 16
    assert len(of.groups.all) == 12
    assert REST in of.groups.all
    assert len({label.step for label in of.groups.all}) <= 4 + 2  # those, none, and the others
    assert len(of.losses.all) <= LOSSES_MAX
    assert len(of.timeline.points()) == STEPS
    assert of.totals_row()["requests"] == sum(group["requests"] for group in of.groups.rows(100)) == 100_000


def test_the_timeline_has_ten_minutes_of_steps() -> None:
    """Steps are five seconds, oldest first, up to now; those in which nothing happened are there, and are nought."""
    of = ledger()
    of.observe(record(2.0, hit=10, misses={Miss.NEW: 5}, ttft_s=0.5))
    of.observe(record(12.0, misses={Miss.COLD: 7}))
    of.settle(BEGAN_S + 20)
    points = of.timeline.points()
    assert len(points) == STEPS
    at_s = [point["at_s"] for point in points]
    assert at_s == [BEGAN_S + 20 - STEP_S * back for back in reversed(range(STEPS))]
    first, gap, second = (points[at_s.index(BEGAN_S + offset)] for offset in (0, 5, 10))
    assert (first["requests"], first["prompt_tokens"], first["misses"]) == (1, 15, {"new": 5})
    assert 0.4 < first["ttft_p50_s"] < 0.6
    assert (gap["requests"], gap["misses"], gap["ttft_p50_s"]) == (0, {}, None)
    assert (second["requests"], second["misses"]) == (1, {"cold": 7})
    of.settle(BEGAN_S + 20 + STEPS * STEP_S)
    assert not any(point["requests"] for point in of.timeline.points())
    assert of.totals_row()["ttft_p50_s"] is None
    assert of.totals_row()["requests"] == 2


def test_a_clock_that_goes_back_loses_nothing() -> None:
    """Requests of workers do not come in order; a late one counts in the step under way."""
    of = ledger()
    for at_s in (30.0, 5.0, 31.0, 0.0):
        of.observe(record(at_s, hit=1))
    of.settle(BEGAN_S + 29)
    assert of.totals_row()["requests"] == sum(point["requests"] for point in of.timeline.points()) == 4


@given(st.lists(st.floats(0.005, 280), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_are_right_to_a_bucket(times_s: list[float], part: float) -> None:
    """What a histogram gives is within a quarter of the value at that rank."""
    of = Timeline(BEGAN_S)
    for time_s in times_s:
        of.now.ttft[bisect_left(TTFT_S, time_s)] += 1
    (found,) = of.ttft_s(part)
    true = sorted(times_s)[max(0, -int(-part * len(times_s) // 1) - 1)]
    assert found is not None
    assert true / 1.26 - 0.01 <= found <= true * 1.26


def test_a_percentile_of_nothing_is_nothing() -> None:
    """And beyond the last bound it is that bound."""
    assert percentile([0.0] * (len(TTFT_S) + 1), TTFT_S, 0.5) is None
    assert percentile([0.0] * len(TTFT_S) + [1.0], TTFT_S, 0.5) == TTFT_S[-1]


@given(st.lists(st.tuples(st.floats(0, 40 * WINDOW_S), st.floats(0, 1e6)), max_size=20))
def test_a_faded_sum_is_what_each_part_faded_to(parts: list[tuple[float, float]]) -> None:
    """Weighing when added and dividing when read comes to fading each part by its age, also where weights begin
    anew."""
    fading, total = Fading(WINDOW_S / RAISE_WINDOWS, 0.0), 0.0
    parts = sorted(parts)
    for at_s, value in parts:
        total = total * fading.move(at_s) + value * fading.weight
    now_s = parts[-1][0] if parts else 0.0
    expected = sum(value * 2.718281828459045 ** ((at_s - now_s) / (WINDOW_S / RAISE_WINDOWS)) for at_s, value in parts)
    assert total / fading.weight == pytest.approx(expected)


def test_a_steady_loss_is_told_by_the_hour() -> None:
    """A thousand tokens a minute are sixty thousand an hour, whether it has been so for ten minutes or five hours."""
    of = ledger()
    for minute in range(1, 301):
        seen = Sighting(template=7, difference=difference(Change.TIMESTAMP))
        of.observe(record(minute * 60, misses={Miss.DIVERGED: 1_000}, sighting=seen))
        if minute in (10, 300):
            of.settle(BEGAN_S + minute * 60)
            (row,) = page(of)
            assert row["lost_tokens_per_h"] == pytest.approx(60_000, rel=0.06)
            assert row["gpu_s_per_h"] == pytest.approx(60, rel=0.06)
    assert row["lost_tokens"] == pytest.approx(60_000, rel=0.06)


# -- templates -----------------------------------------------------------------------------------------------------


def test_a_branch_is_as_wide_as_its_twigs_together() -> None:
    """A request counts for every template that it begins with; own tokens are those behind the parent's; the most
    served comes first; holders are whoever has its last block."""
    of = ledger()
    of.know([Template(1, 0, 4_000, key=11), Template(2, 1, 6_000, key=12), Template(3, 1, 5_000, key=0)])
    for template, hit in ((1, 100), (2, 300), (2, 300), (3, 50)):
        of.observe(record(1.0, hit=hit, misses={Miss.NEW: 100}, sighting=Sighting(template=template)))
    of.settle(BEGAN_S + 1)
    shown = views(of, holders=lambda key: {"b", "a"} if key == 11 else {"a"})
    rows = {row["id"]: row for row in map(shown.branch, shown.most)}
    assert [f"{id_:016x}" for id_ in (1, 2, 3)] == list(rows)
    root, twig, other = rows.values()
    assert (root["parent"], twig["parent"], other["parent"]) == ("", root["id"], root["id"])
    assert (root["requests"], twig["requests"], other["requests"]) == (4, 2, 1)
    assert (root["served_tokens"], twig["served_tokens"]) == (1_150, 800)
    assert root["hit_rate"] == pytest.approx(750 / 1_150, abs=1e-4)
    assert (root["prompt_tokens"], twig["prompt_tokens"], twig["own_tokens"]) == (1_000, 1_500, 500)
    assert (root["holders"], twig["holders"], other["holders"]) == (["a", "b"], ["a"], [])


def test_templates_in_a_circle_are_told_apart() -> None:
    """Parents that are not shorter are no parents: whatever is told, there is an end to it."""
    of = ledger()
    of.know([Template(1, 2, 1_000, 0), Template(2, 1, 1_000, 0), Template(3, 3, 50, 0), Template(4, 99, 50, 0)])
    assert [row["parent"] for row in map(views(of).branch, (1, 2, 3, 4))] == [""] * 4


def test_conversations_of_all_workers_count() -> None:
    """Each worker sees conversations of its own; who tells again tells anew."""
    of = ledger()
    of.know([Template(1, 0, 1_000, 0, conversations=2)], "worker 0")
    of.know([Template(1, 0, 1_000, 0, conversations=3)], "worker 1")
    of.know([Template(1, 0, 1_000, 0, conversations=4)], "worker 0")
    assert views(of).template(1, [])["conversations"] == 7


def test_who_holds_a_longer_prefix_holds_the_shorter_one() -> None:
    """Where nobody is known by the block that ends it."""
    of = ledger()
    of.know([Template(1, 0, 500, 10), Template(2, 1, 1_000, 0), Template(3, 2, 2_000, 30), Template(4, 1, 900, 40)])
    held = {30: {"b"}, 40: {"a"}}
    shown = views(of, holders=lambda key: held.get(key, ()))
    assert [shown.branch(id_)["holders"] for id_ in (1, 2, 3, 4)] == [["a", "b"], ["b"], ["b"], ["a"]]


def test_a_parent_that_one_knows_is_the_parent() -> None:
    """A worker that has not seen the shorter template yet does not tear the longer one off."""
    of = ledger()
    of.know([Template(1, 0, 500, 0), Template(2, 1, 1_000, 0)], "worker 0")
    of.know([Template(2, 0, 1_000, 0)], "worker 1")
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
    of.observe(record(1.0, hit=10, sighting=Sighting(template=1)))
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
        sighting = Sighting(template=1 if number % 2 else number)
        of.observe(record(number, hit=100, misses={}, sighting=sighting))
    of.settle(BEGAN_S + 500)
    assert 1 in of.branches.all


# -- groups --------------------------------------------------------------------------------------------------------


def test_a_group_says_what_its_last_requests_were_like() -> None:
    """Requests, rates, medians, times to first token and tool calls, by route, tenant, tools and step."""
    of = ledger()
    for number in range(9):
        seen = Sighting(tools=True, tool_calls=number % 3, step="plan")
        times: dict[str, Any] = {"ttft_s": (number + 1) / 10}
        replay = number == 8
        of.observe(record(number, hit=number * 100, misses={Miss.NEW: 100}, sighting=seen, replay=replay, **times))
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


# -- advice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "more", "text"),
    [
        (Change.TIMESTAMP, {}, "Message 0 (system) holds a date or a time at byte 41"),
        (Change.IDENTIFIER, {}, "an identifier (a UUID, a request id) at byte 41"),
        (Change.COUNTER, {}, "a number at byte 41"),
        (Change.TOOL_ORDER, {"message": -1, "path": "tools"}, "The tools come in 3 orders. Sort them"),
        (Change.TOOL_ADDED, {"message": -1, "path": "tools"}, "Bring the same tools"),
        (Change.TOOL_REMOVED, {"message": -1, "path": "tools"}, "Bring the same tools"),
        (Change.KEY_ORDER, {"message": -1, "path": "tools[2].function.parameters"}, "canonical_tools"),
        (Change.WHITESPACE, {}, "white space only, at byte 41"),
        (Change.EDITED_HISTORY, {"message": 4}, "rewritten at message 4. Append"),
        (Change.TRUNCATED_HISTORY, {"message": 3}, "Old messages are dropped, from message 3 on. Keep the prefix"),
        (Change.REORDERED_CONTEXT, {"message": 1, "role": "user"}, "Message 1 (user) has the same passages"),
        (Change.OTHER, {"message": -1, "path": ""}, "The beginning of the prompt changes at byte 41"),
    ],
)
def test_each_kind_of_difference_has_its_advice(change: Change, more: dict[str, Any], text: str) -> None:
    """Where it is, what it is, and what to do about it."""
    of = ledger()
    for piece in range(3):
        seen = Sighting(template=7, difference=difference(change, piece_hash=piece, **more))
        of.observe(record(1.0, misses={Miss.DIVERGED: 100}, sighting=seen))
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert text in row["text"]
    assert row["text"].endswith(".")
    assert (row["change"], row["template"], row["lost_tokens"], row["requests"]) == (change, f"{7:016x}", 300, 3)
    assert row["last_at_s"] == pytest.approx(BEGAN_S + 1, abs=1)


def test_every_kind_of_difference_was_tried() -> None:
    """No kind is without advice."""
    marks = test_each_kind_of_difference_has_its_advice.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(Change)


def test_advice_is_most_costly_first() -> None:
    """By tokens lost, whatever the reason; what costs nothing is not there; a load test is said, last."""
    of = ledger()
    for template, lost in ((1, 500), (2, 2_000), (3, 0)):
        misses = {Miss.DIVERGED: lost} if lost else {}
        seen = Sighting(template=template, difference=difference(Change.TIMESTAMP))
        of.observe(record(0.0, hit=10_000, misses=misses, sighting=seen, replay=True))
    misses = {Miss.EVICTED: 1_000, Miss.SPILLED: 900, Miss.NEW: 10_000, Miss.IDENTITY: 10}
    of.observe(record(0.0, hit=0, misses=misses, saved_ms=500.0))
    of.settle(BEGAN_S)
    rows = page(of, kv_tokens=50_000)
    assert [(row["rank"], row["change"], row["lost_tokens"]) for row in rows] == [
        (1, "timestamp", 2_000),
        (2, "evicted", 1_000),
        (3, "spilled", 900),
        (4, "timestamp", 500),
        (5, "replays", 0),
    ]
    assert "holds 50k tokens, and up to 51k are in use" in rows[1]["text"]
    assert rows[4]["text"].startswith("100% of hits are replays")
    assert [row["change"] for row in page(of, rows_max=2)] == ["timestamp", "replays"]


@pytest.mark.parametrize("miss", [each for each in Miss if each not in {Miss.DIVERGED, Miss.NEW, Miss.TAIL}])
def test_each_reason_that_costs_much_is_explained(miss: Miss) -> None:
    """Of all that somebody can do something about, and of what nobody can read."""
    of = ledger()
    of.observe(record(1.0, hit=50, misses={miss: 50}))
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert (row["change"], row["lost_tokens"]) == (miss, 50)
    assert "tokens an hour" in row["text"]


def differs(of: Ledger, template: int, lost: int, change: Change = Change.TIMESTAMP, **more: Any) -> None:
    """A request that differed from another one of its template, and lost so many tokens by it."""
    seen = Sighting(template=template, difference=difference(change, **more))
    of.observe(record(1.0, misses={Miss.DIVERGED: lost}, sighting=seen))


def test_branches_of_a_template_share_its_advice() -> None:
    """What is wrong with the prefix of several templates is one piece of advice, with the tokens of all and the label
    of the one that costs most, or else of what that begins with; what stands elsewhere is another one."""
    of = ledger(excerpts=True)
    of.know([Template(1, 0, 1_000, 0, label="tools"), Template(2, 1, 2_000, 0), Template(3, 2, 3_000, 0)])
    of.know([Template(8, 1, 1_500, 0, label="cousin"), Template(9, 0, 900, 0, label="stranger")])
    for template, lost in ((1, 100), (2, 300), (3, 200), (8, 50), (9, 70)):
        differs(of, template, lost)
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
        differs(of, 1 + piece % 2, 10, Change.TOOL_ORDER, **place)
    of.settle(BEGAN_S + 1)
    (row,) = page(of)
    assert row["text"].startswith("The tools come in 6 orders.")
    assert row["lost_tokens"] == 60


def test_what_costs_next_to_nothing_is_no_advice() -> None:
    """A list of everything hides what matters: a thousandth of all prompt tokens is the least."""
    of = ledger()
    of.observe(record(1.0, hit=100_000))
    differs(of, 1, 99)
    differs(of, 2, 200)
    of.settle(BEGAN_S + 1)
    assert [row["lost_tokens"] for row in page(of)] == [200]


def test_places_in_history_that_differ_by_number_only_are_one() -> None:
    """History moves with every turn: it would fill the list. The first place is named."""
    of = Losses(excerpts=False)
    for message in (9, 5, 7):
        what = difference(Change.EDITED_HISTORY, message=message, path=f"messages[{message}].content")
        of.add(1, what, 10, 1.0, BEGAN_S)
    (row,) = of.by_template(1.0, 9)(1)
    assert (row["message"], row["requests"], row["lost_tokens"]) == (5, 3, 30)


@pytest.mark.parametrize("excerpts", [False, True])
def test_text_is_shown_only_where_excerpts_are_wanted(excerpts: bool) -> None:
    """Whatever an edge tells, nothing of it is on a page unless the settings allow it."""
    of = ledger(excerpts=excerpts)
    what = difference(Change.TIMESTAMP, before=CANARY, after=CANARY, shape="aaa aaaa")
    of.observe(record(1.0, misses={Miss.DIVERGED: 9}, sighting=Sighting(template=5, difference=what)))
    of.settle(BEGAN_S + 1)
    rows = [page(of), of.losses.by_template(of.fading.weight, 9)(5)]
    assert (CANARY.encode() in msgspec.json.encode(rows)) is excerpts


def test_requests_that_were_not_placed_say_nothing() -> None:
    """A 401 or a 404 has no prompt."""
    of = ledger()
    refused = record(1.0)
    refused.receipt = None
    of.observe(refused)
    unread = record(1.0)
    unread.miss = None
    of.observe(unread)
    of.settle(BEGAN_S + 1)
    assert of.totals[REQUESTS] == 1
    assert of.totals_row()["prompt_tokens"] == 0
