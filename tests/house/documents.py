"""The documents as tests read them: their texts, tables, code blocks and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        ROOT / "loadtest" / "README.md",
        ROOT / "deploy" / "README.md",
        *(ROOT / "helm").rglob("*.md"),
    ]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def page(name: str) -> str:
    """A document's text, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def block(text: str, name: str) -> str:
    """What stands between the markers of a rendered block."""
    return text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]


def table(text: str) -> list[list[str]]:
    """Cells of every row of every Markdown table in the text, heads and rules left out."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    heads = {i - 1 for i, row in enumerate(rows) if row[0].strip() == "---"}
    cells = [[cell.strip() for cell in row] for i, row in enumerate(rows) if i not in heads]
    return [row for row in cells if row[0] != "---"]


def section(text: str, title: str) -> str:
    """A page's text from a heading to the next of its level or above."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}$", text, flags=re.MULTILINE)[1:3]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def code_blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language, with continued lines joined."""
    return [found.replace("\\\n", " ") for found in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def prose(text: str) -> str:
    """The text without fenced blocks and rendered blocks."""
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them: the second of one name ends in -1 or _1."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command with an argument in any document, in a block or in a sentence: the document's name, and the
    command's words up to a redirection."""
    for name in NAMES:
        text = page(name)
        for line in "\n".join(code_blocks(text, "sh")).splitlines():
            yield name, _words(line)
        for words in re.findall(r"`(make [^`]+|warmroute [a-z-]+ [^`]+|python -m loadtest [a-z]+ [^`]+)`", text):
            yield name, _words(words.replace("\\|", "|"))


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [word.removeprefix(".venv/bin/") for word in takewhile(lambda word: word not in (">", ">>"), words)]
