"""The tool that renames (deploy/renaming), on a small tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from deploy.renaming.proof import compare
from deploy.renaming.table import read_table
from tests.house.documents import ROOT

SHAPES = '''"""Shapes (hub/shapes.py)."""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Protocol

class Told(Protocol):
    def heard(self, told: int) -> int: ...

@dataclass
class Box:
    """A `Box`."""
    told: int = 0

    def heard(self, told: int) -> int:
        self.told = told
        return self.told

class Other:
    told = "its own"

    def free(self) -> str:
        return self.told

def moved(box: Box) -> Box:
    return replace(box, told=box.told + 1)
'''
USER = """from __future__ import annotations
from router.hub import shapes
from router.hub.shapes import Box, Told, moved

def use(it: Told, moved_by: int) -> str:
    box = moved(Box(told=moved_by))
    return f"{it.heard(box.told)} {shapes.Other().told} {getattr(box, 'told')} told"
"""
MAP = {
    "modules": {"router.hub": "router.control", "router.hub.shapes": "router.control.forms"},
    "names": {"router.hub.shapes.Box": "Case", "router.hub.shapes.moved": "shift", "router.hub.shapes.gone": "x"},
    "members": {"router.hub.shapes.Box.told": "count", "router.hub.shapes.Told.heard": "receive"},
}


def tree(root: Path) -> Path:
    """A tree of git with these modules."""
    for name, text in {"__init__": "", "hub/__init__": "", "hub/shapes": SHAPES, "user": USER}.items():
        path = root / f"router/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "pyproject.toml").write_text("[tool.mypy]\nstrict = true\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    subprocess.run(["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"], check=True)
    return root


def test_names_follow_scopes_and_members_their_types(tmp_path: Path) -> None:
    """Files move, imports follow; of two members of one name only that of the map changes, with the implementation of
    its protocol; keywords, `replace` and getattr follow; parameters, locals and words do not. The proof agrees."""
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new")
    table = tmp_path / "names.json"
    table.write_bytes(msgspec.json.encode(MAP))
    command = [sys.executable, "-m", "deploy.renaming", "--root", new, "--map", table, "--write"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "refused router.hub.shapes.gone: 1: is gone" in run.stdout
    forms = (new / "router/control/forms.py").read_text()
    assert "Shapes (control/forms.py)" in forms
    assert "A `Case`." in forms
    assert "def receive(self, told: int)" in forms
    assert forms.count("receive") == 2
    assert "self.count = told" in forms
    assert 'told = "its own"' in forms
    assert "replace(box, count=box.count + 1)" in forms
    user = (new / "router/user.py").read_text()
    assert "from router.control import forms\nfrom router.control.forms import Case, Told, shift" in user
    assert "shift(Case(count=moved_by))" in user
    assert "{it.receive(box.count)} {forms.Other().told} {getattr(box, 'count')} told" in user
    assert not [why for _, why, _ in compare(old, new, read_table(table)) if why]
    (new / "router/user.py").write_text(user.replace("box = shift", "box = 1 and shift"))
    assert [path for path, why, _ in compare(old, new, read_table(table)) if why] == ["router/user.py"]
