r"""`python -m deploy.manifests`: renders the chart's examples to `deploy/manifests/`, for users without Helm.

    sed 's/\bdefault\b/NAMESPACE/' deploy/manifests/vllm.yaml | kubectl apply -f -

Labels that mark the objects as managed by Helm are left out. Helm itself is the one in `.venv-k8s`
(`python -m tests.k8s.install`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "warmroute"
HELM = ROOT / ".venv-k8s" / "bin" / "helm"
TARGET = Path(__file__).with_name("manifests")
# Each needs only one kind of engine. Other examples name Secrets, volumes and namespaces of a particular user.
EXAMPLES = ("vllm", "sglang")
NAMESPACE = "default"
HELM_TIMEOUT_S = 60.0
HEAD = """\
# Rendered from helm/warmroute by `make manifests`; change the chart, not this file.
# Routers and engines are in the namespace `default`; for another namespace replace this word everywhere.
# Replace registry.example.com with the location of your image. The settings are the annotation `warmroute/settings` of
# the Deployment's pods: applying a changed file starts a rollout of the routers.
"""


def release(example: str) -> str:
    """Return the name of all objects in a file, different in each: two releases may run beside each other."""
    return f"warmroute-{example}"


def render(example: str) -> str:
    """Return one file of manifests. Raises CalledProcessError, with Helm's message in `stderr`."""
    values = CHART / "examples" / f"{example}.yaml"
    command = [HELM, "template", release(example), CHART, "--namespace", NAMESPACE, "--skip-tests", "--values", values]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HELM_TIMEOUT_S)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    kept = [
        line for line in lines if line and not re.match(r" +(helm\.sh/chart|app\.kubernetes\.io/managed-by):", line)
    ]
    return HEAD + "\n".join(kept) + "\n"


def main() -> int:
    """Write the files."""
    TARGET.mkdir(exist_ok=True)
    for example in EXAMPLES:
        (TARGET / f"{example}.yaml").write_text(render(example), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
