"""Forecasts that were learned on one half of a recording, judged on the other half by their log-loss.

A question is about an answer that has been idle for `idle_s` seconds: is its prompt used again within `more_s` further
seconds? The loss of a forecast is the mean of -ln(its chance of the actual outcome), in nats: 0.69 for even odds, 0 for
perfect knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean

from loadtest.common.report import Row
from loadtest.reuse_forecast import curves
from loadtest.reuse_forecast.curves import Curve, Gap, Kind, curve_from_odds, fit_curve, gap_of
from loadtest.reuse_forecast.recordings import HALVES, RECORDINGS, Answer, SessionTrace
from router.core.estimators.reuse import ReuseModel

QUESTIONS = ((0.0, 4.0), (0.0, 16.0), (0.0, 64.0), (0.0, 256.0), (0.0, 1_024.0), (64.0, 1_024.0), (256.0, 1_024.0))
"""(seconds idle since the answer's end, seconds more)"""
CHANCE_MIN = 1e-3
"""The smallest chance that counts for a forecast, so that its loss has a limit."""
MARKS_MAX = 100_000
Forecast = Callable[[Answer, float, float], float]
"""(answer, seconds idle, seconds more) -> chance of a next use within them."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A forecast by its name."""

    name: str
    kind: Kind | None = None
    """The kinds of answers that it distinguishes; None for a single curve."""
    bound: bool = False
    """True if it uses information that no router can have."""


CONSTANT, TODAY, ONE = Rival("base rate"), Rival("today's curve"), Rival("one curve from the end")
RIVALS = (
    CONSTANT,
    TODAY,
    ONE,
    Rival("by answer tokens", curves.classify_length),
    Rival("by the gap before", curves.classify_gap),
    Rival("by tokens and gap", curves.classify_length_gap),
    Rival("by agent or sub-agent", curves.classify_agent),
    Rival("bound: the last one", curves.classify_last, bound=True),
    Rival("bound: soon, later or never", curves.classify_soon, bound=True),
)


def judge(name: str, learnt: SessionTrace, judged: SessionTrace) -> Iterator[Row]:
    """Yield a row for each forecast and question."""
    for rival in RIVALS:
        forecast = _forecast(rival, learnt)
        for idle_s, more_s in QUESTIONS:
            asked = list(_select_answers(judged, idle_s, more_s))
            loss = fmean(_loss(forecast(answer, idle_s, more_s), again) for answer, again in asked)
            row = Row(workload=name, policy=rival.name, case=case_of(idle_s, more_s), load_name=judged.half, got=loss)
            row.requests, row.bound = len(asked), rival.bound or None
            yield row


def rows_of_all(names: Sequence[str] = tuple(RECORDINGS)) -> Iterator[list[Row]]:
    """Yield for each recording the rows of either half, judged by forecasts from the other one."""
    for name in names:
        halves = {half: RECORDINGS[name](half) for half in HALVES}
        for learnt, judged in (("tune", "claim"), ("claim", "tune")):
            yield list(judge(name, halves[learnt], halves[judged]))


def case_of(idle_s: float, more_s: float) -> str:
    """Return a question in words."""
    return f"within {more_s:,.0f} s" + (f", idle for {idle_s:.0f} s" if idle_s else "")


def _select_answers(recording: SessionTrace, idle_s: float, more_s: float) -> Iterator[tuple[Answer, bool]]:
    """Yield the answers for which the question has a known outcome, and the outcome."""
    for answer in recording.answers:
        if answer.told_s >= idle_s + more_s and answer.again_s >= idle_s:
            yield answer, answer.again_s <= idle_s + more_s


def _loss(chance: float, again: bool) -> float:
    given = chance if again else 1 - chance
    return -log(min(1 - CHANCE_MIN, max(CHANCE_MIN, given)))


# Learned forecasts


def _forecast(rival: Rival, learnt: SessionTrace) -> Forecast:
    if rival is CONSTANT:
        return _base_rates(learnt)
    if rival is TODAY:
        return _make_router_forecast(learnt)
    known = [(answer, gap) for answer in learnt.answers if (gap := gap_of(answer)) is not None]
    one = fit_curve(gap for _, gap in known)
    if rival.kind is None:
        return lambda _, idle_s, more_s: one.within(idle_s, more_s)
    return _make_kind_forecast(rival.kind, known, one)


def _base_rates(learnt: SessionTrace) -> Forecast:
    rates = {}
    for question in QUESTIONS:
        truths = [again for _, again in _select_answers(learnt, *question)]
        rates[question] = (sum(truths) + 1) / (len(truths) + 2)
    return lambda _, idle_s, more_s: rates[idle_s, more_s]


def _make_router_forecast(learnt: SessionTrace) -> Forecast:
    """Return the router's own forecast, which observed all prompts at their arrival, and counts from then."""
    memory, now_s = ReuseModel(MARKS_MAX), 0.0
    for answer in learnt.answers:
        if answer.asked_s > learnt.learnt_s:
            break
        now_s = answer.asked_s
        memory.observe(answer.keys, now_s)
        memory.reuse_probability(now_s)  # a query lets older observations fade; the price queries for every request
    curve = curve_from_odds(memory.reuse_probability(now_s + 1.0))
    return lambda answer, idle_s, more_s: curve.within(answer.ended_s - answer.asked_s + idle_s, more_s)


def _make_kind_forecast(kind: Kind, known: Sequence[tuple[Answer, Gap]], one: Curve) -> Forecast:
    gaps: dict[int, list[Gap]] = {}
    for answer, gap in known:
        gaps.setdefault(kind(answer), []).append(gap)
    of = {key: fit_curve(own, one) for key, own in gaps.items()}
    return lambda answer, idle_s, more_s: of.get(kind(answer), one).within(idle_s, more_s)


# Tables


def heads(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the heads of `lines`: the judged half, the forecast, and the questions."""
    return ("judged on", "forecast", *dict.fromkeys(row.case or "" for row in rows))


def lines(rows: Sequence[Row], name: str) -> list[tuple[str, ...]]:
    """Return a line for each half of a recording and each forecast.

    Above them is a line with the number of answers for each question.
    """
    found = list[tuple[str, ...]]()
    for half in HALVES:
        same = [row for row in rows if (row.workload, row.load_name) == (name, half)]
        asked = {row.case: f"{row.requests:,}" for row in same}
        found += [(half, "answers", *asked.values())] if same else []
        for rival in dict.fromkeys(row.policy for row in same):
            losses = (f"{row.got:.3f}" for row in same if row.policy == rival)
            found.append((half, rival or "", *losses))
    return found
