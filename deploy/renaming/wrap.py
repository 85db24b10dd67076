"""Wraps lines that new names made too long: `python -m deploy.renaming.wrap --root DIR`, after `ruff format`.

Prose (docstrings, comments on lines of their own) hands its last words on to the next line of its paragraph; a string
that is a value of a dict becomes several; banners lose dashes. What is left is by hand: `ruff check --select E501`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

WIDTH = 120
_VALUE = re.compile(r'^( *)((?:"[^"]*"|[^"#]*): )"([^"\\]*)"(,?)$')
_PART = re.compile(r'^( *)"([^"\\]*)"$')
_BANNER = re.compile(r"^ *# -- .*?(-{3,})$")
_LIST = re.compile(r"^\s*(#\s*)?([-*|>]|\d+\.|`{3}|--|\w+:)")
_BEGINNINGS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def _prose(text: str) -> dict[int, int]:
    """Lines of prose, from 1, and the block of each: words move within a block only."""
    blocks: dict[int, int] = {}
    before, last = tokenize.NEWLINE, 0
    lines = text.split("\n")
    for token in tokenize.tokenize(io.BytesIO(text.encode()).readline):
        if token.type == tokenize.STRING and before in _BEGINNINGS:
            blocks.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), token.start[0]))
        elif token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            number = token.start[0]
            blocks[number] = blocks[number - 1] if last == number - 1 and number - 1 in blocks else number
            last = number
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return blocks


def _indent(line: str) -> str:
    """What a line of the same paragraph begins with."""
    return re.match(r"\s*(# ?)?", line)[0]  # type: ignore[index]


def wrap(text: str) -> str:
    """The text with prose and strings of at most WIDTH columns, as far as it can be."""
    lines, blocks = text.split("\n"), _prose(text)
    out: list[str] = []
    carried = carried_line = ""
    for number, line in enumerate(lines, 1):
        if carried:
            taken = _takes(line, blocks, number)
            if not taken:
                out.append(carried_line)
            line = f"{_indent(line)}{carried} {line[len(_indent(line)) :]}" if taken else line
            carried = ""
        if len(line) <= WIDTH:
            out.append(line)
        elif banner := _BANNER.match(line):
            out.append(line[: max(WIDTH, banner.start(1) + 3)])
        elif number in blocks:
            kept, carried = _cut(line)
            out.append(kept)
            carried_line = _indent(line) + carried
        elif value := _VALUE.match(line):
            indent, key, string, comma = value.groups()
            if comma:
                out += [f"{indent}{key}(", *_parts(f"{indent}    ", string), f"{indent}),"]
            else:  # the first of several parts
                out += [f'{indent}{key}""', *_parts(indent, string)]
        elif part := _PART.match(line):
            out += _parts(*part.groups())
        else:
            out.append(line)
    return "\n".join(out)


def _takes(line: str, blocks: dict[int, int], number: int) -> bool:
    """Whether this line goes on with the paragraph of the one before."""
    same = number in blocks and blocks.get(number - 1) == blocks[number]
    return same and bool(line.strip(' #"')) and not _LIST.match(line)


def _cut(line: str) -> tuple[str, str]:
    at = line.rfind(" ", 0, WIDTH + 1)
    if at <= len(_indent(line)) + 3:
        return line, ""
    return line[:at].rstrip(), line[at + 1 :]


def _parts(indent: str, text: str) -> list[str]:
    """A string on as many lines as it needs."""
    out = []
    while len(indent) + len(text) + 2 > WIDTH:
        at = text.rfind(" ", 0, WIDTH - len(indent) - 2)
        out.append(f'{indent}"{text[:at]}"')
        text = text[at:]
    return [*out, f'{indent}"{text}"']


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.renaming.wrap", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="a renamed work tree")
    root = parser.parse_args().root
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "*.py"], capture_output=True, check=True)  # noqa: S607
    wrapped = 0
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = root / name
        text = path.read_text(encoding="utf-8")
        if name.endswith("_pb2.py") or not any(len(line) > WIDTH for line in text.split("\n")):
            continue
        if (new := wrap(text)) != text:
            path.write_text(new, encoding="utf-8")
            wrapped += 1
    print(f"{wrapped} files wrapped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
