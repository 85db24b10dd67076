"""Promises of the table of five workloads (`loadtest agree --table`): it sends what the simulation asks, and warm is
held against the best of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.common.client import Answer
from loadtest.common.report import Row
from loadtest.common.traces import Request
from loadtest.replay.run import Sent, row_of
from loadtest.sim_vs_http import race_table as agree_table
from loadtest.sim_vs_http.command import main
from loadtest.sim_vs_http.race_table import TABLE
from loadtest.sim_vs_http.report import HTTP
from tests.loadtest.rendering import Page
from tests.loadtest.sim_vs_http.test_agree import SETTINGS


def of_table(router: str, policy: str, ttft_s: float, e2e_s: float, output: float, **more: float) -> Row:
    """A row of the table's race."""
    base = Row(workload="overfull_chats", router=router, policy=policy, ttft_p90_s=ttft_s, e2e_p90_s=e2e_s)
    return replace(base, output_tokens_per_s=output, errors=0, rejected=0, **more)  # type: ignore[arg-type]


def test_warm_is_held_against_the_best_in_each_figure() -> None:
    """Each figure has the best of the others as its bar, 5 % of it are allowed, and more failures than theirs are
    none."""
    ours = of_table("warmroute", "warm", 1.04, 10.6, 96.0)
    theirs = [of_table("smg", "cache_aware", 1.0, 12.0, 90.0), of_table("warmroute", "round_robin", 2.0, 10.0, 100.0)]

    verdicts = agree_table.judge_rows([ours, *theirs])

    assert [(each.goal, each.router, each.policy, each.ok) for each in verdicts] == [
        ("p90 TTFT", "smg", "cache_aware", True),
        ("p90 end-to-end", "warmroute", "round_robin", False),
        ("output tokens/s", "warmroute", "round_robin", True),
        ("failed requests", "smg", "cache_aware", True),
    ]
    assert not agree_table.judge_rows([ours, *theirs[:1], replace(ours, errors=1)])[3].got
    assert agree_table.judge_rows([replace(ours, errors=1), *theirs])[3].ok is False
    assert agree_table.judge_rows(theirs) == []
    said = agree_table.verdict_lines(verdicts)
    assert said[1] == "overfull_chats: p90 end-to-end 1.060 x, 1.05 x of warmroute round_robin allowed: missed"


def test_real_time_counts_once_in_what_is_judged() -> None:
    """Of a first token that came after 0.5 s of wall time at three times life's speed, 0.6 simulated seconds are the
    engine's and 0.3 the router's holding back: what is left of the wall time, 0.2 s, counts once. Who failed counts as
    having taken the whole timeout."""
    request = Request(0.0, 0.0, 100, 5, "n", 64, ((0, 1),))
    late = Answer(0.5, 0.9, engine_ttft_s=0.6, waited_s=0.1)
    settings = replace(SETTINGS, time_scale=3.0)

    def life(*answers: Answer) -> tuple[float | None, float | None]:
        sent = [Sent("s", request, each, False) for each in answers]
        made = row_of("trace", settings, sent, 1.0, [])
        return made.ttft_engine_p90_s, made.ttft_life_p90_s

    assert life(late) == (pytest.approx(0.6 + 0.3), pytest.approx(0.6 + 0.3 + 0.2))
    assert life(late, replace(late, ttft_s=None, failure="timeout")) == (settings.timeout_s, settings.timeout_s)
    assert life(replace(late, engine_ttft_s=None)) == (None, None)
    ours = of_table("warmroute", "warm", 1.2, 1.0, 1.0, ttft_life_p90_s=1.1, ttft_engine_p90_s=1.0)
    theirs = of_table("smg", "cache_aware", 1.3, 1.0, 1.0, ttft_life_p90_s=1.1, ttft_engine_p90_s=1.0)
    first, *_, last = agree_table.judge_rows([ours, theirs])
    assert (first.got, first.ok) == (1.0, True)
    assert (last.goal, last.got, last.ok) == (agree_table.AT_ENGINES, 1.0, None)


def test_what_real_time_hides_is_no_bar_and_passes_none() -> None:
    """A rival whose requests queue for the processor keeps them from its replicas, and their short times at the engines
    are none to be held against; if it is warm's requests that do, it has missed the goal."""
    ours = of_table("warmroute", "warm", 1.2, 1.0, 1.0, ttft_life_p90_s=1.1, ttft_engine_p90_s=1.0)
    queues = of_table("vllm-router", "cache_aware", 5.0, 1.0, 1.0, ttft_life_p90_s=0.5, wire_s=4.0)
    clear = of_table("smg", "cache_aware", 2.0, 1.0, 1.0, ttft_life_p90_s=2.0, ttft_engine_p90_s=2.0)

    verdict = agree_table.judge_rows([ours, queues, clear])[0]
    assert (verdict.router, verdict.ok) == ("smg", True)
    hidden = agree_table.judge_rows([replace(ours, wire_s=0.5), clear])
    assert (hidden[0].note, hidden[0].ok) == ("hidden by real time", False)
    assert agree_table.verdict_lines(hidden)[0] == "overfull_chats: p90 TTFT hidden by real time: missed"


def test_rows_of_the_table_are_medians() -> None:
    """One run in which the machine was busy is not what is told: figures are medians over runs, failures add up."""
    rows = [of_table("smg", "cache_aware", ttft, 10.0, 1.0, wire_s=0.0) for ttft in (1.0, 9.0, 2.0)]

    row_ = agree_table.median_row([replace(rows[0], errors=2), *rows[1:]])

    assert (row_.ttft_p90_s, row_.errors) == (2.0, 2)
    assert (row_.ttft_p90_least_s, row_.ttft_p90_most_s) == (1.0, 9.0)
    lines = agree_table.table_cells([row_])
    assert len(lines) == 2
    assert len(lines[0]) == len(lines[1])


@pytest.mark.long
def test_the_table_is_raced_judged_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--table` names all five; a small race of one of them tells its figures and its verdicts, and writes both."""
    out = tmp_path / "table.json"
    flags = ["--peers", "--workloads", "hot_prefix_short", "--rows", "warm,round_robin", "--requests", "6"]
    flags += ["--replicas", "2", "--runs", "1", "--time-scale", "20", "--rivals", str(tmp_path), "--json", str(out)]

    assert main(flags) == 0

    assert "hot_prefix_short: failed requests 0, 0 of warmroute round_robin allowed: holds" in capfd.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [each["case"] for each in rows[:2]] == [HTTP, HTTP]
    goals = [each["goal"] for each in rows[2:]]
    assert goals[:4] == ["p90 TTFT", "p90 end-to-end", "output tokens/s", "failed requests"]
    assert rows[0]["time_scale"] == 20
    assert 0 < rows[0]["ttft_engine_p90_s"] <= rows[0]["ttft_life_p90_s"] <= rows[0]["ttft_p90_s"]
    assert all(each.get("output_tokens_per_s") and each.get("e2e_p90_s") for each in rows[:2])


def test_the_table_is_rendered_for_the_page(tmp_path: Path) -> None:
    """The page has the rows and a line for each verdict; as the race on traces it is refused."""
    page = Page(tmp_path, "http")
    rows = [of_table("warmroute", "warm", 1.0, 9.0, 100.0), of_table("smg", "cache_aware", 2.0, 8.0, 90.0)]
    judged = [*rows, *agree_table.judge_rows(rows)]
    text = page.render("python -m loadtest agree --peers --table", judged, {"smg": "1.13.0"})

    assert "| overfull_chats | smg | cache_aware |" in text
    assert "- overfull_chats: p90 end-to-end 1.125 x, 1.05 x of smg cache_aware allowed: missed." in text
    Page(tmp_path, "peers").refuse("python -m loadtest agree --peers --table", judged)
    page.refuse("python -m loadtest agree --peers", rows)


@pytest.mark.long
def test_the_table_sends_what_the_simulation_asks() -> None:
    """A slice of the table has the scenario's prompts, answers and order; stretched, its requests come at the rate that
    it names, and those of the ladder's stage keep their distances."""
    for name, slice_ in TABLE.items():
        made = slice_.make(slice_.load, agree_table.SEED)
        turns = [turn for session in made.workload.sessions for turn in session]
        trace, settings = agree_table.trace_of(name), agree_table.settings_of(name, None, None)
        requests = [each for session in trace.sessions for each in session.requests]

        assert [each.prompt_key() for each in requests] == [turn.request.prompt_key() for turn in turns]
        assert [each.output_tokens for each in requests] == [turn.output_tokens for turn in turns]
        assert trace.kind == ("open" if made.workload.open else "sessions")
        assert (settings.warm_up, settings.sessions_active) == (made.workload.warm_up, made.workload.active)
        assert settings.requests_max <= trace.request_count
    times = [session.requests[0].at_s for session in agree_table.trace_of("hot_prefix_long").sessions]
    assert len(times) / times[-1] == pytest.approx(10, rel=0.1)
    ladder = agree_table.trace_of("ladder_honest").sessions
    stage = [session.requests[0].at_s for session in ladder[750:]]
    assert stage == sorted(stage)
    assert stage[0] - ladder[749].requests[0].at_s > agree_table.LADDER_GAP_S - 10
    assert len(stage) / (stage[-1] - stage[0]) == pytest.approx(40, rel=0.1)
