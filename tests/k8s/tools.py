"""The tools of .venv-k8s as functions: Helm twice, schemas of Kubernetes, checkov."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.k8s import install

REPO = install.REPO
CHART = REPO / "helm" / "warmroute"
BIN = install.VENV / "bin"
PYTHON = BIN / "python"
HELM = BIN / "helm"
KUBECTL = BIN / "kubectl"
TOOL_TIMEOUT_S = 180.0
RELEASE, NAMESPACE = "llm", "serving"

Document = dict[str, Any]


def run(command: Sequence[str | Path], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """What a tool says; its exit code is the caller's to judge."""
    return subprocess.run(
        [str(word) for word in command], input=text, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )


def in_tools(script: str, *arguments: str | Path, text: str | None = None) -> Any:
    """Run Python in .venv-k8s; what it prints is JSON."""
    done = run([PYTHON, "-c", script, *arguments], text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the Helm program."""
    return run([HELM, *words])


def template(*options: str | Path, release: str = RELEASE, chart: Path = CHART) -> list[Document]:
    """The chart as the Helm program renders it, `helm test` pods included."""
    done = helm("template", release, chart, "--namespace", NAMESPACE, *options)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Document]:
    """Every YAML document that is not empty."""
    return [document for document in yaml.safe_load_all(text) if document]
