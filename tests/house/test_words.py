"""One word for one thing: the glossary names what is there, and no class of the router shares its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the router and of the instruments, parsed."""
    files = [file for folder in ("router", "loadtest") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def defined(*kinds: type[ast.stmt]) -> Iterator[tuple[str, Path]]:
    """Every class or function (as `kinds` say) with its file."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, file


def twice() -> dict[str, list[str]]:
    """Public class names that the router defines more than once, with their files."""
    found = defaultdict[str, list[str]](list)
    for name, file in defined(ast.ClassDef):
        if not name.startswith("_") and file.is_relative_to(ROOT / "router"):
            found[name].append(str(file.relative_to(ROOT)))
    return {name: files for name, files in found.items() if len(files) > 1}


@cache
def names() -> frozenset[str]:
    """Every class and function of the router and of the instruments."""
    return frozenset(name for name, _ in defined(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def named(page: str) -> set[str]:
    """Names of code on a page: all that stands in the parentheses behind a word, and elsewhere names of classes."""
    heads = re.findall(r"^- \*\*.+?\): ", page, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"`([^`]+)`", head)} | set(re.findall(r"`([A-Z]\w+)`", page))


@pytest.mark.parametrize("name", sorted(named(GLOSSARY)))
def test_the_glossary_names_what_is_there(name: str) -> None:
    """Each name behind a word of the glossary is a class or function of the code, or a file."""
    if "/" in name:
        assert (ROOT / name).exists()
    else:
        assert name in names()


def test_no_word_stands_twice_in_the_glossary() -> None:
    """Each term of art has one entry."""
    words = re.findall(r"\*\*(.+?)\*\*", GLOSSARY)
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))


def test_no_two_classes_of_the_router_share_a_name() -> None:
    """A public class name is defined once in `router/`."""
    assert not twice()
