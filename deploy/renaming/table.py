"""The map of new names (names.json) and what was read of the tree: what every stage of the renaming needs."""

from __future__ import annotations

import builtins
import json
import keyword
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deploy.renaming.edits import Edit
from deploy.renaming.scopes import Occurrences, read_file

MAP = Path(__file__).with_name("names.json")
HERE = ("deploy/renaming/", "tests/house/test_renaming.py")
BUILTINS = frozenset({*dir(builtins), *keyword.kwlist})


@dataclass(frozen=True)
class Table:
    """Old full names to new ones. `modules`: to full names, packages with all in them; the others: to the last part.

    `fixes`: old path of a file, text as it is when all else is done, and text in its place: what no rule finds.
    """

    modules: dict[str, str]
    names: dict[str, str]
    members: dict[str, str]
    fixes: tuple[tuple[str, str, str], ...] = ()

    def new_module(self, full: str) -> str:
        """The new full name of a module or package, by the longest row that has it or a package of it."""
        parts = full.split(".")
        for length in range(len(parts), 0, -1):
            row = self.modules.get(".".join(parts[:length]))
            if row is not None:
                return ".".join([row, *parts[length:]])
        return full

    def new_path(self, path: str) -> str:
        """Where a file goes: modules by their row, other files with their folder."""
        folder, _, name = path.rpartition("/")
        if name.endswith(".py") and name != "__init__.py":
            return self.new_module(path[:-3].replace("/", ".")).replace(".", "/") + ".py"
        return f"{self.new_module(folder.replace('/', '.')).replace('.', '/')}/{name}" if plain(folder) else path


def plain(folder: str) -> bool:
    """Whether a folder may be a package."""
    return bool(folder) and all(part.isidentifier() for part in folder.split("/"))


def read_table(path: Path = MAP) -> Table:
    """The map. Raises OSError, or ValueError for what is no map."""
    rows = json.loads(path.read_bytes())
    return Table(rows["modules"], rows["names"], rows["members"], tuple(map(tuple, rows.get("fixes", ()))))


class Modules:
    """What each module defines or imports, by which a full name is followed to where it is defined."""

    def __init__(self, files: Iterable[Occurrences]) -> None:
        self.globals = {file.module: file.globals.bound for file in files}

    def resolve(self, full: str) -> str:
        """The full name by which the thing is defined: re-exports are followed."""
        for _ in range(20):
            if full in self.globals:
                return full
            module, _, name = full.rpartition(".")
            bound = self.globals.get(module)
            target = bound.get(name) if bound else None
            if target is None or target == full:
                return full
            full = target
        return full


@dataclass
class Tree:
    """Tracked files, and the occurrences of names in each that is Python; what is planned gathers here.

    `refused`: rows that are not applied, with all reasons. `to_see`: places that a person should look at.
    """

    root: Path
    files: list[str]
    read: dict[str, Occurrences]
    sources: dict[str, bytes]
    modules: Modules
    edits: defaultdict[str, list[Edit]] = field(default_factory=lambda: defaultdict(list))
    refused: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    to_see: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def module_of(path: str) -> str:
    """The full name of a file's module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_tree(root: Path) -> Tree:
    """Read all tracked files of Python but for the tool's own. Raises SyntaxError, CalledProcessError."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)  # noqa: S607
    files = [name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()]
    files = [name for name in files if not name.startswith(HERE)]
    sources = {name: (root / name).read_bytes() for name in files if name.endswith(".py")}
    read = {name: read_file(source, module_of(name)) for name, source in sources.items()}
    return Tree(root, files, read, sources, Modules(read.values()))
