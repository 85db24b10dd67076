"""Tables of docs/reference/promises.md, rendered from markers in the tests.

`@pytest.mark.promise("A sentence.", "section")` marks a test, a class of tests, or as `pytestmark` a whole file.
`@pytest.mark.finding("2026-11-28/4")` does the same for findings that FINDINGS of the tests' folder describes. The
sources are parsed and not imported, so that the page includes suites that need an engine, a browser or a cluster.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.docgen.markdown import PageError, table

FINDINGS = "findings.toml"
SECTIONS = {
    "clients": "Clients",
    "tenants": "Tenants",
    "admin": "Admin listener and settings",
    "store": "Shared store and other routers",
    "engines": "Engines",
    "gateway": "Gateway",
    "discovery": "Discovery",
    "kubernetes": "Kubernetes",
    "faults": "Faults",
    "records": "Logs, metrics, traces and files",
    "supply": "Packages and images",
}
"""Section of a marker -> its heading on the page, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker `name(*words)` and its test, as pytest names it."""

    name: str
    words: tuple[str, ...]
    test: str


@dataclass(slots=True)
class Promise:
    """A sentence, its section, and the tests that keep it."""

    sentence: str
    section: str
    tests: list[str] = field(default_factory=list)


def marks(folder: Path, names: Sequence[str]) -> Iterator[Mark]:
    """Yield the markers of these names in all files `test_*.py` of a folder. Raises PageError."""
    for file in sorted(folder.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if any(f"mark.{name}(" in text for name in names):
            path = file.relative_to(folder.parent).as_posix()
            yield from _marks_of(ast.parse(text), path, names)


def _marks_of(tree: ast.Module, path: str, names: Sequence[str]) -> Iterator[Mark]:
    """Yield the markers of one file. Raises PageError if one is at a place at which pytest collects no test."""
    taken: set[int] = set()
    for statement in tree.body:
        for test, expression in _places(statement, path):
            for node in ast.walk(expression):
                if isinstance(node, ast.Call) and (name := _name_of(node)) in names:
                    taken.add(id(node))
                    yield Mark(name, _words_of(node, path), test)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node) in names and id(node) not in taken:
            raise PageError(f"{path}:{node.lineno}: no test of this file bears this marker")


def _places(statement: ast.stmt, path: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (test, expression that may contain its markers) for a statement of a file."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
            yield from ((f"{path}::{name}", each) for each in statement.decorator_list)
        case ast.ClassDef(name=name) if name.startswith("Test"):
            yield from ((f"{path}::{name}", each) for each in statement.decorator_list)
            for part in statement.body:
                yield from _places(part, f"{path}::{name}")
        case ast.Assign(targets=[ast.Name(id="pytestmark")]):
            yield path, statement.value
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("Test"):
            yield f"{path}::{name}", statement.value


def _name_of(call: ast.Call) -> str:
    """Return the name of the marker that a call makes; empty for other calls."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=name):
            return name
    return ""


def _words_of(call: ast.Call, path: str) -> tuple[str, ...]:
    words = tuple(each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
    if len(words) != len(call.args) or call.keywords:
        raise PageError(f"{path}:{call.lineno}: a marker takes literal strings only")
    return words


# Promises


def promises(folder: Path) -> list[Promise]:
    """Return all promises, in the order of sections, then of their sentences. Raises PageError."""
    found: dict[str, Promise] = {}
    for mark in marks(folder, ["promise"]):
        if len(mark.words) != 2 or mark.words[1] not in SECTIONS:
            raise PageError(f"{mark.test}: promise(sentence, section), and a section is one of {', '.join(SECTIONS)}")
        sentence, section = mark.words
        promise = found.setdefault(sentence, Promise(sentence, section))
        if promise.section != section:
            raise PageError(
                f"{mark.test}: {sentence!r} is of {promise.section} at {promise.tests[0]}, not of {section}"
            )
        promise.tests.append(mark.test)
    order = list(SECTIONS)
    return sorted(found.values(), key=lambda each: (order.index(each.section), each.sentence))


def promises_block(folder: Path) -> str:
    """Return a table for each section. Raises PageError."""
    sections: defaultdict[str, list[Promise]] = defaultdict(list)
    for promise in promises(folder):
        sections[promise.section].append(promise)
    return "\n\n".join(
        f"## {SECTIONS[name]}\n\n{table(['promise', 'kept by'], [(p.sentence, _format_links(p.tests)) for p in kept])}"
        for name, kept in sections.items()
    )


def _format_links(tests: Sequence[str]) -> str:
    """Return tests as links, each with the name of its function, class or file."""
    return ", ".join(f"[`{_short(test)}`](../../{test.partition('::')[0]})" for test in tests)


def _short(test: str) -> str:
    """Return the name of a function or class, or the path of a whole file."""
    path, _, name = test.partition("::")
    return name or path


# Findings


def findings(folder: Path) -> dict[str, str]:
    """Return number (`review/finding`) -> one sentence, from the folder's FINDINGS. Raises PageError."""
    try:
        reviews = tomllib.loads((folder / FINDINGS).read_text(encoding="utf-8"))
        return {f"{review}/{n}": str(words) for review, found in reviews.items() for n, words in found.items()}
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise PageError(f"{FINDINGS}: {error}") from error


def tests_of_findings(folder: Path, known: Mapping[str, str]) -> dict[str, list[str]]:
    """Return number -> its tests, none for a finding without a test. Raises PageError for an unknown number."""
    tests: dict[str, list[str]] = {number: [] for number in known}
    for mark in marks(folder, ["finding"]):
        for number in mark.words:
            if number not in tests:
                raise PageError(f"{mark.test}: {FINDINGS} has no {number}")
            tests[number].append(mark.test)
    return tests


def findings_block(folder: Path) -> str:
    """Return a table of all findings. Raises PageError."""
    known = findings(folder)
    tests = tests_of_findings(folder, known)
    rows = [(number, words, _format_links(tests[number]) or "no test yet") for number, words in known.items()]
    return table(["finding", "subject", "regression test"], rows)
