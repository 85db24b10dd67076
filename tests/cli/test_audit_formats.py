"""Formats of logs that `warmroute audit` reads. The examples in its documentation are data of these tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from router.cli.audit.log_formats import FORMATS, LogReader, records_in
from router.cli.audit.log_requests import LoggedRequest
from router.cli.main import main
from router.core.dialects import PATHS
from tests.cli.test_audit import Audited, tables

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/audit.md"
ASKED = b"high"  # in every prompt of an example


def examples() -> list[tuple[str, str]]:
    """(Section, example) of the page."""
    found = []
    for section in PAGE.read_text().split("\n### ")[1:]:
        name = section.partition("\n")[0]
        found += [(name, block) for block in re.findall(r"```(?:json|text)\n(.*?)\n```", section, re.DOTALL)]
    return found


def read(text: str) -> list[LoggedRequest]:
    """Requests of one record."""
    return list(LogReader().read(text.encode()))


def audited(tmp_path: Path, name: str, data: str) -> Audited:
    """The rows of the report on a file."""
    (tmp_path / name).write_text(data)
    assert main(["audit", str(tmp_path / name), "--json", str(tmp_path / "out.json")]) == 0
    return tables(tmp_path / "out.json")


@pytest.mark.parametrize(("section", "example"), examples())
def test_examples_of_the_documentation_are_read(section: str, example: str) -> None:
    """Each example is one request with a prompt in which the question stands, and its time is known if it has one."""
    (request,) = read(example)
    ask = PATHS[request.path].parse(request.path, request.body)

    assert ask.prompt is not None
    assert ASKED in request.body
    assert request.at_s is not None or section == "Request bodies"


def test_every_format_has_an_example() -> None:
    """The documentation has an example of each format, and a section for each row of its table."""
    first = [
        next(each.name for each in FORMATS if each.read(record) is not None)
        for _, example in examples()
        for record in records_in(example.encode())
    ]
    assert set(first) == {each.name for each in FORMATS}
    assert set(re.findall(r"^\| \[.*\]\(#([a-z-]+)\)", PAGE.read_text(), re.MULTILINE)) == {
        section.lower().replace(" ", "-") for section, _ in examples()
    }

