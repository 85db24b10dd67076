"""Which build of the router runs: its version, whether its core is native code, and the commit that it was made from.

Nothing is asked of git. The image writes the commit into a file beside this module (deploy/Dockerfile); a clone or a
wheel has no such file, and then the commit is not known.
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
COMMIT_CHARS_MAX = 64  # a hash of git has 40 or 64
NATIVE_MODULE = "router.core.facts.requests"  # compiled wherever any module is (deploy/compiled.py)


@dataclass(frozen=True, slots=True)
class Build:
    """What tells one build of the router from another."""

    version: str
    native: bool  # whether the modules that every request passes run as compiled code
    commit: str  # hash of the commit in hexadecimal; "" where it is not known
    python: str  # version of the interpreter, such as 3.12.4

    def __str__(self) -> str:
        kind = "native code" if self.native else "pure Python"
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.version} ({kind}, Python {self.python}{commit})"


def build(commit_file: Path = COMMIT_FILE) -> Build:
    """The build that runs here. `commit_file` holds the hash of its commit; it may be absent."""
    spec = find_spec(NATIVE_MODULE)
    origin = (spec.origin or "") if spec is not None else ""
    return Build(
        __version__, origin.endswith(tuple(EXTENSION_SUFFIXES)), _commit(commit_file), platform.python_version()
    )


def tell_build() -> None:
    """Log which build has started, once for each start of the router."""
    log.info("warmroute has started", extra={"event": "started", "fields": asdict(build())})


def _commit(file: Path) -> str:
    """The hash in this file; "" for one that is absent or holds anything else, such as `unknown`."""
    try:
        with file.open(encoding="ascii", errors="replace") as text:
            said = text.read(COMMIT_CHARS_MAX + 2).strip()
    except OSError:
        return ""
    return said if said and len(said) <= COMMIT_CHARS_MAX and not set(said) - set("0123456789abcdef") else ""
