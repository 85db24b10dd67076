"""Pages lead somewhere, say things once, and make a site."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.documents import NAMES, ROOT, anchors, code_blocks, page, prose, section


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    """Every link to a file of ours leads to one, every anchor to a heading, and every file named in code is there."""
    text = page(name)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link
    for path in re.findall(r"`((?:router|loadtest|tests|core)/[\w/]+(?:\.py)?/?)`", text):
        assert (ROOT / path).exists() or (ROOT / "router" / path).exists(), path


def test_no_sentence_is_in_two_places() -> None:
    """What one page says no other says again; a reader who finds it twice has to compare."""
    places = defaultdict(list)
    for name in NAMES:
        for line in prose(page(name)).splitlines():
            if not line.startswith(("|", "#", "![")):
                for sentence in re.split(r"(?<=[.:]) ", re.sub(r"^\s*(-|\d+\.) ", "", line)):
                    if len(sentence) > 50:
                        places[sentence].append(name)
    assert {line: names for line, names in places.items() if len(names) > 1} == {}


def test_readme_is_short() -> None:
    """README has at most 250 lines: what is longer belongs on a page."""
    assert len(page("README.md").splitlines()) <= 250


def test_the_site_is_made(tmp_path: Path) -> None:
    """`mkdocs build --strict` makes a site: no dead link, no page without its place in the navigation,
    no command that cannot be copied."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    top = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<strong>Hit rate</strong>" in top, "README's top"
    assert "Step 0" not in top
    runbook = (tmp_path / "operate" / "runbook" / "index.html").read_text(encoding="utf-8")
    assert "/metrics | grep token_hit</code>" in runbook


@pytest.mark.parametrize("name", NAMES)
def test_python_compiles(name: str) -> None:
    """Python in the documents is Python."""
    for text in code_blocks(page(name), "python"):
        compile(text, name, "exec")


def test_every_package_is_on_the_map() -> None:
    """ARCHITECTURE.md names every package of the router and of its core, and the modules beside them."""
    text = section(page("ARCHITECTURE.md"), "Layers")
    parts = {source.relative_to(ROOT / "router").with_suffix("").parts for source in (ROOT / "router").rglob("*.py")}
    rooms = {part[0] for part in parts} | {part[1] for part in parts if part[0] == "core"}
    for room in rooms - {"__init__"}:
        assert re.search(rf"^ *(.* \| )?{room}( \| \w+)*  ", text, re.MULTILINE), room
