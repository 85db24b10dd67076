"""The hook that checks subjects of commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import commit_subject


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ("Keep real engines from starving on two cores\n\nBecause they step without a pause.\n", 0),
        ("Feed caches before traffic comes\n# Please enter the commit message\n", 0),
        ("Pass engines' headers on", 0),
        ("Merge branch 'other'", 0),
        ('Revert "kept something."', 0),
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
def test_each_rule_has_a_line_of_its_own(
    message: str, faults: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An imperative with an object passes, with comments of git or a body; so do messages that git makes. A refused
    message is status 1 with a line for each reason."""
    file = tmp_path / "message"
    file.write_text(message, encoding="utf-8")
    assert commit_subject.main([str(file)]) == bool(faults)
    assert capsys.readouterr().err.count("\n") == faults
