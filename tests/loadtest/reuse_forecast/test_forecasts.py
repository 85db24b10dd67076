from __future__ import annotations

from array import array
from itertools import count
from math import inf, log
from random import Random

import pytest

from loadtest.common.report import Row, envelope
from loadtest.common.traces import Request
from loadtest.docgen.forecasts import forecasts_block
from loadtest.docgen.markdown import PageError
from loadtest.reuse_forecast import recordings, scoring
from loadtest.reuse_forecast.command import main
from loadtest.reuse_forecast.curves import (
    EDGES_S,
    Curve,
    Gap,
    classify_gap,
    classify_last,
    classify_length,
    curve_from_odds,
    fit_curve,
    gap_of,
)
from loadtest.reuse_forecast.recordings import CUT_TOKENS, Answer, SessionTrace
from loadtest.reuse_forecast.scoring import CHANCE_MIN, QUESTIONS, RIVALS, heads, judge, lines
from loadtest.simulate.engine.workload import SimRequest
from router.core.estimators.reuse import BUCKETS, HORIZON_S, ReuseModel

KEYS = count(1)


def turn(keys: list[int], tokens: int = 100) -> SimRequest:
    """A prompt with these block keys and an answer of so many tokens."""
    request = Request(0.0, 0.0, 128 * len(keys), tokens, "n", 64, ())
    return SimRequest(0, "s", 0.0, 0.0, 128 * len(keys), tokens, request, 0, array("Q", keys), 0, 0, 0, array("Q"))


def answered(keys: list[int], asked_s: float, lasts_s: float = 1.0, told_s: float = inf, tokens: int = 100) -> Answer:
    """A prompt whose answer took so long."""
    return Answer(turn(keys, tokens), keys, asked_s, asked_s + lasts_s, told_s)


def made(seed: int, prompts: int, soon: float = 4.0) -> SessionTrace:
    """A recording in which short answers are followed soon, and long ones after minutes or never."""
    rng, answers, now_s = Random(seed), list[Answer](), 0.0
    for n in range(prompts):
        short = rng.random() < 0.6
        now_s += 5.0
        answers.append(answered([n * 10], now_s, tokens=64 if short else 900))
        gap_s = rng.uniform(1, 2 * soon) if short else rng.uniform(100, 900)
        if short or rng.random() < 0.5:
            answers.append(answered([n * 10, n * 10 + 1], now_s + 1 + gap_s, told_s=0.0))
    return recordings._link_prompts("made", "tune", answers, now_s)


def test_gaps_of_a_recording_are_those_that_the_router_finds() -> None:
    """A prompt that goes on behind another one is its next turn; the gap runs from the end of that one's answer."""
    answers = [answered([1, 2], 0.0, 3.0), answered([5], 1.0), answered([1, 2, 3], 10.0), answered([1, 9], 11.0)]
    recording = recordings._link_prompts("made", "tune", answers, 20.0)
    first, other, second, branch = recording.answers
    assert (first.again_s, second.before_s) == (7.0, 7.0)
    assert other.again_s == second.again_s == branch.again_s == inf
    assert first.before_s == other.before_s == branch.before_s == inf


@pytest.mark.parametrize("name", ["claude_code", "mooncake"])
def test_halves_share_no_conversation_and_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recorded request is in one half, and its conversation in no other."""
    monkeypatch.setattr(recordings, "prepare", lambda pairs, *_, **__: [_named(*pair) for pair in pairs])
    halves = [recordings.RECORDINGS[name](half) for half in recordings.HALVES]
    names = [{answer.turn.session for answer in half.answers} for half in halves]
    assert not names[0] & names[1]
    assert sum(len(half.answers) for half in halves) == {"claude_code": 7_531, "mooncake": 12_031}[name]
    for half in halves:
        asked = [answer.asked_s for answer in half.answers]
        assert asked == sorted(asked)
        assert 0 < half.learnt_s <= asked[-1]


def _named(session: str, request: Request) -> SimRequest:
    """A prompt with the session and the times of a recorded one, which nothing goes on behind."""
    made = turn([next(KEYS)] * 4, request.output_tokens)
    made.session, made.request, made.at_s, made.prompt_tokens = session, request, request.at_s, request.input_tokens
    return made


def test_of_what_was_cut_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last prompt of a session is unknown where it is long, and the last one where it is not."""
    monkeypatch.setattr(recordings, "prepare", lambda pairs, *_, **__: [_named(*pair) for pair in pairs])
    told = {answer.turn.session: answer for answer in recordings.sessions("tune").answers}
    assert {last.turn.prompt_tokens > CUT_TOKENS for last in told.values()} == {True, False}
    for last in told.values():
        assert (gap_of(last) is None) == (last.turn.prompt_tokens > CUT_TOKENS)


def test_the_routers_curve_is_read_as_it_is() -> None:
    """From the odds that the router tells follow its hazards: the chance of a return within the horizon is theirs."""
    memory = ReuseModel(10_000)
    for n in range(300):
        memory.observe([n], n * 10.0)
        if n % 3:
            memory.observe([n, -n - 1], n * 10.0 + 5.0)
    odds = memory.reuse_probability(3_000.0)
    curve = curve_from_odds(odds)
    for b, edge_s in enumerate(EDGES_S[:-1]):
        assert curve.within(edge_s, HORIZON_S) == pytest.approx(odds[b])


def test_a_curve_is_the_share_that_returned() -> None:
    """Without anything censored, chances at the edges of buckets are shares of the gaps, but for the prior."""
    gaps = [Gap(2.0**n + 0.5, again=True) for n in range(8) for _ in range(1_000)]
    curve = fit_curve(gaps)
    for n in range(1, 8):
        assert curve.within(0.0, 2.0**n) == pytest.approx(n / 8, abs=0.001)
        assert curve.within(2.0**n, 2.0**n) == pytest.approx(1 / (8 - n), abs=0.01)


def test_a_kind_of_which_little_is_known_has_everybodys_curve() -> None:
    """A kind's curve begins as the one of all, and is its own when it has seen enough."""
    one = Curve((0.1,) * BUCKETS)
    assert fit_curve([], one) == one
    few = fit_curve([Gap(0.5, again=True)] * 2, one).within(0.0, 1.0)
    many = fit_curve([Gap(0.5, again=True)] * 2_000, one).within(0.0, 1.0)
    assert 0.1 < few < 0.2 < 0.95 < many


def test_kinds_are_of_what_is_known_at_the_end() -> None:
    """The kind of an answer does not depend on what came after it, but for those that are told."""
    recording = made(1, 200)
    before = [(rival.kind(answer)) for rival in RIVALS if rival.kind for answer in recording.answers]
    for answer in recording.answers:
        answer.again_s = 3.0 if answer.again_s == inf else inf
    after = [(rival.kind(answer)) for rival in RIVALS if rival.kind for answer in recording.answers]
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    told = sum(rival.bound for rival in RIVALS)
    assert changed
    assert changed <= told * len(recording.answers)
    honest = [rival.kind for rival in RIVALS if rival.kind and not rival.bound]
    assert classify_length in honest
    assert classify_gap in honest
    assert classify_last not in honest


def test_who_tells_answers_apart_loses_less_where_they_differ() -> None:
    """On a recording in which the length says how soon a prompt returns, the curve by length has the least loss of
    those that are not told, and every loss is that of the chances that were given."""
    rows = list(judge("made", made(1, 800), made(2, 800)))
    assert len(rows) == len(RIVALS) * len(QUESTIONS)
    losses = {(row.policy, row.case): row.got or 0.0 for row in rows}
    for case in ("within 16 s", "within 64 s", "within 256 s"):
        by_tokens = losses["by answer tokens", case]
        assert by_tokens < 0.9 * losses["one curve from the end", case]
        assert by_tokens < 0.9 * losses["today's curve", case]
        assert losses["one curve from the end", case] == pytest.approx(losses["base rate", case], abs=0.02)
    assert all(0 <= loss <= -log(CHANCE_MIN) for loss in losses.values())


def test_a_question_is_asked_only_where_its_answer_is_known() -> None:
    """What was recorded for too short a time is left out, whether or not the prompt returned in it."""
    soon, later = answered([1], 0.0, told_s=30.0), answered([2], 0.0, told_s=30.0)
    soon.again_s = 8.0
    recording = SessionTrace("made", "tune", (soon, later), 1.0)
    assert [again for _, again in scoring._select_answers(recording, 0.0, 16.0)] == [True, False]
    assert [again for _, again in scoring._select_answers(recording, 16.0, 8.0)] == [False]
    assert not list(scoring._select_answers(recording, 0.0, 64.0))


def test_the_tables_have_every_figure() -> None:
    """In the terminal and on the page there is a line for each half and forecast; a page without one is refused."""
    rows = [
        Row(workload=name, load_name=half, policy=rival.name, case=case, got=0.5, requests=7)
        for name in recordings.RECORDINGS
        for half in recordings.HALVES
        for rival in RIVALS
        for case in ("within 4 s", "within 16 s")
    ]
    assert heads(rows) == ("judged on", "forecast", "within 4 s", "within 16 s")
    assert len(lines(rows, "mooncake")) == 2 * (1 + len(RIVALS))
    document = envelope("forecasts", rows)
    block = forecasts_block(document)
    assert block.count("0.500") == len(rows)
    assert document["machine"]["cpu"] in block
    assert document["date"][:10] in block
    document["rows"] = [row for row in document["rows"] if row["workload"] == "mooncake"]
    with pytest.raises(PageError, match="claude_code is missing"):
        forecasts_block(document)


def test_the_command_says_what_is_wrong() -> None:
    """A recording that there is not is exit status 2."""
    with pytest.raises(SystemExit) as error:
        main(["--recording", "nothing"])
    assert error.value.code == 2
