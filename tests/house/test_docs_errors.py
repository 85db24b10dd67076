"""Every error that the router makes is explained, and no other is: status and code, from the calls that make it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from router.http.failures import StreamInterrupted, UpstreamError
from tests.house.documents import ROOT, page, section, table

SOURCES = sorted((ROOT / "router").rglob("*.py"))


def called_with_code(name: str) -> Iterator[tuple[int, str]]:
    """(status, code) of every call in the router that makes an error of ours: `Refusal(status, code, ...)` and others
    of that shape, `InvalidBody(code, ...)` as a 400, `Shed(code, ...)` as a 429."""
    statuses = {"InvalidBody": 400, "Shed": 429}
    for constants, calls in _calls():
        for node in calls:
            if _name(node.func) != name:
                continue
            values = [_choices(argument, constants) for argument in node.args[:2]]
            if name in statuses:
                yield from ((statuses[name], code) for code in values[0])
            elif len(values) > 1:
                yield from ((status, code) for status in values[0] for code in values[1])


@cache
def _calls() -> list[tuple[dict[str, Any], list[ast.Call]]]:
    """Of each source what it calls by a name of its own, and its calls."""
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    places = [source.relative_to(ROOT).with_suffix("").parts for source in SOURCES]
    own = {".".join(place): dict(_constants(tree)) for place, tree in zip(places, trees, strict=True)}
    return [
        (
            {name: own[module][name] for module, name in _imported(tree) if name in own.get(module, {})}
            | dict(_constants(tree)),
            [node for node in ast.walk(tree) if isinstance(node, ast.Call)],
        )
        for tree in trees
    ]


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a module takes from others by name: (module, name)."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """What a module calls by a name of its own."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                yield name, value


def _name(called: ast.expr) -> str:
    """Of a function, or of a method behind its dot."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _choices(node: ast.expr, constants: dict[str, Any]) -> list[Any]:
    """Constants that an expression may be: `404 if model else 400` is either; `error.code` none of ours."""
    if isinstance(node, ast.IfExp):
        return [*_choices(node.body, constants), *_choices(node.orelse, constants)]
    if isinstance(node, ast.Name) and node.id in constants:
        return [constants[node.id]]
    return [node.value] if isinstance(node, ast.Constant) else []


def test_every_error_code_is_in_the_table() -> None:
    """The router's own errors, status and code, are exactly those in the table."""
    documented = {
        (int(row[0]), code)
        for row in table(page("docs/reference/errors.md"))
        for code in re.findall(r"`(\w+)`", row[1])
    }
    made = {error for name in ("Refusal", "InvalidBody", "Shed") for error in called_with_code(name)}
    assert made == documented


def test_every_error_of_a_stream_is_explained() -> None:
    """The codes of error events that streams end in are those in the table."""
    documented = {
        row[0].strip("`")
        for row in table(section(page("docs/guide/failures.md"), "Stream endings"))
        if re.fullmatch(r"`\w+`", row[0])
    }
    assert {code for _, code in called_with_code("error_event")} == documented


def test_every_error_of_the_admin_listener_is_in_the_table() -> None:
    """Its errors, status and code, are exactly those in the table."""
    rows = table(section(page("docs/guide/access.md"), "Admin listener"))
    documented = {(int(row[0]), code) for row in rows for code in re.findall(r"`(\w+)`", row[1])}
    assert documented == {*called_with_code("make_error_response"), *called_with_code("admin_refusal")}


def test_every_kind_of_failure_is_explained() -> None:
    """The kinds that failures are counted under are in a table where the metrics are, and no other is."""
    rows = page("docs/reference/metrics.md").split("<!-- metrics:end -->")[1]
    kinds = {failure.kind for made in (UpstreamError, StreamInterrupted) for failure in descendants(made)}
    assert {row[0].strip("`") for row in table(rows) if row[0][0] == "`"} - {"kind"} == {*kinds, StreamInterrupted.kind}


def descendants(made: type[Any]) -> Iterator[type[Any]]:
    """All classes that are made of this one."""
    for each in made.__subclasses__():
        yield each
        yield from descendants(each)
