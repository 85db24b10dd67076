"""Tests of what runs on Kubernetes need the tools of .venv-k8s; the chart's examples are rendered once for all."""

from __future__ import annotations

import pytest

from tests.k8s import install
from tests.k8s.tools import EXAMPLES, Document, documents, example, template


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Without the tools nothing here says anything: a failure, never a skip."""
    if not install.installed():
        pytest.fail("tools are not installed: python -m tests.k8s.install", pytrace=False)


@pytest.fixture(scope="session")
def rendered(tools: None) -> dict[str, list[Document]]:
    """Every example by its name, as the Helm program renders it; `default` is the chart with the one value it needs."""
    found = {name: template("--values", example(name)) for name in EXAMPLES}
    return found | {"default": template("--set", "config.discovery.selector=app=vllm")}


@pytest.fixture(scope="session")
def everything(rendered: dict[str, list[Document]]) -> dict[str, list[Document]]:
    """All that, and the sidecar."""
    return rendered | {"sidecar": documents(example("sidecar").read_text(encoding="utf-8"))}
