"""Goals of the overhead bench, and its command."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType

import pytest

from loadtest.common import rivals
from loadtest.common.report import Row
from loadtest.proxy_cost import command as overhead
from loadtest.proxy_cost import extremes
from loadtest.proxy_cost import failover as overhead_continuing
from loadtest.proxy_cost import load as overhead_load
from loadtest.proxy_cost import observatory as overhead_observatory
from loadtest.proxy_cost import report as overhead_report
from loadtest.proxy_cost.load import CpuSample
from loadtest.proxy_cost.report import CASES, CaseRun, goals, row_of
from tests.loadtest.proxy_cost.routers import asked, run, warmroute
from tests.loadtest.rendering import Page

# A router of no virtue: it copies bytes between a client and the first replica.
PIPE = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def handle(reader, writer):
    up = await asyncio.open_connection("127.0.0.1", int(sys.argv[2].rpartition(":")[2]))
    await asyncio.gather(copy(reader, up[1]), copy(up[0], writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()

asyncio.run(main())
"""


def test_rows_are_medians_of_rounds() -> None:
    """CPU a unit, rates and added times are medians; errors and requests are sums; differences are plain."""
    direct = CpuSample(ttfts_s=[0.010, 0.010])
    turns = [
        CaseRun(CpuSample(2, Counter(), 1.0, us / 1e6 * 100, 100, [ttft_s] * 2), direct, mb)
        for us, ttft_s, mb in ((10.0, 0.012, 50.0), (30.0, 0.009, 70.0), (20.0, 0.011, 60.0))
    ]
    turns[0].measured.errors["closed"] += 1
    row = row_of("smg", CASES["stream100"], turns, 4)

    assert (row.cpu_us_per_chunk, row.load, row.load_unit, row.rss_mb) == (20.0, 100.0, "chunks/s", 60.0)
    assert (row.added_ttft_p50_ms, row.errors, row.requests) == (1.0, 1, 6)
    turns = [CaseRun(CpuSample(100, Counter(), 2.0, 0.001))]
    assert row_of("smg", CASES["short"], turns, 4).cpu_us_per_request == 10.0


def streamed(cpu_us: float, errors: int = 0) -> CpuSample:
    """A window of 100 events, these µs each."""
    return CpuSample(4, Counter({"closed": errors} if errors else {}), 1.0, cpu_us * 100 / 1e6, 100)


@pytest.mark.parametrize(("on_us", "slack", "got", "ok"), [(105.0, 0.0, 1.05, True), (107.0, 0.0, 1.07, False)])
def test_the_observatory_is_judged_by_the_median_of_the_ratios(
    on_us: float, slack: float, got: float, ok: bool
) -> None:
    """A round in which the machine was busy with something else decides nothing, and an error is a miss."""
    rounds = [asked(100.0, on_us), asked(100.0, 190.0), asked(200.0, 2 * on_us)]
    row = overhead_observatory.row_of("mid", rounds, slack)
    assert (row.got, row.ok) == (got, ok)
    assert overhead_observatory.row_of("mid", [asked(100.0, 100.0, errors=1)], slack).ok is False


@pytest.mark.parametrize(
    ("part", "case"),
    [
        pytest.param(overhead_observatory, "mid", id="observatory"),
        pytest.param(overhead_continuing, overhead_continuing.CASE, id="streams-that-may-go-on"),
    ],
)
async def test_with_and_without_take_turns(part: ModuleType, case: str) -> None:
    """Both run all the while, who goes first changes from pair to pair, and as many are told as were announced."""
    told, asked_ = list[int](), list[str]()
    running = partial(warmroute, asked_=asked_, on_us=repeat(100.0))

    rows = await part.rows(running, 2, 0.0, lambda: told.append(1))

    turns = [each.removeprefix(f"{case} ") for each in asked_ if each.startswith(f"{case} ")]
    assert turns == ["off", "on", "on", "off"] * 2
    assert len(told) == part.steps(2)
    assert [row.workload for row in rows] == list(part.TEXT)


@pytest.mark.parametrize(("on_us", "mids", "ok"), [(106.0, 16, False), (100.0, 8, True)])
async def test_what_misses_its_goal_is_measured_again(on_us: float, mids: int, ok: bool) -> None:
    """In as many rounds again, and all of them count; what keeps its goal is not, and nothing is told of it."""
    told, asked_ = list[int](), list[str]()
    running = partial(warmroute, asked_=asked_, on_us=repeat(on_us))

    rows = await overhead_observatory.rows(running, 2, 0.0, lambda: told.append(1), again=True)

    assert sum(each.startswith("mid ") for each in asked_) == mids
    assert sum(each.startswith("short ") for each in asked_) == 8
    assert len(told) == overhead_observatory.steps(2)
    assert [row.ok for row in rows] == [True, ok, True]


async def test_what_is_measured_again_may_keep_its_goal() -> None:
    """Once the median of all rounds keeps it, no more are run."""
    asked_ = list[str]()
    running = partial(warmroute, asked_=asked_, on_us=chain([120.0], repeat(100.0)))

    rows = await overhead_observatory.rows(running, 1, 0.0, lambda: None, again=True)

    assert sum(each.startswith("mid ") for each in asked_) == 6
    assert [row.got for row in rows] == [1.0, 1.0, 1.0]


async def test_a_case_that_misses_its_goal_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --check, at all routers, in as many rounds again; the others are left alone, and medians are of all."""
    routers = tuple(rivals.Rival(name, ()) for name in ("warmroute", "smg"))
    costs_us = {"warmroute": iter([95.0, 95.0, 60.0, 60.0]), "smg": iter([100.0] * 4)}
    measured = list[tuple[str, int, str]]()

    async def turn_of(
        bench: overhead.OverheadBench, router: rivals.Rival, turn: int, cases: Sequence[overhead_report.Case]
    ) -> None:
        for case in cases:
            us = next(costs_us[router.name]) if case.name == "short" else {"warmroute": 10.0, "smg": 100.0}[router.name]
            measured.append((router.name, turn, case.name))
            made = CpuSample(100, Counter(), 1.0, us * 100 / 1e6)
            bench.turns.setdefault((router.name, case.name), []).append(CaseRun(made))

    monkeypatch.setattr(overhead.OverheadBench, "_turn", turn_of)
    for again, runs, got in ((False, 8, 0.95), (True, 12, 0.775)):
        measured.clear()
        costs_us = {"warmroute": iter([95.0, 95.0, 60.0, 60.0]), "smg": iter([100.0] * 4)}
        plan = overhead.Plan(("short", "mid"), routers, 2, 1, 1.0, 30.0, again=again)
        bench = overhead.OverheadBench(plan, tmp_path, ["http://127.0.0.1:1"])
        told = list[int]()
        await bench.run(told.append)
        assert len(measured) == runs
        assert [case for _, turn, case in measured if turn >= 2] == ["short"] * (runs - 8)
        assert told == list(range(1, bench.steps + 1))
        judged = {row.case: row.got for row in bench.rows() if row.goal is not None}
        assert judged == {"short": got, "mid": 0.1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few connections and short phases."""
    for name, case in CASES.items():
        monkeypatch.setitem(CASES, name, overhead_report.Case(name, 4, case.streams, case.text))
    for name in ("WARM_S", "IDLE_S", "PROBES_S"):
        monkeypatch.setattr(overhead, name, 0.1)
    for name, value_s in (("SETTLE_S", 0.05), ("STARTING_S", 0.2)):
        monkeypatch.setattr(overhead_load, name, value_s)
    for name, value in (("FLOOD_BYTES", 20_000_000), ("STALLED_S", 0.3), ("STALL_S", 0.1)):
        monkeypatch.setattr(extremes, name, value)


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_command_measures_any_router(tmp_path: Path) -> None:
    """A router given by its command line is started, measured without errors in every case, and stopped."""
    script = tmp_path / "pipe.py"
    script.write_text(PIPE)
    command = f"pipe={sys.executable} {script} {{port}} {{urls}}"
    status, rows = run(["--router", command, "--routers", "pipe", "--check"], tmp_path)

    assert status == 0
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert (row["router"], row["errors"], row["replicas"]) == ("pipe", 0, 2), row
        assert float(str(row.get("cpu_us_per_chunk") or row["cpu_us_per_request"])) > 0
        assert float(str(row["rss_mb"])) > 1
    assert "stream300" in (tmp_path / "chart.svg").read_text()
    assert str(script) not in "".join(p.read_text(errors="replace") for p in Path("/proc").glob("[0-9]*/cmdline"))


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_command_measures_warmroute(tmp_path: Path) -> None:
    """warmroute itself is measured, its goals are there, and its slow reader loses nothing."""
    status, rows = run(["--routers", "warmroute", "--cases", "short,stream100,slow_reader"], tmp_path)

    assert status == 0
    measured = [row for row in rows if "goal" not in row]
    assert [(row["case"], row["errors"]) for row in measured] == [("short", 0), ("stream100", 0)]
    slow = next(row for row in rows if row.get("workload") == "slow_reader")
    assert slow["errors"] == 0, slow


@pytest.mark.usefixtures("small")
def test_wrong_answers_decide_without_check(tmp_path: Path) -> None:
    """Where warmroute answers wrongly, the status says so, though no figure is judged."""
    flags = ["--flag=--set", "--flag=limits.body_bytes_max=8000"]
    status, rows = run(["--routers", "warmroute", "--cases", "short,mid", *flags], tmp_path)

    assert status == 1
    measured = [row for row in rows if "goal" not in row]
    assert [(row["case"], bool(row["errors"])) for row in measured] == [("short", False), ("mid", True)]


def test_a_router_that_does_not_start_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on without it and says why; a name that is not there ends the command at once."""
    status, rows = run(
        ["--router", "none=/does/not/exist {port} {urls}", "--routers", "none", "--cases", "short"], tmp_path
    )

    assert (status, rows) == (0, [])
    assert "none is omitted: none cannot be started" in capsys.readouterr().err
    assert run(["--routers", "nobody"], tmp_path)[0] == 2
    assert "nobody: must be one of warmroute" in capsys.readouterr().err


def test_figures_are_rendered(tmp_path: Path) -> None:
    """The page's block is made from a run's JSON, again and again; runs of some cases or with slack are refused."""
    rows = [
        Row(router=router, case=case.name, errors=0, rss_mb=60.0)
        for case in CASES.values()
        for router in ("warmroute", "nginx")
    ]
    for row in rows:
        row.cpu_us_per_chunk = 15.0 if CASES[row.case or ""].streams else None
        row.cpu_us_per_request = None if CASES[row.case or ""].streams else 90.0
    alone = [Row(workload="slow_reader", goal="g"), Row(workload="long_prompts", goal="g")]
    alone += [overhead_observatory.row_of(case, [asked(100.0, 104.0)], 0.0) for case in overhead_observatory.CASES]
    alone += [overhead_continuing.row_of([(streamed(20.0), streamed(50.0))], 0.0)]
    page = Page(tmp_path, "overhead")
    text = page.render("overhead", [*rows, *goals(rows, 0.0), *alone], {"nginx": "1.22.1"})
    assert text.count("| stream300 | warmroute | 15.0 | 1.00 |") == 1
    assert "nginx 1.22.1" in text
    assert "not judged" in text
    assert "of those that may not (20.0 µs) | 3.00 | 2.50 | met |" in text
    whole = [*rows, *alone]
    for some, command in ((rows[:2], "overhead"), (whole[:-1], "overhead"), (whole, "overhead --check --slack 0.25")):
        page.refuse(command, some)


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    """Cases of one run have numbers far enough apart that no request comes twice."""
    plan = overhead.Plan(("short",), (), 1, 1, 1.0, 30.0)
    bench = overhead.OverheadBench(plan, tmp_path, ["http://127.0.0.1:1"])
    first, second = (next(bench._numbers) for _ in range(2))
    assert second - first >= overhead.NUMBERS_A_CASE > 60 * 100_000
    assert time.time() < 10**12  # a number has 12 digits
