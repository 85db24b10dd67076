"""The floors of the package: imports go down only. That every module can be imported first, `make check` looks at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import router
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.observations import Observations
from router.core.fleet.registry import Fleet
from router.core.placement.answer_feedback import OutcomeFeedback
from router.core.placement.disaggregator import Disaggregator

PACKAGE = Path(router.__file__).parent
# Modules that construct parts around a Router.
CONSTRUCTING = {
    "control/control_plane.py",
    "control/peer_routers.py",
    "control/wiring.py",
    "telemetry/metrics/__init__.py",
}
PARTS = {
    "fleet": Fleet,
    "fitness": Eligibility,
    "observations": Observations,
    "outcomes": OutcomeFeedback,
    "disaggregator": Disaggregator,
}
READ = {("fleet", "share"), ("fleet", "pulls"), ("outcomes", "unannounced")}
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
    """Outside of the core, methods of the Router's parts are called, and READ is all that is read of them. Nothing
    reads the Router's memory of answers or its explainer, and nothing writes to a part. Only the modules that construct
    parts pass the registry to a part that needs nothing else."""
    use = re.compile(r"router\.(fleet|fitness|observations|outcomes|disaggregator)\.(\w+)")
    hidden = re.compile(
        r"router\.(answers|explainer)\b|router\.(\w+\.)*\w+ [-+|]?= |fleet\.members(\[|\.(pop|clear|update))"
    )
    passed = re.compile(r"router\.(fleet|fitness)\b(?!\.)")
    outside = [path for path in PACKAGE.rglob("*.py") if "core" not in path.relative_to(PACKAGE).parts]
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in outside}
    used = {(part, name) for text in texts.values() for part, name in use.findall(text)}
    assert len(used) > 20
    assert {(part, name) for part, name in used if not callable(getattr(PARTS[part], name, None))} == READ
    assert not [f"{name}: {hit[0]}" for name, text in texts.items() for hit in hidden.finditer(text)]
    assert {name for name, text in texts.items() if passed.search(text)} == CONSTRUCTING


def test_the_core_needs_nothing_above_it() -> None:
    """Importing all of the core loads nothing of the floors above and no event loop."""
    run = python("-c", CORE_ALONE)
    assert run.returncode == 0, run.stderr
