"""Both forms of the router as a sidecar: beside a client, and beside each engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.k8s.tools import KUBECTL, REPO, SIDECARS, Document, containers, documents, invalid, only, run, settings_of

CUSTOM = "monitoring.coreos.com/v1"
FORMS = ("client", "engine")
ENGINE = REPO / "deploy" / "engines" / "vllm.yaml"


def objects(form: str) -> list[Document]:
    """What a form has, the patched Deployment of engines included."""
    found = documents((SIDECARS / f"{form}.yaml").read_text(encoding="utf-8"))
    return [*found, engines()] if form == "engine" else found


def engines() -> Document:
    """The Deployment of engines as the patch leaves it, by kubectl."""
    text = yaml.safe_dump(next(yaml.safe_load_all(ENGINE.read_text(encoding="utf-8"))))
    patch = ("--local", "--filename", "-", "--patch-file", SIDECARS / "engine-patch.yaml", "--output", "yaml")
    done = run([KUBECTL, "patch", *patch], text)
    assert done.returncode == 0, done.stderr
    found: Document = yaml.safe_load(done.stdout)
    return found


def pod(form: str) -> tuple[dict[str, str], Document, Document]:
    """Labels and spec of the pod, and its router."""
    found = objects(form)
    made = only(found, "Pod") if form == "client" else only(found, "Deployment")["spec"]["template"]
    (router,) = (each for each in containers(made["spec"]) if each["name"] == "warmroute")
    return made["metadata"]["labels"], made["spec"], router


@pytest.mark.parametrize("form", FORMS)
def test_objects_are_valid(form: str) -> None:
    """No field is misspelt, by the schemas of three Kubernetes versions."""
    assert invalid([each for each in objects(form) if each["apiVersion"] != CUSTOM]) == []


@pytest.mark.parametrize("form", FORMS)
def test_prometheus_scrapes_it(form: str, secrets: Path) -> None:
    """The admin port is open with a token, of the Secret with which the monitor scrapes it."""
    labels, spec, router = pod(form)
    settings = settings_of([each for each in objects(form) if each["kind"] == "ConfigMap"], secrets)
    monitor = only(objects(form), "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert ports[endpoint["port"]] == settings.listen.admin_port
    assert settings.listen.admin_host == "0.0.0.0"
    (secret,) = (each["secret"] for each in spec["volumes"] if each["name"] == "secrets")
    credentials = endpoint["authorization"]["credentials"]
    assert (credentials["name"], credentials["key"]) == (secret["secretName"], secret["items"][0]["key"])
    assert settings.admin.token_file.endswith(f"/{secret['items'][0]['path']}")


def test_clients_of_engines_reach_a_router(secrets: Path) -> None:
    """The Service leads to the router's port, which the policy opens, and discovery still takes the engine's."""
    labels, spec, router = pod("engine")
    found = objects("engine")
    settings = settings_of([each for each in found if each["kind"] == "ConfigMap"], secrets)
    service = only(found, "Service")["spec"]
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert service["selector"].items() <= labels.items()
    assert ports[service["ports"][0]["targetPort"]] == settings.listen.port
    (rule,) = only(found, "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {*ports}
    (engine,) = spec["containers"]
    taken = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert "http" in taken
    assert not {*ports} & {*taken}
    assert not {*ports.values()} & {*taken.values()}
    key, _, value = settings.discovery.selector.partition("=")
    assert labels[key] == value


def test_a_router_beside_an_engine_waits_for_none(secrets: Path) -> None:
    """It has no readiness of its own, which would wait for the pod's, and time to end after its engine."""
    _, spec, router = pod("engine")
    assert "readinessProbe" not in router
    assert router["restartPolicy"] == "Always"
    before = next(yaml.safe_load_all(ENGINE.read_text(encoding="utf-8")))["spec"]["template"]["spec"]
    listen = settings_of([each for each in objects("engine") if each["kind"] == "ConfigMap"], secrets).listen
    needed = before["terminationGracePeriodSeconds"] + listen.lame_duck_s + listen.drain_s + 15
    assert spec["terminationGracePeriodSeconds"] == needed


def test_only_the_router_has_the_token() -> None:
    """The engine's container mounts no token of the API server."""
    _, spec, router = pod("engine")
    (token,) = (volume["name"] for volume in spec["volumes"] if "projected" in volume)
    mounts = {each["name"]: [m["name"] for m in each.get("volumeMounts", [])] for each in containers(spec)}
    assert [name for name, mounted in mounts.items() if token in mounted] == [router["name"]]
    assert spec["automountServiceAccountToken"] is False
