"""The hook that checks subjects of commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import commit_subject


@pytest.mark.parametrize(
    "message",
    [
        "Keep real engines from starving on two cores\n\nBecause they step without a pause.\n",
        "Feed caches before traffic comes\n# Please enter the commit message\n",
        "Pass engines' headers on",
        "Merge branch 'other'",
        'Revert "kept something."',
    ],
)
def test_subjects_that_pass(message: str) -> None:
    """An imperative with an object passes, with comments of git or a body; so do messages that git makes."""
    assert not commit_subject.faults(message)


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ("", 1),
        ("fix", 1),
        ("fix the tests", 1),
        ("Fixed the tests", 1),
        ("Fixing the tests", 1),
        ("Fixes the tests", 1),
        ("Fix the tests.", 1),
        ("Fix the tests\nand the rest", 1),
        ("Fix " + "x" * 69, 1),
        ("Fixed " + "x" * 69 + ".\nand", 4),
    ],
)
def test_subjects_that_fail(message: str, faults: int) -> None:
    """Each rule has a line of its own."""
    assert len(commit_subject.faults(message)) == faults


def test_the_command_refuses_by_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused message is status 1 with the reasons, a good one 0."""
    file = tmp_path / "message"
    file.write_text("Fixed it all", encoding="utf-8")
    assert commit_subject.main([str(file)]) == 1
    assert "imperative" in capsys.readouterr().err
    file.write_text("Fix it all", encoding="utf-8")
    assert commit_subject.main([str(file)]) == 0
