"""The matrix of faults judges what it saw, and says so."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from loadtest.common import rivals
from loadtest.common.report import Row
from loadtest.faults import command as faults
from loadtest.faults import matrix
from loadtest.faults.bench import Bench, CaseNotApplicable, FaultAnswer, Run, Scale, row
from loadtest.faults.cases.memory import REPLICAS, Churn, churn
from loadtest.faults.judge import verdict
from loadtest.faults.report import print_report
from loadtest.faults.report import verdict as verdict_of
from loadtest.faults.soak import catches, slope
from router.core.cache_state.prefix_index import PrefixIndex
from tests.loadtest.rendering import Page

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
ERROR = b'data: {"error":{"message":"broken","code":"stream_broken"}}\n\n'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (TOKEN, "silent"),
        (TOKEN + b"data: [DONE]\n\n", "silent"),
        (TOKEN + ERROR, "honest"),
        (TOKEN + b"data: {\x00garbage\n\n" + ERROR, "honest"),
        (TOKEN + ERROR + b"data: [DONE]\n\n", "honest"),
        (TOKEN + b"data: [DONE]\n\n" + ERROR, "error behind [DONE]"),
        (TOKEN + b"data: half of a tok" + ERROR, "silent"),  # no client sees the error in there
        (TOKEN + ERROR + b"data: hal", "error, then half an event"),
        (TOKEN + FINISH, "invented"),
    ],
)
def test_only_an_error_event_that_clients_see_is_honest(body: bytes, said: str) -> None:
    """The judge passes what official clients raise on, and nothing else."""
    assert verdict("chat", body, "") == said


def test_each_family_has_its_own_error_event() -> None:
    """What is an error in one API is none in another."""
    message = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"x"}}\n\n'
    response = b'event: error\ndata: {"type":"error","code":"stream_broken","message":"x","sequence_number":4}\n\n'
    assert verdict("messages", message, "") == "honest"
    assert verdict("messages", response, "") == "silent"
    assert verdict("responses", response, "") == "honest"
    assert verdict("messages", ERROR, "") == verdict("responses", ERROR, "") == "silent"
    assert verdict("responses", b'data: {"type":"response.completed"}\n\n', "") == "invented"
    assert (
        verdict("messages", b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n', "") == "invented"
    )


def test_a_broken_connection_is_told_with_its_error() -> None:
    """An error event before a cut is not a clean ending."""
    assert verdict("chat", TOKEN, "ClientPayloadError") == "ClientPayloadError"
    assert verdict("chat", TOKEN + ERROR, "ClientPayloadError") == "error, then ClientPayloadError"


def test_slack_is_for_times_and_never_for_counts() -> None:
    """A count that is over is missed; a time may be over by the factor, and its figure stays the true one."""
    assert row(1, "count", 2, 3).ok is False
    assert row(1, "time", 2.0, 3.0, slack=1.0).ok is False
    timed = row(1, "time", 2.0, 3.0, slack=3.0)
    assert (timed.ok, timed.got, timed.expected, timed.timed) == (True, 3.0, 2.0, True)
    assert row(1, "never came", 2.0, None, slack=3.0).ok is False


async def test_with_counts_no_time_is_judged(tmp_path: Path) -> None:
    """A time that came is neither met nor missed, however late; one that never came is missed, and so is a count."""

    async def late(bench: Bench) -> list[Row]:
        return [row(1, "time", 1.0, 1e9, slack=bench.scale.slack), row(1, "never", 1.0, None, slack=bench.scale.slack)]

    async def wrong(_: Bench) -> list[Row]:
        return [row(1, "count", 1, 2), row(1, "fine", 1, 1)]

    bench = Bench(rivals.ours(), Scale(slack=math.inf, counts=True), tmp_path)
    found = await faults.measure(bench, [1], Console(quiet=True), {1: (late, wrong)})
    assert [(r.case, r.ok) for r in found] == [("time", None), ("never", False), ("count", False), ("fine", True)]
    assert verdict_of(found[0]) == "not judged"
    assert (bench.scale.pick_count(10, 100), bench.scale.patience_s(1.0), bench.scale.patience_s(20.0)) == (
        5,
        60.0,
        200.0,
    )


async def test_with_counts_rows_run_side_by_side(tmp_path: Path) -> None:
    """Two of three run at a time, each with a folder of its own, and are told in the order of the goals."""
    there, both = set[Path](), asyncio.Event()

    async def meets(bench: Bench) -> list[Row]:
        assert bench.folder not in there
        there.add(bench.folder)
        if len(there) == 2:
            both.set()
        async with asyncio.timeout(60.0):
            await both.wait()
        return [row(1, "met", 0, 0)]

    async def third(_: Bench) -> list[Row]:
        return [row(2, "third", 2, len(there))]

    bench = Bench(rivals.ours(), Scale(counts=True), tmp_path)
    found = await faults.measure(bench, [1, 2], Console(quiet=True), {1: (meets, meets), 2: (third,)}, jobs=2)
    assert [(r.case, r.ok) for r in found] == [("met", True), ("met", True), ("third", True)]


def test_where_times_are_judged_rows_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Several at a time are refused without --counts, with what to do."""
    assert faults.main(["--jobs", "2"]) == 2
    assert "--counts" in capsys.readouterr().err


def test_errors_are_counted_by_kind() -> None:
    """What clients saw is in the row."""
    found = row(
        1, "x", 0, 2, found=[FaultAnswer("1", 200), FaultAnswer("2", 502), FaultAnswer("3", 200, error="timeout")]
    )
    assert (found.requests, found.errors, found.errors_by_kind) == (3, 2, {"502": 1, "timeout": 1})


async def _mixed(bench: Bench) -> list[Row]:
    async with bench.run_cluster(1) as run:
        answer = await run.ask()
        seen = await run.fetch_requests()
        return [
            row(1, "answered", 0, not answer.ok),
            row(1, "seen", 1, len(seen)),
            row(1, "x", 0, 0 if bench.ours else 1),
        ]


async def _only_ours(bench: Bench) -> list[Row]:
    bench.only_ours("nobody else has it")
    return [row(2, "ours", 0, 0)]


@pytest.mark.long
def test_the_command_runs_ours_and_any_other_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of both are in the JSON; a rival's missed row does not decide, one that is not for it says n/a."""
    monkeypatch.setattr(faults, "GOALS", {1: (_mixed,), 2: (_only_ours,)})
    words = "-m router serve --port {port} --admin-port {metrics_port} --set replicas={urls}"
    other = f"other={sys.executable} {words}"
    file = tmp_path / "faults.json"
    status = faults.main(["--rows", "1,2", "--no-rivals", "--rival", other, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(r["router"], r["case"], r.get("ok")) for r in rows] == [
        (rivals.OURS, "answered", True),
        (rivals.OURS, "seen", True),
        (rivals.OURS, "x", True),
        (rivals.OURS, "ours", True),
        ("other", "answered", True),
        ("other", "seen", True),
        ("other", "x", False),
        ("other", "_only_ours", None),
    ]
    assert rows[-1]["note"] == "n/a: nobody else has it"
    assert status == 0
    assert "other: 2 of 3 rows as promised" in capsys.readouterr().out


def test_a_row_of_ours_that_is_missed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1."""

    async def missed(_: Bench) -> list[Row]:
        return [row(1, "x", 0, 1)]

    monkeypatch.setattr(faults, "GOALS", {1: (missed,)})
    assert faults.main(["--rows", "1", "--no-rivals"]) == 1


async def test_only_times_are_tried_again(tmp_path: Path) -> None:
    """A time that was missed gets two more tries, a count none."""
    tries: list[str] = []

    async def late(_: Bench) -> list[Row]:
        tries.append("late")
        return [row(1, "x", 1.0, 5.0 / len(tries), slack=2.0)]

    async def wrong(_: Bench) -> list[Row]:
        tries.append("wrong")
        return [row(1, "x", 1, 5), row(1, "y", 1.0, 5.0, slack=1.0)]

    bench = Bench(rivals.ours(), Scale(), tmp_path)
    found = await faults.measure(bench, [1], Console(quiet=True), {1: (late, wrong)})
    assert tries == ["late", "late", "late", "wrong"]
    assert [r.ok for r in found] == [True, False, False]


async def test_a_router_that_cannot_be_started_is_a_missed_row_of_ours_only(tmp_path: Path) -> None:
    """A rival that does not come up has not failed a promise."""
    for name, ok in ((rivals.OURS, False), ("other", None)):
        bench = Bench(rivals.Rival(name, (sys.executable, "-c", "raise SystemExit('no')")), Scale(), tmp_path)
        found = await faults.measure(bench, [1], Console(quiet=True), {1: (_mixed,)})
        assert [(r.ok, "no" in (r.note or "")) for r in found] == [(ok, True)]


def test_unknown_goals_are_refused() -> None:
    """The command line names what there is."""
    with pytest.raises(SystemExit):
        faults.main(["--rows", "99"])
    assert {1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 16, 18, 19, 20, 23, 27, 28} <= matrix.GOALS.keys()


def test_the_report_says_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a row, with the verdict in a word; what was missed is said once more at the end."""
    rows = [row(4, "x", 0, 3), row(10, "y", 1.5, 1.25), Row(goal="3", case="z", note="n/a: [none]")]
    for each in rows:
        each.router = rivals.OURS
    print_report(Console(width=120), rows)
    lines = capsys.readouterr().out.splitlines()
    found = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [cells[:5] for cells in found] == [
        ["3", "z", "-", "-", "n/a"],
        ["4", "x", "0", "3", "MISSED"],
        ["10", "y", "1.5", "1.25", "ok"],
    ]
    assert found[0][5] == "n/a: [none]"
    assert lines[-2:] == ["warmroute: 1 of 2 rows as promised", "missed: goal 4: x: 3 for 0."]


# Index memory


def test_churn_stays_within_the_budget_in_order() -> None:
    """Far more blocks come by than are held, and what is left is what was used last; with that it ends, however slow
    the machine is."""
    said = churn(600.0, 2 << 20, 2.0)
    assert 0 < 2 * said["held"] <= said["distinct"]
    assert said["seconds_s"] < 60.0
    assert said["estimate_mb"] * 1e6 <= 2 << 20
    assert said["out_of_order"] == 0


def test_an_index_that_forgets_the_wrong_prompts_is_noticed() -> None:
    """The check of the order can fail: one that drops what was used last does."""
    index = PrefixIndex(2 << 20)
    for i in range(REPLICAS):
        index.add(f"r{i}", 1 << 40)
    churned = Churn(600.0, index, turnover=4.0, sample_every=3)
    churned.run(0)
    *_, (_, name, keys) = [each for each in churned.sample.values() if index.depth(each[1], each[2])]
    assert churned.count_misordered() == 0
    index.drop(name, keys)
    assert churned.count_misordered() > 0


# Soak


def test_slope_looks_past_the_warm_up() -> None:
    """Growth that ends with the warm-up is none; growth that goes on is told for three minutes."""
    assert slope([1.0] * 10 + [50.0] * 30, 180.0) == 0.0
    assert slope([float(i) for i in range(180)], 180.0) == pytest.approx(180.0, rel=0.1)
    assert slope([1.0] * 4, 180.0) is None


def test_a_signal_is_sent_only_to_who_takes_it() -> None:
    """SIGHUP would end a process that has no handler for it."""
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_not_for_this_is_an_error_with_a_reason() -> None:
    """Rows give the reason."""
    with pytest.raises(CaseNotApplicable, match="why"):
        Bench(rivals.Rival("other", ()), Scale(), Path()).only_ours("why")


def test_figures_are_rendered(tmp_path: Path) -> None:
    """The page's block is made from a run's JSON and can be made again: each router's figure stands beside the promise
    that it is of; runs of some goals, without warmroute, or with slack are refused."""
    ours = [Row(router=rivals.OURS, goal=str(goal), case="a", expected=1, got=0.5, ok=True) for goal in matrix.GOALS]
    ours += [
        Row(router=rivals.OURS, goal="8", case="hung", expected=0.02, got=0.0, ok=True),
        Row(router=rivals.OURS, goal="8", case="... fail", expected=0, got=0, ok=True),
        Row(router=rivals.OURS, goal="8", case="slow", expected=0.02, got=0.03, ok=False),
        Row(router=rivals.OURS, goal="8", case="... fail", expected=0, got=0, ok=True),
    ]
    other = [
        Row(router="other", goal="8", case="hung", expected=0.02, got=0.5, ok=False),
        Row(router="other", goal="8", case="... fail", ok=False, note="did not end in time"),
        Row(router="other", goal="8", case="slow", note="n/a: no metrics"),
        Row(router="other", goal="8", case="... fail", expected=0, got=7, ok=False),
    ]
    page = Page(tmp_path, "faults")
    text = page.render("faults --json faults.json", [*ours, *other], {"other": "1.2"})
    assert "| goal | case | promised | warmroute | other |" in text
    assert "| 8 | hung | 0.02 | 0 | 0.5, missed |\n| 8 | ... fail | 0 | 0 | missed |" in text
    assert "| 8 | slow | 0.02 | 0.03, missed | n/a |\n| 8 | ... fail | 0 | 0 | 7, missed |" in text
    assert f"- warmroute: {len(ours) - 1} of {len(ours)} as promised.\n- other: 0 of 3 as promised." in text
    assert "other 1.2." in text
    for some, command in (
        (ours[1:], "faults"),
        (other, "faults"),
        (ours, "faults --slack 3"),
        (ours, "faults --counts"),
    ):
        page.refuse(command, some)


def test_the_ports_of_a_router_are_read_from_what_it_says(tmp_path: Path) -> None:
    """A run finds the admin listener of warmroute in its output, and none in that of a rival."""
    output = tmp_path / "output"
    run = Run([], SimpleNamespace(output=output), 1, SimpleNamespace())  # type: ignore[arg-type]  # only its output is read
    output.write_text("Starting rival on 8080\n")
    assert run.admin_port == 0
    output.write_text("listening http://127.0.0.1:8080 admin http://127.0.0.1:8001\n")
    assert run.admin_port == 8001
