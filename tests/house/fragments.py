"""How much of the code's prose are fragments: comments and docstrings that only make sense with the code before them.

    python -m tests.house.fragments [--list] [PATHS]

A remark counts as a fragment when its first word is a preposition, pronoun, relative or conjunction that needs a noun
which stands elsewhere: "of those that wait", "else the default" (HANGING; in comments also CLAUSES). The count is cheap
and errs on both sides: "For each replica, its load" is a good comment and is counted; a fragment that begins with a
participle is not. So the share compares one state of the code with another, and judges no single line. On `router/`
before its prose was rewritten these words find 37 % of the end-of-line comments, where a count by hand had found 36 %.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Words that need a noun before them, in a comment as in a docstring.
HANGING = frozenset(
    (
        "of", "that", "those", "this", "these", "it", "its", "they", "their", "them", "both",
        "as", "else", "by", "for", "from", "to", "into", "in", "on", "at", "with",
        "without", "within", "behind", "and", "or", "but", "nor", "than", "then", "so", "if",
        "till", "until", "since", "likewise", "ditto", "because", "although", "though",
    )
)  # fmt: skip
# Words that begin a noun clause. "What a client asks." is a good docstring; at the end of a line the clause hangs on
# the name before it.
CLAUSES = frozenset(["what", "which", "who", "whose", "whom", "where", "when", "while"])
TOOLS = re.compile(r"#+\s*(noqa|type:|fmt:|pragma|mypy:|ruff:|nosec|pylint)")
WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Remark:
    """One end-of-line comment or docstring."""

    path: Path
    line: int
    kind: str
    """`comment` or `docstring`."""
    text: str
    """Its first line."""

    @property
    def fragment(self) -> bool:
        """Whether the first word needs a noun that stands elsewhere."""
        first = WORD.match(self.text)
        word = first.group().lower() if first is not None else ""
        return word in HANGING or (self.kind == "comment" and word in CLAUSES)

    @property
    def see(self) -> bool:
        """Whether a docstring only sends its reader elsewhere."""
        return self.kind == "docstring" and re.match(r"[Ss]ee \S+$|[Ss]ee [^.]*\.$", self.text) is not None


def remarks(path: Path) -> Iterator[Remark]:
    """All end-of-line comments and docstrings of a Python file; directives to tools (`# noqa`) are none."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        before = token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and before and not TOOLS.match(token.string):
            yield Remark(path, token.start[0], "comment", token.string.lstrip("# "))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield Remark(path, node.body[0].lineno, "docstring", said.partition("\n")[0].strip())


def files(paths: Sequence[Path]) -> list[Path]:
    """Every Python file at or below the paths, in order."""
    return sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])})


def room_of(path: Path) -> str:
    """The folder that a file's remarks are counted under: two levels deep, three below `router/core`."""
    parts = path.resolve().relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if parts[:2] == ("router", "core") else 2]) or "."


def report(found: Sequence[Remark]) -> str:
    """A line a room and one for all: comments, fragments among them, docstrings, fragments among them, "See X"."""
    counts: dict[str, Counter[str]] = {}
    for remark in found:
        for room in (room_of(remark.path), "total"):
            count = counts.setdefault(room, Counter())
            count[remark.kind] += 1
            count[f"{remark.kind} fragment"] += remark.fragment
            count["see"] += remark.see
    total = counts.pop("total", Counter())
    lines = [f"{'room':28} {'comments':>9} {'fragments':>15} {'docstrings':>11} {'fragments':>15} {'See X':>6}"]
    for room, count in [*sorted(counts.items()), ("total", total)]:
        shares = [
            f"{count[f'{kind} fragment']:>8} {_share(count[f'{kind} fragment'], count[kind]):>6.1%}"
            for kind in ("comment", "docstring")
        ]
        lines.append(
            f"{room:28} {count['comment']:>9} {shares[0]} {count['docstring']:>11} {shares[1]} {count['see']:>6}"
        )
    return "\n".join(lines)


def share(found: Sequence[Remark]) -> float:
    """The part of the remarks that are fragments."""
    return _share(sum(remark.fragment for remark in found), len(found))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, with `--list` after every fragment as `file:line: text`."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.fragments", description="Counts fragments in prose.")
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[ROOT / "router"], help="files or folders; default: router/"
    )
    parser.add_argument("--list", action="store_true", help="every fragment and every 'See X', with file and line")
    options = parser.parse_args(argv)
    found = [remark for path in files(options.paths) for remark in remarks(path)]
    if options.list:
        for remark in found:
            if remark.fragment or remark.see:
                print(f"{remark.path.resolve().relative_to(ROOT)}:{remark.line}: {remark.text}")
    print(report(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
