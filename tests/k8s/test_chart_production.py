"""The values for production give what they promise. Other tests of the chart take them as one more example."""

from __future__ import annotations

from typing import Any

from tests.k8s.tools import CHART, PRODUCTION, REPO, Document, example, only, template


def test_a_router_may_be_away(rendered: dict[str, list[Document]]) -> None:
    """Two routers, never on one node, of which one is evicted at a time; those of a rollout are counted apart."""
    found = rendered[PRODUCTION]
    deployment, budget = only(found, "Deployment")["spec"], only(found, "PodDisruptionBudget")["spec"]
    assert deployment["replicas"] == 2
    assert budget["maxUnavailable"] == 1
    template_of_pods = deployment["template"]
    hard = [
        each
        for each in template_of_pods["spec"]["topologySpreadConstraints"]
        if each["whenUnsatisfiable"] == "DoNotSchedule"
    ]
    assert [each["topologyKey"] for each in hard] == ["kubernetes.io/hostname"]
    for each in template_of_pods["spec"]["topologySpreadConstraints"]:
        assert each["labelSelector"]["matchLabels"].items() <= template_of_pods["metadata"]["labels"].items()
        assert each["matchLabelKeys"] == ["pod-template-hash"]


def test_every_door_has_a_name_on_it(rendered: dict[str, list[Document]]) -> None:
    """Whoever comes in, and whatever is reached, is named; the API server alone is known by its ports, and the file
    says how to close those too. The Secrets of the keys are told with the commands that make them."""
    policy = only(rendered[PRODUCTION], "NetworkPolicy")["spec"]
    assert all(rule.get("from") for rule in policy["ingress"])
    everybody: list[Any] = [{"namespaceSelector": {}}]
    assert everybody not in [rule["from"] for rule in policy["ingress"]]
    open_ports = [[port["port"] for port in rule["ports"]] for rule in policy["egress"] if not rule.get("to")]
    assert open_ports == [[443, 6443, 8443, 16443]]
    closed = template("--values", example(PRODUCTION), "--set", "networkPolicy.apiServerCidrs={10.96.0.1/32}")
    assert all(rule.get("to") for rule in only(closed, "NetworkPolicy")["spec"]["egress"])
    text = example(PRODUCTION).read_text(encoding="utf-8")
    for secret in ("llm-api-keys", "llm-admin-token", "llm-valkey"):
        assert f"kubectl create secret generic {secret} " in text


def test_it_is_watched(rendered: dict[str, list[Document]]) -> None:
    """Monitor, rules and dashboards are there, and the monitor shows the token of the Secret that the file names."""
    found = rendered[PRODUCTION]
    (endpoint,) = only(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "admin"
    assert endpoint["authorization"]["credentials"] == {"name": "llm-admin-token", "key": "token"}
    labels = [only(found, kind)["metadata"]["labels"]["release"] for kind in ("PodMonitor", "PrometheusRule")]
    assert labels == ["kube-prometheus-stack"] * 2
    boards = {f"warmroute-{path.name}" for path in (CHART / "files" / "dashboards").glob("*.json")}
    shown = {name for d in found if d["kind"] == "ConfigMap" for name in d["data"]}
    assert shown == boards


def test_what_is_off_renders_too(tmp_path: Any) -> None:
    """Lines that are commented out, for a route, the API server's networks and a priority, are right as they are."""
    lines = example(PRODUCTION).read_text(encoding="utf-8").splitlines()
    on = (
        "# priorityClassName:",
        "  # apiServerCidrs:",
        "# httpRoute:",
        "#   enabled:",
        "#   parentRefs:",
        "#   hostnames:",
    )
    file = tmp_path / "values.yaml"
    taken = [line.replace("# ", "", 1) if line.startswith(on) else line for line in lines]
    assert sum(a != b for a, b in zip(lines, taken, strict=True)) == len(on)
    file.write_text("\n".join(taken))
    found = template("--values", file)
    assert only(found, "HTTPRoute")["spec"]["hostnames"] == ["llm.example.com"]
    assert only(found, "Deployment")["spec"]["template"]["spec"]["priorityClassName"] == "high"


def test_the_guide_names_the_file() -> None:
    """Who reads how to install finds these values."""
    for page in ("docs/guide/kubernetes.md", "helm/warmroute/README.md"):
        assert "values-production.yaml" in (REPO / page).read_text(encoding="utf-8")
