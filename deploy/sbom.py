"""Bill of materials of a lock, as CycloneDX: `python -m deploy.sbom requirements/image.lock OUT`.

The tool reads names, versions and hashes from the lock. The router itself is added here, because its version is in its
code. The output does not depend on time or machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
TOOL_TIMEOUT_S = 120.0


def version() -> str:
    """Return the router's version without importing it, because its dependencies may be missing."""
    found = re.search(r'^__version__ = "([^"]+)"$', (REPO / "router" / "__init__.py").read_text("utf-8"), re.MULTILINE)
    if not found:
        raise ValueError("router/__init__.py has no __version__")
    return found[1]


def bill(lock: Path) -> dict[str, Any]:
    """Return all packages of the lock, below the router. Raises CalledProcessError if the tool fails."""
    tool = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
    done = subprocess.run(
        [*tool, "--of", "JSON", "--pyproject", str(REPO / "pyproject.toml"), str(lock)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=TOOL_TIMEOUT_S,
    )
    made: dict[str, Any] = json.loads(done.stdout)
    made["metadata"]["component"] |= {"version": version(), "purl": f"pkg:pypi/warmroute@{version()}"}
    for component in made["components"]:
        del component["description"]  # the lock's own lines once more
    root = made["metadata"]["component"]["bom-ref"]
    parts = sorted(component["bom-ref"] for component in made["components"])
    made["dependencies"] = [{"ref": root, "dependsOn": parts}, *({"ref": part} for part in parts)]
    return made


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.sbom", description="CycloneDX of a lock")
    parser.add_argument("lock", type=Path)
    parser.add_argument("out", type=Path, help="folder for the file")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"warmroute-{version()}.cdx.json"
    path.write_text(json.dumps(bill(options.lock), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
