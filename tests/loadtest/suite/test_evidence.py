"""`make evidence` runs what measures time, keeps what it found, and says what was missed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadtest.suite import command as evidence
from loadtest.suite.parts import FULL, LOADTEST, PARTS, PYTHON, REPEATED, Command, Part
from tests.support.figures import FILE, figure

ROOT = Path(__file__).parents[3]
ROWS = '{"rows": [{"case": "a", "expected": 1, "got": 0.5, "ok": true}, {"case": "b", "got": 7}, %s]}'
LATE = '{"workload": "w", "goal": "in time", "expected": 1, "got": 3, "ok": false}'


def code(text: str, status: int = 0) -> tuple[str, ...]:
    """A command that writes a text to the file that is its last word, and ends with this status."""
    return (PYTHON, "-c", f"import sys; open(sys.argv[1], 'a').write({text!r}); sys.exit({status})", "{json}")


def braces(text: str) -> str:
    """The text, as words have it."""
    return text.replace("{", "{{").replace("}", "}}")


def run(folder: Path, *parts: Part, **options: object) -> int:
    """The exit status of a run of these parts."""
    parsed = evidence.parser().parse_args(["--folder", str(folder)])
    for name, value in options.items():
        setattr(parsed, name, value)
    return evidence.evidence(parsed, "evidence", parts)


def test_figures_of_all_parts_are_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that are judged are the figures; a part without any has the word of its last command; what is missed is said
    once more, and decides with --check alone."""
    measures = Part("measures", 1, "x", (Command(code(braces(ROWS % LATE), 1), judges=True),))
    asks = Part("asks", 1, "whether it holds", (Command((PYTHON, "-c", "raise SystemExit(1)"), judges=True),))
    assert run(tmp_path, measures, asks) == 0
    said = capsys.readouterr().out
    assert "measures: 1 of 2 as promised" in said
    assert "missed: measures: w, in time: 3 for 1\nmissed: asks: whether it holds: None for None" in said
    document = json.loads((tmp_path / "evidence.json").read_text())
    assert [(row["part"], row["ok"]) for row in document["rows"]] == [
        ("measures", True),
        ("measures", False),
        ("asks", False),
    ]
    assert run(tmp_path, measures, asks, check=True) == 1


def test_a_part_is_measured_once_at_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was interrupted goes on where it was; at another commit, or when told so, all is measured again."""
    counts = tmp_path / "counts"
    part = Part("counts", 1, "x", (Command((PYTHON, "-c", f"open({str(counts)!r}, 'a').write('.')")),))
    for commit, again, times in (("a", False, 1), ("a", False, 1), ("a", True, 2), ("b", False, 3)):
        monkeypatch.setattr(evidence.report_header, "commit", lambda _, commit=commit: commit)
        assert run(tmp_path, part, again=again) == 0
        assert len(counts.read_text()) == times


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that fails ends its part and no other, and what an earlier run found of it is not taken for news."""
    fails = Part("fails", 1, "x", (Command((PYTHON, "-c", "print('why'); raise SystemExit(2)"), judges=True),))
    spoils = Part("spoils", 1, "x", (Command(code("no rows")),))
    goes = Part(
        "goes", 1, "x", (Command((PYTHON, "-c", "raise SystemExit(3)"), optional=True), Command((PYTHON, "-c", "")))
    )
    assert run(tmp_path, fails, spoils, goes) == 2
    said = capsys.readouterr().out
    assert re.search(r"^not measured: fails: .*exit status 2; see .*fails\.log$", said, re.MULTILINE)
    assert re.search(r"^not measured: spoils: .*invalid rows", said, re.MULTILINE)
    assert "goes: 1 of 1 as promised" in said
    assert "why" in (tmp_path / "fails.log").read_text()


def test_figures_of_tests_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says of time is a row of its part, and no test fails by it."""
    file = tmp_path / "figures.json"
    monkeypatch.setenv(FILE, str(file))
    figure("soon, s", 1.0, 0.25)
    figure("late, s", 1.0, 4.0)
    part = Part("figures", 1, "x", (), lines=True)
    assert [(row["case"], row["got"], row["ok"]) for row in evidence.read_judged_rows(part, file)] == [
        ("soon, s", 0.25, True),
        ("late, s", 4.0, False),
    ]


def test_parts_are_what_they_say() -> None:
    """Parts have names of their own, as the command line takes them, and their files are there."""
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert evidence.parser().parse_args(["--only", ",".join(names)]).only == tuple(names)
    with pytest.raises(SystemExit):
        evidence.parser().parse_args(["--only", "nothing"])
    for part in PARTS:
        for step in part.steps:
            for word in step.words:
                assert not word.startswith("tests/") or (ROOT / word).exists(), word
            assert all(word.format(json="j", folder="f", python="p") for word in step.words if word)


def test_full_sizes_are_those_of_the_documents() -> None:
    """Every variable with a full size in CONTRIBUTING.md is set by a part, to that size, where it is read."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(WARMROUTE_\w+)` \| [\d,]+ \| ([\d,]+)", page, re.MULTILINE)
    sizes = {name: size.replace(",", "") for name, size in rows}
    given = {key: value for part in PARTS for step in part.steps for key, value in step.environment.items()}
    assert {name: value for name, value in given.items() if name.startswith("WARMROUTE_")} == sizes
    read = "".join((ROOT / file).read_text(encoding="utf-8") for file in REPEATED)
    assert all(name in read for name in FULL)


def test_the_demo_of_the_evidence_is_the_one_that_is_promised() -> None:
    """The demo's part checks as many runs as the documents' figures are medians of."""
    demo = next(part for part in PARTS if part.name == "demo")
    *runs, check = demo.steps
    assert check.words[:4] == (*LOADTEST, "pages")
    assert [step.words[step.words.index("--json") + 1] for step in runs] == list(check.words[5:])
