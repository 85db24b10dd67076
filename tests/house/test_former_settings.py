"""Former names of settings are on their own page, and in no other document, value or example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from router.former_names import KEY_FIELDS, REMOVED, REMOVED_VALUES, SETTING_VALUES, SETTINGS
from tests.house.documents import ROOT, code_blocks

PAGE = ROOT / "docs/reference/former-names.md"
FOLDERS = ("docs", "helm", "examples", "deploy")
KEYS = "|".join(map(re.escape, SETTINGS))
VARIABLES = "|".join(key.replace(".", "_").upper() for key in SETTINGS)
FORMER = re.compile(rf"(?<![\w$/-])(?<!\w\.)(?:config\.)?((?:{KEYS}))(?![\w(])|WARMROUTE_(?:{VARIABLES})\b|--face\b")


def texts() -> Iterator[tuple[Path, str]]:
    """The documents, the chart, the manifests and the examples."""
    for file in (*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")))):
        if file not in (PAGE, ROOT / "CHANGELOG.md") and file.is_file() and "__pycache__" not in file.parts:
            try:
                yield file, file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def trees(file: Path, text: str) -> Iterator[Any]:
    """The YAML in a file or in its fenced blocks; templates are no YAML."""
    for part in code_blocks(text, "yaml") if file.suffix == ".md" else [text] if file.suffix == ".yaml" else []:
        try:
            yield from yaml.safe_load_all(part)
        except yaml.YAMLError:
            continue


def former_in(tree: Any) -> Iterator[str]:
    """Former names in nested mappings, at any depth."""
    if isinstance(tree, list):
        for each in tree:
            yield from former_in(each)
    if isinstance(tree, dict):
        for name, inner in tree.items():
            if isinstance(inner, dict):
                yield from (key for key in (f"{name}.{field}" for field in inner) if key in SETTINGS)
            yield from former_in(inner)
            if isinstance(inner, str) and ": " in inner and "\n" in inner:  # settings within a ConfigMap
                yield from former_in(next(trees(Path("a.yaml"), inner), None))


def test_former_settings_are_on_their_page_only() -> None:
    """In prose, in commands, in the environment and in YAML."""
    found = []
    for file, text in texts():
        names = [match[0] for match in FORMER.finditer(text)]
        names += [name for tree in trees(file, text) for name in former_in(tree)]
        found += [f"{file.relative_to(ROOT)}: {name}" for name in names]
    assert found == []


def test_every_former_setting_is_on_the_page() -> None:
    """With the current name beside it."""
    page = PAGE.read_text(encoding="utf-8")
    for former, name in (*SETTINGS.items(), *KEY_FIELDS.items()):
        assert f"| `{former}` | `{name}` |" in page
    for key, values in SETTING_VALUES.items():
        for former, value in values.items():
            assert f"| `{key}` | `{former}` | `{value}` |" in page


def test_every_removed_setting_and_value_is_on_the_page() -> None:
    """With its replacement beside it."""
    page = PAGE.read_text(encoding="utf-8")
    for key, replacement in REMOVED.items():
        assert f"| `{key}` | {replacement} |" in page
    for key, values in REMOVED_VALUES.items():
        for value, replacement in values.items():
            assert f"| `{key}` | `{value}` | {replacement} |" in page
