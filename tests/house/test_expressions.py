"""Regular expressions take time linear in what they read: one that does not would let one party hold up all others."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.house.expressions import slow_because

ROOT = Path(__file__).resolve().parents[2]
ROUTER = ROOT / "router"
AT_ONE_PLACE = {"match", "fullmatch"}  # methods that match at one place; all others search
OTHERS = {"escape", "Pattern", "Match", "error", "DEBUG", "ASCII", "DOTALL", "IGNORECASE", "MULTILINE", "VERBOSE"}

# Expressions that may take more than linear time, and what bounds their input.
BOUNDED = {
    "router/cli/audit/engine_logs.py:_NOT_JSON": "a quote always matches, and nothing is scanned again behind it",
    "router/core/insights/difference/volatile_values.py:_OF_ID": (
        "a label of LABEL_BYTES, or a piece within WINDOW_BYTES"
    ),
    "router/core/insights/difference/volatile_values.py:_PREFIXED": "a word within WINDOW_BYTES",
    "router/core/insights/difference/volatile_values.py:_NUMBER": "the window of WINDOW_BYTES on either side of a byte",
}
# Expressions that are made when the program runs, and why they are linear.
MADE = {
    "router/core/dialects/multipart.py": "the boundary of a form as it is: one literal",
    "router/tokenization/tokenizers.py": "the special tokens of a tokenizer, which its file has: literals",
}


class Use(NamedTuple):
    """One expression: where it stands, its name or line, itself, and whether it is searched for."""

    file: str
    name: str
    pattern: re.Pattern[Any]
    searched: bool


@cache
def _trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(ROUTER.rglob("*.py"))}


def _of_re(node: ast.AST) -> str:
    """The function of `re` that is called; "" for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.attr if node.func.value.id == "re" and node.func.attr not in OTHERS else ""
    return ""


@cache
def _ways() -> dict[tuple[str, str], set[str]]:
    """How each name is used, by file where it is private: its methods, or "" where it is handed on as it is."""
    ways: dict[tuple[str, str], set[str]] = {}
    for file, tree in _trees().items():
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name and isinstance(getattr(node, "ctx", None), ast.Load):
                parent = parents[node]
                ways.setdefault(_place(file, name), set()).add(parent.attr if isinstance(parent, ast.Attribute) else "")
    return ways


def _place(file: Path, name: str) -> tuple[str, str]:
    return str(file) if name.startswith("_") else "", name


def uses() -> Iterator[Use]:
    """Every expression of the router that is known before it runs; one that is not must be listed in MADE."""
    for file, tree in _trees().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _of_re(node)]
        if not calls:
            continue
        place = file.relative_to(ROOT).as_posix()
        module = importlib.import_module(place.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
        names = {
            value: target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target, value in _assigned(node)
            if isinstance(target, ast.Name)
        }
        for call in calls:
            given = call if _of_re(call) == "compile" else call.args[0]
            try:
                made = eval(compile(ast.Expression(given), place, "eval"), dict(vars(module)))
            except NameError:
                assert place in MADE, f"{place}:{call.lineno} is made when the program runs: say why it is linear"
                continue
            name = names.get(call, "")
            how = _ways().get(_place(file, name), {""}) if name else {_of_re(call)}
            pattern = made if isinstance(made, re.Pattern) else re.compile(made)
            yield Use(place, name or f"line {call.lineno}", pattern, not how <= AT_ONE_PLACE)


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


@pytest.mark.promise("Every scanner of foreign bytes takes time linear in its input.", "engines")
@pytest.mark.finding("2026-11-28/8")
def test_expressions_are_linear() -> None:
    """Each expression of the router takes time linear in its input, but for those whose input is short."""
    found = {f"{use.file}:{use.name}": slow_because(use.pattern, searched=use.searched) for use in uses()}
    slow = {where: why for where, why in found.items() if why}
    assert {where: why for where, why in slow.items() if where not in BOUNDED} == {}
    assert slow.keys() == BOUNDED.keys()  # of a list with what is not there nobody believes the rest
    assert len(found) > 100


def test_expressions_are_not_imported_by_another_name() -> None:
    """Modules name `re` as `re`, so that every expression is found."""
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "regex"), file
            elif isinstance(node, ast.Import):
                assert all(each.name not in ("re", "regex") or each.asname is None for each in node.names), file
                assert all(each.name != "regex" for each in node.names), file


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"(a+)+b", False),
        (r"(a|aa)*b", False),
        (r"(?:a*c?)*b", False),
        (r"a*a*b", False),
        (r"(a|b|ab)*c", False),
        (r"\s*x", True),
        (r'"reason":"[^\n]*\n', True),
        (r"\w+=", True),
        (r'"(?:[^"\\]|\\.)*"', True),
        (r"(?i)a[^b]*b", True),
        (r"a(?:[ab]*c)?", True),
        (r"x+$", True),
        (r"^ *\n? *x", True),
    ],
)
def test_what_is_slow_is_found(pattern: str, *, searched: bool) -> None:
    """Repeats within repeats, repeats side by side, and repeats in which a search may begin again."""
    assert slow_because(re.compile(pattern), searched=searched)


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"\s*x", False),
        (r"(?<!\w)\w+=", True),
        (r"(?m)^name\{[^\n]*\} \d+", True),
        (r'"usage":\s*\{', True),
        (r"a[^b]*", True),
        (r"(?:[^{}]|\{[^{}]*\})*\}", False),
        (r"(?:\.[a-z]{1,63})*", False),
        (r"a{1,3}b", True),
    ],
)
def test_what_is_linear_passes(pattern: str, *, searched: bool) -> None:
    """Anchors, looks behind and classes that have nothing in common make an expression linear."""
    assert slow_because(re.compile(pattern), searched=searched) == ""
