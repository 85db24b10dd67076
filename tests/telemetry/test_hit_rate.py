"""The one hit rate, what of it is verified, and what engines' own counters say of the rest."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.insights.breakdown import with_actual_usage
from router.core.insights.ledger.totals import Ledger
from router.core.placement.router import Router
from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import Confidence, ExternalKv, PlacementReason, Receipt, Usage
from router.core.types.replicas import Load
from router.telemetry.counters import RequestMetrics
from router.telemetry.engine_hit_rate import EngineHitRate
from router.telemetry.metrics import Metrics, MetricSources
from router.telemetry.series import RecentTokens
from tests.telemetry.counted import record, router

ID = "http://10.0.0.0:8000"
answers = st.lists(
    st.tuples(st.integers(1, 5_000), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()),
    min_size=1,
    max_size=60,
)


def answer(
    it: Metrics | RequestMetrics,
    tokens: int,
    predicted: int,
    cached: int | None,
    *,
    explained: bool = True,
    split: bool = False,
) -> None:
    """One request that was answered: the engine tells what was cached unless that is None. A split one had two legs."""
    receipt = Receipt(ID, "warm", PlacementReason.WARM, Confidence.ESTIMATED, tokens, predicted)
    if split:
        receipt.brought = ExternalKv(leg=PrefillStage("http://10.0.0.9:8000", KvConnector.NIXL, "", 0, 0.0, 0.0, 0.0))
    usage = Usage(tokens, 1, cached)
    if explained:
        receipt.miss = TokenBreakdown(tokens, predicted, {MissReason.NEW: tokens - predicted})
    miss = with_actual_usage(receipt.miss, usage) if receipt.miss is not None else None
    it.observe(record(at_s=1.0, ending="ok", receipt=receipt, usage=usage, miss=miss))


def sums(page: bytes) -> dict[str, float]:
    """Sums by name over all label values."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^warmroute_(\w+)(?:{.*})? (\S+)$", page.decode(), re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@given(answers)
def test_the_rate_is_off_by_no_more_than_what_is_not_verified(
    seen: list[tuple[int, float, float, bool, bool]],
) -> None:
    """However many answers tell what their engine found, with an observatory or without: the hit rate on the page
    differs from the true one by no more than the part of the prompt tokens of which no engine told."""
    it, true = Metrics(router(1), lambda: 0.0), 0
    for tokens, held, believed, tells, explained in seen:
        cached = int(tokens * held)
        answer(it, tokens, int(tokens * believed), cached if tells else None, explained=explained)
        true += cached
    page = sums(it.page())
    prompt = page["hit_tokens_total"] + page["miss_tokens_total"]
    assert prompt == sum(tokens for tokens, *_ in seen)
    verified = page["reported_prompt_tokens_total"] / prompt if "reported_prompt_tokens_total" in page else 0.0
    assert abs(page["hit_tokens_total"] - true) / prompt <= 1 - verified + 1e-9
    assert page["token_hit_ratio"] == pytest.approx(page["hit_tokens_total"] / prompt)
    assert page["token_hit_verified_ratio"] == pytest.approx(verified)


def test_one_answer_that_tells_does_not_stand_for_a_thousand_that_do_not() -> None:
    """A health check whose engine reports nothing cached leaves the rate where the others were predicted to be."""
    it = Metrics(router(1), lambda: 0.0)
    for _ in range(1_000):
        answer(it, 1_000, 840, None)
    answer(it, 29, 0, 0)
    page = sums(it.page())
    assert page["token_hit_ratio"] == pytest.approx(0.84, abs=0.001)
    assert page["token_hit_verified_ratio"] == pytest.approx(29 / 1_000_029)


def test_recent_tokens_out_of_order() -> None:
    """Records that come late count, and do not make what came before fade twice."""
    turned, straight = RecentTokens(), RecentTokens()
    for at_s in (1000.0, 900.0, 1000.0):
        turned.add(2, 1, 1, True, at_s)
        straight.add(2, 1, 1, True, 1000.0)
    assert (turned.prompt, turned.verified_hit) == (straight.prompt, straight.verified_hit) == (6, 3)
    turned.add(6, 0, 0, False, 1000.0 + 1e6)
    assert (turned.hit / turned.prompt, turned.verified) == (0.0, 0.0)


def probed(of: Router, queries: float, hits: float, prompt: float) -> None:
    """What the engine's page says now."""
    of.observations.observe_load(
        ID, Load(prompt_tokens_total=prompt, cache_query_tokens_total=queries, cache_hit_tokens_total=hits)
    )


def test_engines_counters_tell_of_answers_that_do_not() -> None:
    """Where the work is all ours, silent answers are counted at the rate that the engine's counters leave for them:
    half of the tokens here, though 90 % were predicted; what answers told is taken off first."""
    of = router(1)
    it, count = RequestMetrics(), EngineHitRate()
    it.add_replica(ID)
    (member,) = of.members
    probed(of, 0.0, 0.0, 0.0)
    count.settle([member], it.verified_tokens, it.unverified_tokens, 0.0)
    for second in range(1, 11):
        for _ in range(10):
            answer(it, 1_000, 900, None)
        answer(it, 10_000, 9_000, 9_000)
        probed(of, 20_000.0 * second, 14_000.0 * second, 20_000.0 * second)
        member.counters.sent_prompt_tokens = member.counters.engine_prompt_tokens
        count.settle([member], it.verified_tokens, it.unverified_tokens, float(second))
    prompt, cached = count.sums["m"]
    assert 50_000 <= prompt <= 100_000  # from when the share is known
    assert cached / prompt == pytest.approx(0.5, abs=0.01)


def test_counters_of_a_leg_tell_nothing() -> None:
    """Of a request in two legs both engines count the prompt, and its answer tells what one of them found: while a
    replica takes such, its counters say nothing of silent answers, and they do again afterwards."""
    of = router(1)
    it, count = RequestMetrics(), EngineHitRate()
    it.add_replica(ID)
    (member,) = of.members
    sums = list[bool]()
    for second in range(30):
        answer(it, 10_000, 9_000, None, split=second < 15)
        probed(of, 20_000.0 * second, 10_000.0 * second, 20_000.0 * second)
        member.counters.sent_prompt_tokens = member.counters.engine_prompt_tokens
        count.settle([member], it.verified_tokens, it.unverified_tokens, float(second))
        sums.append(bool(count.sums))
    assert not any(sums[:15])
    assert sums[-1]


def test_counters_of_a_shared_replica_tell_nothing() -> None:
    """Half of the replica's work is somebody else's: its counters are not taken for ours."""
    of = router(1)
    it, count = RequestMetrics(), EngineHitRate()
    it.add_replica(ID)
    (member,) = of.members
    for second in range(10):
        answer(it, 10_000, 9_000, None)
        probed(of, 40_000.0 * second, 0.0, 40_000.0 * second)
        member.counters.sent_prompt_tokens = member.counters.engine_prompt_tokens / 2
        count.settle([member], it.verified_tokens, it.unverified_tokens, float(second))
    assert count.sums == {}


def test_counters_that_begin_anew_are_no_rate() -> None:
    """An engine that restarted, and a replica that left and came back, make no sums that are negative."""
    of = router(1)
    it, count = RequestMetrics(), EngineHitRate()
    for second in range(1, 40):
        if second % 10 == 1:
            it.remove_replica(ID)
            it.add_replica(ID)
        answer(it, 10_000, 9_000, None)
        (member,) = of.members
        probed(of, 10_000.0 * (second % 15), 5_000.0 * (second % 15), 10_000.0 * second)
        member.counters.sent_prompt_tokens = member.counters.engine_prompt_tokens
        count.settle([member], it.verified_tokens, it.unverified_tokens, float(second))
    prompt, cached = count.sums["m"]
    assert 0 < prompt <= 390_000
    assert cached / prompt == pytest.approx(0.5)


def test_tokens_by_reason() -> None:
    """Every reason is there from a model's first request on; what was computed is counted by why, what was
    cached by whether the prompt was asked for before, and the two add up to the prompts. What is not known to be a
    replay says nothing of diversity."""
    ledger = Ledger(templates_max=1, groups_max=2, steps_max=1, excerpts=False, tenant=str, now_s=0.0)
    it = Metrics(router(), lambda: 0.0, MetricSources(ledger=lambda: ledger))
    it.observe(record(status=404))
    page = it.page().decode()
    assert all(f'warmroute_miss_tokens_total{{model="m",reason="{miss}"}} 0.0' in page for miss in MissReason)
    assert all(f'warmroute_hit_tokens_total{{kind="{kind}",model="m"}} 0.0' in page for kind in ("genuine", "replay"))
    difference = Difference(DifferenceKind.WHITESPACE, 0, "user", "messages[0].content", 1, 1, 200)
    for replay, miss, seen in (
        (
            False,
            TokenBreakdown(100, 20, {MissReason.DIVERGED: 70, MissReason.TAIL: 10}),
            PromptAnalysis(difference=difference),
        ),
        (True, TokenBreakdown(100, 90, {MissReason.TAIL: 10}), PromptAnalysis()),
        (False, TokenBreakdown(50, 0, {MissReason.UNSUPPORTED: 50}), None),
    ):
        receipt = Receipt(ID, "warm", PlacementReason.WARM, Confidence.EXACT, 100, 60, replay=replay)
        ended = record(ending="ok", receipt=receipt, miss=miss, analysis=seen)
        ledger.observe(ended)
        it.observe(ended)
    ledger.settle(1.0)
    page = it.page().decode()
    for name, value in (
        ('miss_tokens_total{model="m",reason="diverged"}', 70),
        ('miss_tokens_total{model="m",reason="tail"}', 20),
        ('miss_tokens_total{model="m",reason="unsupported"}', 50),
        ('hit_tokens_total{kind="genuine",model="m"}', 20),
        ('hit_tokens_total{kind="replay",model="m"}', 90),
        ("duplicate_prompts_total", 1),
        ("prompt_diversity_ratio", 0.5),
        ('prompt_divergences_total{change="whitespace"}', 1),
    ):
        assert f"\nwarmroute_{name} {float(value)}\n" in page
