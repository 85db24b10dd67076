"""What reaches the chart's pods and what they reach: network policies, Services, monitors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.engines.discovery.known_stacks import ROLE, STACKS, stack_of
from tests.k8s.tools import EXAMPLES, NEEDED, PRODUCTION, Document, example, of_store, only, settings_of, template

# What the pod of `helm test` is let in by.
TEST_KEYS = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
# Selectors as discovery takes them, and what a LabelSelector makes of them.
SELECTORS = {
    "app=vllm": [{"key": "app", "operator": "In", "values": ["vllm"]}],
    "app==vllm, tier != test": [
        {"key": "app", "operator": "In", "values": ["vllm"]},
        {"key": "tier", "operator": "NotIn", "values": ["test"]},
    ],
    "gpu in (a100, h100),!draining,example.com/ready": [
        {"key": "gpu", "operator": "In", "values": ["a100", "h100"]},
        {"key": "draining", "operator": "DoesNotExist"},
        {"key": "example.com/ready", "operator": "Exists"},
    ],
    "gpu notin (t4),app in (vllm)": [
        {"key": "gpu", "operator": "NotIn", "values": ["t4"]},
        {"key": "app", "operator": "In", "values": ["vllm"]},
    ],
    "intern=,inside=notin": [
        {"key": "intern", "operator": "In", "values": [""]},
        {"key": "inside", "operator": "In", "values": ["notin"]},
    ],
}


@pytest.mark.promise("The chart's network policies close all connections except those the router needs.", "kubernetes")
@pytest.mark.parametrize("selector", SELECTORS)
def test_selectors_are_understood(selector: str, tmp_path: Path) -> None:
    """The network policy lets routers reach exactly the pods that discovery selects, where it looks for them."""
    file = tmp_path / "values.yaml"
    file.write_text(
        yaml.safe_dump(NEEDED | {"config": {"discovery": {"selector": selector, "namespaces": ["a", "b"]}}})
    )
    (peer,) = only(template("--values", file), "NetworkPolicy")["spec"]["egress"][0]["to"]

    assert peer["podSelector"]["matchExpressions"] == SELECTORS[selector]
    assert peer["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    ]


def selected(term: dict[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy one of `matchExpressions`, as Kubernetes has it."""
    there, values = term["key"] in labels, term.get("values", [])
    match term["operator"]:
        case "In":
            return labels.get(term["key"]) in values
        case "NotIn":
            return labels.get(term["key"]) not in values
        case _:
            return there == (term["operator"] == "Exists")


def test_without_a_selector_known_stacks_are_reached() -> None:
    """Without a selector the policy opens to the pods that discovery then takes, where it looks for them, and to no
    other: for each known stack its labels, one label short of them, and a pod that only prefills."""
    found = template("--values", example("stacks"))
    peers = only(found, "NetworkPolicy")["spec"]["egress"][0]["to"]
    assert all(peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["serving"] for peer in peers)

    def reached(labels: Mapping[str, str]) -> bool:
        terms = [peer["podSelector"]["matchExpressions"] for peer in peers]
        return any(all(selected(term, labels) for term in each) for each in terms)

    assert len(peers) == len(STACKS)
    for stack in STACKS:
        full = {key: value or "any" for key, value in stack.labels.items()}
        short = [{key: value for key, value in full.items() if key != left_out} for left_out in full]
        for labels in (full, full | {"more": "x"}, full | {ROLE: "prefill"}, *short):
            assert reached(labels) is (stack_of(labels) is not None), labels
        assert reached(full)
    assert not reached({"app": "vllm"})


@pytest.mark.promise("The chart's network policies close all connections except those the router needs.", "kubernetes")
@pytest.mark.parametrize("name", [*EXAMPLES, "default"])
def test_networks_are_closed(name: str, rendered: dict[str, list[Document]], secrets: Path) -> None:
    """In: the main port and metrics. Out: engines, DNS, the API server where it is asked, a store where there is
    one. By port or by peer."""
    found = rendered[name]
    policy, settings = only(found, "NetworkPolicy")["spec"], settings_of(found, secrets)
    labels = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()

    metrics = settings.listen.admin_port if settings.admin.token_file else settings.listen.port
    ports = (settings.listen.port,) if name == "gateway" else (settings.listen.port, metrics)
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": port, "protocol": "TCP"}] for port in ports]
    assert all("from" in rule for rule in policy["ingress"][1:])
    engines, names, *others = policy["egress"]
    assert engines["to"]
    assert {port["port"] for port in names["ports"]} == {53}
    expected = {443, 6443, 8443, 16443} if settings.discovery.source == "kubernetes" else set()
    expected |= {4318} if settings.tracing.endpoint else set()
    expected |= {6379} if settings.peering.redis_url else set()
    assert {port["port"] for rule in others for port in rule["ports"]} == expected


def test_a_collector_with_an_address_of_ipv6() -> None:
    """Of a collector's address the port is let out, and what is asked for without one."""
    for endpoint, port in {
        "http://[fd00::1]:4318": 4318,
        "http://[fd00::1]/v1/traces": 80,
        "https://collector.observability": 443,
    }.items():
        found = template("--values", example("vllm"), "--set", f"config.tracing.endpoint={endpoint},replicaCount=1")
        (rule,) = only(found, "NetworkPolicy")["spec"]["egress"][3:]
        assert rule["ports"] == [{"port": port, "protocol": "TCP"}]


EVERYBODY = "everybody"


def let_in(found: list[Document], port: int) -> list[Any]:
    """Who may reach a port by all rules together: the union of their peers, or everybody."""
    peers: list[Any] = []
    for rule in only(found, "NetworkPolicy")["spec"]["ingress"]:
        if "ports" not in rule or port in [each["port"] for each in rule["ports"]]:
            peers += rule.get("from", [EVERYBODY])
    return peers


def team(name: str) -> dict[str, Any]:
    """Pods of a namespace, as a peer."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


@pytest.mark.parametrize("name", [*EXAMPLES, "default"])
@pytest.mark.parametrize("prometheus", [[], [team("monitoring")]])
def test_clients_shut_out_all_others(name: str, prometheus: list[Any], tmp_path: Path) -> None:
    """Rules add up: where `clients` are named, all rules for the main port together let in those, the pod of `helm
    test` and, where metrics are on that port, the Prometheus that is named; never everybody."""
    file, needed = tmp_path / "values.yaml", tmp_path / "needed.yaml"
    policy = {"clients": [team("agents")], "prometheus": prometheus}
    file.write_text(yaml.safe_dump({"networkPolicy": policy}))
    needed.write_text(yaml.safe_dump(NEEDED))
    found = template("--values", needed if name == "default" else example(name), "--values", file)
    apart = name in {"secured", PRODUCTION}
    test = {"podSelector": {"matchLabels": next(iter(d for d in found if d["kind"] == "Pod"))["metadata"]["labels"]}}
    of_test = {key: test["podSelector"]["matchLabels"][key] for key in TEST_KEYS}
    expected = [team("agents"), {"podSelector": {"matchLabels": of_test}}, *([] if apart else prometheus)]
    assert let_in(found, 8000) == expected
    everybody = [{"namespaceSelector": {}}]
    assert let_in(found, 8001) == ((prometheus or everybody) if apart else [])


def test_clients_are_narrowed_for_all_but_the_test() -> None:
    """Where only some may come, the pod of `helm test` still may: it says whether they could."""
    found = template("--values", example("secured"))
    peers = only(found, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    test = next(d for d in found if d["kind"] == "Pod")["metadata"]["labels"]
    assert len(peers) == 2
    assert peers[1]["podSelector"]["matchLabels"].items() <= test.items()


def test_services_select_routers_and_nothing_else(rendered: dict[str, list[Document]]) -> None:
    """Services, the budget and the monitor select the routers' pods, and never the pod of `helm test`."""
    found = [document for document in rendered["secured"] if not of_store(document)]
    labels = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    test = next(d for d in found if d["kind"] == "Pod")["metadata"]["labels"]
    selectors = [d["spec"]["selector"] for d in found if d["kind"] == "Service"]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in found if d["kind"] in {"Deployment", "PodMonitor"}]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in found if d["kind"] == "PodDisruptionBudget"]
    assert len(selectors) == 4
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test.items()


def test_monitors_ask_with_the_token(rendered: dict[str, list[Document]]) -> None:
    """With an admin token metrics are scraped from the admin port, with the token; without one from the main port."""
    (with_token,) = only(rendered["secured"], "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert with_token["port"] == "admin"
    assert with_token["authorization"]["credentials"] == {"name": "llm-admin-token", "key": "token"}

    plain = template("--values", example("vllm"), "--set", "monitor.enabled=true,monitor.kind=ServiceMonitor")
    (without,) = only(plain, "ServiceMonitor")["spec"]["endpoints"]
    assert (without["port"], "authorization" in without) == ("http", False)
    headless = next(d for d in plain if d["metadata"]["name"].endswith("-metrics"))
    assert (
        only(plain, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        <= headless["metadata"]["labels"].items()
    )
    assert [port["name"] for port in headless["spec"]["ports"]] == ["http"]


def test_engines_that_connect_to_the_router() -> None:
    """With `events.bind` the port is on the pod and the Service, and open to engines alone."""
    bind = "replicaCount=1,config.events.bind=tcp://0.0.0.0:5557"
    found = template("--values", example("vllm"), "--set", bind)
    rule = only(found, "NetworkPolicy")["spec"]["ingress"][2]
    assert rule["ports"] == [{"port": 5557, "protocol": "TCP"}]
    assert rule["from"][0]["podSelector"]["matchExpressions"] == SELECTORS["app=vllm"]
    assert {port["name"] for port in only(found, "Service")["spec"]["ports"]} == {"http", "kv-events"}


def test_tokenizers_of_the_hub_can_be_fetched() -> None:
    """A tokenizer that comes from the hub lets the pods reach it; one from a volume opens nothing."""
    dns = ("--values", example("dns"))
    for source, opened in (("repo=meta-llama/Llama-3.3-70B-Instruct", [443]), ("path=/tokenizers/llama", [])):
        found = template(*dns, "--set", f"replicaCount=1,tokenizers[0].model=llama,tokenizers[0].{source}")
        others = only(found, "NetworkPolicy")["spec"]["egress"][2:]
        assert [port["port"] for rule in others for port in rule["ports"]] == opened
