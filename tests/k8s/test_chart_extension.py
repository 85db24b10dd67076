"""What the chart lets its users add: containers, objects, arguments, fields of the Service, tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.tools import (
    CHART,
    NAMESPACE,
    NEEDED,
    RELEASE,
    Document,
    example,
    helm,
    invalid,
    only,
    pod_specs,
    settings_of,
    template,
)

SAFE = {
    "image": "registry.example.com/helper:1.0.0",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


def with_values(folder: Path, values: dict[str, Any]) -> list[Document]:
    """The chart with the values it needs and these."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(NEEDED | values))
    return template("--values", file)


def router_of(found: list[Document]) -> tuple[Document, Document]:
    """The routers' pod spec, and the router's container in it."""
    spec = only(found, "Deployment")["spec"]["template"]["spec"]
    (container,) = (each for each in spec["containers"] if each["name"] == "warmroute")
    return spec, container


def test_pods_take_more(tmp_path: Path) -> None:
    """Containers beside and before the router, variables from Secrets, arguments, names and a runtime class are in the
    pod as they were given, templates in containers rendered, and Kubernetes knows every field."""
    aliases = [{"ip": "10.1.2.3", "hostnames": ["engine.example.com"]}]
    dns = {"options": [{"name": "ndots", "value": "2"}], "searches": ["example.com"]}
    found = with_values(
        tmp_path,
        {
            "extraContainers": [SAFE | {"name": "agent", "args": ["--for={{ .Release.Name }}"]}],
            "initContainers": [SAFE | {"name": "wait", "restartPolicy": "Always"}],
            "extraArgs": ["--set", "log.level=debug"],
            "extraEnvFrom": [{"secretRef": {"name": "proxies"}}],
            "hostAliases": aliases,
            "dnsPolicy": "ClusterFirst",
            "dnsConfig": dns,
            "runtimeClassName": "gvisor",
            "tolerations": [{"key": "cost", "operator": "Lt", "value": "5"}],
        },
    )
    spec, container = router_of(found)
    assert [each["name"] for each in spec["containers"]] == ["warmroute", "agent"]
    assert spec["containers"][1]["args"] == [f"--for={RELEASE}"]
    assert [each["name"] for each in spec["initContainers"]] == ["wait"]
    assert container["args"][-2:] == ["--set", "log.level=debug"]
    assert container["envFrom"] == [{"secretRef": {"name": "proxies"}}]
    assert (spec["hostAliases"], spec["dnsPolicy"], spec["dnsConfig"]) == (aliases, "ClusterFirst", dns)
    assert spec["runtimeClassName"] == "gvisor"
    assert invalid(found) == []


def test_more_objects_are_made(tmp_path: Path) -> None:
    """Objects are given as maps or as texts, templates of the chart in both."""
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\ndata: {a: b}\n"
    as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-map"}}
    labels = '{{ include "warmroute.selectorLabels" . | nindent 4 }}'
    odd = f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: odd\n  labels: {labels}\n"
    found = [d for d in with_values(tmp_path, {"extraObjects": [as_map, text, odd]}) if d["kind"] == "ConfigMap"]
    assert [document["metadata"]["name"] for document in found] == [f"{RELEASE}-map", f"{RELEASE}-text", "odd"]
    assert found[2]["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE


def test_annotations_of_all_objects(tmp_path: Path) -> None:
    """What is to stand on all objects does, under what each has of its own; the Deployment's are not the pods'."""
    file = tmp_path / "values.yaml"
    on = ("autoscaling", "metricsService", "monitor", "prometheusRule", "grafanaDashboards", "ingress", "httpRoute")
    values: dict[str, Any] = {
        "commonAnnotations": {"team": "llm", "owner": "a"},
        "deploymentAnnotations": {"reloader.stakater.com/auto": "true", "owner": "b"},
        "ingress": {"hosts": ["llm.example.com"]},
    }
    for name in on:
        values.setdefault(name, {})["enabled"] = True
    file.write_text(yaml.safe_dump(values))
    found = template("--values", example("secured"), "--values", file)
    assert {d["kind"] for d in found} > {"Ingress", "HTTPRoute", "PodMonitor", "PrometheusRule", "Pod", "Role"}
    for document in found:
        assert document["metadata"]["annotations"]["team"] == "llm", document["kind"]
    deployment = only(found, "Deployment")
    assert deployment["metadata"]["annotations"]["owner"] == "b"
    pod = deployment["spec"]["template"]["metadata"]["annotations"]
    assert (pod["owner"], "reloader.stakater.com/auto" in pod) == ("a", False)
    assert only(found, "Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_fields_of_the_service(tmp_path: Path) -> None:
    """A load balancer's class, the networks that may come, local traffic, zones, ports of nodes and address families
    are on the Service, and Kubernetes knows them; without values none is."""
    given = {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["203.0.113.0/24"],
        "externalTrafficPolicy": "Local",
        "trafficDistribution": "PreferClose",
        "ipFamilyPolicy": "PreferDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
    }
    found = with_values(tmp_path, {"service": given | {"type": "LoadBalancer", "nodePort": 30080}})
    spec = only(found, "Service")["spec"]
    assert {key: spec[key] for key in given} == given
    assert spec["ports"][0]["nodePort"] == 30080
    assert invalid(found) == []
    plain = only(with_values(tmp_path, {}), "Service")["spec"]
    assert {*plain} == {"type", "selector", "ports"}
    assert "nodePort" not in plain["ports"][0]


def test_tokenizers_of_the_hub(tmp_path: Path) -> None:
    """A tokenizer from the hub has its revision, a place that can be written, room of its own and the token of a
    Secret; it comes behind those of the settings, and pods are still restricted."""
    llama = {"model": "llama", "repo": "meta-llama/Llama-3.3-70B-Instruct", "revision": "6f6073b"}
    config = NEEDED["config"] | {"tokens": {"sources": ["qwen=/tokenizers/qwen"], "verify": False}}
    hub = {"existingSecret": "hub", "key": "token", "cacheSizeLimit": "2Gi"}
    found = with_values(
        tmp_path, {"config": config, "tokenizers": [llama, {"path": "/tokenizers/all"}], "huggingFace": hub}
    )
    tokens = settings_of(found, tmp_path).tokens
    assert tokens.sources == (
        "qwen=/tokenizers/qwen",
        "llama=meta-llama/Llama-3.3-70B-Instruct@6f6073b",
        "/tokenizers/all",
    )
    assert tokens.verify is False
    spec, container = router_of(found)
    env = {each["name"]: each for each in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == env["HF_HOME"]["value"])
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    assert volume["emptyDir"] == {"sizeLimit": "2Gi"}
    assert invalid(found) == []

    for _, local in (router_of(with_values(tmp_path, {"tokenizers": [{"model": "a", "path": "/t/a"}]})),):
        assert "env" not in local


def test_every_pod_has_the_image_that_was_named() -> None:
    """Without a repository nothing is rendered, and the message says where an image comes from; none is assumed."""
    done = helm("template", RELEASE, CHART, "--set", "config.discovery.selector=app=vllm")
    assert done.returncode != 0
    assert "image.repository is required: no public image exists yet; build it (docker build" in done.stderr
    found = template("--values", example("vllm"), "--set", "image.repository=localhost:5000/w,replicaCount=1")
    for spec in pod_specs(found):
        assert spec["containers"][0]["image"].startswith("localhost:5000/w:")


# What is said after an installation


def notes(*options: str | Path) -> str:
    """What Helm prints after an installation."""
    done = helm("install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("NOTES:\n")[1]


OPEN = "WARNING: every client that can reach this address may use your engines: no API key is required."


@pytest.mark.parametrize(
    ("name", "options", "warned"),
    [
        ("vllm", (), False),
        ("vllm", ("--set", "service.type=LoadBalancer"), True),
        ("vllm", ("--set", "service.type=LoadBalancer,apiKeys.existingSecret=keys"), False),
        ("ingress", (), True),
        ("gateway", (), False),
    ],
)
def test_notes_warn_of_an_open_door(name: str, options: tuple[str, ...], warned: bool) -> None:
    """Whoever opens the router to the outside without keys reads so, and with which value to close it."""
    said = notes("--values", example(name), *options)
    assert (OPEN in said) is warned
    assert ("apiKeys.existingSecret" in said) is warned


def test_notes_say_which_pods_are_found() -> None:
    """Who gave no selector reads which pods are found all the same, that no others are reached, and what to set."""
    stacks, others = "engines of vLLM production-stack, KServe, llm-d and LeaderWorkerSet", "For other engines"
    said = notes("--values", example("stacks"))
    assert f"in front of {stacks}, found by their labels, in serving." in said
    assert f"{others} set the labels of their pods: --set config.discovery.selector=app=vllm" in said
    policy = "The NetworkPolicy allows routers to connect only to pods with these labels"
    assert policy in said
    assert policy not in notes("--values", example("stacks"), "--set", "networkPolicy.enabled=false")
    selected = notes("--values", example("vllm"))
    assert "in front of pods with app=vllm in serving." in selected
    assert others not in selected


def test_notes_name_the_address_outside() -> None:
    """The name under which clients come from outside stands there, of an Ingress and of a Gateway."""
    assert "External address, through the Ingress: https://llm.example.com/v1\n" in notes(
        "--values", example("ingress")
    )
    assert "External address, through the Gateway: https://llm.example.com/v1" in notes("--values", example("gateway"))
