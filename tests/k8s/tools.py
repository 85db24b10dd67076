"""The tools of .venv-k8s as functions: Helm twice, schemas of Kubernetes, checkov."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from router.cli.config_loader import load
from router.config.schema import Settings
from tests.k8s import install

REPO = install.REPO
CHART = REPO / "helm" / "warmroute"
BIN = install.VENV / "bin"
PYTHON = BIN / "python"
HELM = BIN / "helm"
KUBECTL = BIN / "kubectl"
TOOL_TIMEOUT_S = 180.0
RELEASE, NAMESPACE = "llm", "serving"
# The value that the chart needs and the one that most give, and the options that give them.
NEEDED: dict[str, Any] = {
    "config": {"discovery": {"selector": "app=vllm"}},
    "image": {"repository": "registry.example.com/warmroute"},
}
NEEDED_OPTIONS = ("--set", "config.discovery.selector=app=vllm,image.repository=registry.example.com/warmroute")
# The name under which tests know the values for production.
PRODUCTION = "production"
# Where a pod has its secrets.
SECRETS = "/etc/warmroute/secrets"
# The oldest that the chart takes, one between, the newest that there are schemas of.
VERSIONS = ("1.31.0", "1.34.0", "1.37.0")
_VALIDATOR = """
import json, sys, kubernetes_validate as k
wrong = []
for version, document in json.load(sys.stdin):
    try:
        k.validate(document, version, strict=True)
    except (k.ValidationError, k.SchemaNotFoundError) as error:
        wrong.append(f"{version} {document['kind']}/{document['metadata']['name']}: {error.message}")
print(json.dumps(wrong))
"""
# Values files as the Helm library renders them: arguments are the chart, the release and the namespace.
LIBRARY = """
import json, sys, helm_python
with helm_python.Chart.load(sys.argv[1]) as chart:
    jobs = json.load(sys.stdin)
    print(json.dumps([chart.render(values, name=sys.argv[2], namespace=sys.argv[3]) for values in jobs]))
"""
# What is wrong with the spec of custom resources, by the definitions in the file that is the argument.
STRUCTURES = """
import json, sys, jsonschema
schemas, wrong = json.load(open(sys.argv[1])), []
for document in json.load(sys.stdin):
    schema = schemas[f"{document['apiVersion']}/{document['kind']}"] | {"definitions": schemas["definitions"]}
    errors = jsonschema.Draft7Validator(schema).iter_errors(document["spec"])
    wrong += [f"{document['kind']}: {error.json_path} {error.message}" for error in errors]
print(json.dumps(wrong))
"""
# Definitions of custom resources, for STRUCTURES.
CRDS = REPO / "tests" / "k8s" / "data" / "crds.json"

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


def invalid(found: Sequence[Document], versions: Sequence[str] = VERSIONS) -> list[str]:
    """What is wrong with these objects, by the schemas of these Kubernetes versions."""
    jobs = [(version, document) for version in versions for document in found]
    wrong: list[str] = in_tools(_VALIDATOR, text=json.dumps(jobs))
    return wrong


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


def by_name(found: list[Document]) -> dict[tuple[str, str, str], Document]:
    """Objects by what makes them one: kind, namespace, name."""
    named = {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]): d for d in found}
    assert len(named) == len(found), "an object is there twice"
    return named


def example(name: str) -> Path:
    """A values file of the chart's examples, or the one for production."""
    return CHART / "values-production.yaml" if name == PRODUCTION else CHART / "examples" / f"{name}.yaml"


def picker(name: str) -> Path:
    """A values file of an endpoint picker."""
    return CHART / "examples" / "picker" / f"{name}.yaml"


# Values files; objects to copy from are in examples/sidecar.
EXAMPLES = [*sorted(path.stem for path in (CHART / "examples").glob("*.yaml")), PRODUCTION]
SIDECARS = CHART / "examples" / "sidecar"


# Values files of endpoint pickers.
PICKERS = sorted(path.stem for path in (CHART / "examples" / "picker").glob("*.yaml"))


def of_store(document: Document) -> bool:
    """Whether an object belongs to the Valkey of the release."""
    return document["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "store"


def only(found: list[Document], kind: str) -> Document:
    """The one object of a kind, beside those of the Valkey."""
    (document,) = (document for document in found if document["kind"] == kind and not of_store(document))
    return document


def settings_text(found: list[Document]) -> str:
    """The settings file that the routers start with: an annotation of their pods, or a ConfigMap's (the sidecar)."""
    notes = [d["spec"]["template"]["metadata"].get("annotations", {}) for d in found if d["kind"] == "Deployment"]
    texts = [of_pod["warmroute/settings"] for of_pod in notes if "warmroute/settings" in of_pod]
    texts += [document["data"]["warmroute.yaml"] for document in found if "warmroute.yaml" in document.get("data", {})]
    assert len(texts) == 1
    return str(texts[0])


def settings_of(found: list[Document], secrets: Path) -> Settings:
    """The settings file as the router reads it, with secrets where this machine has them."""
    file = secrets / "warmroute.yaml"
    file.write_text(settings_text(found).replace(SECRETS, str(secrets)), encoding="utf-8")
    return load(file, {})


def pod_specs(found: list[Document]) -> list[Document]:
    """The spec of every pod that the objects make."""
    specs = [document["spec"] for document in found if document["kind"] == "Pod"]
    return specs + [document["spec"]["template"]["spec"] for document in found if document["kind"] == "Deployment"]


def containers(spec: Document) -> list[Document]:
    """All containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]
