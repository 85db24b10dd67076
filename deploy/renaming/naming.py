"""Plans for modules, and for names that modules define: where each stands, and what stands against a new one."""

from __future__ import annotations

import ast
from collections import defaultdict

from deploy.renaming.edits import Edit
from deploy.renaming.scopes import At, Named, Scope, look_up
from deploy.renaming.table import BUILTINS, Table, Tree


def new_name(tree: Tree, table: Table, named: Named) -> tuple[str, str]:
    """What a name means, in full, and its new name: its own where it keeps it."""
    full = tree.modules.resolve(named.target)
    if full.rpartition(".")[2] != named.name or full in tree.refused:
        return full, named.name
    if full in tree.modules.globals:
        return full, table.new_module(full).rpartition(".")[2]
    return full, table.names.get(full, named.name)


def _is_free(tree: Tree, table: Table, scope: Scope | None, module: str, new: str) -> bool:
    """Whether nothing else has the new name in that scope when all is done."""
    if scope is None:
        return new not in BUILTINS
    target = scope.bound.get(new) or (f"{module}.{new}" if scope.kind == "module" else None)
    if target is None:
        return False
    named = Named(None, new, target, ())  # type: ignore[arg-type]
    return new_name(tree, table, named)[1] != new


def _refuse(tree: Tree, table: Table) -> bool:
    """Note the rows whose new name is taken where it is used. Returns whether any is new."""
    before = len(tree.refused)
    for path, read in tree.read.items():
        for named in read.names:
            full, new = new_name(tree, table, named)
            if new == named.name or named.renamed or full in tree.modules.globals:
                continue
            if not _is_free(tree, table, look_up(named.scopes, new), read.module, new):
                tree.refused[full].append(f"{new} is taken at {path}:{named.at.line}")
    return len(tree.refused) > before


def _refuse_doubles(tree: Tree, table: Table) -> None:
    """Two names of one module that would become one, and two modules likewise."""
    rows: dict[str, list[str]] = defaultdict(list)
    for full, new in table.names.items():
        if full not in tree.refused:
            rows[f"{full.rpartition('.')[0]}.{new}"].append(full)
    for module in tree.modules.globals:
        rows[table.new_module(module)].append(module)
    for new, several in rows.items():
        for full in several if len(several) > 1 else ():
            tree.refused[full].append(f"{', '.join(several)} would all be {new}")


def plan_names(tree: Tree, table: Table) -> None:
    """Edits of all names and imports. A row that cannot hold everywhere holds nowhere, and is in `tree.refused`."""
    defined = {f"{read.module}.{name}" for read in tree.read.values() for name in read.globals.bound}
    for full in table.names.keys() - defined:
        tree.refused[full].append("is gone")
    for row in table.modules:
        if row not in tree.modules.globals and not any(
            name.startswith(f"{row.replace('.', '/')}/") for name in tree.files
        ):
            tree.refused[row].append("is gone")
    _refuse_doubles(tree, table)
    while _refuse(tree, table):
        pass
    for path, read in tree.read.items():
        for at, module in read.imported:
            if (new := table.new_module(module)) != module:
                tree.edits[path].append(Edit(at.line, at.column, module, new))
                tree.counts["imports"] += 1
        aliased = _aliased(tree, table, path)
        for named in read.names:
            full, new = new_name(tree, table, named)
            _check_parent(tree, table, path, named, full)
            if new == named.name:
                continue
            if full in aliased:
                if not named.is_import:
                    continue
                new = new if named.renamed else f"{new} as {named.name}"
            tree.edits[path].append(Edit(named.at.line, named.at.column, named.name, new))
            tree.counts["names"] += 1
        _plan_exports(tree, table, path)
        for dotted in read.dotted:
            holder = module_of_receiver(tree, dotted.node.value, dotted.scopes)
            if holder is None:
                continue
            named = Named(dotted.at, dotted.node.attr, f"{holder}.{dotted.node.attr}", ())
            _, new = new_name(tree, table, named)
            if new != named.name:
                tree.edits[path].append(Edit(named.at.line, named.at.column, named.name, new))
                tree.counts["names of modules"] += 1


def _aliased(tree: Tree, table: Table, path: str) -> set[str]:
    """Modules whose new name is taken in this file: they are imported under the old one."""
    read, found, first = tree.read[path], set[str](), dict[str, str]()
    for named in read.names:
        full, new = new_name(tree, table, named)
        if full not in tree.modules.globals or new == named.name or named.renamed:
            continue
        taken = first.setdefault(new, full) != full
        if taken or not _is_free(tree, table, look_up(named.scopes, new), read.module, new):
            found.add(full)
    tree.to_see += [f"{path}: module {full} keeps its name by `as`" for full in sorted(found)]
    return found


def _check_parent(tree: Tree, table: Table, path: str, named: Named, full: str) -> None:
    if not named.is_import or full not in tree.modules.globals or named.target != full:
        return
    package = full.rpartition(".")[0]
    if table.new_module(full).rpartition(".")[0] != table.new_module(package):
        tree.to_see.append(f"{path}:{named.at.line}: {full} leaves its package")


def _plan_exports(tree: Tree, table: Table, path: str) -> None:
    """Strings of `__all__`."""
    read = tree.read[path]
    if "__all__" not in read.globals.bound:
        return
    for node in ast.parse(tree.sources[path]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            for text in ast.walk(node.value):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    named = Named(At(text.lineno, text.col_offset + 1), text.value, f"{read.module}.{text.value}", ())
                    _, new = new_name(tree, table, named)
                    if new != named.name:
                        tree.edits[path].append(Edit(named.at.line, named.at.column, named.name, new))


def module_of_receiver(tree: Tree, node: object, scopes: tuple[Scope, ...]) -> str | None:
    """The module that an expression is (`a`, `a.b`), or None."""
    full = full_name(tree, node, scopes)
    return full if full in tree.modules.globals else None


def full_name(tree: Tree, node: object, scopes: tuple[Scope, ...]) -> str | None:
    """The full name of what an expression of names and dots means; None for a local, and for what is no such thing."""
    if isinstance(node, ast.Name):
        scope = look_up(scopes, node.id)
        if scope is None or scope.kind == "class":
            return None
        target = scope.bound.get(node.id)
        if target is None and scope.kind == "module":
            target = f"{scope.module}.{node.id}"
        return tree.modules.resolve(target) if target else None
    if isinstance(node, ast.Attribute):
        module = full_name(tree, node.value, scopes)
        return tree.modules.resolve(f"{module}.{node.attr}") if module in tree.modules.globals else None
    return None
