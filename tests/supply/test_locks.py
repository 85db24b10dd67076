"""requirements/: everything locked, hashed, above the floors, and installable as it is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.supply.install import REPO, VENV
from tests.supply.tool import program, tool

REQUIREMENTS = REPO / "requirements"
PYPROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
FLOORS: dict[str, dict[str, Any]] = tomllib.loads((REQUIREMENTS / "floors.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["optional-dependencies"]
# What each lock is for: the requirements that it must fulfil.
WANTED = {
    "runtime": PROJECT["dependencies"],
    "image": [*PROJECT["dependencies"], *EXTRAS["kubernetes"], *EXTRAS["tokenizers"], *EXTRAS["tracing"]],
    "demo": [
        *PROJECT["dependencies"],
        *(each for extra in ("kubernetes", "tokenizers", "tracing", "demo") for each in EXTRAS[extra]),
    ],
    "build": PYPROJECT["build-system"]["requires"],
    "native": re.findall(r"^\w[^\s#]*", (REQUIREMENTS / "native.in").read_text("utf-8"), re.MULTILINE),
}
RUNTIME_DEPENDENCIES_MAX = 10
INSTALL_TIMEOUT_S = 300.0
ENTRY = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)", re.MULTILINE)


@dataclass(frozen=True)
class Locked:
    """One package of a lock."""

    version: Version
    hashes: int


def text_of(name: str) -> str:
    """A lock as it is written."""
    return (REQUIREMENTS / f"{name}.lock").read_text(encoding="utf-8")


def lock_of(name: str) -> dict[str, Locked]:
    """A lock's packages by their normalised names."""
    return {
        canonicalize_name(found[1]): Locked(Version(found[2]), found[3].count("--hash"))
        for found in ENTRY.finditer(text_of(name))
    }


def every_requirement() -> list[Requirement]:
    """Every range in pyproject.toml, but the extras of our own name."""
    lines = [
        *PROJECT["dependencies"],
        *PYPROJECT["build-system"]["requires"],
        *(e for each in EXTRAS.values() for e in each),
    ]
    return [Requirement(line) for line in lines if canonicalize_name(Requirement(line).name) != "warmroute"]


@pytest.mark.parametrize("name", sorted(WANTED))
def test_lock_fulfils_the_project(name: str) -> None:
    """What pyproject.toml asks for is locked, at a version that it allows."""
    locked = lock_of(name)
    for line in WANTED[name]:
        wanted = Requirement(line)
        found = locked.get(canonicalize_name(wanted.name))
        assert found, f"{wanted.name} is not in {name}.lock: make lock"
        assert found.version in wanted.specifier, f"{wanted.name} {found.version} is not {wanted.specifier}: make lock"


@pytest.mark.promise("The image is locked by version and hash and built from wheels only.", "supply")
@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_line_is_pinned_and_hashed(name: str) -> None:
    """Nothing in a lock but exact versions with hashes and comments: no index, no URL, no option."""
    assert all(package.hashes for package in lock_of(name).values())
    rest = [line for line in ENTRY.sub("", text_of(name)).splitlines() if line and not line.lstrip().startswith("#")]
    assert rest == []
    assert "://" not in text_of(name)
    assert str(REPO) not in text_of(name)


def test_build_input_is_the_projects() -> None:
    """requirements/build.in asks for what [build-system] asks for."""
    lines = [line.partition("#")[0].strip() for line in (REQUIREMENTS / "build.in").read_text("utf-8").splitlines()]
    assert [line for line in lines if line] == PYPROJECT["build-system"]["requires"]


def test_locks_agree() -> None:
    """A package has one version in all locks: what was tried with the demo is what the image runs."""
    demo = lock_of("demo")
    for name in ("runtime", "image"):
        for package, locked in lock_of(name).items():
            assert demo[package] == locked, f"{package} of {name}.lock"


@pytest.mark.promise("No lock and no version range permits a version below `requirements/floors.toml`.", "supply")
@pytest.mark.parametrize("name", sorted(WANTED))
def test_no_lock_is_below_a_floor(name: str) -> None:
    """No locked version has a vulnerability that floors.toml knows of."""
    below = [
        f"{package} {locked.version} < {FLOORS[package]['floor']}: {', '.join(FLOORS[package]['fixes'])}"
        for package, locked in lock_of(name).items()
        if package in FLOORS and locked.version < Version(FLOORS[package]["floor"])
    ]
    assert below == []


@pytest.mark.promise("No lock and no version range permits a version below `requirements/floors.toml`.", "supply")
def test_no_range_reaches_below_a_floor() -> None:
    """Whoever installs without a lock gets no version with a known vulnerability either."""
    low = []
    for requirement in every_requirement():
        floor = FLOORS.get(canonicalize_name(requirement.name))
        if floor:
            least = min(Version(each.version) for each in requirement.specifier if each.operator in (">=", "=="))
            if least < Version(floor["floor"]):
                low.append(f"{requirement} reaches below {floor['floor']}: {', '.join(floor['fixes'])}")
    assert low == []


def test_floors_name_their_reason() -> None:
    """Every floor is a version and says which vulnerabilities it is for."""
    for package, floor in FLOORS.items():
        assert package == canonicalize_name(package)
        assert Version(floor["floor"])
        assert floor["fixes"]
        assert all(re.fullmatch(r"(CVE-\d{4}-\d{4,}|GHSA(-[0-9a-z]{4}){3})", fix) for fix in floor["fixes"])


@pytest.mark.promise("At most ten packages are needed to run.", "supply")
def test_few_dependencies() -> None:
    """The router itself asks for at most ten packages."""
    assert len(PROJECT["dependencies"]) <= RUNTIME_DEPENDENCIES_MAX


def pip_upon(venv: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """What pip says of an environment that has none."""
    command = [VENV / "bin" / "python", "-m", "pip", "--python", venv / "bin" / "python", *words]
    return program(command, timeout_s=INSTALL_TIMEOUT_S)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the lock of the image in it, as the Dockerfile makes it."""
    venv = tmp_path_factory.mktemp("locked") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=INSTALL_TIMEOUT_S)
    install = ("install", "--quiet", "--no-compile", "--disable-pip-version-check")
    done = pip_upon(venv, *install, "--require-hashes", "--only-binary", ":all:", "-r", REQUIREMENTS / "image.lock")
    assert done.returncode == 0, done.stderr
    return venv


@pytest.mark.promise("The image is locked by version and hash and built from wheels only.", "supply")
def test_lock_is_complete(installed: Path) -> None:
    """With hashes asked for, pip takes the lock: nothing that any package needs is missing or contradicts another, and
    nothing is installed that the lock does not name."""
    done = pip_upon(installed, "check")
    assert done.returncode == 0, done.stdout
    listed = pip_upon(installed, "freeze", "--all")
    assert listed.returncode == 0, listed.stderr
    there = {canonicalize_name(line.partition("==")[0]) for line in listed.stdout.split()}
    assert there == set(lock_of("image"))


@pytest.mark.promise("The image is locked by version and hash and built from wheels only.", "supply")
def test_another_files_hash_is_refused(tmp_path: Path) -> None:
    """A package whose bytes are not those that were locked is not installed."""
    line = re.sub(r"[0-9a-f]{64}", "0" * 64, next(ENTRY.finditer(text_of("runtime")))[0])
    forged = tmp_path / "forged.lock"
    forged.write_text(line + "\n", encoding="utf-8")
    done = tool("python", "-m", "pip", "download", "-q", "--require-hashes", "--no-deps", "-d", tmp_path, "-r", forged)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
