"""Plans for lists that name modules by their last part: floors in pyproject.toml, and what is compiled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from deploy.renaming.edits import Edit
from deploy.renaming.members import MemberPlan
from deploy.renaming.table import Table, Tree

_CONTAINER = re.compile(r'^containers = \["([\w.]+)"\]', re.MULTILINE)
_LAYERS = re.compile(r"^layers = \[([^\]]*)\]", re.MULTILINE)
_RELATIVE = re.compile(r'^name = "[^"]*"', re.MULTILINE)
REACH = "tests/attack/reach.py"
COMPILED = "deploy/compiled.py"
GENERATED = "_pb2.py"


def plan_lists(tree: Tree, table: Table) -> None:
    """Put the edits into the tree."""
    for path in tree.files:
        if path == "pyproject.toml":
            text = (tree.root / path).read_text(encoding="utf-8")
            _put(tree, path, text, _floors(tree, table, text))
            _put(tree, path, text, _contract_names(tree, table, text))
        elif path == COMPILED:
            _plan_compiled(tree, table, tree.sources[path].decode())
        elif path.endswith(GENERATED):
            text = tree.sources[path].decode()
            _put(tree, path, text, _generated(tree, table, path, text))


def plan_parsers(tree: Tree, table: Table, members: MemberPlan) -> None:
    """Functions of a file as the attacks name them: `"core/a.py": ("Class.method", "-function")`."""
    if REACH not in tree.read:
        return
    for node in ast.walk(ast.parse(tree.sources[REACH])):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            path = str(key.value) if isinstance(key, ast.Constant) else ""
            module = f"router.{path.removesuffix('.py').replace('/', '.')}"
            for text in ast.walk(value) if module in tree.modules.globals else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    first, *behind = text.value.removeprefix("-").split(".")
                    full = f"{module}.{first}"
                    new = [table.names.get(full, first) if full not in tree.refused else first]
                    new += [members.word(full, behind[0]) or behind[0]] if behind else []
                    column = text.col_offset + 1 + text.value.startswith("-")
                    old = ".".join([first, *behind])
                    line = tree.sources[REACH].splitlines()[text.lineno - 1]
                    if new != [first, *behind] and line[column:].startswith(old.encode()):  # parts of f-strings are not
                        tree.edits[REACH].append(Edit(text.lineno, column, old, ".".join(new)))
                        tree.counts["lists"] += 1


def _put(tree: Tree, path: str, text: str, found: Iterator[tuple[int, str, str]]) -> None:
    for at, old, new in found:
        if old != new:
            line = text.count("\n", 0, at) + 1
            column = len(text[text.rfind("\n", 0, at) + 1 : at].encode())
            tree.edits[path].append(Edit(line, column, old, new))
            tree.counts["lists"] += 1


def _words(tree: Tree, table: Table, package: str, text: str, start: int) -> Iterator[tuple[int, str, str]]:
    for word in re.finditer(r"\w+", text):
        full = f"{package}.{word[0]}"
        if full in tree.modules.globals:
            yield start + word.start(), word[0], table.new_module(full).rpartition(".")[2]


def _floors(tree: Tree, table: Table, text: str) -> Iterator[tuple[int, str, str]]:
    """Each `layers` belongs to the last `containers` before it."""
    for layers in _LAYERS.finditer(text):
        containers = [found for found in _CONTAINER.finditer(text) if found.start() < layers.start()]
        if containers:
            for string in re.finditer(r'"[^"]*"', layers[1]):
                yield from _words(tree, table, containers[-1][1], string[0], layers.start(1) + string.start())


def _contract_names(tree: Tree, table: Table, text: str) -> Iterator[tuple[int, str, str]]:
    """`Only sharing.store knows it`: modules without their top, in names of contracts."""
    for name in _RELATIVE.finditer(text):
        for word in re.finditer(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*", name[0]):
            full = f"router.{word[0]}"
            if full in tree.modules.globals and ("." in word[0] or word[0] == "gateway"):
                yield name.start() + word.start(), word[0], table.new_module(full).removeprefix("router.")


def _generated(tree: Tree, table: Table, path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Where protoc put the name of its source: it has a length before it, so the new one must be as long."""
    old, new = path.rpartition("/")[0], table.new_path(path).rpartition("/")[0]
    for was, becomes in ((old, new), (old.replace("/", "."), new.replace("/", "."))):
        if len(was) != len(becomes):
            tree.to_see.append(f"{path}: make it again by `python -m deploy.protos`")
            return
        for found in re.finditer(re.escape(was), text):
            yield found.start(), was, becomes


def _plan_compiled(tree: Tree, table: Table, text: str) -> None:
    """`ROOMS = {"core/cache": "estimate masks"}`: packages below `router`, and modules of each."""
    lines = text.split("\n")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(value, ast.Constant):
                continue
            package = f"router.{str(key.value).replace('/', '.')}"
            new = table.new_module(package).removeprefix("router.").replace(".", "/")
            at = offsets[key.lineno - 1] + key.col_offset + 1
            _put(tree, COMPILED, text, iter([(at, str(key.value), new)]))
            begin = offsets[value.lineno - 1] + value.col_offset
            end = offsets[(value.end_lineno or 0) - 1] + (value.end_col_offset or 0)
            _put(tree, COMPILED, text, _words(tree, table, package, text[begin:end], begin))
