"""deploy/engines: what a cluster would take, and what warmroute needs of the engines' pods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.tools import REPO, invalid

ENGINES = ("vllm", "sglang")


def documents(engine: str) -> list[dict[str, Any]]:
    """Objects of one engine's file."""
    path = REPO / "deploy" / "engines" / f"{engine}.yaml"
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def of_kind(engine: str, kind: str) -> Any:
    """The one object of a kind."""
    (found,) = [document for document in documents(engine) if document["kind"] == kind]
    return found


def container(engine: str) -> Any:
    """The engine's container."""
    (found,) = of_kind(engine, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_snippets_are_valid_strictly(engine: str) -> None:
    """No field is misspelt, by the schemas of three Kubernetes versions."""
    assert invalid(documents(engine)) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_flags_are_those_of_the_documentation(engine: str) -> None:
    """Every flag that the guide tells of an engine is given, so that nobody has to merge the two."""
    guide = (REPO / "docs" / "guide" / "engines.md").read_text(encoding="utf-8")
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    told = set(re.findall(rf"^\| {name} \| `(--[\w-]+)`", guide, re.MULTILINE))
    given = {arg.partition("=")[0] for arg in container(engine)["args"]}
    assert told
    assert told <= given


@pytest.mark.parametrize("engine", ENGINES)
def test_kv_events_are_published_where_the_ports_say(engine: str) -> None:
    """The flag is JSON, binds every interface, has a replay endpoint, and both are ports of the container by name."""
    (flag,) = [arg for arg in container(engine)["args"] if arg.startswith("--kv-events-config=")]
    config = json.loads(flag.partition("=")[2])
    ports = {port["name"]: port["containerPort"] for port in container(engine)["ports"]}
    assert config["publisher"] == "zmq"
    assert config["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert config["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
    assert f"--port={ports['http']}" in container(engine)["args"]


@pytest.mark.parametrize("engine", ENGINES)
def test_pods_are_watched_and_end_in_peace(engine: str) -> None:
    """All three probes ask /health; the pause before SIGTERM and running answers after it are within the grace."""
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(engine)[probe]["httpGet"] == {"path": "/health", "port": "http"}
    pause_s = container(engine)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = of_kind(engine, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    # vLLM aborts what runs unless told otherwise (vllm/config/vllm.py, shutdown_timeout); SGLang waits without a limit
    # (sglang/srt/managers/tokenizer_manager.py, sigterm_watchdog).
    waits = [int(arg.partition("=")[2]) for arg in container(engine)["args"] if arg.startswith("--shutdown-timeout=")]
    assert len(waits) == (engine == "vllm")
    answers_s = min(waits, default=grace_s - pause_s - 15)
    assert answers_s >= 180
    assert 0 < pause_s < pause_s + answers_s + 15 <= grace_s
    assert re.search(r":v\d+\.\d+\.\d+", container(engine)["image"])


@pytest.mark.promise("KV events of engines in `deploy/engines` are reachable from warmroute's pods only.", "kubernetes")
@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_router_reaches_the_ports(engine: str) -> None:
    """The NetworkPolicy selects the engines' pods and lets the router alone to every port, KV events among them; the
    chart's Envoy reaches the port of requests and no other."""
    policy, deployment = of_kind(engine, "NetworkPolicy")["spec"], of_kind(engine, "Deployment")["spec"]
    assert policy["podSelector"] == deployment["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    rule, envoys = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "warmroute"}}}]
    assert envoys["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "warmroute-envoy"}}}]
    (port,) = envoys["ports"]
    assert port["port"] == next(each["containerPort"] for each in container(engine)["ports"] if each["name"] == "http")
    assert {port["port"] for port in rule["ports"]} == {port["containerPort"] for port in container(engine)["ports"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_charts_example_finds_these_pods(engine: str) -> None:
    """The selector, the port and the egress of the chart's example for an engine are those of its pods."""
    path: Path = REPO / "helm" / "warmroute" / "examples" / f"{engine}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    discovery = values["config"]["discovery"]
    labels = of_kind(engine, "Deployment")["spec"]["template"]["metadata"]["labels"]
    wanted = dict(part.split("=") for part in discovery["selector"].split(","))
    assert wanted.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container(engine)["ports"]}
    assert discovery.get("port", "http") in (*ports, str(ports["http"]))
    let: set[int] = set()
    for entry in values["networkPolicy"]["enginePorts"]:
        let |= set(range(entry["port"], entry.get("endPort", entry["port"]) + 1))
    assert set(ports.values()) <= let
