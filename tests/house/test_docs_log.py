"""The reference of the log says what the code writes: every line has an event, and every event its row."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

from router.telemetry import logs
from router.telemetry.log_queue import DROPPED
from tests.house.documents import ROOT, page, section, table

METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
OURS = {"log", "requests_log"}


@functools.cache
def written() -> list[tuple[str, str, str]]:
    """(place, level, event) of every line that the router's code writes; an event of "" is a line without one."""
    return list(_written())


def _written() -> Iterator[tuple[str, str, str]]:
    for file in sorted((ROOT / "router").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            local = {
                target.id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=method)):
                        if logger in OURS and method in METHODS:
                            place = f"{file.relative_to(ROOT)}:{node.lineno}"
                            for event in _events(node, local, module, function) or [""]:
                                yield place, method, event


def _events(call: ast.Call, local: dict[str, ast.expr], module: str, function: ast.AST) -> list[str]:
    """The events that a call of a logger may have."""
    extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
    if isinstance(extra, ast.Name):
        extra = local.get(extra.id)
    if not isinstance(extra, ast.Dict):
        return []
    values = dict(zip([ast.unparse(key) if key else "" for key in extra.keys], extra.values, strict=True))
    value = values.get("'event'")
    return _texts(value, local, module, function) if value is not None else []


def _texts(value: ast.expr, local: dict[str, ast.expr], module: str, function: ast.AST) -> list[str]:
    """The texts that an expression may be: a constant, one of two, or one of a table of (sentence, event)."""
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    if isinstance(value, ast.IfExp):
        return [text for branch in (value.body, value.orelse) for text in _texts(branch, local, module, function)]
    if isinstance(value, ast.Name) and value.id in local:
        return _texts(local[value.id], local, module, function)
    if isinstance(value, ast.Name) and hasattr(found := importlib.import_module(module), value.id):
        return [getattr(found, value.id)]
    for node in ast.walk(function):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, ast.Name(id=name)])], value=ast.Subscript(value=ast.Name(id=of))
            ):
                if isinstance(value, ast.Name) and name == value.id:
                    rows: dict[Any, tuple[str, str]] = getattr(importlib.import_module(module), of)
                    return [event for _, event in rows.values()]
    return []


def rows() -> dict[str, set[str]]:
    """Levels by event, as documented."""
    found = table(section(page("docs/reference/log.md"), "Events"))
    return {row[0].strip("`"): set(row[1].split(", ")) for row in found if row[0].startswith("`")}


def test_every_line_has_an_event() -> None:
    """No line of the router's own can be found by its wording alone."""
    assert [place for place, _, event in written() if not event] == []


def test_every_event_is_in_the_table() -> None:
    """The events in the code, and those that logs.py writes past the logging module, are exactly those in the table."""
    code = {event for _, _, event in written()} | {logs.REQUEST, DROPPED}
    assert code == rows().keys()
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", event) for event in code)


def test_every_level_is_as_documented() -> None:
    """Where a line's level is fixed in the code, the table has it."""
    fixed = {(event, method) for _, method, event in written() if method in ("info", "warning", "error")}
    fixed |= {(event, "error") for _, method, event in written() if method == "exception"}
    documented = rows()
    assert [(event, level) for event, level in sorted(fixed) if level not in documented[event]] == []


def test_what_warns_says_what_to_do() -> None:
    """Every event that is a warning or worse and needs somebody has a last column."""
    found = table(section(page("docs/reference/log.md"), "Events"))
    calm = {"spans_lost"}
    silent = [
        row[0] for row in found if row[1] in ("warning", "error") and not row[3] and row[0].strip("`") not in calm
    ]
    assert silent == []
