"""deploy/wheels.py: for which Pythons and systems wheels are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy import wheels


def python(folder: Path, version: str, says: str, status: int = 0) -> Path:
    """A program that calls itself this interpreter."""
    folder.mkdir(exist_ok=True)
    made = folder / f"python{version}"
    made.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n", encoding="utf-8")
    made.chmod(0o755)
    return made


def test_every_supported_python_is_looked_for(tmp_path: Path) -> None:
    """The first on the PATH that runs and is what it is called; a stand-in for one that is not installed is passed
    over, and so is PyPy."""
    oldest, newest = wheels.supported()[0], wheels.supported()[-1]
    python(tmp_path / "one", oldest, f"cpython {oldest}", status=127)
    python(tmp_path / "one", newest, f"pypy {newest}")
    right = python(tmp_path / "two", oldest, f"cpython {oldest}")
    path = os.pathsep.join([str(tmp_path / "none"), str(tmp_path / "one"), str(tmp_path / "two")])
    assert wheels.interpreters(path) == {oldest: right}
    named = python(tmp_path / "three", newest, f"cpython {newest}")
    other = python(tmp_path / "three", "2.7", "cpython 2.7")
    assert wheels.interpreters(path, [named, other]) == {oldest: right, newest: named}


def test_the_oldest_glibc_counts() -> None:
    """A wheel may name several; one without any is for no other machine."""
    assert wheels.glibc_of("w-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl") == 17
    assert wheels.glibc_of("w-1-cp311-cp311-manylinux_2_26_aarch64.manylinux_2_28_aarch64.whl") == 26
    with pytest.raises(wheels.WheelError, match="linux_x86_64"):
        wheels.glibc_of("w-1-cp311-cp311-linux_x86_64.whl")
