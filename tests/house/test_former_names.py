"""Former names of the outer surface are on their own page, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.former_names import HEADERS, LABEL_VALUES, LOG_EVENTS, METRICS
from tests.house.documents import ROOT

PAGE = ROOT / "docs/reference/former-names.md"
FOLDERS = ("docs", "deploy", "helm", "examples")
NAMES = [*METRICS, *HEADERS, *LOG_EVENTS]
# `genuine` is also a current kind of `warmroute_hit_tokens_total`, and no value of a place has quotes around it.
VALUES = [value for values in LABEL_VALUES.values() for value in values if value != "genuine"]
FORMER = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, NAMES))})(?![\w-])|[`\"'](?:{'|'.join(VALUES)})[`\"']")


def texts() -> Iterator[tuple[Path, str]]:
    """The documents, the manifests and the examples."""
    for file in (ROOT / "README.md", *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")))):
        if file != PAGE and file.is_file() and "__pycache__" not in file.parts:
            try:
                yield file, file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_former_names_are_on_their_page_only() -> None:
    """Documents, dashboards, alerts and examples use the current names."""
    found = [f"{file.relative_to(ROOT)}: {name}" for file, text in texts() for name in FORMER.findall(text)]
    assert found == []


@pytest.mark.parametrize("names", [METRICS, HEADERS, LOG_EVENTS, *LABEL_VALUES.values()])
def test_every_former_name_is_on_the_page(names: dict[str, object]) -> None:
    """With the current name beside it."""
    page = PAGE.read_text(encoding="utf-8")
    for former, name in names.items():
        assert f"| `{former}` | `{getattr(name, 'name', name)}` |" in page


def test_no_name_is_both_former_and_current() -> None:
    """Otherwise a metric or an event would stand for two things."""
    assert not METRICS.keys() & {renamed.name for renamed in METRICS.values()}
    assert not LOG_EVENTS.keys() & set(LOG_EVENTS.values())
    assert not HEADERS.keys() & set(HEADERS.values())
