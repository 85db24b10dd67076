"""Promises of `loadtest agree`: both worlds are asked the same, their rows are compared rightly, and who is missing is
said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.common.client import Answer
from loadtest.common.report import Row
from loadtest.common.traces import Request
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.replay import demo
from loadtest.replay.run import ReplaySettings, Sent, run_replay
from loadtest.sim_vs_http.cases import SLICES, load_slice_trace, spread
from loadtest.sim_vs_http.command import main
from loadtest.sim_vs_http.over_http import HttpTarget, over_http
from loadtest.sim_vs_http.report import (
    HEADS,
    HTTP,
    SIMULATED,
    AgreeRun,
    Comparison,
    Pooled,
    markdown,
    peer_cells,
    pool_runs,
)
from loadtest.sim_vs_http.slices import Cluster, setting_of, simulate_slice, workload_of
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.engine.world import Simulation, limits_of
from loadtest.simulate.policies import ROWS
from tests.loadtest.rendering import Page
from tests.loadtest.replay.test_replay import FakeEngine, serving

SETTINGS = ReplaySettings(
    url="",
    model=demo.MODEL,
    time_scale=50,
    requests_max=12,
    sessions_active=4,
    think_max_s=1,
    output_tokens_max=8,
    workload="agent",
    policy="round_robin",
)


def cluster(*, wire_s: float = 0.0, kv_tokens: int = demo.KV_TOKENS) -> Cluster:
    """Two replicas."""
    return Cluster(CALIBRATIONS[CALIBRATION], kv_tokens, ("http://a", "http://b"), 1.0, wire_s)


@pytest.mark.long
async def test_both_worlds_are_asked_the_same() -> None:
    """Over HTTP and in the simulation a slice has the same requests, and engines count the same tokens of each."""
    trace = load_slice_trace(SETTINGS)
    behind = HttpTarget(2, demo.MODEL, CALIBRATION, demo.KV_TOKENS)

    run = await over_http(trace, SETTINGS, behind, "round_robin")
    part = simulate_slice(workload_of(trace, SETTINGS), SETTINGS, cluster(), ROWS["round_robin"].make, 1)

    real = {(each.session, each.request): each.answer.prompt_tokens for each in run.sent}
    virtual = {(each.session, each.request): each.answer.prompt_tokens for each in part.sent}
    assert (run.row.errors, len(real), len(virtual)) == (0, 12, 12)
    assert len(real.keys() & virtual.keys()) >= 6  # a closed loop sends what its answers' times make it send
    assert all(virtual[key] == real[key] for key in real.keys() & virtual.keys())
    assert len(run.counted) == 2
    assert sum(asked for asked, _ in run.counted) == sum(real.values())


@pytest.mark.parametrize("changes", [{}, {"answer_limits": (None, 7, 900)}, {"foreknowledge": True}])
async def test_both_worlds_send_the_same_limits(changes: dict[str, Any]) -> None:
    """A request has the same `max_tokens` over HTTP and in the simulation; a limit that would cut an answer of the
    trace, be it of a request that is not sent, is in neither."""
    settings = replace(SETTINGS, workload="conversation", time_scale=1_000, **changes)
    trace = load_slice_trace(settings)
    async with serving(FakeEngine()) as engine:
        await run_replay(trace, replace(settings, url=engine.url))
    real = {body["messages"][0]["content"]: body.get("max_tokens") for body in engine.bodies}

    workload = workload_of(trace, settings)
    limit_of = limits_of(workload, setting_of(settings, cluster(), 1))
    turns = [turn for session in workload.sessions for turn in session]

    assert {turn.text(): limit_of(turn) for turn in turns} == real
    assert set(real.values()) != {None}
    assert 7 not in real.values()


def test_a_way_makes_late_and_changes_no_order() -> None:
    """Time on the way is added to first tokens, and requests are placed in the order in which they are sent."""
    settings = replace(SETTINGS, workload="conversation")
    workload = workload_of(load_slice_trace(settings), settings)

    without, with_ = (
        simulate_slice(workload, settings, cluster(wire_s=w), ROWS["round_robin"].make, 1) for w in (0.0, 5.0)
    )

    def placed(part: AgreeRun) -> list[str | None]:
        return [each.answer.replica for each in part.sent]

    assert placed(with_) == placed(without)
    assert (with_.row.ttft_p50_s or 0) > (without.row.ttft_p50_s or 0) + 2


def test_a_replica_that_goes_while_requests_are_on_their_way() -> None:
    """Who comes to a replica that is gone is tried elsewhere, and who was given up on the way is not asked for."""
    settings = replace(SETTINGS, workload="conversation")
    workload = workload_of(load_slice_trace(settings), settings)
    gone = Fault("restart", at_s=3.0, replica=0, lasts_s=1_000.0)

    def run(*faults: Fault, timeout_s: float = 300.0) -> list[str]:
        setting = ClusterSpec(replicas=2, wire_s=2.0, faults=faults, timeout_s=timeout_s)
        return [each.failure for each in Simulation(workload, setting, ROWS["round_robin"].make).run().sent]

    assert run(gone) == [""] * 12
    assert run(timeout_s=0.1) == ["timeout"] * 12


def test_a_closed_loop_prepares_no_fewer_sessions_than_it_may_reach() -> None:
    """However short sessions are, those that were prepared hold all requests that may be sent."""
    settings = replace(SETTINGS, requests_max=40)
    workload = workload_of(load_slice_trace(settings), settings)
    lengths = sorted(map(len, workload.sessions))

    assert sum(lengths[: len(lengths) - settings.sessions_active + 1]) >= 40 or len(lengths) == 40
    part = simulate_slice(workload, settings, cluster(), ROWS["warm"].make, 1)
    assert part.row.requests == 40


def test_arrivals_are_spread_within_what_they_were_rounded_to() -> None:
    """The open slice has hardly two requests at a moment, is the same each time, and none is moved by 3 s."""
    settings = replace(SETTINGS, workload="conversation")
    trace = load_slice_trace(settings)
    times = [session.requests[0].at_s for session in trace.sessions[:200]]

    assert times == sorted(times)
    assert len(set(times)) == 200
    assert load_slice_trace(settings) == trace
    assert all(0 <= at_s - at_s // 3 * 3 < 3 for at_s in times)
    assert spread(load_slice_trace(SETTINGS)) == load_slice_trace(
        SETTINGS
    )  # sessions are closed loop: nothing to spread


def row(policy: str, hit: float, ttft: float, router: str = "warmroute", **more: int) -> Row:
    """A row as agree makes them."""
    return replace(
        Row(workload="agent", policy=policy, router=router, token_hit_rate=hit, ttft_p90_s=ttft, errors=0, rejected=0),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("http", "virtual", "ok"),
    [
        (row("warm", 0.50, 1.0), row("warm", 0.519, 1.19), True),
        (row("warm", 0.50, 1.0), row("warm", 0.525, 1.0), False),
        (row("warm", 0.50, 1.0), row("warm", 0.50, 0.79), False),
        (row("cache_aware", 0.50, 1.0, "smg"), row("cache_aware", 0.525, 1.0, "smg"), True),
        (row("cache_aware", 0.50, 1.0, "smg"), row("cache_aware", 0.469, 1.0, "smg"), False),
        (row("warm", 0.50, 1.0, errors=1), row("warm", 0.50, 1.0), False),
    ],
)
def test_agreement_is_within_points_and_percent(http: Row, virtual: Row, ok: bool) -> None:
    """Ours agree within 2 points, restated rules within 3, both within 20 % of p90 TTFT; an error is no agreement."""
    comparison = Comparison(Pooled(http, 0.0, 0.0), Pooled(virtual, 0.0, 0.0), 0.1)

    assert comparison.ok is ok
    assert comparison.hit_points == pytest.approx(100 * ((virtual.token_hit_rate or 0) - (http.token_hit_rate or 0)))
    if not http.errors:
        assert all(verdict.ok for verdict in comparison.verdicts()) is ok


def test_runs_are_put_together_request_by_request() -> None:
    """The row of several runs is that of all their requests and all their tokens, not a mean of rows."""
    request = Request(0.0, 0.0, 100, 5, "n", 64, ((0, 1),))

    def part(ttft_s: float, count: int, hits: float) -> AgreeRun:
        sent = [Sent("s", request, Answer(ttft_s / 2, ttft_s, prompt_tokens=100, cached_tokens=0), False)] * count
        run = row("warm", hits / 100, ttft_s)
        run.duration_s, run.imbalance = 10.0, 1.5
        return AgreeRun(run, sent, [(100.0 * count, hits * count)])

    both = pool_runs([part(1.0, 9, 10.0), part(3.0, 1, 60.0)], replace(SETTINGS, time_scale=2.0), HTTP)

    assert (both.row.case, both.row.requests, both.row.duration_s) == (HTTP, 10, 20.0)
    assert (both.row.ttft_p90_s, both.row.ttft_p99_s) == (1.0, 3.0)
    assert both.row.token_hit_rate == pytest.approx(0.15)
    assert (both.hit_range, both.ttft_range) == (pytest.approx(50), pytest.approx(100))


def test_peers_are_multiples_of_ours() -> None:
    """A peer's p90 TTFT is told as a multiple of ours, and whose requests came in time as a share."""
    theirs = row("cache_aware", 0.2, 3.0, "smg", requests=40)
    theirs.goodput, theirs.duration_s = 2.0, 10.0

    lines = peer_cells([row("warm", 0.8, 2.0), theirs])

    assert lines[0][5] == "1.00 x"
    assert lines[1] == ("agent", "smg", "cache_aware", "20.0 %", "3.00 s", "1.50 x", "50.0 %", "0")
    assert "| agent | smg | cache_aware |" in markdown([HEADS, *lines])


def test_comparison_is_rendered_for_the_page(tmp_path: Path) -> None:
    """The page has a line for each goal of each case, with what was got of it; no goals, no page."""
    both = Comparison(
        *(Pooled(replace(row("warm", 0.8, s), case=case), 0.0, 0.0) for case, s in ((HTTP, 2.0), (SIMULATED, 3.0))), 0.1
    )
    rows = [both.http.row, both.simulated.row, *both.verdicts()]

    page = Page(tmp_path, "agree")
    text = page.render("python -m loadtest agree", rows, {"warmroute": "0.1.0"})
    assert "| 2.00 / 3.00 s | p90 TTFT in percent | 20 | +50.0 | does not |" in text
    assert "| hit rate in points | 2 | +0.0 | agrees |" in text
    page.refuse("python -m loadtest agree", rows[:2])


def test_peers_are_rendered(tmp_path: Path) -> None:
    """The page's block has the table, the command without this machine's folders, and the versions; rows of a
    comparison with the simulation, or of ours alone, are refused."""
    page, ours, theirs = Page(tmp_path, "peers"), row("warm", 0.8, 2.0), row("cache_aware", 0.2, 3.0, "smg")
    command = f"python -m loadtest agree --peers --json {page.file}"

    text = page.render(command, [ours, theirs], {"smg": "1.13.0"})
    assert text.count("1.50 x") == 1
    assert "`python -m loadtest agree --peers --json peers.json`" in text
    assert "smg 1.13.0" in text
    for rows in ([ours], [theirs], [ours, theirs, replace(ours, case="agreement")]):
        page.refuse(command, rows)


@pytest.mark.long
def test_a_rival_that_is_missing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a rival the others are measured all the same, and the missing one is named with what would help."""
    out = tmp_path / "agree.json"
    flags = ["--workloads", "conversation", "--rows", "round_robin,smg", "--requests", "6", "--replicas", "2"]
    flags += ["--runs", "1", "--simulations", "2", "--time-scale", "50", "--rivals", str(tmp_path), "--json", str(out)]

    assert main(flags) == 0

    said = capfd.readouterr()
    assert "smg: not installed" in said.err
    assert "--install-rivals" in said.err
    rows = json.loads(out.read_text())["rows"]
    assert [each["case"] for each in rows] == [HTTP, SIMULATED, "agreement", "agreement"]
    assert [each["requests"] for each in rows[:2]] == [6, 12]  # one run, and two simulated ones


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown workload or row is one line that names those there are."""
    with pytest.raises(SystemExit) as ended:
        main(["--workloads", "nonsense"])

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("nonsense", *SLICES))


async def test_a_warm_up_is_sent_and_not_counted() -> None:
    """Requests of the warm-up are in no figure, over HTTP and simulated: of two runs' 12 requests with 8 to warm up, 4
    count, and hits are those of these four."""
    settings = replace(SETTINGS, workload="conversation", warm_up=8)
    trace = load_slice_trace(settings)

    run = await over_http(
        trace, settings, HttpTarget(2, demo.MODEL, CALIBRATION, demo.KV_TOKENS, 0.1, scaled=True), "round_robin"
    )
    part = simulate_slice(workload_of(trace, settings), settings, cluster(), ROWS["round_robin"].make, 1)

    for row_, sent in ((run.row, run.sent), (part.row, part.sent)):
        assert (row_.requests, row_.errors, len(sent)) == (4, 0, 12)
        assert sum(each.counts for each in sent) == 4
        tokens = [each.answer for each in sent if each.counts]
        assert row_.token_hit_rate == pytest.approx(
            sum(each.cached_tokens or 0 for each in tokens) / sum(each.prompt_tokens for each in tokens)
        )
