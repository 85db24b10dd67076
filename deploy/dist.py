"""Wheel and sdist with the same bytes on every machine: `SOURCE_DATE_EPOCH=N python -m deploy.dist OUT`.

Theory: two builds of one commit differ in the times, the modes and the order of files, and in other files of the clone.
So the sources are copied to an empty folder with one mode and one time, and setuptools (of the version locked in
requirements/build.lock) builds there. setuptools takes the sdist's tar and gzip headers from the machine, so the sdist
is packed again. See https://reproducible-builds.org/docs/archives/.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# The files in folders are those that the sdist needs to make its own wheel; MANIFEST.in puts them there.
FILES = (
    *("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "requirements/native.in"),
    *("deploy/backend.py", "deploy/compiled.py", "deploy/compiled_sources.py", "deploy/native_wheel.py"),
)
PACKAGES = ("router", "loadtest")
FOLDER_MODE, FILE_MODE = 0o755, 0o644
# A zip has no time before 1980: https://docs.python.org/3/library/zipfile.html#zipfile.ZipInfo
EPOCH_MIN_S = 315_532_800


def copy_sources(into: Path, epoch_s: int) -> None:
    """Copy only the sources of the wheel from the clone, with one mode and one time."""
    for name in FILES:
        (into / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(REPO / name, into / name)
    for name in PACKAGES:
        shutil.copytree(REPO / name, into / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in [*into.rglob("*"), into]:
        path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        os.utime(path, (epoch_s, epoch_s))


def repack(sdist: Path, epoch_s: int) -> None:
    """Rewrite the archive with its members in order and without owner, original mode or time."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, member.size, epoch_s
            clean.mode = FOLDER_MODE if member.isdir() else FILE_MODE
            new.addfile(clean, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch_s) as compressed:
        compressed.write(packed.getvalue())


def build(out: Path, epoch_s: int) -> list[Path]:
    """Make both in `out`; setuptools must be installed. Its own output goes to standard error."""
    from setuptools import build_meta  # type: ignore[import-untyped]  # only where the wheel is made

    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    before, spoken = Path.cwd(), os.dup(1)
    os.dup2(2, 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy_sources(Path(folder), epoch_s)
            os.chdir(folder)
            sdist = out / build_meta.build_sdist(str(out))
            wheel = out / build_meta.build_wheel(str(out))
            os.chdir(before)
    finally:
        os.dup2(spoken, 1)
        os.close(spoken)
    repack(sdist, epoch_s)
    return [wheel, sdist]


def main() -> int:
    """Run the command line; 2 without a time."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dist", description="reproducible wheel and sdist")
    parser.add_argument("out", type=Path, help="folder for both")
    out: Path = parser.parse_args().out
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch.isdigit() or int(epoch) < EPOCH_MIN_S:
        print("SOURCE_DATE_EPOCH must be seconds since 1970, after 1979: the time of the commit", file=sys.stderr)
        return 2
    for path in build(out, int(epoch)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
