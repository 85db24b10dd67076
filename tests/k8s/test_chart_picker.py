"""The chart's second mode: an endpoint picker, the InferencePool that names it, and gateways that ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from router.ingress import gateway_rules
from tests.k8s.test_chart_pods import restricted
from tests.k8s.tools import (
    CHART,
    CRDS,
    LIBRARY,
    NAMESPACE,
    PICKERS,
    RELEASE,
    STRUCTURES,
    Document,
    by_name,
    documents,
    helm,
    in_tools,
    invalid,
    only,
    picker,
    pod_specs,
    settings_of,
    settings_text,
    template,
)

NEEDED = ("--set", "image.repository=registry.example.com/warmroute,mode=extproc,pool.matchLabels.app=vllm")
CUSTOM = {"gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1"}
CUSTOM |= {"gateway.envoyproxy.io/v1alpha1", "networking.istio.io/v1alpha3"}
FORGEABLE = list(gateway_rules.FORGEABLE)


def named(found: list[Document], kind: str, suffix: str = "") -> Document:
    """The object of a kind with the release's own name and this suffix."""
    return by_name(found)[kind, NAMESPACE, f"{RELEASE}-warmroute{suffix}"]


# What is valid


def test_examples_are_these(pickers: dict[str, list[Document]]) -> None:
    """There is one for each way to a picker, and both Helms make the same of each."""
    assert PICKERS == ["envoy-gateway", "istio", "standalone"]
    values = [yaml.safe_load(picker(name).read_text(encoding="utf-8")) for name in PICKERS]
    texts = in_tools(LIBRARY, CHART, RELEASE, NAMESPACE, text=json.dumps(values))
    for name, files in zip(PICKERS, texts, strict=True):
        found = [each for path, text in files.items() if path.endswith(".yaml") for each in documents(text)]
        assert by_name(found) == by_name(pickers[name]), name


def test_objects_are_valid(pickers: dict[str, list[Document]]) -> None:
    """Kubernetes' own against the schemas of three versions; custom resources against their definitions."""
    found = [document for each in pickers.values() for document in each]
    assert invalid([document for document in found if document["apiVersion"] not in CUSTOM]) == []
    custom = [document for document in found if document["apiVersion"] in CUSTOM]
    assert in_tools(STRUCTURES, CRDS, text=json.dumps(custom)) == []
    assert {document["kind"] for document in custom} == {
        "InferencePool",
        "HTTPRoute",
        "Gateway",
        "ClientTrafficPolicy",
        "EnvoyFilter",
    }


def test_an_invalid_pool_is_seen() -> None:
    """Nine ports, or a failure mode that is none, so that the test above says something."""
    pool = only(template(*NEEDED), "InferencePool")
    wrong = pool | {"spec": pool["spec"] | {"targetPorts": [{"number": port} for port in range(1, 10)]}}
    assert in_tools(STRUCTURES, CRDS, text=json.dumps([wrong])) != []


# The pool, and who may follow it


def test_the_pool_names_the_picker() -> None:
    """Its members are the pods with those labels at those ports, its picker is this release's Service at a port that
    the Service has, and failure mode is what the values say."""
    found = template(*NEEDED, "--set-json", "pool.targetPorts=[8000,8001]", "--set", "pool.failureMode=FailClose")
    spec, service = only(found, "InferencePool")["spec"], only(found, "Service")
    assert spec["selector"] == {"matchLabels": {"app": "vllm"}}
    assert spec["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert spec["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": service["metadata"]["name"],
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }
    assert {port["port"]: port["targetPort"] for port in service["spec"]["ports"]} == {
        9002: "ext-proc",
        9003: "grpc-health",
    }
    assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"http2"}


@pytest.mark.promise("Discovery reads InferencePools by name, so that a Role can name them too.", "discovery")
def test_the_role_names_the_pools(tmp_path: Path) -> None:
    """List and watch of pods, and of those pools by name, in the pools' own namespaces; nothing else."""
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}

    def of(*names: str) -> dict[str, Any]:
        return {
            "apiGroups": ["inference.networking.k8s.io"],
            "resources": ["inferencepools"],
            "resourceNames": list(names),
            "verbs": ["list", "watch"],
        }

    assert only(template(*NEEDED), "Role")["rules"] == [pods, of(f"{RELEASE}-warmroute")]
    file = tmp_path / "values.yaml"
    pools = ["a", "b", "team/a"]
    values = {"config": {"discovery": {"source": "kubernetes", "pools": pools}}, "pool": {"create": False}}
    file.write_text(yaml.safe_dump(values))
    found = template(*NEEDED, "--values", file)
    roles = {d["metadata"]["namespace"]: d["rules"] for d in found if d["kind"] == "Role"}
    assert roles == {NAMESPACE: [pods, of("a", "b")], "team": [pods, of("a")]}
    assert not [document for document in found if document["kind"] == "InferencePool"]
    assert yaml.safe_load(settings_text(found))["discovery"] == {
        "source": "kubernetes",
        "pools": pools,
        "namespaces": [NAMESPACE],
    }


def test_pools_of_a_router_that_is_no_picker(tmp_path: Path, secrets: Path) -> None:
    """The proxy may follow pools too, by the settings alone."""
    file = tmp_path / "values.yaml"
    peer = {"podSelector": {"matchLabels": {"app": "vllm"}}}
    values = {"config": {"discovery": {"pools": ["vllm"]}}, "networkPolicy": {"engines": [peer]}}
    file.write_text(yaml.safe_dump(values | {"image": {"repository": "registry.example.com/warmroute"}}))
    found = template("--values", file)
    discovery = settings_of(found, secrets).discovery
    assert (discovery.pools, discovery.selector, discovery.namespaces) == (("vllm",), "", (NAMESPACE,))
    assert only(found, "Role")["rules"][1]["resourceNames"] == ["vllm"]


def test_without_a_pool_the_labels_are_the_selector(pickers: dict[str, list[Document]]) -> None:
    """Where the definition of pools is not installed, labels and port say who is a replica."""
    discovery = yaml.safe_load(settings_text(pickers["standalone"]))["discovery"]
    assert discovery == {"source": "kubernetes", "selector": "app=vllm", "port": "8000", "namespaces": [NAMESPACE]}
    assert [d["kind"] for d in pickers["standalone"]].count("InferencePool") == 0


def test_engines_of_the_release_are_the_pool(tmp_path: Path) -> None:
    """With engines in the same release their labels are the pool's."""
    file = tmp_path / "values.yaml"
    model = {"name": "sim", "engine": "simulated", "image": "registry.example.com/warmroute:0.1.0-demo"}
    peer = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    engines = {"enabled": True, "models": [model], "networkPolicy": {"gateways": [peer]}}
    file.write_text(yaml.safe_dump({"engines": engines, "mode": "extproc"}))
    found = template("--values", file, "--set", "image.repository=registry.example.com/warmroute")
    labels = only(found, "InferencePool")["spec"]["selector"]["matchLabels"]
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in found if d["kind"] == "Deployment"]
    assert [labels.items() <= each.items() for each in pods].count(True) == 1
    policy = by_name(found)["NetworkPolicy", NAMESPACE, f"{RELEASE}-sim"]["spec"]
    routers, gateways = policy["ingress"]
    assert {port["port"] for port in routers["ports"]} == {8000, 5557, 5558}
    assert [port["port"] for port in gateways["ports"]] == [8000]
    assert gateways["from"] == [{"podSelector": {"matchLabels": {"warmroute/envoy-of": RELEASE}}}, peer]


# The router's pods


@pytest.mark.parametrize("mode", ["extproc", "both"])
def test_ports_and_probes(mode: str) -> None:
    """A picker has the two ports of gRPC and is probed on the one for health; beside clients both have theirs, and the
    main port is probed as ever."""
    found = template(*NEEDED, "--set", f"mode={mode}")
    (spec,) = (spec for spec in pod_specs(found) if spec["containers"][0]["name"] == "warmroute")
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    grpc = {"ext-proc": 9002, "grpc-health": 9003, "admin": 8001}
    assert ports == (grpc if mode == "extproc" else grpc | {"http": 8000})
    if mode == "extproc":
        assert container["readinessProbe"]["grpc"] == {"port": 9003, "service": "readiness"}
        assert container["livenessProbe"]["grpc"] == {"port": 9003, "service": "liveness"}
    else:
        assert container["readinessProbe"]["httpGet"]["port"] == "http"
    names = {port["name"] for port in named(found, "Service")["spec"]["ports"]}
    assert names == {"grpc-ext-proc", "grpc-health"} | ({"http"} if mode == "both" else set())
    assert [d["kind"] for d in found].count("Pod") == (mode == "both")


def test_settings_of_a_picker(tmp_path: Path) -> None:
    """The mode, an address that can be reached from outside the pod, and the Secret's certificate."""
    options = ("--set", "tls.existingSecret=cert,tls.clientCaKey=ca.crt,adminToken.existingSecret=token")
    settings = yaml.safe_load(settings_text(template(*NEEDED, *options)))
    assert settings["listen"]["mode"] == "extproc"
    assert settings["extproc"] == {
        "host": "0.0.0.0",
        "tls_certificate": "/etc/warmroute/secrets/tls.crt",
        "tls_key": "/etc/warmroute/secrets/tls.key",
        "tls_client_ca": "/etc/warmroute/secrets/tls-client-ca.crt",
    }
    assert "mode" not in settings_text(template(*NEEDED, "--set", "mode=proxy,pool.matchLabels=null"))


@pytest.mark.parametrize("name", PICKERS)
def test_the_router_takes_the_settings(name: str, pickers: dict[str, list[Document]], secrets: Path) -> None:
    """What is rendered is a settings file that the router loads."""
    settings = msgspec.to_builtins(settings_of(pickers[name], secrets))
    assert (settings["extproc"]["host"], settings["listen"]["mode"]) == ("0.0.0.0", "extproc")


@pytest.mark.promise(
    "The chart's Envoy reaches engines, pickers and DNS only, and exposes readiness and metrics.", "kubernetes"
)
def test_pods_are_restricted_and_have_no_token(pickers: dict[str, list[Document]]) -> None:
    """Envoy's pods too meet the restricted Pod Security Standard, and only the pickers may ask the API server."""
    for name, found in pickers.items():
        for spec in pod_specs(found):
            assert restricted(spec) == [], name
            is_router = spec["containers"][0]["name"] == "warmroute"
            assert spec["automountServiceAccountToken"] is is_router
    assert len(pod_specs(pickers["standalone"])) == 3


# Networks


def test_networks_of_a_picker(pickers: dict[str, list[Document]]) -> None:
    """In: the picker's ports, for the gateway alone where it is named; the API server, engines and DNS are out, as for
    any router. No main port is opened."""
    for name in ("istio", "envoy-gateway"):
        policy = named(pickers[name], "NetworkPolicy")["spec"]
        (rule,) = policy["ingress"]
        assert [port["port"] for port in rule["ports"]] == [9002, 9003]
        assert len(rule["from"]) == 2
        (peer,) = policy["egress"][0]["to"]
        assert peer["podSelector"]["matchExpressions"] == [{"key": "app", "operator": "In", "values": ["vllm"]}]
    found = template(
        *NEEDED, "--values", picker("standalone"), "--set-json", 'networkPolicy.clients=[{"podSelector":{}}]'
    )
    peers = named(found, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    labels = named(found, "Deployment", "-envoy")["spec"]["template"]["metadata"]["labels"]
    assert [peer for peer in peers if peer["podSelector"].get("matchLabels", {"-": ""}).items() <= labels.items()]


@pytest.mark.promise(
    "The chart's Envoy reaches engines, pickers and DNS only, and exposes readiness and metrics.", "kubernetes"
)
def test_networks_of_envoy(pickers: dict[str, list[Document]]) -> None:
    """Out: the engines at their ports, the pickers at theirs, DNS; no API server, nothing else."""
    found = pickers["standalone"]
    policy = named(found, "NetworkPolicy", "-envoy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = [{port["port"] for port in rule["ports"]} for rule in policy["egress"]]
    assert ports == [{8000}, {9002, 9003}, {53}]
    assert all(rule["to"] for rule in policy["egress"][:2])
    assert [{port["port"] for port in rule["ports"]} for rule in policy["ingress"]] == [{8080}, {8081}]
    router = named(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["egress"][1]["to"][0]["podSelector"]["matchLabels"].items() <= router.items()
    envoy = named(found, "Deployment", "-envoy")["spec"]["template"]["metadata"]["labels"]
    assert not named(found, "Service")["spec"]["selector"].items() <= envoy.items(), "Envoy is no picker"


# Ways in


def test_routes_lead_to_the_pool_or_to_envoy(pickers: dict[str, list[Document]]) -> None:
    """A route's backend is the pool, in whose name the gateway asks the picker; with an Envoy of its own it is that,
    and so is an Ingress'."""
    for name in ("istio", "envoy-gateway"):
        (backend,) = only(pickers[name], "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
        pool = only(pickers[name], "InferencePool")["metadata"]["name"]
        assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    ways = ("--set", "ingress.enabled=true,httpRoute.enabled=true")
    lists = ("--set-json", 'ingress.hosts=["llm.example.com"]', "--set-json", 'httpRoute.parentRefs=[{"name": "g"}]')
    found = template("--values", picker("standalone"), *ways, *lists)
    envoy = named(found, "Service", "-envoy")
    (backend,) = only(found, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": envoy["metadata"]["name"], "port": envoy["spec"]["ports"][0]["port"]}
    (path,) = only(found, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": envoy["metadata"]["name"], "port": {"name": "http"}}


@pytest.mark.promise(
    "Clients of the chart's Envoy or example gateways choose no destination, picker or not.", "kubernetes"
)
def test_gateways_strip_what_a_client_may_not_say(pickers: dict[str, list[Document]]) -> None:
    """Both gateways take the headers away before routing, by which a client could choose who is connected to."""
    policy = only(pickers["envoy-gateway"], "ClientTrafficPolicy")["spec"]
    assert policy["headers"]["earlyRequestHeaders"]["remove"] == FORGEABLE
    (patch,) = only(pickers["istio"], "EnvoyFilter")["spec"]["configPatches"]
    (extension,) = patch["patch"]["value"]["typed_config"]["early_header_mutation_extensions"]
    assert [each["remove"] for each in extension["typed_config"]["mutations"]] == FORGEABLE


# What is said after an installation


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("istio", "must have the InferencePool llm-warmroute as its backend, like the HTTPRoute llm-warmroute."),
        ("standalone", "Clients in the cluster use http://llm-warmroute-envoy.serving.svc/v1, which is Envoy."),
    ],
)
def test_notes_of_a_picker(name: str, said: str) -> None:
    """Where clients go, and how to see whether it works; nothing of a main port that is not there."""
    values = picker(name)
    done = helm("install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client", "--values", values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:\n")[1]
    assert said in notes
    assert "They are endpoint pickers" in notes
    assert "service/llm-warmroute 8000" not in notes


# What is refused

REFUSED = {
    "labels that nobody gave": ("mode: extproc", "pool.matchLabels is required: labels of the engines' pods"),
    "no such mode": ("mode: gateway", "at '/mode': value must be one of"),
    "nine ports": ("pool: {targetPorts: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", "at '/pool/targetPorts': maxItems"),
    "a failure mode in small letters": (
        "pool: {failureMode: failOpen}",
        "at '/pool/failureMode': value must be one of",
    ),
    "an open door": (
        "{mode: extproc, pool: {matchLabels: {app: v}, failureMode: FailOpen}, apiKeys: {existingSecret: a}}",
        "set FailClose, or pool.failOpenWithoutKeys",
    ),
    "a pool beside pools": (
        "{mode: extproc, pool: {matchLabels: {app: vllm}}, config: {discovery: {pools: [a]}}}",
        "pool.create: set it to false with config.discovery.pools",
    ),
    "a selector beside a pool": (
        "{mode: extproc, pool: {matchLabels: {app: vllm}}, config: {discovery: {selector: app=vllm}}}",
        "config.discovery.selector: pool.matchLabels selects the pods",
    ),
    "a pool elsewhere": (
        "{mode: extproc, pool: {matchLabels: {app: vllm}}, config: {discovery: {namespaces: [a]}}}",
        "a pool selects only pods of its own namespace",
    ),
    "pools behind a closed network": (
        "config: {discovery: {pools: [a]}}",
        "networkPolicy.engines is required: the chart does not know the labels",
    ),
    "an Envoy without a picker": ("envoy: {enabled: true}", "envoy.enabled requires mode extproc or both"),
    "an Envoy and TLS": (
        "{mode: extproc, pool: {matchLabels: {app: v}}, envoy: {enabled: true}, tls: {existingSecret: a}}",
        "tls.existingSecret: this Envoy connects to the picker in plain text",
    ),
    "ports that only a pool could tell": (
        "{mode: extproc, pool: {create: false, matchLabels: {app: v}, targetPorts: [1, 2]}, envoy: {enabled: true}}",
        "pool.targetPorts: several ports require an InferencePool",
    ),
    "a way in to nowhere": (
        "{mode: extproc, pool: {matchLabels: {app: v}}, ingress: {enabled: true, hosts: [a]}}",
        "ingress.enabled: a picker accepts no client requests",
    ),
    "metrics on a port that is not there": (
        "{mode: extproc, pool: {matchLabels: {app: v}}, monitor: {enabled: true}}",
        "adminToken.existingSecret is required: a picker has no main port",
    ),
    "one port twice": (
        "{mode: both, pool: {matchLabels: {app: v}}, config: {listen: {port: 9002}}}",
        "must be four different fixed numbers",
    ),
    "engines that no gateway reaches": (
        "{mode: extproc, engines: {enabled: true, models: [{name: a, engine: vllm, model: /m}]}}",
        "engines.networkPolicy.gateways is required",
    ),
    "engines at another port": (
        "{mode: extproc, engines: {enabled: true, models: [{name: a, engine: sglang, model: /m}]}}",
        "pool.targetPorts must have 30000, the port of the engines of a",
    ),
    "a mode past the chart": ("extraArgs: [--mode=extproc]", "would bypass the chart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_make_no_sense_are_refused(name: str, tmp_path: Path) -> None:
    """And the message says what to write instead."""
    values, said = REFUSED[name]
    file = tmp_path / "values.yaml"
    file.write_text(values)
    done = helm("template", RELEASE, CHART, "--values", file, "--set", "image.repository=registry.example.com/w")
    assert done.returncode != 0, done.stdout
    assert said in done.stderr, done.stderr
