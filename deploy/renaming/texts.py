"""Plans for text: names, modules and paths in strings, comments and documents.

What a text means is less certain than what code means, so a word is replaced only where it can be nothing else: a path
or a dotted name that exists, a name in backticks that one thing of the tree has, and outside of backticks one with a
hump or an underscore. `tree.counts` says how many; the proof (proof.py) lists the strings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from deploy.renaming.edits import Edit
from deploy.renaming.members import MemberPlan
from deploy.renaming.table import Table, Tree, module_of

KINDS = frozenset({"md", "toml", "yml", "yaml", "sh", "in", "js", "css", "html", "proto", "pyi"})
FILES = frozenset({"Makefile", "run", "Dockerfile", ".gitignore", ".dockerignore", ".gitleaks.toml"})
SKIPPED = ("CHANGELOG.md", "loadtest/data/", "tests/attack/seeds/", "tests/attack/grown/", "requirements/")
GENERATED = "_pb2.py"
WORDLESS = ("deploy/openapi/", "docs/reference/api.md", "helm/")
"""Files where a name in backticks may be one of the admin API's, and only paths are replaced."""
ROOMS = ("docs/architecture/", "docs/extend/", "ARCHITECTURE.md")
"""Documents where a word in backticks may be a package."""

_DOTTED = re.compile(r"(?<![\w./-])(?:router|loadtest|tests|deploy)(?:\.\w+)+")
_PATH = re.compile(r"(?<![\w/-])(?:\.\./)*((?:[A-Za-z_][\w-]*/)+(?:[\w-]+(?:\.\w+)*)?)")
_ROOM = re.compile(r"(\*\*)?`([a-z_]+)`")
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MAP = re.compile(r"^ *[a-z_]+(?: \| [a-z_]+)*(?=  )")
_FILE = re.compile(r"(?<![\w./-])([A-Za-z_]\w*)\.py(?![\w])")
_TICKED = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"(?<![\w.\-/$])[A-Za-z_]\w*(?:\.\w+)*(?![\w/]|-\w)")
_IMPORT = re.compile(r"from ((?:router|loadtest|tests|deploy)[\w.]*) import (\([\w,\s]+\)|[\w, ]+)")
_BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
_HUMPS = re.compile(r"[A-Z]\w*[a-z]\w*[A-Z]\w*|[A-Z]\w*_\w*|[a-z]+_\w+")

Line = tuple[int, int, str, bool]
"""Number, column in bytes, text, and whether names in it are replaced: in prose, but not in what a program says."""
Found = tuple[int, str, str]
"""Column in characters, what stands there, and what is to stand there."""


class TextPlan:
    """Finds what to replace in a line of text."""

    def __init__(self, tree: Tree, table: Table, members: MemberPlan | None) -> None:
        self._tree, self._table, self._members = tree, table, members
        self._known = {*tree.files, *(str(parent) for name in tree.files for parent in PurePosixPath(name).parents)}
        self._homes: dict[str, list[str]] = defaultdict(list)
        self._defined: dict[str, list[str]] = defaultdict(list)
        # Lower-case words that are strings somewhere, such as codes of errors, are not the functions of that name.
        self._said = {text.value for read in tree.read.values() for text in read.strings}
        for path, read in tree.read.items():
            if not path.startswith("tests/"):
                self._homes[path.rpartition("/")[2][:-3]].append(path)
            for name, target in read.globals.bound.items():
                if target is None and not path.startswith(("tests/", "deploy/")):
                    self._defined[name].append(f"{read.module}.{name}")

    def plan(self) -> None:
        """Put the edits into the tree. Planned ones come first: what overlaps them is left out."""
        for path in self._tree.files:
            if path.startswith(SKIPPED) or path.endswith(GENERATED):
                continue
            if path.endswith(".py"):
                self._programs(path)
                self._constants(path)
                lines = list(_texts(self._tree.sources[path]))
            elif path.rpartition("/")[2] in FILES or path.rpartition(".")[2] in KINDS:
                whole = (self._tree.root / path).read_text(encoding="utf-8").split("\n")
                lines = [(number, 0, line, True) for number, line in enumerate(whole, 1)]
                self._examples(path, whole)
            else:
                continue
            self._plan_lines(path, lines)

    def _programs(self, path: str) -> None:
        """Strings that are programs, such as those of `python -c`: what they import keeps its meaning."""
        lines = self._tree.sources[path].decode().split("\n")
        for text in self._tree.read[path].strings:
            if isinstance(text.value, str):
                numbers = range(text.lineno, (text.end_lineno or 0) + 1)
                self._replace(path, lines, numbers, self._imported(text.value))

    def _constants(self, path: str) -> None:
        """Calls with the name of a constant and its module: `Constant("HELD_WORTH", "router.core.placement")`."""
        for call, _ in self._tree.read[path].calls:
            texts = [arg for arg in call.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if len(texts) == 2 and texts[1].value in self._tree.modules.globals:
                full = self._tree.modules.resolve(f"{texts[1].value!s}.{texts[0].value!s}")
                new = self._table.names.get(full) if full not in self._tree.refused else None
                if new is not None:
                    edit = Edit(texts[0].lineno, texts[0].col_offset + 1, str(texts[0].value), new)
                    self._tree.edits[path].append(edit)
                    self._tree.counts["constants"] += 1

    def _examples(self, path: str, lines: list[str]) -> None:
        """Programs in documents."""
        whole = "\n".join(lines)
        for fence in _FENCE.finditer(whole):
            first = whole.count("\n", 0, fence.start(1)) + 1
            self._replace(path, lines, range(first, first + fence[1].count("\n")), self._imported(fence[1]))

    def _imported(self, program: str) -> dict[str, str]:
        """New names of what a program imports, by the old ones."""
        words = {}
        for found in _IMPORT.finditer(program):
            for name in re.findall(r"\w+", found[2]):
                full = self._tree.modules.resolve(f"{found[1]}.{name}")
                if full in self._tree.modules.globals:
                    words[name] = self._table.new_module(full).rpartition(".")[2]
                elif full in self._table.names and full not in self._tree.refused:
                    words[name] = self._table.names[full]
        return {old: new for old, new in words.items() if old != new}

    def _replace(self, path: str, lines: list[str], numbers: range, words: dict[str, str]) -> None:
        for number in numbers:
            line = lines[number - 1]
            for old, new in words.items():
                for found in re.finditer(rf"(?<![\w.]){old}(?!\w)", line):
                    self._tree.edits[path].append(Edit(number, len(line[: found.start()].encode()), old, new))
                    self._tree.counts["programs"] += 1

    def _rooms(self, path: str, line: str) -> Iterator[Found]:
        """Packages by their last part: in backticks, and on the map in ARCHITECTURE.md."""
        for match in _ROOM.finditer(line):
            yield match.start(2), match[2], self._room(match[2])
        if path == "ARCHITECTURE.md" and (rooms := _MAP.match(line)):
            core = line.startswith(" ")
            for word in re.finditer(r"\w+", rooms[0]):
                yield word.start(), word[0], self._room(word[0], core=core)

    def _room(self, name: str, *, core: bool | None = None) -> str:
        below = {True: ("router.core",), False: ("router",), None: ("router", "router.core")}[core]
        homes = [f"{top}.{name}" for top in below if f"{top}.{name}" in self._tree.modules.globals]
        return self._table.new_module(homes[0]).rpartition(".")[2] if len(homes) == 1 else name

    def _plan_lines(self, path: str, lines: Iterable[Line]) -> None:
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for edit in self._tree.edits.get(path, ()):
            taken[edit.line].append((edit.column, edit.column + len(edit.old.encode())))
        for number, column, line, words in lines:
            for at, old, new in self._in_line(path, line, words=words):
                begin = column + len(line[:at].encode())
                end = begin + len(old.encode())
                if old == new or any(begin < behind and first < end for first, behind in taken[number]):
                    continue
                taken[number].append((begin, end))
                self._tree.edits[path].append(Edit(number, begin, old, new))
                self._tree.counts["texts"] += 1

    def _in_line(self, path: str, line: str, *, words: bool) -> Iterator[Found]:
        for match in _DOTTED.finditer(line):
            yield match.start(), match[0], self.dotted(match[0])
        for match in _PATH.finditer(line):
            if not path.startswith("helm/") or match[1].startswith(("router/", "loadtest/", "tests/")):
                yield match.start(1), match[1], self.path(match[1])
        if not words or path.startswith(WORDLESS):
            return
        for match in _FILE.finditer(line):
            yield match.start(1), match[1], self._file(path, match[1])
        if path.startswith(ROOMS):
            yield from self._rooms(path, line)
        for match in _TICKED.finditer(line):
            for word in _WORD.finditer(match[1]):
                yield match.start(1) + word.start(), word[0], self._word(path, word[0])
        if path.endswith((".py", ".md")):
            for word in _WORD.finditer(line):
                if _HUMPS.fullmatch(word[0].partition(".")[0]):
                    yield word.start(), word[0], self._word(path, word[0])

    def dotted(self, text: str) -> str:
        """A dotted name from the top: a module, and what is in it."""
        parts = text.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if module in self._tree.modules.globals or module.replace(".", "/") in self._known:
                behind = self._behind(module, parts[length:])
                return ".".join([self._table.new_module(module), *behind])
        return text

    def _behind(self, module: str, parts: list[str]) -> list[str]:
        if not parts:
            return parts
        full = self._tree.modules.resolve(f"{module}.{parts[0]}")
        new = self._table.names.get(full, parts[0]) if full not in self._tree.refused else parts[0]
        return [new, *self._member(full, parts[1:])]

    def _member(self, name: str, parts: list[str]) -> list[str]:
        word = self._members.word(name, parts[0]) if self._members is not None and parts else None
        return [word, *parts[1:]] if word else parts

    def path(self, text: str) -> str:
        """A path from the top or from a package: `router/core/a.py`, `core/a.py`, `core/a`, `tests/core/`."""
        slash = "/" if text.endswith("/") else ""
        plain = text.rstrip("/")
        if f"docs/{plain}" in self._known or (plain.endswith(".md") and plain not in self._known):
            return text
        for ending in ("", ".py"):
            for top in ("", "router/", "loadtest/", "tests/"):
                whole = top + plain + ending
                if whole not in self._known or (top and "/" not in plain and not slash):
                    continue
                new = self._table.new_path(whole) if whole in self._tree.files else self._folder(whole)
                return new.removeprefix(top).removesuffix(ending) + slash if new.startswith(top) else text
        head, _, name = plain.rpartition("/")
        if "/" in head and not slash and "." not in head and (renamed := self.path(head + "/")) != head + "/":
            return renamed + name
        return text

    def _folder(self, path: str) -> str:
        return self._table.new_module(path.replace("/", ".")).replace(".", "/")

    def _file(self, path: str, name: str) -> str:
        """The name of a file alone: one beside, or the only one."""
        beside = f"{path.rpartition('/')[0]}/{name}.py"
        homes = [beside] if beside in self._tree.read else _first(self._homes.get(name, []), "router/")
        return module_of(self._table.new_path(homes[0])).rpartition(".")[2] if len(homes) == 1 else name

    def _word(self, path: str, text: str) -> str:
        """A name as the file knows it, or else as only one thing in the tree is called; and members behind it."""
        first, *behind = text.split(".")
        read = self._tree.read.get(path)
        full = None
        if read is not None and first in read.globals.bound:
            full = self._tree.modules.resolve(read.globals.bound[first] or f"{read.module}.{first}")
        elif first[0].isupper() or (_HUMPS.fullmatch(first) and first not in self._said):
            homes = _first(self._defined.get(first, []), "router.")
            full = homes[0] if len(homes) == 1 else None
        if full is None or full in self._tree.refused:
            return text
        if full.rpartition(".")[2] != first:
            return ".".join([first, *(self._behind(full, behind) if full in self._tree.modules.globals else behind)])
        if full in self._tree.modules.globals:
            return ".".join([self._table.new_module(full).rpartition(".")[2], *self._behind(full, behind)])
        return ".".join([self._table.names.get(full, first), *self._member(full, behind)])


def _first(homes: list[str], top: str) -> list[str]:
    """Those below `top` where there are any: the router comes before its instruments."""
    return [home for home in homes if home.startswith(top)] or homes


def _texts(source: bytes) -> Iterator[Line]:
    """Strings and comments, line by line. A string that begins a statement is prose, as comments are."""
    lines = source.decode().split("\n")
    before = tokenize.NEWLINE
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            prose = token.type == tokenize.COMMENT or before in _BEGINNINGS
            for number in range(token.start[0], token.end[0] + 1):
                line = lines[number - 1]
                begin = token.start[1] if number == token.start[0] else 0
                end = token.end[1] if number == token.end[0] else len(line)
                yield number, len(line[:begin].encode()), line[begin:end], prose
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
