"""The pages on the architecture: layers as in the contracts, a paragraph for each package, boxes that are files."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from loadtest.docgen.layers import layers
from loadtest.docgen.markdown import PageError, with_block

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ROOT / "docs" / "architecture"
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PACKAGES = (PAGES / "packages.md").read_text(encoding="utf-8")
# Where a diagram's box may be said from: shorter names fit on a line.
BASES = ("router", "router/engines/discovery", "router/engines")


def packages(container: str) -> set[str]:
    """Packages that the layers of a container name."""
    for contract in tomllib.loads(PYPROJECT)["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [container]:
            return {package.strip() for layer in contract["layers"] for package in layer.split("|")}
    raise AssertionError(container)


def boxes() -> list[tuple[str, str]]:
    """(page, box) for all boxes of all diagrams: what stands in brackets within a fenced block."""
    found = []
    for page in sorted(PAGES.glob("*.md")):
        for block in re.findall(r"```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            found += [(page.name, box) for box in re.findall(r"\[([^\]]+)\]", block)]
    return found


def test_layers_are_those_of_the_contracts() -> None:
    """The tables between the markers of docs/architecture/packages.md are what `layers` renders from pyproject.toml."""
    assert with_block(PACKAGES, "layers", layers(PYPROJECT)) == PACKAGES, "render docs/architecture/packages.md again"


def test_a_missing_contract_is_an_error() -> None:
    """A pyproject.toml without one of the contracts is an error that names the container."""
    with pytest.raises(PageError, match=r"no contract of layers for router"):
        layers("[tool.importlinter]\n")


@pytest.mark.parametrize("package", sorted((packages("router") | packages("router.core")) - {"__main__"}))
def test_every_package_has_its_paragraph(package: str) -> None:
    """Each package of the router and of its core has a paragraph on the page of packages, or a heading."""
    assert re.search(rf"^\*\*`{package}`\*\*|^## The {package}$", PACKAGES, re.MULTILINE)


@pytest.mark.parametrize(("page", "box"), boxes())
def test_every_box_of_a_diagram_is_a_file(page: str, box: str) -> None:
    """Boxes of the diagrams are files or packages of the router."""
    assert any((ROOT / base / box).exists() for base in BASES), f"{page}: {box}"


def test_the_map_is_short() -> None:
    """ARCHITECTURE.md is the map and links, on one screen."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    paths = re.findall(r"[\w/]+\.py", text)
    assert len(paths) > 15
    assert all((ROOT / "router" / path).is_file() for path in paths)


def examples() -> list[tuple[str, str]]:
    """(page, text) of every example on the pages about extending that is a whole module: it begins with a docstring."""
    return [
        (page.name, text)
        for page in sorted((ROOT / "docs" / "extend").glob("*.md"))
        for text in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        if text.startswith('"""')
    ]


@pytest.mark.parametrize(("page", "text"), examples(), ids=[page for page, _ in examples()])
def test_examples_are_modules_that_run(page: str, text: str) -> None:
    """A module shown on a page about extending can be run: all that it imports is there, and its class is made."""
    module = ModuleType(page.removesuffix(".md"))
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(text, page, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    assert any(isinstance(value, type) and value.__module__ == module.__name__ for value in vars(module).values())
