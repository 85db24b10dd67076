"""Rewrites a module's source for mypyc: the same code, with two constructs in a form that mypyc compiles best.

Records: a msgspec Struct is the fastest form of a few fields in Python, but for mypyc it is a foreign class with fields
that are looked up by name. From a plain class mypyc makes a struct of C. So each `class X(Struct)` becomes a plain
class with the same `__init__`, `__eq__` and `__struct_fields__`. Records that msgspec itself reads or writes must stay
as they are, and are written as `msgspec.Struct`.

Constants: a global is looked up in the module's dict, one that is `Final` is not.

Every line keeps its number, so that tracebacks and profiles name the lines of the source.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

HARMLESS = frozenset({"eq", "gc"})  # keywords of a Struct; `gc` has no meaning for a class of mypyc's
_FUTURE = "from __future__ import annotations"
_NOT_MUTABLE = (ast.Constant, ast.Attribute, ast.Tuple, ast.UnaryOp)
_VALUES = (
    ast.Constant,
    ast.Attribute,
    ast.Call,
    ast.Tuple,
    ast.Dict,
    ast.DictComp,
    ast.Set,
    ast.UnaryOp,
    ast.JoinedStr,
)
_MAKERS_OF_TYPES = frozenset({"TypeVar", "NewType"})


def for_mypyc(source: str) -> str:
    """Return the module's source for mypyc. Raises ValueError for a record that cannot be rewritten."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_record(node):
            _put_record(lines, node)
    names = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    declared = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            pairs = list(_pairs(node))
            if pairs and all(names[name] == 1 and name not in declared for name, _ in pairs):
                _put_constants(lines, node, pairs)
    at = lines.index(_FUTURE) if _FUTURE in lines else -1
    if at < 0:
        return source
    lines[at] += "; from typing import ClassVar, Final"
    return "\n".join(lines) + "\n"


def is_record(node: ast.ClassDef) -> bool:
    """Return True if this is a Struct that is neither decoded nor encoded by msgspec."""
    return [ast.unparse(base) for base in node.bases] == ["Struct"]


def _put_record(lines: list[str], node: ast.ClassDef) -> None:
    """Replace a record by a plain class on the same number of lines.

    Fields, `__init__` and `__eq__` have one line each, in the place of the docstring and the fields.
    """
    told = {word.arg: ast.unparse(word.value) for word in node.keywords}
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if set(told) - HARMLESS or any(each.value and not isinstance(each.value, _NOT_MUTABLE) for each in fields):
        raise ValueError(f"{node.name}: line {node.lineno}: not a record that mypyc can have as a plain class")
    names = [ast.unparse(each.target) for each in fields]
    types = [ast.unparse(each.annotation) for each in fields]
    defaults = [f" = {ast.unparse(each.value)}" if each.value else "" for each in fields]
    given = ", ".join(f"{name}: {type_}{default}" for name, type_, default in zip(names, types, defaults, strict=True))
    declared = "; ".join(f"{name}: {type_}" for name, type_ in zip(names, types, strict=True))
    new = [
        f"{declared}; __struct_fields__: ClassVar[tuple[str, ...]] = ({', '.join(map(repr, names))},)",
        f"def __init__(self, {given}) -> None: {'; '.join(f'self.{name} = {name}' for name in names)}",
    ]
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    if told.get("eq") != "False" and "__eq__" not in methods:
        same = " and ".join(f"self.{name} == other.{name}" for name in names)
        new.append(f"def __eq__(self, other: object) -> bool: return isinstance(other, {node.name}) and {same}")
    first, last = node.body[0].lineno, fields[-1].end_lineno or 0
    if node.body[0].lineno == node.lineno or last - first + 1 < len(new):
        raise ValueError(f"{node.name}: line {node.lineno}: too few lines for a plain class")
    lines[node.lineno - 1] = f"class {node.name}:"
    for at in range(first - 1, last):
        lines[at] = f"    {new.pop(0)}" if new else ""
    for each in node.body:  # a class with __eq__ and without __hash__ has None
        if isinstance(each, ast.Assign) and ast.unparse(each).startswith("__hash__ = None"):
            lines[each.lineno - 1] = ""


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Yield names and values of constants assigned here, but not of other values, such as a type alias."""
    target, value = node.targets[0], node.value
    if len(node.targets) > 1:
        return
    if isinstance(target, ast.Name) and _is_value(value):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and all(map(_is_value, value.elts)):
        for each, given in zip(target.elts, value.elts, strict=True):
            yield ast.unparse(each), given


def _is_value(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return not isinstance(node.op, ast.BitOr)  # of types it makes a type
    return isinstance(node, _VALUES) and not (isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKERS_OF_TYPES)


def _put_constants(lines: list[str], node: ast.Assign, pairs: list[tuple[str, ast.expr]]) -> None:
    at = node.lineno - 1
    if len(pairs) == 1:
        name = pairs[0][0]
        lines[at] = lines[at].replace(f"{name} =", f"{name}: Final =", 1)
    elif node.end_lineno == node.lineno:
        lines[at] = "; ".join(f"{name}: Final = {ast.unparse(value)}" for name, value in pairs)
