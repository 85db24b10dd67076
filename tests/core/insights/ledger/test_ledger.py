"""The observatory's sums: they add up to what was put in, stay within their bounds, and fade."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.insights.breakdown import with_actual_usage
from router.core.insights.ledger.decaying_sums import RAISE_WINDOWS, TTFT_S, DecayingSum, percentile
from router.core.insights.ledger.groups import REST
from router.core.insights.ledger.lost_tokens import LOSSES_MAX
from router.core.insights.ledger.timeline import STEP_S, STEPS, Timeline
from router.core.insights.ledger.totals import KINDS_MAX, WINDOW_S
from router.core.types.cache_misses import DifferenceKind, MissReason, PromptAnalysis, Template, TokenBreakdown
from router.core.types.placements import Usage
from router.telemetry.request_record import RequestRecord
from tests.core.insights.ledger.records import BEGAN_S, difference, ledger, page, record, requests, views


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
    assert row["prompt_tokens"] == sum(each.cache.miss.prompt_tokens for each in seen if each.cache.miss)
    assert row["hit_tokens"] + sum(row["misses"].values()) == row["prompt_tokens"]
    assert row["genuine_tokens"] + row["replay_tokens"] == row["hit_tokens"]
    told = [each.cache.miss for each in seen if each.cache.miss and each.usage and each.usage.verified]
    assert row["verified_tokens"] == sum(miss.prompt_tokens for miss in told)
    assert row["verified_hit_tokens"] == row["verified_predicted_tokens"] == sum(miss.hit for miss in told)
    groups = of.groups.rows(1_000)
    assert sum(group["requests"] for group in groups) == len(seen)
    assert sum(group["prompt_tokens"] for group in groups) == row["prompt_tokens"]
    assert sum(group["verified_tokens"] for group in groups) == row["verified_tokens"]
    firsts = sum(sum(group.ttft[:-1]) for group in of.groups.all.values())
    assert firsts == sum(each.times.ttft_s is not None for each in seen)
    points = of.timeline.points()
    oldest_s = points[0]["at_s"]
    assert sum(point["requests"] for point in points) == sum(each.at_s >= oldest_s for each in seen)
    for point in points:
        assert point["hit_tokens"] + sum(point["misses"].values()) == point["prompt_tokens"]


answers = st.lists(
    st.tuples(st.integers(1, 5_000), st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=80
)


@given(answers)
def test_the_rate_is_off_by_no_more_than_what_is_not_verified(seen: list[tuple[int, float, float, bool]]) -> None:
    """However many answers tell what their engine found, and whatever was predicted of the others: the hit rate that is
    shown differs from the true one by no more than the part of the prompt tokens of which no engine told."""
    of, true = ledger(), 0
    for tokens, held, believed, tells in seen:
        cached, predicted = int(tokens * held), int(tokens * believed)
        usage = Usage(tokens, 1, cached if tells else None)
        miss = with_actual_usage(TokenBreakdown(tokens, predicted, {MissReason.NEW: tokens - predicted}), usage)
        ended = record(1.0, predicted, {MissReason.NEW: tokens - predicted}, usage=usage)
        ended.cache.miss, true = miss, true + cached
        of.observe(ended)
    of.settle(BEGAN_S + 2)
    row = of.totals_row()
    prompt = row["prompt_tokens"]
    unverified = 1 - row["verified_tokens"] / prompt
    assert abs(row["hit_tokens"] - true) / prompt <= unverified + 1e-9
    if all(tells for *_, tells in seen):
        assert row["hit_tokens"] == row["verified_hit_tokens"] == true


def test_one_answer_that_tells_does_not_stand_for_a_thousand_that_do_not() -> None:
    """A health check of 29 tokens reports that nothing was cached: the rate stays what was predicted of all others."""
    of = ledger()
    for _ in range(1_000):
        of.observe(record(1.0, 840, {MissReason.NEW: 160}, usage=Usage(1_000, 1)))
    of.observe(record(1.0, 0, {MissReason.COLD: 29}, usage=Usage(29, 1, 0)))
    of.settle(BEGAN_S + 2)
    row = of.totals_row()
    assert row["hit_tokens"] / row["prompt_tokens"] == pytest.approx(0.84, abs=0.001)
    assert (row["verified_tokens"], row["verified_hit_tokens"]) == (29, 0)


@pytest.mark.long
def test_bounds_hold_whatever_comes() -> None:
    """A hundred thousand requests of as many templates, steps, tenants and differences: nothing is over its bound."""
    chance, of = random.Random(1), ledger()
    for number in range(100_000):
        name = str(chance.random())
        what = difference(message=number % 50, path=name, piece_hash=number) if number % 3 == 0 else None
        seen = PromptAnalysis(template=chance.getrandbits(64), step=name * 10, tools=number % 2 == 0, difference=what)
        of.observe(record(number / 50, hit=1, misses={MissReason.DIVERGED: 1}, tenant=name, analysis=seen))
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
    of.observe(record(2.0, hit=10, misses={MissReason.NEW: 5}, ttft_s=0.5))
    of.observe(record(12.0, misses={MissReason.COLD: 7}))
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
    """Requests do not come in order; a late one counts in the step under way."""
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
    fading, total = DecayingSum(WINDOW_S / RAISE_WINDOWS, 0.0), 0.0
    parts = sorted(parts)
    for at_s, value in parts:
        total = total * fading.move(at_s) + value * fading.weight
    now_s = parts[-1][0] if parts else 0.0
    expected = sum(value * 2.718281828459045 ** ((at_s - now_s) / (WINDOW_S / RAISE_WINDOWS)) for at_s, value in parts)
    assert total / fading.weight == pytest.approx(expected)


def test_a_steady_loss_is_told_by_the_hour() -> None:
    """A thousand tokens a minute are sixty thousand an hour, whether it has been so for half an hour or five hours."""
    of = ledger()
    for minute in range(1, 301):
        seen = PromptAnalysis(template=7, difference=difference(DifferenceKind.TIMESTAMP))
        of.observe(record(minute * 60, misses={MissReason.DIVERGED: 1_000}, analysis=seen))
        if minute in (30, 300):
            of.settle(BEGAN_S + minute * 60)
            (row,) = page(of)
            assert row["lost_tokens_per_h"] == pytest.approx(60_000, rel=0.06)
            assert row["gpu_s_per_h"] == pytest.approx(60, rel=0.06)
    assert row["lost_tokens"] == pytest.approx(60_000, rel=0.06)


def test_a_branch_is_as_wide_as_its_twigs_together() -> None:
    """A request counts for every template that it begins with; own tokens are those behind the parent's; the most
    served comes first; holders are whoever has its last block."""
    of = ledger()
    of.know([Template(1, 0, 4_000, key=11), Template(2, 1, 6_000, key=12), Template(3, 1, 5_000, key=0)])
    for template, hit in ((1, 100), (2, 300), (2, 300), (3, 50)):
        of.observe(record(1.0, hit=hit, misses={MissReason.NEW: 100}, analysis=PromptAnalysis(template=template)))
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
