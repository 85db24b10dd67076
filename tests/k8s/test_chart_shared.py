"""Routers of the chart that share a store: what they are told, what is mounted, whom they may reach."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from loadtest.common.processes import free_port
from tests.k8s.tools import (
    CHART,
    NAMESPACE,
    NEEDED_OPTIONS,
    RELEASE,
    Document,
    helm,
    of_store,
    only,
    settings_of,
    settings_text,
    template,
)
from tests.peering.stores import PROGRAMS

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
    keyed = "apiKeys.existingSecret=k,adminToken.existingSecret=t,replicaCount=5"
    for values, routers in (("replicaCount=5", 0), (keyed, 5), ("replicaCount=5,valkey.enabled=false", 5)):
        assert settings_of(template(*NEEDED_OPTIONS, "--set", values), secrets).peering.expected_routers == routers
    assert "peering" not in settings_text(template(*NEEDED_OPTIONS, "--set", "replicaCount=1"))


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
    """Routers may go to the store, on its ports, where there is one; the chart's Valkey lets in its routers alone."""
    assert _to_store(template(*NEEDED_OPTIONS, "--set", SHARED)) == [
        {"ports": [{"port": 6379, "protocol": "TCP"}], "to": [{"namespaceSelector": {}}]}
    ]
    assert not _to_store(template(*NEEDED_OPTIONS, "--set", "replicaCount=1"))
    found = template(*NEEDED_OPTIONS)
    store = _store(found)
    policy, pods = store["NetworkPolicy"]["spec"], store["Deployment"]["spec"]["template"]
    (rule,) = _to_store(found)
    (to,), (peer,) = rule["to"], policy["ingress"][0]["from"]
    assert to["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    routers = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= routers.items()
    assert not peer["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert store["Service"]["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    assert settings_text(found).count(f"redis://{store['Service']['metadata']['name']}:6379")


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ("replicaCount=2", True),
        ("replicaCount=1", False),
        ("replicaCount=1,autoscaling.enabled=true,autoscaling.minReplicas=1", True),
        ("valkey.enabled=false", False),
        (SHARED, False),
        ("config.shared.url=redis://h", False),
        ("peering.existingSecret=s", False),
    ],
)
def test_several_routers_have_a_store(values: str, made: bool) -> None:
    """More than one router, and no other store: then there is a Valkey, and the routers are told of it."""
    found = template(*NEEDED_OPTIONS, "--set", values)
    assert bool(_store(found)) is made
    assert ("redis://llm-warmroute-valkey:6379" in settings_text(found)) is made


def test_what_sharing_nothing_costs_is_said() -> None:
    """Notes warn of routers that share nothing, and of a Valkey that is open to all; never of one router."""
    alone, open_to_all = "WARNING: these routers share nothing", "WARNING: every pod of the cluster can write"
    for values, said in (
        ("replicaCount=2", set()),
        ("valkey.enabled=false", {alone}),
        ("valkey.enabled=false,replicaCount=1", set()),
        ("networkPolicy.enabled=false", {open_to_all}),
        ("networkPolicy.enabled=false,valkey.existingSecret=s", set()),
    ):
        notes = helm("install", RELEASE, CHART, "--dry-run=client", *NEEDED_OPTIONS, "--set", values)
        assert notes.returncode == 0, notes.stderr
        assert {warning for warning in (alone, open_to_all) if warning in notes.stdout} == said
        assert "http://127.0.0.1:8001/dashboard" in notes.stdout


@pytest.mark.parametrize("password", ["", "0123abcd"])
async def test_the_valkey_of_the_chart_starts(password: str, tmp_path: Path) -> None:
    """A real server takes the container's command: no disk, bounded memory, and only the right password if there is
    one. The stream of messages is never evicted, for keys without a life time are not."""
    secret = ("--set", "valkey.existingSecret=s") if password else ()
    pod = _store(template(*NEEDED_OPTIONS, *secret))["Deployment"]["spec"]["template"]["spec"]
    shell, flags, script = pod["containers"][0]["command"]
    assert password not in script or not password
    (tmp_path / "password").write_text(password)
    (tmp_path / "valkey-server").symlink_to(PROGRAMS[0])
    port = free_port()
    script = script.replace("/etc/valkey/", f"{tmp_path}/").replace("protected-mode", f"port {port}\nprotected-mode")
    path = f"{tmp_path}:{os.environ['PATH']}"
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(shell, flags, script, env={"PATH": path}, stdout=quiet)
    try:
        assert await _ask(port, "PING") == (b"-NOAUTH" if password else b"+PONG")
        login = f"AUTH {password}\r\n" if password else ""
        for name, value in (("maxmemory-policy", b"volatile-lru"), ("maxmemory", b"201326592"), ("save", b"")):
            assert value in await _ask(port, f"{login}CONFIG GET {name}")
    finally:
        server.terminate()
        assert await server.wait() == 0


async def _ask(port: int, text: str) -> bytes:
    """The first word of the answer to inline commands, or all of it if there are several; waits for the server."""
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.01)
        writer.write(f"{text}\r\nQUIT\r\n".encode())
        answer = await reader.read()
        writer.close()
    return answer if "CONFIG" in text else answer.split()[0]


def _store(found: list[Document]) -> dict[str, Document]:
    return {document["kind"]: document for document in found if of_store(document)}


def _to_store(found: list[Document]) -> list[Document]:
    rules = only(found, "NetworkPolicy")["spec"]["egress"]
    return [rule for rule in rules if {"port": 6379, "protocol": "TCP"} in rule.get("ports", [])]
