"""Promises of `loadtest simulate`: the command runs what it is asked, says plainly what it cannot, and judges."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from loadtest.common.report import Row, write_json
from loadtest.common.traces import Request
from loadtest.docgen import command as pages
from loadtest.docgen.race import PICTURES
from loadtest.simulate import command as simulate
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.engine.workload import Workload, open_workload, prepare
from loadtest.simulate.options import parser
from loadtest.simulate.results import race, sweep
from loadtest.simulate.results.race import PolicyEntry, RaceJob, run_job, shorten_workload
from loadtest.simulate.scenarios.registry import LOADS, Scenario

BLOCK = 16
TRACE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [%d, %d]}\n'


def tiny(load: str, seed: int) -> Scenario:
    """Twelve prompts of three conversations on two replicas, closer together at a higher load."""
    requests = [
        (str(i % 3), Request(i / LOADS[load], 0.0, 2_000, 4, f"tiny{seed}", 500, ((10 * (i % 3), 3), (100 + i, 1))))
        for i in range(12)
    ]
    turns = prepare(requests, BLOCK, output_tokens_max=100)
    return Scenario(open_workload("tiny", turns, BLOCK), ClusterSpec(replicas=2, seed=seed), LOADS[load], "requests/s")


@pytest.fixture(autouse=True)
def only_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else to race on."""
    monkeypatch.setattr(race, "SCENARIOS", {"tiny": tiny})
    monkeypatch.setattr(simulate, "SCENARIOS", {"tiny": tiny})


def run(*arguments: str) -> int:
    """In this process."""
    return simulate.main([*arguments, "--jobs", "1"])


def test_rows_of_each_policy_load_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has a row for every run and one over the seeds; progress goes to stderr, the table to stdout."""
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    words = ("--scenario", "tiny", "--policy", "warm", "round_robin", "--load", "below", "above", "--seed", "1-2")
    assert run(*words, "--json", str(path), "--svg", str(picture)) == 0
    document = json.loads(path.read_text())
    single = {(r["policy"], r["load_name"], r["seed"]) for r in document["rows"] if "seed" in r}
    merged = [r for r in document["rows"] if "seeds" in r]
    out, err = capsys.readouterr()

    assert document["command"].startswith("simulate --scenario tiny")
    assert single == {(p, load, s) for p in ("warm", "round_robin") for load in ("below", "above") for s in (1, 2)}
    assert len(merged) == 4
    assert all(row["requests"] == 24 and row["errors"] == 0 and row["requests_per_wall_minute"] > 0 for row in merged)
    assert "round_robin" in out
    assert "simulated runs: 8 of 8" in err
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_same_seed_same_row() -> None:
    """A run is a function of what it is asked: two of the same differ in nothing but how long they took."""
    job = RaceJob("tiny", "at", 3, (PolicyEntry("warm"), PolicyEntry("two_choices")))
    first, again = ([{**row.to_dict(), "requests_per_wall_minute": 0} for row in run_job(job)] for _ in range(2))

    assert first == again


def test_flags_change_the_cluster() -> None:
    """What is given replaces what the scenario says, and nothing else does."""
    words = ["--scenario", "tiny", "--replicas", "3", "--kv-tokens", "5000", "--routers", "2"]
    words += ["--probe-interval-s", "0.5", "--calibration", "llama-3.1-8b-a100"]
    words += ["--fault", "slow@3:1:60:2.5", "--fault", "restart@9:0"]
    options = parser().parse_args(words)
    (job,) = simulate.jobs_of(options)
    setting = job.build().setting

    assert (setting.replicas, setting.kv_tokens, setting.routers, setting.probe_interval_s) == (3, 5_000, 2, 0.5)
    assert setting.calibration.kv_tokens == 137_216
    assert setting.faults == (Fault("slow", 3.0, 1, 60.0, 2.5), Fault("restart", 9.0, 0))
    assert setting.timeout_s == ClusterSpec().timeout_s


def test_numbers_are_loads() -> None:
    """A load may be said as a share instead of a name."""
    row = run_job(RaceJob("tiny", "0.5", 1, (PolicyEntry("warm"),)))[0]

    assert (row.load, row.load_name) == (0.5, "0.5")


@pytest.mark.parametrize("is_open", [True, False])
def test_requests_ends_the_workload(is_open: bool) -> None:
    """So many of it behind its warm-up, whether they come by the clock or wait for each other."""
    turns = prepare(
        [("s", Request(float(i), 0.0, 100, 2, "n", 100, ((i, 1),))) for i in range(9)], BLOCK, output_tokens_max=9
    )
    workload = open_workload("w", turns, BLOCK) if is_open else Workload("w", (tuple(turns),), False, BLOCK, active=1)

    assert shorten_workload(workload, 4).request_count == 4
    assert shorten_workload(workload, 40).request_count == 9
    assert shorten_workload(replace(workload, warm_up=3), 4).request_count == 7


def test_a_trace_file_is_a_workload(tmp_path: Path) -> None:
    """Any trace, as fast as the load says."""
    path, out = tmp_path / "some.jsonl", tmp_path / "out.json"
    path.write_text("".join(TRACE % (1000 * i, i % 2, 10 + i) for i in range(6)))
    words = ("--trace", str(path), "--load", "1", "2", "--policy", "warm", "--requests", "5", "--json", str(out))
    assert run(*words) == 0
    slow, fast = (row for row in json.loads(out.read_text())["rows"] if "seed" in row)

    assert (slow["workload"], slow["requests"], slow["load_name"]) == ("some", 5, "1")
    assert fast["load"] == pytest.approx(2 * slow["load"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--list"),
        (("--scenario", "nope"), "'nope'"),
        (("--scenario", "tiny", "--policy", "nope"), "'nope'"),
        (("--scenario", "tiny", "--calibration", "nope"), "'nope'"),
        (("--scenario", "tiny", "--load", "much"), "'much'"),
        (("--scenario", "tiny", "--load", "0"), "'0'"),
        (("--scenario", "tiny", "--replicas", "257"), "'257'"),
        (("--scenario", "tiny", "--seed", "9-3"), "9-3"),
        (("--scenario", "tiny", "--event-loss", "1.5"), "'1.5'"),
        (("--scenario", "tiny", "--fault", "explode@3:1"), "explode@3:1"),
        (("--scenario", "tiny", "--fault", "slow@3"), "slow@3"),
        (("--scenario", "tiny", "--fault", "slow@3:2", "--replicas", "2"), "replica 2 of 2"),
        (("--scenario", "tiny", "--fault", "restart@3:2"), "replica 2 of 2"),
        (("--scenario", "tiny", "--kv-tokens", "15"), "15 tokens"),
        (("--scenario", "tiny", "--json", "no-such-directory/x"), "no-such-directory"),
        (("--scenario", "tiny", "--svg", "no-such-directory/x"), "no-such-directory"),
        (("--trace", "no-such-file"), "no-such-file"),
        (("--trace", "x", "--scenario", "tiny"), "only one"),
        (("--rows", "no-such-file", "--no-run"), "no-such-file"),
    ],
)
def test_a_wrong_argument_is_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, nothing run, and the line names what is wrong."""
    try:
        status: Any = run(*words)
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()

    assert status == 2
    assert out == ""
    assert err.startswith("simulate: ")
    assert err.count("\n") == 1
    assert said in err


def test_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Every scenario and policy, with where it is from."""
    assert run("--list") == 0
    out = capsys.readouterr().out

    assert all(name in out for name in ("tiny", "round_robin", "above", "qwen3-32b-2xh100", "warmroute's own"))


def made(policy: str, p90_s: float) -> Row:
    """A row of one seed."""
    return Row(workload="made", load_name="at", policy=policy, seed=6, ttft_p90_s=p90_s, goodput_share=0.9)


@pytest.mark.parametrize(("warm_s", "status"), [(1.0, 0), (3.0, 1)])
def test_check_is_the_exit_status(
    warm_s: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 as soon as one thing that must be seen is not, and the line says which."""
    rows = [made("warm", warm_s), made("round_robin", 2.0), made("least_loaded", 4.0)]
    write_json(tmp_path / "race.json", "simulate --race", rows)

    assert run("--race", "--rows", str(tmp_path / "race.json"), "--no-run", "--check") == status
    assert ("missed: made, at, p90 TTFT: 1.500 x" in capsys.readouterr().out) is bool(status)


def test_earlier_rows_are_replaced_by_what_is_run_again(tmp_path: Path) -> None:
    """Rivals need not run again for each change of ours: their rows are taken in, ours are new."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert run("--scenario", "tiny", "--policy", "warm", "round_robin", "--json", str(before)) == 0
    document = json.loads(before.read_text())
    for row in document["rows"]:
        row["ttft_p90_s"] = 99.0
    before.write_text(json.dumps(document))
    assert run("--scenario", "tiny", "--policy", "warm", "--rows", str(before), "--json", str(after)) == 0
    p90s = {row["policy"]: row["ttft_p90_s"] for row in json.loads(after.read_text())["rows"] if "seed" in row}

    assert p90s["round_robin"] == 99.0
    assert p90s["warm"] < 99.0


def test_a_race_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Whoever has a row already does not run again, the others do, of other seeds too; all rows are in the file."""
    path = tmp_path / "race.json"
    words = ("--scenario", "tiny", "--policy", "warm", "round_robin", "--json", str(path))
    assert run(*words) == 0
    document = json.loads(path.read_text())
    kept = [row for row in document["rows"] if "seed" in row and row["policy"] == "warm"]
    kept[0]["ttft_p90_s"] = 99.0
    path.write_text(json.dumps(document | {"rows": kept}))

    assert run(*words, "--seed", "1-2", "--rows", str(path), "--missing") == 0
    rows = {(row["policy"], row["seed"]): row for row in json.loads(path.read_text())["rows"] if "seed" in row}
    assert rows.keys() == {(policy, seed) for policy in ("warm", "round_robin") for seed in (1, 2)}
    assert [key for key, row in rows.items() if row["ttft_p90_s"] == 99.0] == [("warm", 1)]


def test_rows_that_cannot_be_judged_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rivals may race without us, to be taken in by a later run: what they took is not lost because nothing can be said
    of it, and it is said why."""
    path = tmp_path / "race.json"
    assert run("--race", "--seeds", "1", "--policy", "round_robin", "--json", str(path)) == 2
    assert "no rows of warm" in capsys.readouterr().err
    assert {row["policy"] for row in json.loads(path.read_text())["rows"]} == {"round_robin"}


def test_a_race_leaves_what_the_process_keeps() -> None:
    """Where the collector was told already what stays, a race takes nothing of that back: it would be looked through
    again and again by whatever runs afterwards."""
    kept = gc.get_freeze_count()
    assert kept
    run_job(RaceJob("tiny", "at", 1, (PolicyEntry("round_robin"),)))
    assert gc.get_freeze_count() > kept / 2, "all is taken back at once; a few of the objects may have ended meanwhile"


def test_race_is_judged_and_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command races all there is and says what is seen; the page of placement has the standings and
    how many claims hold, the race's each cell, with pictures beside them; rows that were not judged or of another
    cluster are refused.
    """
    path = tmp_path / "race.json"
    page, cells = (tmp_path / pages.BLOCKS[name] for name in ("race", "cells"))
    cells.parent.mkdir(parents=True)
    page.write_text("# x\n<!-- race:begin -->\n<!-- race:end -->\n")
    cells.write_text("# y\n<!-- cells:begin -->\n<!-- cells:end -->\n")
    run("--race", "--seeds", "1-2", "--policy", "warm", "least_loaded", "round_robin", "--json", str(path))
    out = capsys.readouterr().out
    assert pages.main(["--race", str(path), "--root", str(tmp_path)]) == 0
    text = page.read_text()

    assert "load: above" in out
    assert "mean p90 TTFT:" in out
    assert "| warm |" in text
    assert (
        "`python -m loadtest simulate --race --seeds 1-2 --scenario tiny --policy warm least_loaded round_robin`"
        in text
    )
    assert "mean p90 TTFT:" in text
    assert str(tmp_path) not in text
    assert "| `warm` |" in cells.read_text()
    assert all(ET.parse(cells.parent / name).getroot().tag.endswith("svg") for name in PICTURES)
    for words in (("--scenario", "tiny"), ("--race", "--requests", "9")):
        run(*words, "--policy", "warm", "least_loaded", "round_robin", "--json", str(path))
        assert pages.main(["--race", str(path), "--root", str(tmp_path)]) == 1
    assert page.read_text() == text


def test_a_part_of_the_race_is_checked_without_the_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean is a claim about all workloads: of a few, only what is claimed of each is judged."""
    rows = [made("warm", 1.0), made("round_robin", 1.0), made("least_loaded", 1.0)]
    write_json(tmp_path / "part.json", "simulate", rows)
    write_json(tmp_path / "before.json", "simulate", [made("warm", 0.9)])
    before = str(tmp_path / "baseline.json")
    assert run("--no-run", "--rows", str(tmp_path / "before.json"), "--save-baseline", before) == 0
    words = ("--rows", str(tmp_path / "part.json"), "--no-run", "--check", "--baseline", before)

    assert run(*words) == 0
    assert "mean p90 TTFT" not in capsys.readouterr().out
    assert run("--race", *words) == 1
    assert "to an earlier warm: 1.111 x" in capsys.readouterr().out
    assert run("--race", *words, "--replicas", "3") == 0, "it was another cluster"


def test_sweep_moves_each_constant_and_puts_it_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each other value of each constant; afterwards all are as they were."""
    before = [constant.get_value() for constant in sweep.CONSTANTS]
    assert run("--sweep", "--seed", "1", "--json", str(tmp_path / "sweep.json")) == 0
    rows = [row for row in json.loads((tmp_path / "sweep.json").read_text())["rows"] if "seed" in row]
    out = capsys.readouterr().out

    assert [constant.get_value() for constant in sweep.CONSTANTS] == before
    assert len(rows) == 1 + sum(len(constant.list_alternatives()) for constant in sweep.CONSTANTS)
    assert all(f"{constant.name} = " in out for constant in sweep.CONSTANTS)


def test_a_constant_is_another_while_it_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run sees the value, also one that fails puts it back."""
    seen: list[float] = []
    module = "router.core.estimators.model_speeds"

    def stopped(*_: object) -> None:
        seen.append(import_module(module).TIE_TOKENS)
        raise RuntimeError("stopped")

    monkeypatch.setattr(race, "Simulation", stopped)
    own = sweep.Constant("TIE_TOKENS", module).get_value()
    with pytest.raises(RuntimeError) as caught:
        run_job(RaceJob("tiny", "at", 1, (PolicyEntry("warm", "x", ((module, "TIE_TOKENS", 7),)),)))

    assert seen == [7]
    assert sweep.Constant("TIE_TOKENS", module).get_value() == own
    assert caught.value.__notes__ == ["warm on tiny, at, seed 1"]


def test_moves_are_against_the_same_seed() -> None:
    """Each value is compared with the constants as they are on the same workload, load and seed."""
    rows = [
        Row(workload="w", load_name="at", policy="warm", seed=seed, case=case, ttft_p90_s=p90_s, e2e_p90_s=e2e_s)
        for case, seed, p90_s, e2e_s in (
            (None, 1, 1.0, 9.0),
            (None, 2, 4.0, 10.0),
            ("X = 3, not 1", 1, 1.2, 18.0),
            ("X = 3, not 1", 2, 4.8, 5.0),
        )
    ]
    (move,) = sweep.moves(rows)

    assert (move.p90_ratio, move.e2e_ratio) == (pytest.approx(1.2), pytest.approx(1.0))
    assert sweep.lines([move]) == [("X = 3, not 1", "+20.0 %, +0.0 %", "+20.0 %, +0.0 %", "w, at +20.0 %")]
    assert len(sweep.heads([move])) == 4
