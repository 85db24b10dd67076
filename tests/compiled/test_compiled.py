"""deploy/compiled.py: every module that it names is there, and `make test-compiled` tests what it made."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.compiled import MODULES, REPO
from deploy.compiled_sources import HARMLESS
from tests.compiled import COMPILED

ORDINARY = ("router", "enum", "typing")  # bases with which mypyc makes a class of Python's, or the base is its own


def test_what_is_compiled_is_there() -> None:
    """A module that was renamed is not left out in silence."""
    assert [module for module in MODULES if not (REPO / module).is_file()] == []


def classes() -> Iterator[tuple[str, ast.ClassDef, dict[str, str]]]:
    """Each class of the router, with its module's file and what the names there are imported from."""
    for path in sorted((REPO / "router").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name: f"{node.module.replace('.', '/')}.py"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(REPO)), node, imported


def names(nodes: list[ast.expr]) -> list[str]:
    """What stands there by name, without what is in brackets behind it."""
    return [node.id for part in nodes for node in [getattr(part, "value", part)] if isinstance(node, ast.Name)]


@pytest.mark.long
def test_what_is_not_compiled_inherits_from_nothing_that_is() -> None:
    """It would be a TypeError as soon as one is made. Protocols are only named."""
    protocols = {(file, node.name) for file, node, _ in classes() if "Protocol" in names(node.bases)}
    wrong = [
        (file, node.name, base)
        for file, node, imported in classes()
        for base in names(node.bases)
        if file not in MODULES and imported.get(base) in MODULES and (imported[base], base) not in protocols
    ]
    assert wrong == []


@pytest.mark.long
def test_compiled_classes_inherit_no_weak_references() -> None:
    """mypyc adds its own list of them beside an inherited one. What is then freed leaves references that point at
    nothing, and the next collection of garbage ends the process: the logging module has such references to handlers."""
    wrong = []
    for file, node, _ in classes():
        if file in MODULES:
            made = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), node.name, object)
            bases = [each for each in made.__mro__[1:] if each.__module__.partition(".")[0] not in ORDINARY]
            wrong += [(file, node.name) for each in bases if getattr(each, "__weakrefoffset__", 0) > 0]
    assert wrong == []


@pytest.mark.long
def test_compiled_classes_keep_what_they_are_told() -> None:
    """mypyc drops keywords (`frozen=True`), and loses the attributes of an exception's class."""
    for file, node, _ in classes():
        if file not in MODULES:
            continue
        assert {word.arg for word in node.keywords} <= HARMLESS, (file, node.name)
        if any(base.endswith("Exception") for base in names(node.bases)):
            assert not any(isinstance(each, ast.Assign | ast.AnnAssign) for each in node.body), (file, node.name)


def test_a_variable_has_one_type() -> None:
    """In a function, of two `except` clauses with the same `as error` the second would be a TypeError when it comes
    true, where the one is no base of the other's."""
    for module in MODULES:
        for function in ast.walk(ast.parse((REPO / module).read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                caught = [node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name]
                assert len(caught) == len(set(caught)), (module, function.name)


@pytest.mark.skipif("PYTHONSAFEPATH" not in os.environ, reason="no native code is asked for: see `make test-compiled`")
def test_native_code_is_what_is_tested() -> None:
    """All of it, and of the sources that are here now."""
    assert COMPILED
    for module in MODULES:
        file = Path(importlib.import_module(module.removesuffix(".py").replace("/", ".")).__file__ or "")
        assert file.suffix == ".so", file
        source = file.with_name(Path(module).name)
        assert source.read_bytes() == (REPO / module).read_bytes()


SUSPENDS = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)


def waits(node: ast.AST, *, handles: bool = False) -> list[int]:
    """Lines on which a module may suspend while it handles an exception, or one goes by."""
    lines = [node.lineno] if handles and isinstance(node, SUSPENDS) else []
    finals = node.finalbody if isinstance(node, ast.Try) else []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        handles = False  # it runs when it is called
    for child in ast.iter_child_nodes(node):
        lines += waits(child, handles=handles or isinstance(child, ast.ExceptHandler) or child in finals)
    return lines


def test_nothing_compiled_waits_while_it_handles_an_exception() -> None:
    """A coroutine of mypyc's keeps its exception in the thread while it is suspended: whatever others raise meanwhile
    gets that as its context, and where two such coroutines cross it stays for good. Requests were then refused with the
    reason of another one's."""
    two = "async def f():\n try:\n  await g()\n except E:\n  await h()\n finally:\n  await i()\n"
    assert waits(ast.parse(two)) == [5, 7]
    assert waits(ast.parse("async def f():\n try:\n  pass\n except E:\n  async def g():\n   await h()\n")) == []
    wrong = {module: waits(ast.parse((REPO / module).read_text(encoding="utf-8"))) for module in MODULES}
    assert {module: lines for module, lines in wrong.items() if lines} == {}
