"""Promises of `loadtest simulate --ladder`: each stage counts for itself, and what was published stands beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.simulate import command as simulate
from loadtest.simulate.results import ladder
from tests.loadtest.rendering import Page


def made(name: str, policy: str, rate: int, p90_s: float, output_tokens_per_s: float = 1_000.0) -> Row:
    """A row of one stage."""
    row = Row(name, policy, case=ladder.case_of(rate), load=float(rate), seed=6, requests=9)
    row.ttft_p90_s, row.output_tokens_per_s = p90_s, output_tokens_per_s
    return row


def whole(times: float = 2.0) -> list[Row]:
    """Every row at every stage, so many times as slow as published where there is a figure."""
    return [
        made(name, policy, rate, times * ladder.P90_S.get(rate, {}).get(contender.published, 0.25))
        for name in (ladder.PUBLISHED, ladder.HONEST)
        for policy, contender in ladder.CONTENDERS.items()
        for rate in ladder.RATES
    ]


@pytest.mark.long
def test_each_stage_is_a_row_of_its_own() -> None:
    """A stage's row has the requests that came in it and no others, and the setting that is llm-d's or the race's."""
    first, row = ladder.climb(ladder.LadderRun(ladder.PUBLISHED, "llmd_weights_2025", 6, ((3, 20), (15, 20))))
    (honest,) = ladder.climb(ladder.LadderRun(ladder.HONEST, "random", 6, ((15, 20),)))

    assert [(each.case, each.load, each.requests, each.seed) for each in (first, row, honest)] == [
        ("3/s", 3.0, 60, 6),
        ("15/s", 15.0, 300, 6),
        ("15/s", 15.0, 300, 6),
    ]
    assert row.note == "grade exact, metrics every 0.05 s"
    assert honest.note == "grade estimated, metrics every 1 s"
    # 300 answers of 1,000 tokens, in the stage's 20 s and what it takes to drain
    assert row.output_tokens_per_s is not None
    assert row.duration_s is not None
    assert row.output_tokens_per_s * row.duration_s == pytest.approx(300_000)
    assert 20 < row.duration_s < 120
    assert row.replay_hit_rate == row.token_hit_rate
    assert honest.replay_hit_rate == 0


@pytest.mark.long
def test_the_command_runs_both_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for is in the JSON and in a table for each variant, beside what was published."""
    file = tmp_path / "ladder.json"
    assert simulate.main(["--ladder", "15", "--policy", "random", "--json", str(file), "--jobs", "1"]) == 0
    rows = json.loads(file.read_text())["rows"]
    out = capsys.readouterr().out

    assert [(row["workload"], row["policy"], row["case"], row["seed"]) for row in rows] == [
        (ladder.PUBLISHED, "random", "15/s", 6),
        (ladder.HONEST, "random", "15/s", 6),
    ]
    assert "x 2.30 s" in out
    assert "ladder_full_honest" in out


def test_what_must_be_seen_is_judged() -> None:
    """At 60/s of the honest variant: under a second with warm, over a minute with round_robin."""

    def verdicts(warm_s: float, round_robin_s: float) -> list[bool | None]:
        rows = [made(ladder.HONEST, "warm", 60, warm_s), made(ladder.HONEST, "round_robin", 60, round_robin_s)]
        return [row.ok for row in ladder.judge(rows)]

    assert verdicts(0.9, 70.0) == [True, True]
    assert verdicts(1.1, 70.0) == [False, True]
    assert verdicts(0.9, 50.0) == [True, False]
    assert ladder.judge([made(ladder.HONEST, "warm", 57, 5.0)]) == []


def test_published_order_is_judged_where_there_is_one() -> None:
    """Two figures that were published far apart must be in that order; where they are near, either order will do."""
    figures = {"llmd_weights_2025": 0.2, "llmd_default": 90.0, "random": 200.0, "least_loaded": 190.0}

    def judged(**changed: float) -> tuple[float | None, float | None, bool | None]:
        rows = [made(ladder.PUBLISHED, policy, 60, value) for policy, value in {**figures, **changed}.items()]
        (row,) = ladder.judge(rows)
        return row.got, row.expected, row.ok

    assert judged() == (5, 5, True)
    assert judged(llmd_default=195.0) == (4, 5, False)


def test_how_far_off_is_said() -> None:
    """The least and the greatest ratio to a published figure, with where they are; none of what was not published."""
    rows = [row for row in whole() if row.policy != "random" or row.load != 20]
    said = ladder.verdict_lines([*rows, made(ladder.PUBLISHED, "random", 20, 7.03)])

    assert "p90 TTFT is 0.10 x (`random` at 20/s) to 2.00 x (" in said[-2]
    assert "output tokens/s is 0.10 x (`llmd_weights_2025` at 60/s) to 0.21 x (`least_loaded` at 60/s)" in said[-1]
    assert not any(
        "of what was published" in line for line in ladder.verdict_lines([made(ladder.HONEST, "warm", 60, 1)])
    )


def test_each_rule_is_beside_the_figures_of_its_year() -> None:
    """The Service's, a precise rule's and the affinity filter's are of 2026, and no rule has figures of both years."""
    rows = [made(ladder.PUBLISHED, "round_robin", 60, 277.4, 6_551.0), made(ladder.PUBLISHED, "random", 60, 106.0)]
    ((_, _, lines),) = ladder.grids(rows)
    assert [line[0] for line in lines] == ["`round_robin` (Service, 2026)", "`random` (random)"]
    assert lines[0][-2:] == ["277 s, 2.00 x 139 s", "6,551, 1.00 x 6,551"]
    said = ladder.verdict_lines(rows)
    assert [line.rpartition(" ")[2] for line in said] == ["2026", "2026", "2025", "2025"]
    of_2026 = {name for figures in ladder.P90_S_2026.values() for name in figures}
    assert of_2026 <= {each.published for each in ladder.CONTENDERS.values()}
    assert not of_2026 & {name for figures in ladder.P90_S.values() for name in figures}


@pytest.mark.long
def test_the_calibration_is_that_of_the_job() -> None:
    """A stage takes longer with the engines of 2025."""
    took = [
        ladder.climb(ladder.LadderRun(ladder.PUBLISHED, "random", 6, ((3, 20),), name))[0].e2e_p50_s
        for name in ("qwen3-32b-2xh100", "qwen3-32b-2xh100-2026")
    ]
    assert took[0] is not None
    assert took[1] is not None
    assert took[0] > 1.1 * took[1]


def test_rendered_for_the_page(tmp_path: Path) -> None:
    """The page has both tables and what they come to; a part of the ladder is refused and changes nothing."""
    page = Page(tmp_path, "ladder")
    text = page.render(f"simulate --ladder --jobs 1 --json {page.file}", whole())

    assert "`ladder_full_honest`:" in text
    assert "`python -m loadtest simulate --ladder`" in text
    assert "| `llmd_default` (estimated) | 0.80 s, 2.00 x 0.40 s |" in text
    for rows in (whole()[:-1], [row for row in whole() if row.case != "43/s"], [made("tiny", "warm", 60, 1.0)]):
        page.refuse("simulate --ladder", rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ladder", "16"], "'16' is not a stage: must be one of 3, 10, 15"),
        (["--ladder", "--policy", "lpwl"], "unknown row of the ladder 'lpwl'"),
        (["--ladder", "--calibration", "h900"], "unknown calibration 'h900': must be one of qwen3-32b-2xh100, "),
        (["--ladder", "--replicas", "4"], "--ladder cannot be combined with --replicas"),
        (["--ladder", "--scenario", "mooncake"], "--ladder cannot be combined with --scenario"),
    ],
)
def test_what_the_ladder_cannot_do_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit 2, before anything is run."""
    try:
        status: object = simulate.main(words)
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err

    assert status == 2
    assert said in err
    assert err.count("\n") == 1
