"""Types of the tree by mypy's own build: classes with their members, and the classes of each receiver in each file.

A receiver is the expression before a dot, or what is called with keywords. It is found by its place in its file, as
`ast` has it: (line, column, end line, end column), columns in bytes of UTF-8.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from mypy import build, subtypes
from mypy.main import process_options
from mypy.nodes import (
    Block,
    ClassDef,
    Decorator,
    Expression,
    ForStmt,
    FuncDef,
    IfStmt,
    MypyFile,
    Node,
    TryStmt,
    TypeInfo,
    WhileStmt,
    WithStmt,
)
from mypy.options import Options
from mypy.plugin import Plugin
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    Overloaded,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)
from mypy.typevars import fill_typevars_with_any

_MISMATCH = re.compile(r'([^:]+):.* incompatible type "(\w+)"; expected "(\w+)')
FOLDERS = ("router", "loadtest", "deploy", "tests")
UNKNOWN = "?"
"""In place of a class: the receiver has no type."""
ANY_KEYWORDS = "**"
"""Likewise: a function that takes keywords of any name."""
CLASS = "class "
"""Before the name of a class: the receiver is the class itself."""

Place = str
"""`line:column:end line:end column` of an expression."""


@dataclass
class KnownClass:
    """A class: where it stands, its bases (itself first, as in its MRO), and the members that it defines itself.

    `module` is empty for a class of a library. `implements`: protocols, and what else it stands in for.
    """

    module: str
    line: int
    bases: list[str]
    members: list[str]
    is_protocol: bool
    metaclass: str
    implements: list[str] = field(default_factory=list)


@dataclass
class Types:
    """What mypy knows of the tree. `receivers`: by file, classes by place. `files`: the module of each.

    `mismatches`: file, class, and class in whose place it is passed, which mypy refuses.
    """

    classes: dict[str, KnownClass]
    receivers: dict[str, dict[Place, list[str]]]
    files: dict[str, str]
    mismatches: list[tuple[str, str, str]] = field(default_factory=list)


def place_of(node: ast.expr) -> Place:
    """Where an expression is."""
    return f"{node.lineno}:{node.col_offset}:{node.end_lineno}:{node.end_col_offset}"


def _receivers(tree: ast.Module) -> set[Place]:
    places = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            places.add(place_of(node.value))
        elif isinstance(node, ast.Call):
            places.add(place_of(node.func))
            places.update(place_of(argument) for argument in node.args[:2])
    return places


def _classes(found: Type | None) -> set[str]:
    if found is None:
        return set()
    proper = get_proper_type(found)
    if isinstance(proper, Instance):
        return {proper.type.fullname}
    if isinstance(proper, AnyType):
        return {UNKNOWN}
    if isinstance(proper, UnionType):
        return set(chain.from_iterable(_classes(item) for item in proper.items))
    if isinstance(proper, TypeType):
        return {CLASS + name.removeprefix(CLASS) for name in _classes(proper.item)}
    if isinstance(proper, Overloaded):
        return _classes(proper.items[0])
    if isinstance(proper, CallableType):
        if proper.is_type_obj():
            return {CLASS + proper.type_object().fullname}
        return {ANY_KEYWORDS} if proper.is_kw_arg else set()
    if isinstance(proper, TupleType):
        return _classes(proper.partial_fallback)
    if isinstance(proper, (LiteralType, TypedDictType)):
        return _classes(proper.fallback)
    if isinstance(proper, TypeVarType):
        return set(chain(_classes(proper.upper_bound), *(_classes(value) for value in proper.values)))
    return set()


def _class_definitions(nodes: Iterable[Node]) -> Iterator[ClassDef]:
    """The classes of a file, those inside of functions included. (A visitor of mypy's cannot be inherited from.)"""
    for node in nodes:
        if isinstance(node, ClassDef):
            yield node
            yield from _class_definitions(node.defs.body)
        elif isinstance(node, Decorator):
            yield from _class_definitions(node.func.body.body)
        elif isinstance(node, FuncDef):
            yield from _class_definitions(node.body.body)
        elif isinstance(node, Block):
            yield from _class_definitions(node.body)
        elif isinstance(node, (IfStmt, ForStmt, WhileStmt, WithStmt, TryStmt)):
            blocks = node.body if isinstance(node, IfStmt) else [node.body]
            blocks = [*blocks, *(getattr(node, "handlers", None) or ())]
            yield from _class_definitions(blocks)
            yield from _class_definitions(
                filter(None, (getattr(node, "else_body", None), getattr(node, "finally_body", None)))
            )


def _known(info: TypeInfo, module: str) -> KnownClass:
    members = [name for name, symbol in info.names.items() if not symbol.plugin_generated]
    metaclass = info.metaclass_type.type.fullname if info.metaclass_type else ""
    return KnownClass(
        module, info.defn.line, [base.fullname for base in info.mro], members, info.is_protocol, metaclass
    )


def _note_protocols(infos: dict[str, TypeInfo], classes: dict[str, KnownClass]) -> None:
    """Protocols that a class implements without naming them."""
    offered = {name: set(chain.from_iterable(base.names for base in info.mro)) for name, info in infos.items()}
    for wanted, protocol in infos.items():
        if not protocol.is_protocol:
            continue
        members = set(protocol.protocol_members)
        for name, info in infos.items():
            if not members <= offered[name] or wanted in classes[name].bases:
                continue
            left, right = fill_typevars_with_any(info), fill_typevars_with_any(protocol)
            if len(members) > 2 or (
                isinstance(left, Instance)
                and isinstance(right, Instance)
                and subtypes.is_protocol_implementation(left, right)
            ):
                classes[name].implements.append(wanted)


def _of_file(graph_types: dict[Expression, Type], places: set[Place]) -> dict[Place, list[str]]:
    found: dict[Place, set[str]] = {}
    for node, kind in graph_types.items():
        place = f"{node.line}:{node.column}:{node.end_line}:{node.end_column}"
        if place in places:
            found.setdefault(place, set()).update(_classes(kind))
    return {place: sorted(classes) for place, classes in found.items()}


class _Collector(Plugin):
    """Is called for each file when its types are known, and takes them before mypy frees them."""

    def __init__(self, options: Options, root: Path, types: Types, infos: dict[str, TypeInfo]) -> None:
        super().__init__(options)
        self._root, self._types, self._infos = root, types, infos
        self._manager: build.BuildManager | None = None

    def get_additional_indirect_deps(self, file: MypyFile) -> set[str]:
        if self._manager is None:  # there is no other way to it from here
            self._manager = next(found for found in gc.get_objects() if isinstance(found, build.BuildManager))
        path = Path(file.path).resolve()
        if path.is_relative_to(self._root) and path.suffix == ".py" and ".venv" not in path.parts:
            self._take(str(path.relative_to(self._root)), file, self._manager.all_types)
        self._manager.all_types.clear()
        return set()

    def _take(self, path: str, file: MypyFile, types: dict[Expression, Type]) -> None:
        self._types.files[path] = file.fullname
        self._types.receivers[path] = _of_file(types, _receivers(ast.parse((self._root / path).read_bytes())))
        for info in (definition.info for definition in _class_definitions(file.defs)):
            self._infos[info.fullname] = info
            self._types.classes[info.fullname] = _known(info, file.fullname)


def read_types(root: Path) -> Types:
    """The types of the tree at `root`. Takes minutes. Raises mypy.errors.CompileError where it cannot be parsed."""
    os.chdir(root)
    sys.setrecursionlimit(10_000)
    sources, options = process_options(
        ["--explicit-package-bases", *(name for name in FOLDERS if (root / name).exists())]
    )
    options.export_types = True
    options.incremental = False
    options.native_parser = False
    options.cache_dir = os.devnull
    infos: dict[str, TypeInfo] = {}
    types = Types({}, {}, {})
    result = build.build(sources, options, extra_plugins=[_Collector(options, root.resolve(), types, infos)])
    types.mismatches = [(found[1], found[2], found[3]) for error in result.errors if (found := _MISMATCH.match(error))]
    for base in list(chain.from_iterable(info.mro for info in infos.values())):
        if base.fullname not in types.classes:
            types.classes[base.fullname] = _known(base, "")
    _note_protocols(infos, types.classes)
    return types


def load_types(root: Path, cache: Path | None) -> Types:
    """The types of the tree, from `cache` where that file is there; else they are written to it."""
    if cache is not None and cache.exists():
        data = json.loads(cache.read_bytes())
        data["classes"] = {name: KnownClass(**known) for name, known in data["classes"].items()}
        return Types(**data)
    types = read_types(root)
    if cache is not None:
        cache.write_text(json.dumps(asdict(types)))
    return types
