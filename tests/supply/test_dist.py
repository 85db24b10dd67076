"""Wheel, sdist and bill of materials: the same bytes from every clone, and nothing left out."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from router import __version__
from tests.supply.install import REPO
from tests.supply.test_locks import lock_of
from tests.supply.tool import tool

EPOCH_S = "1700000000"
SOURCES = ("deploy", "requirements", "router", "loadtest", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def clone(into: Path, mode: int) -> Path:
    """Another clone: elsewhere, of another age, with other modes, and with things lying about in it."""
    into.mkdir(parents=True)
    for name in SOURCES:
        source = REPO / name
        shutil.copytree(source, into / name) if source.is_dir() else shutil.copy(source, into / name)
    for path in into.rglob("*"):
        path.chmod(mode | 0o111 if path.is_dir() else mode)
        os.utime(path, (1_600_000_000 + mode, 1_600_000_000 + mode))
    (into / "router" / "__pycache__").mkdir(exist_ok=True)
    (into / "router" / "__pycache__" / "left.pyc").write_bytes(b"over")
    (into / "build" / "lib" / "router").mkdir(parents=True)
    (into / "build" / "lib" / "router" / "stale.py").write_text("stale = True\n", encoding="utf-8")
    return into


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both archives, made twice as differently as one machine allows."""
    made = []
    for name, mode, zone, seed in (("one", 0o644, "UTC", "1"), ("elsewhere/two", 0o600, "Asia/Tokyo", "2")):
        root = clone(tmp_path_factory.mktemp("clone") / name, mode)
        environment = {"SOURCE_DATE_EPOCH": EPOCH_S, "TZ": zone, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = tool("python", "-m", "deploy.dist", root / "dist", cwd=root, **environment)
        assert done.returncode == 0, done.stderr
        assert [Path(line).parent for line in done.stdout.split()] == [root / "dist"] * 2
        made.append(root / "dist")
    return made


@pytest.mark.promise("Wheel and sdist are reproducible byte by byte, and the image has that wheel.", "supply")
def test_the_same_bytes_from_every_clone(twice: list[Path]) -> None:
    """Neither place nor time, mode, time zone, hash seed or leftovers change a byte of wheel and sdist."""
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in twice)
    assert set(first) == {f"warmroute-{__version__}-py3-none-any.whl", f"warmroute-{__version__}.tar.gz"}
    assert first == second


def test_wheel_holds_the_package_and_nothing_else(twice: list[Path]) -> None:
    """Every module is in it, with the traces and the licence; no test, no leftover."""
    names = set(zipfile.ZipFile(next(twice[0].glob("*.whl"))).namelist())
    modules = {
        str(path.relative_to(REPO)) for package in ("router", "loadtest") for path in (REPO / package).rglob("*.py")
    }
    assert modules <= names
    assert not [name for name in names if name.startswith(("tests", "deploy", "build")) or "stale" in name]
    assert [name for name in names if name.endswith("LICENSE")]
    assert "loadtest/data/claude_code_sessions.jsonl.gz" in names


def test_sdist_tells_nobody_who_made_it(twice: list[Path]) -> None:
    """No name, no number of a user, one time for all members."""
    with tarfile.open(next(twice[0].glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    assert len(members) > 100
    assert {(each.uid, each.gid, each.uname, each.gname, each.mtime) for each in members} == {
        (0, 0, "", "", int(EPOCH_S))
    }


def test_a_time_is_needed() -> None:
    """Without SOURCE_DATE_EPOCH nothing is made: it would differ the next day."""
    done = tool("python", "-m", "deploy.dist", "nowhere", SOURCE_DATE_EPOCH="")
    assert done.returncode == 2
    assert "SOURCE_DATE_EPOCH" in done.stderr
    assert not (REPO / "nowhere").exists()


@pytest.mark.promise("The bill of materials names each locked package with its hashes.", "supply")
def test_bill_of_materials_names_every_locked_package(tmp_path: Path) -> None:
    """The CycloneDX file has the router itself and each package of the image's lock, by version, with hashes, and is
    the same when it is made again."""
    made = []
    for folder in ("one", "two"):
        done = tool("python", "-m", "deploy.sbom", "requirements/image.lock", tmp_path / folder)
        assert done.returncode == 0, done.stderr
        made.append(Path(done.stdout.strip()).read_bytes())
    assert made[0] == made[1]
    bill = json.loads(made[0])
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/warmroute@{__version__}"
    named = {component["name"]: component for component in bill["components"]}
    locked = lock_of("image")
    assert {name: each["version"] for name, each in named.items()} == {
        n: str(each.version) for n, each in locked.items()
    }
    for name, component in named.items():
        hashes = [each for reference in component["externalReferences"] for each in reference.get("hashes", [])]
        assert len(hashes) == locked[name].hashes
