"""The running build of the router: its version, its kind (native code or pure Python), and its commit.

The code does not call git. The image writes the commit into a file beside this module (deploy/Dockerfile). A clone or a
wheel has no such file, so the commit is unknown there.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict, dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from router import __version__

log = logging.getLogger(__name__)

COMMIT_FILE = Path(__file__).with_name("commit.txt")
COMMIT_CHARS_MAX = 64  # a git hash has 40 or 64 digits
NATIVE_MODULE = "router.core.types.requests"  # compiled if any module is compiled (deploy/compiled.py)


@dataclass(frozen=True, slots=True)
class Build:
    """Properties that distinguish builds of the router."""

    version: str
    native: bool  # True if the modules on the path of every request run as compiled code
    commit: str  # hash of the commit in hexadecimal; "" if unknown
    python: str  # version of the interpreter, such as 3.12.4

    def __str__(self) -> str:
        kind = "native code" if self.native else "pure Python"
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.version} ({kind}, Python {self.python}{commit})"


def build(commit_file: Path = COMMIT_FILE) -> Build:
    """Return the running build. `commit_file` contains the hash of its commit; the file may be absent."""
    spec = find_spec(NATIVE_MODULE)
    origin = (spec.origin or "") if spec is not None else ""
    return Build(
        __version__, origin.endswith(tuple(EXTENSION_SUFFIXES)), _commit(commit_file), platform.python_version()
    )


def log_start(admin_url: str) -> None:
    """Log the running build and the address of the dashboard, once for each start of the router."""
    fields = asdict(build()) | {"dashboard": f"{admin_url}/dashboard"}
    log.info("warmroute started", extra={"event": "started", "fields": fields})


def _commit(file: Path) -> str:
    """Return the hash in this file, or "" if the file is absent or contains anything else, such as `unknown`."""
    try:
        with file.open(encoding="ascii", errors="replace") as text:
            said = text.read(COMMIT_CHARS_MAX + 2).strip()
    except OSError:
        return ""
    return said if said and len(said) <= COMMIT_CHARS_MAX and not set(said) - set("0123456789abcdef") else ""
