"""`pip install` as a stranger runs it: native code where there is a C compiler, pure Python where there is none; and
wheels for other machines."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from deploy.compiled import MODULES
from loadtest.common.processes import free_ports
from router import __version__
from tests.supply.install import REPO, VENV
from tests.supply.tool import program, quick_compiler, tool

EPOCH_S = "1700000000"
BUILD_TIMEOUT_S = 850.0  # a minute on two cores that do nothing else
START_TIMEOUT_S = 60.0
ORIGINS = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution: whoever has it has neither the clone nor its tests."""
    out = tmp_path_factory.mktemp("sdist")
    done = tool("python", "-m", "deploy.dist", out, SOURCE_DATE_EPOCH=EPOCH_S)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.tar.gz"))


def built(sdist: Path, place: Path, **environment: str) -> Path:
    """The wheel that pip builds of the sdist, in an environment of its own as for `pip install`; the time that it took
    is printed."""
    place.mkdir()
    began_s, before = time.monotonic(), os.times()
    words = ["-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "-w", place]
    done = program([sys.executable, *words, sdist], cwd=place, timeout_s=BUILD_TIMEOUT_S, **environment)
    assert done.returncode == 0, done.stdout[-4000:]
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"\nbuilt in {time.monotonic() - began_s:.0f} s, {cpu_s:.0f} s of CPU")
    [said] = re.findall(r"^\s*warmroute: (native code|pure Python.*)$", done.stdout + done.stderr, re.MULTILINE)
    print(f"warmroute: {said}")
    return next(place.glob("warmroute-*.whl"))


def installed(wheel: Path, place: Path) -> Path:
    """A fresh environment with the router, and the extra that compiled modules import."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=BUILD_TIMEOUT_S)
    install = ["install", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", f"{wheel}[gateway]"]
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
    done = program([*pip, *install], cwd=place, timeout_s=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    return place / "bin"


@pytest.fixture(scope="module")
def native(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds where a C compiler is."""
    folder = tmp_path_factory.mktemp("native")
    return built(sdist, folder / "wheel", WARMROUTE_NATIVE="1", CC=str(quick_compiler(folder / "cc", "cc")))


def origins(python: Path, cwd: Path) -> set[str]:
    """What the endings are of the files that compiled modules are imported from."""
    names = [module.removesuffix(".py").replace("/", ".") for module in MODULES]
    done = program([python, "-c", ORIGINS, *names], cwd=cwd)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.split()]
    assert len(files) == len(MODULES)
    assert all("site-packages" in file.parts for file in files)
    return {file.suffix for file in files}


def serves(warmroute: Path, cwd: Path) -> str:
    """What the admin listener's first page says of a router that has been started with this command."""
    ports = free_ports(2)
    words = ["serve", "--replica", "http://127.0.0.1:9", f"--port={ports[0]}", f"--admin-port={ports[1]}"]
    router = subprocess.Popen([warmroute, *words], cwd=cwd, stdout=subprocess.PIPE)
    assert router.stdout is not None
    try:
        said, _, _ = select.select([router.stdout], [], [], START_TIMEOUT_S)
        assert said
        assert router.stdout.readline().startswith(b"listening ")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/", timeout=60) as answer:
            page: str = answer.read().decode()
            return page
    finally:
        router.kill()
        router.wait()
        router.stdout.close()


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
def test_with_a_compiler_it_is_native(native: Path, tmp_path: Path) -> None:
    """Every module that deploy/compiled.py names is imported from its library, the router serves and says so; nothing
    that made it came with it."""
    place = installed(native, tmp_path / "venv")
    kind = f"warmroute {__version__} (native code, Python 3."
    assert program([place / "warmroute", "--version"], cwd=tmp_path).stdout.startswith(kind)
    assert origins(place / "python", tmp_path) == {".so"}
    assert serves(place / "warmroute", tmp_path).startswith(kind)
    for name in ("mypy", "mypyc", "deploy"):
        assert program([place / "python", "-c", f"import {name}"], cwd=tmp_path).returncode == 1, name


def test_without_a_compiler_it_is_pure_and_works(sdist: Path, tmp_path: Path) -> None:
    """The installation succeeds, and the router serves and says so."""
    place = installed(built(sdist, tmp_path / "wheel", CC="/bin/false"), tmp_path / "venv")
    kind = f"warmroute {__version__} (pure Python, Python 3."
    assert program([place / "warmroute", "--version"], cwd=tmp_path).stdout.startswith(kind)
    assert origins(place / "python", tmp_path) == {".py"}
    assert serves(place / "warmroute", tmp_path).startswith(kind)


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="no C compiler is here, or no Linux")
def test_wheels_are_for_any_linux(native: Path, tmp_path: Path) -> None:
    """`deploy.wheels` has one for this Python, which auditwheel finds fit for Linux of many years, tries it, and says
    what was not made. What compiles is the same as for `pip install` (deploy/native_wheel.py), so that is not done
    again."""
    oldest = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "SOURCE_DATE_EPOCH": EPOCH_S}
    words = ["-m", "deploy.wheels", tmp_path, "--python", Path(sys.executable).resolve(), "--made", native]
    done = program([VENV / "bin" / "python", *words], cwd=REPO, timeout_s=BUILD_TIMEOUT_S, **oldest)
    assert done.returncode == 0, done.stderr[-4000:]
    names = [Path(line).name for line in done.stdout.split()]
    this = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert [name for name in names if f"-{this}-{this}-manylinux_2_" in name or f"-{this}-{this}-manylinux2014" in name]
    assert "run this on such a machine" in done.stderr
