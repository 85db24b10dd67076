"""Which class a receiver has, by mypy or else by its name; and of which class the keywords of a call are fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from deploy.renaming.naming import full_name
from deploy.renaming.scopes import Scopes
from deploy.renaming.table import Tree
from deploy.renaming.types_of import CLASS, UNKNOWN, Types, place_of

REPLACERS = frozenset({"replace", "_replace"})
MAKERS = frozenset({"partial", "builds"})
"""Functions that call their first argument, with their keywords: functools.partial, and hypothesis' builds."""
DEPTH_MAX = 5


class Receivers:
    """Classes of expressions."""

    def __init__(self, tree: Tree, types: Types, class_at: dict[tuple[str, int], str]) -> None:
        self.tree, self.types, self._class_at = tree, types, class_at

    def classes(self, path: str, node: ast.expr, scopes: Scopes) -> list[str]:
        """Full names; that of an expression that is the class itself has CLASS before it. UNKNOWN is among them."""
        found = self.types.receivers.get(path, {}).get(place_of(node), [])
        if found and found != [UNKNOWN]:
            return found
        full = full_name(self.tree, node, scopes)
        if full in self.types.classes:
            return [CLASS + full]
        if isinstance(node, ast.Name) and node.id in ("self", "cls"):
            lines = [scope.line for scope in scopes if scope.kind == "class"]
            name = self._class_at.get((self.tree.read[path].module, lines[-1])) if lines else None
            return [name] if name else found
        return found

    def made(self, path: str, node: ast.expr, scopes: Scopes) -> list[str]:
        """Classes that a call of this makes of keywords that are their fields."""
        found = [name.removeprefix(CLASS) for name in self.classes(path, node, scopes) if name.startswith(CLASS)]
        return [name for name in found if self._has_fields(name)]

    def _has_fields(self, name: str) -> bool:
        known = self.types.classes
        bases = known[name].bases if name in known else []
        first = next((base for base in bases if base in known and "__init__" in known[base].members), None)
        return first is None or not known[first].module

    def stand_ins(self) -> Iterator[tuple[str, str]]:
        """What stands for what, in tests: class of the original, and class in its place.

        Seen by `cast(Original, Other())`, by `getattr(self._original, name)` in a class with `__getattr__`, and by what
        mypy refuses: tests are not checked.
        """
        yield from self._refused()
        for path, read in self.tree.read.items():
            for call, scopes in read.calls:
                if not isinstance(call.func, ast.Name) or len(call.args) != 2:
                    continue
                if call.func.id == "cast":
                    originals, others = self._cast(path, call, scopes)
                elif call.func.id == "getattr" and any("__getattr__" in scope.bound for scope in scopes[1:]):
                    originals = self.classes(path, call.args[0], scopes)
                    others = self.classes(path, ast.Name("self", lineno=0, col_offset=0), scopes)
                else:
                    continue
                for original in originals:
                    yield from (
                        (original, other) for other in others if self._is_ours(original) and self._is_ours(other)
                    )

    def _refused(self) -> Iterator[tuple[str, str]]:
        homes: dict[str, list[str]] = {}
        for name, known in self.types.classes.items():
            if known.module:
                homes.setdefault(name.rpartition(".")[2], []).append(name)
        for path, other, original in self.types.mismatches:
            module = self.tree.read[path].module if path in self.tree.read else ""
            found = [homes.get(word, []) for word in (original, other)]
            beside = [[name for name in names if name == f"{module}.{name.rpartition('.')[2]}"] for names in found]
            pair = [near or names for near, names in zip(beside, found, strict=True)]
            pair[0] = [name for name in pair[0] if self.types.classes[name].is_protocol] or pair[0]
            if all(len(names) == 1 for names in pair):
                yield pair[0][0], pair[1][0]

    def _cast(self, path: str, call: ast.Call, scopes: Scopes) -> tuple[list[str], list[str]]:
        wanted = call.args[0]
        if isinstance(wanted, ast.Constant):
            wanted = ast.Name(str(wanted.value).partition("[")[0])
        return [full_name(self.tree, wanted, scopes) or ""], self.classes(path, call.args[1], scopes)

    def _is_ours(self, name: str) -> bool:
        return name in self.types.classes and bool(self.types.classes[name].module)


class Keywords:
    """Of which classes the keywords of a call are fields, through functions that pass them on by `**`."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._functions: dict[str, tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._calls: dict[str, dict[tuple[int, int], Scopes]] = {}
        for path, read in receivers.tree.read.items():
            for node, owner in _functions(ast.parse(receivers.tree.sources[path]).body, read.module):
                self._functions[f"{owner}.{node.name}"] = (path, node)
            self._calls[path] = {(call.lineno, call.col_offset): scopes for call, scopes in read.calls}

    def classes(self, path: str, call: ast.Call, scopes: Scopes, keyword: str, depth: int = 0) -> list[str]:
        """Full names of the classes of which `keyword` of this call is a field."""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in REPLACERS and call.args:
            return self._receivers.classes(path, call.args[0], scopes)
        if called in REPLACERS and isinstance(call.func, ast.Attribute):
            return self._receivers.classes(path, call.func.value, scopes)
        if called in MAKERS and call.args:
            return self._receivers.made(path, call.args[0], scopes)
        if made := self._receivers.made(path, call.func, scopes):
            return made
        return [name for full in self._called(path, call, scopes) for name in self._passed(full, keyword, depth)]

    def _called(self, path: str, call: ast.Call, scopes: Scopes) -> list[str]:
        """Full names of the function or the methods that are called."""
        full = full_name(self._receivers.tree, call.func, scopes)
        if full is not None or not isinstance(call.func, ast.Attribute):
            return [full] if full in self._functions else []
        found = []
        for name in self._receivers.classes(path, call.func.value, scopes):
            known = self._receivers.types.classes.get(name.removeprefix(CLASS))
            methods = (f"{base}.{call.func.attr}" for base in (known.bases if known else ()))
            found += [method for method in methods if method in self._functions][:1]
        return found

    def _passed(self, full: str, keyword: str, depth: int) -> list[str]:
        path, node = self._functions[full]
        named = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        if node.args.kwarg is None or keyword in named or depth > DEPTH_MAX:
            return []
        names = _derived(node, node.args.kwarg.arg)
        found = []
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            scopes = self._calls[path].get((call.lineno, call.col_offset), ())
            if isinstance(call.func, ast.Name) and call.func.id == "setattr":
                found += self._receivers.classes(path, call.args[0], scopes)
            elif any(each.arg is None and _mentions(each.value, names) for each in call.keywords):
                found += self.classes(path, call, scopes, keyword, depth + 1)
        return found


def _derived(node: ast.AST, name: str) -> set[str]:
    """The name, and locals that are made of it."""
    names = {name}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and _mentions(each.value, names):
            names.update(target.id for target in each.targets if isinstance(target, ast.Name))
    return names


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _functions(body: list[ast.stmt], owner: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, owner
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}.{node.name}")


def looped(tree: ast.Module) -> dict[tuple[int, int], list[ast.Constant]]:
    """For calls such as `getattr(x, name)` in `for name in ("a", "b")`, by their places: the strings."""
    found: dict[tuple[int, int], list[ast.Constant]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            loops = [(node.target, node.iter)]
        else:
            loops = [(each.target, each.iter) for each in getattr(node, "generators", ())]
        for target, values in loops:
            if not isinstance(target, ast.Name) or not isinstance(values, (ast.Tuple, ast.List, ast.Set)):
                continue
            texts = [each for each in values.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and len(call.args) > 1 and _mentions(call.args[1], {target.id}):
                    found.setdefault((call.lineno, call.col_offset), []).extend(texts)
    return found
