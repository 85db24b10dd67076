"""Routers of the chart that share a store: what they are told, what is mounted, whom they may reach."""

from __future__ import annotations

from pathlib import Path

from tests.k8s.tools import (
    CHART,
    NAMESPACE,
    NEEDED_OPTIONS,
    RELEASE,
    Document,
    documents,
    example,
    helm,
    invalid,
    only,
    settings_of,
    settings_text,
    template,
)

SHARED = "config.peering.redis_url=rediss://valkey.stores:6380"


def test_routers_are_told_of_the_store_and_of_each_other(secrets: Path) -> None:
    """The URL of the values, or a file of a Secret; and how many routers there are, with an autoscaler how many at
    least. Without a store nothing is said of one."""
    shared = settings_of(template(*NEEDED_OPTIONS, "--set", f"{SHARED},replicaCount=5"), secrets).peering
    assert (shared.redis_url, shared.expected_routers, shared.router_id) == ("rediss://valkey.stores:6380", 5, "")
    more = "autoscaling.enabled=true,autoscaling.minReplicas=3"
    assert settings_of(template(*NEEDED_OPTIONS, "--set", f"{SHARED},{more}"), secrets).peering.expected_routers == 3
    text = settings_text(template(*NEEDED_OPTIONS, "--set", "peering.existingSecret=s,peering.caKey=ca.crt"))
    assert "url_file" in text
    assert "tls_ca" in text
    assert "shared" not in settings_text(template(*NEEDED_OPTIONS))


def test_secrets_of_the_store_are_files() -> None:
    """Each key that is named is mounted, and no other."""
    keys = "peering.existingSecret=s,peering.urlKey=,peering.passwordKey=pw,peering.caKey=ca,peering.certificateKey=pem"
    found = template(*NEEDED_OPTIONS, "--set", f"{SHARED},{keys}")
    volumes = only(found, "Deployment")["spec"]["template"]["spec"]["volumes"]
    (projected,) = (volume["projected"] for volume in volumes if "projected" in volume)
    items = [(s["secret"]["name"], *s["secret"]["items"][0].values()) for s in projected["sources"]]
    assert {(name, key) for name, key, _ in items} == {("s", "pw"), ("s", "ca"), ("s", "pem")}
    text = settings_text(found)
    assert all(f"/etc/warmroute/secrets/{path}" in text for _, _, path in items)


def test_a_password_in_the_values_is_refused() -> None:
    """A pod's annotations are for all to read; and one thing is said once."""
    for values, said in (
        ("config.peering.redis_url=redis://:pw@h", "has a password"),
        ("config.peering.password=pw", "has a password"),
        (f"{SHARED},peering.existingSecret=s", "conflict: set only one of them"),
    ):
        done = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *NEEDED_OPTIONS, "--set", values)
        assert done.returncode
        assert said in done.stderr


def test_the_store_can_be_reached_and_nobody_else_asks_it() -> None:
    """Routers may go to the store, on its ports, where there is one; the example's Valkey lets in its routers alone."""
    assert _to_store(template(*NEEDED_OPTIONS, "--set", SHARED)) == [
        {"ports": [{"port": 6379, "protocol": "TCP"}], "to": [{"namespaceSelector": {}}]}
    ]
    assert not _to_store(template(*NEEDED_OPTIONS))
    found = template("--values", example("several-routers"))
    (rule,) = _to_store(found)
    store = documents((CHART / "examples" / "store" / "valkey.yaml").read_text(encoding="utf-8"))
    assert not invalid(store)
    policy, pods = only(store, "NetworkPolicy")["spec"], only(store, "Deployment")["spec"]["template"]
    (to,), (peer,) = rule["to"], policy["ingress"][0]["from"]
    assert to["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    routers = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= routers.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    service = only(store, "Service")
    assert settings_text(found).count(f"redis://{service['metadata']['name']}:6379")


def _to_store(found: list[Document]) -> list[Document]:
    rules = only(found, "NetworkPolicy")["spec"]["egress"]
    return [rule for rule in rules if {"port": 6379, "protocol": "TCP"} in rule.get("ports", [])]
