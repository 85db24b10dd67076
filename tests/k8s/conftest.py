"""Tests of what runs on Kubernetes need the tools of .venv-k8s; the chart's examples are rendered once for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from router.config.api_keys import entry_of, make_key
from tests.k8s import install
from tests.k8s.tools import EXAMPLES, NEEDED_OPTIONS, PICKERS, SIDECARS, Document, documents, example, picker, template


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Without the tools nothing here says anything: a failure, never a skip."""
    if not install.installed():
        pytest.fail("tools are not installed: python -m tests.k8s.install", pytrace=False)


@pytest.fixture(scope="session")
def rendered(tools: None) -> dict[str, list[Document]]:
    """Every example by its name, as the Helm program renders it; `default` is the chart with the values it needs."""
    found = {name: template("--values", example(name)) for name in EXAMPLES}
    return found | {"default": template(*NEEDED_OPTIONS)}


@pytest.fixture(scope="session")
def pickers(tools: None) -> dict[str, list[Document]]:
    """Every example of an endpoint picker by its name."""
    return {name: template("--values", picker(name)) for name in PICKERS}


@pytest.fixture(scope="session")
def everything(rendered: dict[str, list[Document]], pickers: dict[str, list[Document]]) -> dict[str, list[Document]]:
    """All that, and the sidecar of a client."""
    sidecar = documents((SIDECARS / "client.yaml").read_text(encoding="utf-8"))
    return rendered | {f"picker-{name}": found for name, found in pickers.items()} | {"sidecar": sidecar}


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of secrets as a pod of the secured example has it."""
    folder = tmp_path_factory.mktemp("secrets")
    authority = trustme.CA()
    certificate = authority.issue_cert("llm.example.com")
    files = {
        "admin-token": b"t" * 32,
        "auth-secret": b"s" * 32,
        "upstream-key": b"k" * 8,
        "peering-password_file": b"p" * 32,
        "keys.yaml": entry_of(make_key(), "team").encode(),
        "tls.crt": b"".join(pem.bytes() for pem in certificate.cert_chain_pems),
        "tls.key": certificate.private_key_pem.bytes(),
        "tls-client-ca.crt": authority.cert_pem.bytes(),
        "upstream-ca.crt": authority.cert_pem.bytes(),
        "upstream.pem": certificate.private_key_and_cert_chain_pem.bytes(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
