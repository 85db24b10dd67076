"""The language of the code: comments and docstrings stand without the code before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import fragments

# Largest part of the remarks in `router/` that may be fragments.
CEILINGS = {"comment": 0.05, "docstring": 0.05}

SAMPLE = '''\
"""What this file is."""


class A:
    """Of the main listener."""

    size: int = 0  # of those that wait
    wait_s = 1.0  # Seconds between two looks.
    name = "x"  # noqa: S105 - of no use to anybody
    # Of its own line: a block comment is no end-of-line comment.

    def f(self) -> None:
        """See policies.base.Near."""
'''


@pytest.fixture(scope="module")
def found() -> list[fragments.Remark]:
    """All remarks of the router."""
    return [remark for path in fragments.files([fragments.ROOT / "router"]) for remark in fragments.remarks(path)]


@pytest.mark.parametrize("kind", CEILINGS)
def test_fragments_are_few(found: list[fragments.Remark], kind: str) -> None:
    """At most one comment of twenty, and one docstring of twenty, is a fragment."""
    assert fragments.share([remark for remark in found if remark.kind == kind]) <= CEILINGS[kind]


def test_no_docstring_only_points_elsewhere(found: list[fragments.Remark]) -> None:
    """No docstring says no more than "See X"."""
    assert not [remark for remark in found if remark.see]


def test_what_counts_as_a_fragment(tmp_path: Path) -> None:
    """End-of-line comments and docstrings by their first word; directives and block comments are left out."""
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE, encoding="utf-8")
    rows = [(r.line, r.kind, r.fragment, r.see) for r in sorted(fragments.remarks(path), key=lambda r: r.line)]
    assert rows == [
        (1, "docstring", False, False),
        (5, "docstring", True, False),
        (7, "comment", True, False),
        (8, "comment", False, False),
        (13, "docstring", False, True),
    ]


def test_the_report_has_a_line_for_each_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Every room of the house is counted by itself, and fragments are listed with file and line when asked for."""
    assert fragments.main(["--list", str(fragments.ROOT / "router" / "core")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("router/core/fleet ") for line in lines)
    assert lines[-1].startswith("total ")
    assert any(line.startswith("router/core/") and ".py:" in line for line in lines)
