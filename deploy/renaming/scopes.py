"""What each name in a file means, by Python's scopes: full names of what modules define, and members of classes.

`read_file` makes the occurrences of a file; `Modules` (table.py) follows imports from module to module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Local = str | None
"""What a name is bound to: the full name that is imported, or None for what is defined or assigned there."""


@dataclass
class Scope:
    """A module, class or function with the names that are bound in it."""

    kind: str
    bound: dict[str, Local] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)
    line: int = 0
    module: str = ""


Scopes = tuple[Scope, ...]


def look_up(scopes: Scopes, name: str) -> Scope | None:
    """The scope that binds the name as it is seen from the last of `scopes`, or None: a builtin, or nothing."""
    for depth, scope in enumerate(reversed(scopes)):
        if scope.kind == "class" and depth:
            continue
        if name in scope.outer:
            return scopes[0]
        if name in scope.bound:
            return scope
    return None


@dataclass(frozen=True)
class At:
    """Where a name stands: line, and column in bytes."""

    line: int
    column: int


@dataclass(frozen=True)
class Named:
    """A name that means something of a module: `target` is its full name before imports are followed.

    `is_import`: it stands in an import statement, which binds it here too unless `renamed` (`import x as y`).
    """

    at: At
    name: str
    target: str
    scopes: Scopes = field(compare=False)
    is_import: bool = False
    renamed: bool = False


@dataclass(frozen=True)
class Dotted:
    """A member of whatever `node.value` is."""

    at: At
    node: ast.Attribute
    scopes: Scopes = field(compare=False)


@dataclass(frozen=True)
class Defined:
    """A name in the body of the class at `class_line`, which binds it."""

    at: At
    name: str
    class_line: int


@dataclass
class Occurrences:
    """All of a file. `imported`: the modules of import statements, with their places."""

    module: str
    names: list[Named] = field(default_factory=list)
    dotted: list[Dotted] = field(default_factory=list)
    defined: list[Defined] = field(default_factory=list)
    calls: list[tuple[ast.Call, Scopes]] = field(default_factory=list)
    imported: list[tuple[At, str]] = field(default_factory=list)
    strings: list[ast.Constant] = field(default_factory=list)
    globals: Scope = field(default_factory=lambda: Scope("module"))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _bind(scope: Scope, nodes: Iterable[ast.AST]) -> None:
    """Note what these statements bind, without what functions and classes in them do."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            scope.bound[node.name] = None
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                scope.bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                scope.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            scope.bound.setdefault(node.id, None)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bound.setdefault(node.name, None)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bound.setdefault(node.rest, None)
        elif isinstance(node, ast.Global):
            scope.outer.update(node.names)
        elif isinstance(node, _COMPREHENSIONS):
            stack.extend(inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            continue
        stack.extend(ast.iter_child_nodes(node))
    for name in scope.outer:
        scope.bound.pop(name, None)


class _Reader(ast.NodeVisitor):
    def __init__(self, source: bytes, module: str, tree: ast.Module) -> None:
        self._lines = source.splitlines()
        self.found = Occurrences(module)
        self.found.globals.module = module
        _bind(self.found.globals, tree.body)
        self._scopes: Scopes = (self.found.globals,)
        self._annotating = False

    def _place(self, text: str, line: int, column: int) -> At:
        """Where `text` stands as a whole word at or behind (line, column)."""
        wanted = text.encode()
        while True:
            at = self._lines[line - 1].find(wanted, column)
            while at >= 0:
                before, behind = self._lines[line - 1][:at][-1:], self._lines[line - 1][at + len(wanted) :][:1]
                if not (before.isalnum() or before == b"_" or behind.isalnum() or behind == b"_"):
                    return At(line, at)
                at = self._lines[line - 1].find(wanted, at + 1)
            line, column = line + 1, 0

    def _name(self, at: At, name: str) -> None:
        scope = look_up(self._scopes, name)
        if scope is None:
            return
        if scope.kind == "class":
            self.found.defined.append(Defined(at, name, scope.line))
        elif scope.bound.get(name) is not None:
            self.found.names.append(Named(at, name, scope.bound[name] or "", self._scopes))
        elif scope is self.found.globals:
            self.found.names.append(Named(at, name, f"{self.found.module}.{name}", self._scopes))

    def _within(self, scope: Scope, nodes: Iterable[ast.AST | None]) -> None:
        before, self._scopes = self._scopes, (*self._scopes, scope)
        self._all(nodes)
        self._scopes = before

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None:
            before, self._annotating = self._annotating, True
            self.visit(node)
            self._annotating = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._name(self._place(node.name, node.lineno, node.col_offset + 3), node.name)
        self._all(node.decorator_list)
        self._function(node.args, node.body)
        self._annotation(node.returns)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _function(self, args: ast.arguments, body: Iterable[ast.AST]) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        self._all([*args.defaults, *args.kw_defaults])
        scope = Scope("function", {arg.arg: None for arg in every if arg})
        for arg in every:
            if arg is not None:
                self._annotation(arg.annotation)
        body = list(body)
        _bind(scope, body)
        self._within(scope, body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._name(self._place(node.name, node.lineno, node.col_offset + 5), node.name)
        self._all([*node.decorator_list, *node.bases, *node.keywords])
        scope = Scope("class", line=node.lineno)
        _bind(scope, node.body)
        self._within(scope, node.body)

    def _comprehension(self, node: ast.expr, made: list[ast.expr], generators: list[ast.comprehension]) -> None:
        self.visit(generators[0].iter)
        scope = Scope("function")
        _bind(scope, [generator.target for generator in generators])
        inner = [each for g in generators for each in (g.target, *g.ifs)] + [g.iter for g in generators[1:]]
        self._within(scope, [*inner, *made])

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node, [node.elt], node.generators)

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, [node.key, node.value], node.generators)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        self._all([node.target, node.value])

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self._name(self._place(name, node.lineno, node.col_offset + 6), name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.found.imported.append((At(alias.lineno, alias.col_offset), alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self.found.imported.append((self._place(module, node.lineno, node.col_offset + 4), module))
        for alias in node.names:
            at = At(alias.lineno, alias.col_offset)
            target = f"{module}.{alias.name}"
            self.found.names.append(Named(at, alias.name, target, self._scopes, True, bool(alias.asname)))

    def visit_Name(self, node: ast.Name) -> None:
        self._name(At(node.lineno, node.col_offset), node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        column = (node.end_col_offset or 0) - len(node.attr.encode())
        self.found.dotted.append(Dotted(At(node.end_lineno or 0, column), node, self._scopes))

    def visit_Call(self, node: ast.Call) -> None:
        self.found.calls.append((node, self._scopes))
        if isinstance(node.func, ast.Name) and node.func.id == "cast" and node.args:
            self._annotation(node.args[0])
            self._all([node.func, *node.args[1:], *node.keywords])
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self._annotating and node.lineno == node.end_lineno:
            for inner in _in_string(node):
                self.visit(inner)
        elif isinstance(node.value, (str, bytes)):
            self.found.strings.append(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        before = self._annotating
        if isinstance(node.value, ast.Name) and node.value.id in ("Literal", "Annotated"):
            self._annotating = False
        self.visit(node.slice)
        self._annotating = before


def _in_string(node: ast.Constant) -> Iterator[ast.expr]:
    """The expression in an annotation that is a string, with its places in the file."""
    try:
        body = ast.parse(str(node.value), mode="eval").body
    except SyntaxError:
        return
    for inner in ast.walk(body):
        if isinstance(inner, ast.expr):
            inner.lineno = inner.end_lineno = node.lineno
            inner.col_offset += node.col_offset + 1
            inner.end_col_offset = (inner.end_col_offset or 0) + node.col_offset + 1
    yield body


def read_file(source: bytes, module: str) -> Occurrences:
    """All occurrences of names in a file. Raises SyntaxError."""
    tree = ast.parse(source)
    reader = _Reader(source, module, tree)
    reader.visit(tree)
    return reader.found
