"""Files that docstrings and comments name are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house import prose

FILE = re.compile(r"(?<![\w/.:-])((?:\w+/)*\w+\.py)\b")
# A passage that names one of these may name its files.
OTHERS = re.compile(
    r"vllm|sglang|mooncake|nixl|infera|transformers|coverage\.py|llm-d|dynamo|renderers/", re.IGNORECASE
)
FOLDERS = ("router", "loadtest", "tests", "deploy", "router/core")


@pytest.mark.parametrize("top", ["router", "loadtest", "tests", "deploy"])
def test_files_that_are_named_are_there(top: str) -> None:
    """A path in prose leads to a file of the repository, from its root, a package or the folder of the text itself; a
    bare name is that of some file. Files of engines stand beside the engine's name."""
    names = {path.name for each in FOLDERS for path in (prose.ROOT / each).rglob("*.py")}
    named, unknown = 0, []
    for passage in prose.passages([prose.ROOT / top]):
        folders = [
            prose.ROOT,
            *(prose.ROOT / each for each in FOLDERS),
            passage.path.parent,
            passage.path.parent.parent,
        ]
        for path in FILE.findall(passage.text):
            named += 1
            known = any((folder / path).is_file() for folder in folders) or ("/" not in path and path in names)
            if not known and not OTHERS.search(passage.text):
                unknown.append(f"{passage.path.relative_to(prose.ROOT)}:{passage.line}: {path}")
    assert named > 3
    assert not unknown


ROW = re.compile(r"^(?: {4})?((?:[a-z_0-9]+/?, )*[a-z_0-9]+/?) {2,}\S", re.MULTILINE)


@pytest.mark.parametrize("top", ["router", "loadtest"])
def test_packages_list_their_modules(top: str) -> None:
    """The rows of a package's docstring begin with modules and packages that are there."""
    listed, unknown = 0, []
    for init in (prose.ROOT / top).rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        there = {path.stem for path in init.parent.iterdir()}
        rows = [row.replace("/", "").split(", ") for row in ROW.findall(docstring)]
        listed += len(rows)
        unknown += [f"{init.relative_to(prose.ROOT)}: {name}" for row in rows for name in row if name not in there]
    assert listed > 50
    assert not unknown
