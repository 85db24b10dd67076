"""`python -m deploy.gateway`: writes `helm/warmroute/files/gateway.yaml`, which the chart's templates read.

The file has the rules that a gateway must apply by itself while no picker answers. The suite fails while the file
differs from the output of this module.
"""

from __future__ import annotations

import sys
from pathlib import Path

from router.ingress import gateway_rules

TARGET = Path(__file__).resolve().parents[1] / "helm" / "warmroute" / "files" / "gateway.yaml"
HEAD = "# Made by `make manifests` of router/ingress/gateway_rules.py, which explains the lists.\n"


def text() -> str:
    """Return the file."""
    lists = {
        "forgeable": gateway_rules.FORGEABLE,
        "secrets": gateway_rules.SECRETS,
        "prompts": gateway_rules.PROMPT_PATHS,
        "passthrough": gateway_rules.PASSED_PATHS,
    }
    return HEAD + "".join(f"{name}:\n" + "".join(f"  - {each}\n" for each in found) for name, found in lists.items())


def main() -> int:
    """Write the file."""
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
