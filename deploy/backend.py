"""Build backend for pip (PEP 517): setuptools, with native code in its wheel if that can be built.

Theory: setuptools makes the pure wheel as before, and native_wheel.py puts libraries into it. The C compiler and
Python's headers are tried before anything is fetched. So mypyc is not downloaded without a compiler, or for an editable
installation. A pure wheel is better than no wheel: if native code fails, the pure wheel remains, with a line that
states the reason. `pip install -v` shows the line, and `warmroute --version` the kind of wheel.

With WARMROUTE_NATIVE=1 such a failure fails the build, and WARMROUTE_NATIVE=0 selects the pure wheel.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import build_meta  # type: ignore[import-untyped]  # likewise
from setuptools.build_meta import (  # type: ignore[import-untyped]  # ships no types
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

REPO = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPO / "requirements" / "native.in"
VARIABLE = "WARMROUTE_NATIVE"
TRIAL = "#include <Python.h>\nint warmroute(void) { return PY_VERSION_HEX > 0; }\n"
TRIAL_TIMEOUT_S = 60.0
Settings = dict[str, Any] | None


class NoNativeCodeError(Exception):
    """Native code was required (WARMROUTE_NATIVE=1) and cannot be built; the message names the reason."""


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return requirements of the wheel beyond `[build-system]`: those of native code if it is to be tried."""
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return needed if why_pure() else [*needed, *native_requirements()]


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Make the wheel in this folder, and return its name. Raises NoNativeCodeError."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    why = why_pure() or missing()
    if not why:
        name, why = _with_libraries(Path(wheel_directory, name))
    if why and os.environ.get(VARIABLE) == "1":
        raise NoNativeCodeError(f"{VARIABLE}=1, and {why}")
    print(f"warmroute: pure Python, slower: {why}" if why else "warmroute: native code", file=sys.stderr, flush=True)
    return name


def native_requirements() -> list[str]:
    """Return the packages that build native code, with those that provide their types."""
    return re.findall(r"^\w[^\s#]*", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)


def why_pure() -> str:
    """Return the reason not to try native code here, or "". Raises NoNativeCodeError for an invalid setting."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise NoNativeCodeError(f"{VARIABLE} must be 1 (native code or an error), 0 (none) or not set, not {wanted!r}")
    if wanted == "0":
        return f"{VARIABLE}=0"
    if sys.implementation.name != "cpython" or os.name != "posix":
        return f"native code is for CPython on Linux and macOS; this is {sys.implementation.name} on {sys.platform}"
    return _no_compiler()


def missing() -> str:
    """Return the missing packages that native code needs, in a sentence, or ""."""
    absent = [name for name in ("mypyc", "wheel", "packaging") if find_spec(name) is None]
    return f"{', '.join(absent)} cannot be imported: build isolation is turned off" if absent else ""


def _no_compiler() -> str:
    """Return the reason why the C compiler cannot compile with Python's headers, or ""."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory(prefix="warmroute-trial-") as folder:
        source, made = Path(folder, "trial.c"), Path(folder, "trial.o")
        source.write_text(TRIAL, encoding="utf-8")
        headers = [f"-I{sysconfig.get_path(each)}" for each in ("include", "platinclude")]
        words = [*command, *headers, "-fPIC", "-c", str(source), "-o", str(made)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=TRIAL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C compiler {command[0]!r} does not run: {error}"
        if made.exists() and done.returncode == 0:
            return ""
    said = (done.stderr.strip().splitlines() or ["no output"])[0]
    return f"the C compiler {shlex.join(command)!r} cannot use Python's headers: {said}"


def _with_libraries(wheel: Path) -> tuple[str, str]:
    """Put native code into this wheel, in a separate process: compilers may kill it, and it needs memory.

    Returns the wheel's new name, and the reason why it has no native code.
    """
    words = [sys.executable, "-m", "deploy.native_wheel", str(wheel.resolve())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(words, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        return wheel.name, f"compilation of native code failed (exit status {done.returncode}); see the lines above"
    return done.stdout.split()[-1], ""
