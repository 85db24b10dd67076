"""What a package index shows of the wheel, and what its extras bring."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from router.cli.main import _parser
from tests.house.documents import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OURS = re.compile(r"github\.com/warmroute|pypi\.org/project/warmroute|warmroute\.(io|dev|org|ai)")


def test_the_description_stands_alone() -> None:
    """No link leads to a file that is not there, nor to an address that is not ours; each extra that it names exists,
    and the command that it shows is one."""
    text = PROJECT["readme"]["text"]
    assert "](" not in text
    assert not OURS.search(text + str(PROJECT.get("urls", "")))
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == EXTRAS.keys() - {
        "attack",
        "browser",
        "dev",
        "docs",
    }
    for line in re.findall(r"^warmroute (serve --replica .*)$", text, re.MULTILINE):
        assert len(_parser().parse_args(line.split()).replica) == 2


def test_the_metadata_is_complete() -> None:
    """Authors, words to search for, and a classifier for each Python that CI tests."""
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert tested is not None
    listed = set(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"])))
    assert listed == set(re.findall(r"3\.\d+", tested[1]))
    assert PROJECT["authors"]
    assert len(PROJECT["keywords"]) >= 5


def test_small_extras_are_part_of_the_demo() -> None:
    """Whoever has the demo has `top` and .zst, with the same floors."""
    assert {*EXTRAS["top"], *EXTRAS["audit"]} <= {*EXTRAS["demo"]}


def test_hints_to_install_name_extras_that_exist() -> None:
    """Every `pip install` in a message works in a clone, and none names a package of an index that is not ours."""
    for file in [*(ROOT / "router").rglob("*.py"), *(ROOT / "loadtest").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install '?warmroute", text), file
        for extra in re.findall(r"pip install '\.\[(\w+)\]'", text):
            assert extra in EXTRAS, file
        for extra in re.findall(r"missing\([^)]*\"(\w+)\"\)", text):
            assert extra in EXTRAS, file
