"""Counts patterns of prose that hide the subject of a sentence, and names of callables that hide a verb.

    python -m tests.house.prose [--messages] [--list RULE] [PATHS]

Prose is every docstring and comment of a Python file, and every line of a Markdown file outside of code blocks. With
`--messages` it is every other string literal of at least four words instead: errors, log lines and help texts. A
sentence ends at a full stop, and at the end of a table cell. A rule is a regular expression, so a count is cheap and
has false positives: "a person who calls" is good English. Compare one state of the tree with another, and judge no
single line by it. `tests/house/test_prose.py` has the ceilings.
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
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_PATHS = ("router", "loadtest", "docs", "README.md", "ARCHITECTURE.md", "SECURITY.md")

INTERROGATIVE = re.compile(r"(what|whatever|whether|who|whose|whoever|whom|how|where|which|when|why)\b", re.IGNORECASE)
RULES = {
    "person": r"who|whose|whom|whoever|nobody|somebody|anybody",
    "speech": r"told|tells?|said|says?|heard|hears?|own word",
    "what": r"what|whatever",
    "where": r"where|as far as|as long as|for want of",
    "none": r"is none|are none|there is none|no more|not any more|nothing is|nothing else",
    "calque": (
        r"so many|so long|so much|besides|likewise|meanwhile|in its turn|in turn|from then on|but for|had better"
        r"|all the same|is to be|are to be|of its own|as a whole|goes on|go on|some \d+ (?:s|ms)"
    ),
    "house": (
        r"houses?|rooms?|wings?|seams?|story|stories|desks?|faces?|kin|kinship|foretold|foretells?|mends?|mended"
        r"|blames?|blamed|sightings?|crowds?|crowded"
    ),
}
PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in RULES.items()}
MESSAGE_WORDS_MIN = 4
CLAUSES_MAX = 4  # commas, colons and semicolons of one sentence
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*|] | \| ")
CLAUSE = re.compile(r"[,;:](?=\s)")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
TOOLS = re.compile(r"#+\s*(noqa|type:|fmt:|pragma|mypy:|ruff:|nosec|pylint)")
FENCE = re.compile(r"^\s*(```|~~~)")

IRREGULAR = frozenset(
    (
        "told", "left", "said", "heard", "known", "made", "lost", "held", "sent", "seen", "taken", "given", "begun",
        "gone", "kept", "found", "written", "shown", "stood", "met", "grown", "come", "broken", "chosen", "drawn",
        "fallen", "forgotten", "gotten", "hidden", "spent", "understood", "brought", "caught", "built", "meant",
    )
)  # fmt: skip
FUNCTION_WORDS = frozenset(
    (
        "of", "alone", "whole", "again", "behind", "elsewhere", "together", "own", "besides", "before", "after",
        "since",
        "until", "with", "without", "by", "at", "as", "among", "between", "beside", "here", "there", "now", "later",
        "soon", "both", "all", "none", "nothing", "else", "meanwhile", "who", "whose", "what", "why", "where", "how",
        "if", "so", "up", "off", "out", "aside", "apart", "away", "back", "near", "many", "several", "others",
    )
)  # fmt: skip
NOUNS = frozenset(
    ("seed", "speed", "feed", "need", "string", "ring", "thing", "ping", "red", "bed", "embed", "hundred")
)


@dataclass(frozen=True, slots=True)
class Passage:
    """One docstring, comment block or Markdown paragraph, with the line at which it begins."""

    path: Path
    line: int
    text: str
    is_docstring: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """One place that a rule matches."""

    path: Path
    line: int
    rule: str
    text: str


def definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, and all classes and functions, without a look into expressions, which are most of a tree."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from definitions(child)


@cache
def passages_of_python(path: Path) -> tuple[Passage, ...]:
    """The docstrings and comments of a Python file; consecutive comment lines are one passage."""
    text = path.read_text(encoding="utf-8")
    docstrings = [
        Passage(path, node.body[0].lineno, docstring, is_docstring=True)
        for node in definitions(ast.parse(text))
        if (docstring := ast.get_docstring(node))
    ]
    return (*docstrings, *(_comments(path, text) if "#" in text else ()))


def _comments(path: Path, text: str) -> Iterator[Passage]:
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or TOOLS.match(token.string):
            continue
        row = token.start[0]
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and row == last + 1):
            yield Passage(path, begin, "\n".join(block))
            block = []
        begin = begin if block else row
        block.append(token.string.lstrip("# "))
        last = row if alone else -1
    if block:
        yield Passage(path, begin, "\n".join(block))


def passages_of_markdown(path: Path) -> Iterator[Passage]:
    """The paragraphs and table rows of a Markdown file, without code blocks, inline code and link targets."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and line.strip() and not line.startswith("<!--"):
            plain = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", line))
            yield Passage(path, number, plain)


def passages(paths: Sequence[Path]) -> Iterator[Passage]:
    """All passages at or below the paths."""
    for path in paths:
        files = sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path]
        for file in files:
            yield from passages_of_python(file) if file.suffix == ".py" else passages_of_markdown(file)


def messages_of_python(path: Path) -> Iterator[Passage]:
    """The string literals of a Python file with at least four words, except docstrings. An expression in an f-string
    is a space."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in skipped or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in parts)
        if len(WORD.findall(text)) >= MESSAGE_WORDS_MIN:
            yield Passage(path, node.lineno, text)


def hits(passage: Passage) -> Iterator[Hit]:
    """Every match of a rule in one passage."""
    for rule, pattern in PATTERNS.items():
        for match in pattern.finditer(passage.text):
            line = passage.line + passage.text.count("\n", 0, match.start())
            yield Hit(passage.path, line, rule, _line_at(passage.text, match.start()))
    if passage.is_docstring and INTERROGATIVE.match(passage.text):
        yield Hit(passage.path, passage.line, "opening", passage.text.partition("\n")[0])
    for sentence in SENTENCE_END.split(passage.text):
        if sentence and len(CLAUSE.findall(sentence)) > CLAUSES_MAX:
            yield Hit(passage.path, passage.line, "chain", " ".join(sentence.split())[:120])


def _line_at(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    return text[begin:].partition("\n")[0].strip()


def callables(paths: Sequence[Path]) -> Iterator[tuple[Path, int, str]]:
    """Path, line and name of every function and method, without dunders and properties."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.suffix != ".py":
                continue
            for node in definitions(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
                    continue
                if not any(ast.unparse(each).endswith(("property", "setter")) for each in node.decorator_list):
                    yield file, node.lineno, node.name


def hides_verb(name: str) -> bool:
    """True if a callable's name is a bare participle, or begins or ends with a function word."""
    words = name.strip("_").split("_")
    if words[0] in FUNCTION_WORDS or (len(words) == 1 and words[0] in IRREGULAR):
        return True
    participle = words[0].endswith(("ed", "ing")) and words[0] not in NOUNS
    return len(words) == 1 and participle


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a set of files."""

    words: int
    docstrings: int
    names: int
    hits: Counter[str]

    def rate(self, rule: str) -> float:
        """Matches per 10,000 words; `opening` in percent of docstrings, `callable` in percent of callables."""
        if rule == "opening":
            return 100 * self.hits[rule] / max(1, self.docstrings)
        if rule == "callable":
            return 100 * self.hits[rule] / max(1, self.names)
        return 10_000 * self.hits[rule] / max(1, self.words)


def count_messages(paths: Sequence[Path]) -> tuple[Counts, list[Hit]]:
    """Counts over the messages of the Python files at or below the paths, and every match. Names are not counted."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    passages_ = [passage for file in files if file.suffix == ".py" for passage in messages_of_python(file)]
    words = sum(len(WORD.findall(passage.text)) for passage in passages_)
    found = [hit for passage in passages_ for hit in hits(passage)]
    return Counts(words, 0, 0, Counter(hit.rule for hit in found)), found


def count(paths: Sequence[Path]) -> tuple[Counts, list[Hit]]:
    """Counts over the files at or below the paths, and every match."""
    words = docstrings = 0
    found: list[Hit] = []
    for passage in passages(paths):
        words += len(WORD.findall(passage.text))
        docstrings += passage.is_docstring
        found += hits(passage)
    names = list(callables(paths))
    found += [Hit(path, line, "callable", name) for path, line, name in names if hides_verb(name)]
    return Counts(words, docstrings, len(names), Counter(hit.rule for hit in found)), found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table with a row for each path; with `--list`, first every match of one rule as `file:line: text`."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.prose", description="Counts patterns of prose.")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / path for path in DEFAULT_PATHS])
    parser.add_argument("--list", choices=[*PATTERNS, "opening", "chain", "callable"], metavar="RULE", dest="rule")
    parser.add_argument("--messages", action="store_true", help="count string literals instead of prose")
    options = parser.parse_args(argv)
    rules = [*PATTERNS, "chain", "opening", "callable"]
    print(f"{'path':24} {'words':>8}" + "".join(f"{rule:>10}" for rule in rules))
    for path in options.paths:
        counts, found = (count_messages if options.messages else count)([path])
        for hit in found:
            if hit.rule == options.rule:
                print(f"{hit.path.resolve().relative_to(ROOT)}:{hit.line}: {hit.text}")
        name = str(path.resolve().relative_to(ROOT))
        print(f"{name:24} {counts.words:>8}" + "".join(f"{counts.rate(rule):>10.1f}" for rule in rules))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
