"""The floors of the package: imports go down only. That every module can be imported first, `make check` looks at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import router

PACKAGE = Path(router.__file__).parent
# The core may not read a clock, open a socket or write a log, not even through what it imports of ours.
CORE_ALONE = """
import sys
import router.core.placement.router, router.core.dialects, router.core.fleet.engine_metrics, router.core.dialects.sse
upstairs = sorted(m for m in sys.modules if m.startswith("router.") and not m.startswith("router.core"))
heavy = sorted({"asyncio", "aiohttp", "uvloop", "prometheus_client", "yaml"} & set(sys.modules))
sys.exit(" ".join(upstairs + heavy) or 0)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter beside the package."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=50, check=False
    )


def test_imports_go_down_only() -> None:
    """The contracts in pyproject.toml hold: floors of the package and of the core, a pure core, one importer of
    prometheus_client, no instruments in the router."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    run = python("-c", program)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_parts_of_the_router_are_used_by_their_methods() -> None:
    """Outside of the core nothing reads the Router's table of replicas, its memory of answers or its explainer, and
    nothing writes to one of its parts."""
    table = re.compile(r"router\.(\w+\.)*(members\[|members\.|answers\b|explainer\b)")
    write = re.compile(r"router\.(\w+\.)*\w+ [-+|]?= ")
    outside = [path for path in PACKAGE.rglob("*.py") if "core" not in path.relative_to(PACKAGE).parts]
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in outside}
    assert len(texts) > 100
    found = [
        f"{name}: {hit[0]}" for name, text in texts.items() for each in (table, write) for hit in each.finditer(text)
    ]
    assert not found


def test_the_core_needs_nothing_above_it() -> None:
    """Importing all of the core loads nothing of the floors above and no event loop."""
    run = python("-c", CORE_ALONE)
    assert run.returncode == 0, run.stderr
