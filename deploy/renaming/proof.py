"""Proves that a renamed tree differs from the old one in names only: `python -m deploy.renaming.proof OLD NEW`.

Each file of OLD is held against where it went. Both are parsed; in both every name of the map becomes the same mark,
whichever of its names it has, strings are taken out, and imports are sorted. What differs then is more than a name,
and is listed. Strings are held against each other one by one: with --strings all that differ are listed, to be read.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.renaming.table import HERE, MAP, Table, read_table

_FIELDS = ("id", "attr", "arg", "name", "asname", "module")


class _Marks(ast.NodeTransformer):
    """Puts old names in place of new ones, and empties strings, which it keeps."""

    def __init__(self, back: dict[str, str]) -> None:
        self._back = back
        self.strings: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in _FIELDS:
            value = getattr(node, name, None)
            if isinstance(value, str) and not isinstance(node, ast.ImportFrom):
                setattr(node, name, self._back.get(value, value))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            node.names = [self._back.get(name, name) for name in node.names]
        if isinstance(node, ast.MatchClass):
            node.kwd_attrs = [self._back.get(name, name) for name in node.kwd_attrs]
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            self.strings.append(str(node.value))
            node.value = ""
        return super().generic_visit(node)


def _back(table: Table) -> dict[str, str]:
    """One word for all that the map makes one: `a` became `b` here and `c` there, so all three are marked alike."""
    mark: dict[str, str] = {}

    def head(word: str) -> str:
        while mark.setdefault(word, word) != word:
            word = mark[word]
        return word

    rows = [(row.rpartition(".")[2], new) for row, new in (table.names | table.members).items()]
    rows += [(row.rpartition(".")[2], new.rpartition(".")[2]) for row, new in table.modules.items()]
    for old, new in rows:
        mark[head(new)] = head(old)
    return {word: head(word) for word in list(mark)}


def _imports(node: ast.stmt, back: dict[str, str], table: Table) -> list[str]:
    """Imports as lines without order or grouping: which names they bind, and from which old or new module."""
    if isinstance(node, ast.Import):
        return [f"import {table.new_module(alias.name)} {alias.asname}" for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = table.new_module(node.module or "")
        return [f"from {module} {back.get(each.name, each.name)}" for each in node.names]
    return []


def _skeleton(source: bytes, back: dict[str, str], table: Table) -> tuple[str, list[str]]:
    """What is left without names, imports' order and strings; and the strings."""
    tree = ast.parse(source)
    imports: list[str] = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for each in body:
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                imports += _imports(each, back, table)
        rest = [each for each in body if not isinstance(each, (ast.Import, ast.ImportFrom))]
        node.body = rest or [ast.Pass()]  # type: ignore[attr-defined]
    marks = _Marks(back)
    whole = ast.dump(marks.visit(tree))
    return "\n".join([*sorted(set(imports)), whole]), marks.strings


def compare(old: Path, new: Path, table: Table) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """By file: where it is, what differs besides names (empty if nothing), and pairs of strings that differ."""
    listed = subprocess.run(["git", "-C", str(old), "ls-files", "-z", "*.py"], capture_output=True, check=True)  # noqa: S607
    back = _back(table)
    for path in filter(None, listed.stdout.decode().split("\0")):
        if path.startswith(HERE):
            continue
        goes = table.new_path(path)
        if not (new / goes).exists():
            yield path, f"is not at {goes}", []
            continue
        before, strings = _skeleton((old / path).read_bytes(), back, table)
        after, others = _skeleton((new / goes).read_bytes(), back, table)
        pairs = [(one, other) for one, other in zip(strings, others, strict=False) if one != other]
        why = "" if before == after else _first(before, after)
        if len(strings) != len(others):
            why = why or "has more or fewer strings"
        yield goes, why, pairs


def _first(before: str, after: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), 0)
    return f"...{before[max(0, at - 60) : at + 60]!r} became ...{after[max(0, at - 60) : at + 60]!r}"


def main() -> int:
    """The command. Exit status 1 if a file differs in more than names."""
    parser = argparse.ArgumentParser(prog="python -m deploy.renaming.proof", description=__doc__)
    parser.add_argument("old", type=Path, help="a work tree before")
    parser.add_argument("new", type=Path, help="the same tree renamed")
    parser.add_argument("--map", type=Path, default=MAP, help="the map of names")
    parser.add_argument("--strings", action="store_true", help="list strings that differ")
    options = parser.parse_args()
    files = differ = strings = 0
    for path, why, pairs in compare(options.old.resolve(), options.new.resolve(), read_table(options.map)):
        files, differ, strings = files + 1, differ + bool(why), strings + len(pairs)
        if why:
            print(f"{path}: {why}")
        for one, other in pairs if options.strings else ():
            print(f"{path}:\n  - {one[:300]!r}\n  + {other[:300]!r}")
    print(f"{files} files, {differ} differ in more than names, {strings} strings differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
