"""Fragments of the changelog: one line each, of a theme that pyproject.toml names, and collected without an error."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CHANGES = ROOT / "changes"
THEMES = [
    each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def test_fragments_are_one_line_of_a_known_theme() -> None:
    """Names are `+words.theme.md`; content is one sentence or more in one line, so that the summary stays short."""
    for path in CHANGES.iterdir():
        if path.name == "README.md":
            continue
        named = re.fullmatch(r"\+[a-z0-9-]+\.([a-z]+)\.md", path.name)
        assert named, f"{path.name} is not named +words.theme.md"
        assert named[1] in THEMES
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) == 1, path.name
        assert lines[0].endswith("."), path.name


def test_fragments_become_a_section(tmp_path: Path) -> None:
    """A release has the fragments by theme, before older sections; the summary of what is unreleased has 40 lines."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count("<!-- releases -->\n\n## [") == 1
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## [")[0]
    assert sum(line.startswith("- ") for line in unreleased.splitlines()) <= 40
    for name in ("pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "changes").mkdir()
    for theme in THEMES:
        (tmp_path / "changes" / f"+one.{theme}.md").write_text(f"A change of {theme}.\n", encoding="utf-8")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("- ")] == [
        f"- A change of {theme}." for theme in THEMES
    ]


def test_the_page_names_every_theme() -> None:
    """changes/README.md lists the themes that pyproject.toml has."""
    page = (CHANGES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{theme}`" in page for theme in THEMES)
