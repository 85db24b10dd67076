"""A native wheel from the pure one: `python -m deploy.native_wheel WHEEL`.

It is the same wheel with libraries beside the modules (compiled.py), for this Python and this platform only. The new
one replaces the old one, and its name is the last printed word.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from packaging import tags

from deploy.compiled import compile_into


def tag() -> str:
    """Return the Python, ABI and platform of the libraries, such as `cp311-cp311-linux_x86_64`."""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return str(next(tags.cpython_tags(platforms=[platform])))


def marked(about: str, of: str) -> str:
    """Return a pure wheel's WHEEL as that of one with libraries. Raises ValueError if it is not of a pure wheel."""
    about, pure = re.subn(r"^Root-Is-Purelib: true$", "Root-Is-Purelib: false", about, flags=re.MULTILINE)
    about, tagged = re.subn(r"^Tag: py3-none-any$", f"Tag: {of}", about, flags=re.MULTILINE)
    if (pure, tagged) != (1, 1):
        raise ValueError(f"not a pure wheel: {about}")
    return about


def make_native(wheel: Path) -> Path:
    """Put libraries into this pure wheel. Returns the wheel that replaces it, beside it."""
    with tempfile.TemporaryDirectory(prefix="warmroute-wheel-") as folder:
        _wheel("unpack", "--dest", folder, str(wheel))
        [root] = Path(folder).iterdir()
        compile_into(root, sys.executable, sources_too=False)
        [about] = root.glob("*.dist-info/WHEEL")
        about.write_text(marked(about.read_text(encoding="utf-8"), tag()), encoding="utf-8")
        _wheel("pack", "--dest-dir", str(wheel.parent), str(root))
    [made] = wheel.parent.glob(f"{wheel.name.removesuffix('-py3-none-any.whl')}-{tag()}.whl")
    wheel.unlink()
    return made


def _wheel(*words: str) -> None:
    """Run the command line of the package `wheel`, which keeps RECORD correct."""
    subprocess.run([sys.executable, "-m", "wheel", *words], check=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.native_wheel", description="libraries in a pure wheel")
    parser.add_argument("wheel", type=Path, help="pure wheel, which a native one takes the place of")
    print(make_native(parser.parse_args().wheel).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
