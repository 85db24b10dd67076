"""What the chart's pods may do and how they live: rights, settings, ends."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from tests.k8s.tools import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    NEEDED,
    PRODUCTION,
    RELEASE,
    SECRETS,
    Document,
    containers,
    example,
    helm,
    only,
    pod_specs,
    settings_of,
    settings_text,
    template,
)

NAMES = [*EXAMPLES, "default", "sidecar"]


def restricted(spec: Document) -> list[str]:
    """What the restricted Pod Security Standard has against a pod (kubernetes.io/docs/concepts/security)."""
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    wrong += [f"volume {v['name']}" for v in spec.get("volumes", []) if not {*v} - {"name"} <= allowed]
    of_pod = spec.get("securityContext", {})
    for container in containers(spec):
        own = of_pod | container.get("securityContext", {})
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            wrong.append("privileges")
        if own.get("runAsNonRoot") is not True or own.get("runAsUser") == 0:
            wrong.append("root")
        if own.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            wrong.append("seccomp")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            wrong.append("capabilities")
        if any("hostPort" in port for port in container.get("ports", [])):
            wrong.append("host port")
    return wrong


@pytest.mark.promise("The chart's pods meet the restricted Pod Security Standard with a read-only root.", "kubernetes")
@pytest.mark.parametrize("name", NAMES)
def test_pods_are_restricted(name: str, everything: dict[str, list[Document]]) -> None:
    """Every pod meets the restricted Pod Security Standard, has a root that is read only, and says what it uses."""
    specs = pod_specs(everything[name])
    assert specs
    for spec in specs:
        assert restricted(spec) == []
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
        assert all(volume["emptyDir"].get("sizeLimit") for volume in spec.get("volumes", []) if "emptyDir" in volume)
        assert spec["enableServiceLinks"] is False or name == "sidecar"


def test_a_user_of_the_platforms_choice() -> None:
    """Without a user of ours, as OpenShift wants it, pods are still restricted."""
    for spec in pod_specs(template("--values", example("vllm"), "--set", "runAsUser=null")):
        assert restricted(spec) == []
        assert "runAsUser" not in spec["securityContext"] | spec["containers"][0]["securityContext"]


def test_the_restricted_check_can_fail() -> None:
    """A pod that says nothing of itself is not restricted."""
    assert {*restricted({"containers": [{"name": "a"}]})} == {"privileges", "root", "seccomp", "capabilities"}


# Rights


@pytest.mark.promise(
    "The chart's Role permits listing and watching pods, and nothing for the whole cluster.", "kubernetes"
)
@pytest.mark.parametrize("name", NAMES)
def test_roles_are_the_minimum(name: str, everything: dict[str, list[Document]]) -> None:
    """A Role says list and watch on pods and nothing else, where engines are; where nobody asks there is none."""
    found = everything[name]
    roles = [document for document in found if document["kind"] == "Role"]
    discovery = yaml.safe_load(settings_text(found))["discovery"]
    if discovery["source"] != "kubernetes":
        assert not [document for document in found if document["kind"] in {"Role", "RoleBinding"}]
        return
    assert all(
        role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}] for role in roles
    )
    if name == "sidecar":
        return
    assert [role["metadata"]["namespace"] for role in roles] == discovery["namespaces"]
    bindings = [document for document in found if document["kind"] == "RoleBinding"]
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": role["metadata"]["name"],
        }
        account = only(found, "ServiceAccount")["metadata"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]


@pytest.mark.promise("Pods of the chart that do not need the API server have no token.", "kubernetes")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_where_they_are_needed(name: str, everything: dict[str, list[Document]]) -> None:
    """Only a router that asks the API server has a token of it: no other pod, and none by its ServiceAccount alone."""
    found = everything[name]
    asks = yaml.safe_load(settings_text(found))["discovery"]["source"] == "kubernetes"
    assert only(found, "ServiceAccount")["automountServiceAccountToken"] is False
    for spec in pod_specs(found):
        is_router = spec["containers"][0]["name"] == "warmroute"
        assert spec["automountServiceAccountToken"] is (asks and is_router)


def test_the_sidecar_alone_has_the_token(everything: dict[str, list[Document]]) -> None:
    """Beside an agent only the router's container has a token, with the three files that a pod's own would have."""
    (spec,) = pod_specs(everything["sidecar"])
    (volume,) = (volume for volume in spec["volumes"] if "projected" in volume)
    files = {
        item["path"]
        for source in volume["projected"]["sources"]
        for part in source.values()
        for item in part.get("items", [part])
    }
    assert files == {"token", "ca.crt", "namespace"}
    where = {
        each["name"]: [m["mountPath"] for m in each.get("volumeMounts", []) if m["name"] == volume["name"]]
        for each in containers(spec)
    }
    assert where == {"warmroute": ["/var/run/secrets/kubernetes.io/serviceaccount"], "agent": []}


def test_an_account_of_somebody_else() -> None:
    """With an account and rights that are there already, the chart makes neither."""
    off = "serviceAccount.create=false,serviceAccount.name=mine,rbac.create=false"
    found = template("--values", example("vllm"), "--set", off)
    assert not [d for d in found if d["kind"] in {"ServiceAccount", "Role", "RoleBinding"}]
    assert only(found, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


# Settings


@pytest.mark.promise("The chart opens the admin listener to a cluster only with a token.", "kubernetes")
@pytest.mark.parametrize("name", NAMES)
def test_the_router_takes_the_settings(name: str, everything: dict[str, list[Document]], secrets: Path) -> None:
    """The settings file of every example is one that the router starts with."""
    settings = settings_of(everything[name], secrets)
    assert settings.discovery.source in {"kubernetes", "dns", "static"}
    if name != "sidecar":
        assert settings.listen.host == "0.0.0.0"
        assert (settings.listen.admin_host == "127.0.0.1") is (name not in {"secured", PRODUCTION})


def test_settings_are_passed_through(secrets: Path, tmp_path: Path) -> None:
    """What `config` says is what the router hears: large numbers, small ones, zeros, switches, lists, odd texts."""
    config = {
        "discovery": {"selector": "app=vllm", "resync_s": 60},
        "routing": {"index_bytes_max": 34_359_738_368, "kv_tokens_max": 0},
        "tracing": {"sample_ratio": 0.0000001},
        "listen": {"lame_duck_s": 0, "drain_s": 12.5, "metrics_on_main": False, "connections_max": 300},
        "tokens": {"template_kwargs": ['m={"enable_thinking": false}'], "sources": ["m=/t/<a> & b"]},
        "upstream": {"retry_ratio": 0},
        "log": {"requests": False},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(NEEDED | {"config": config}))
    settings = settings_of(template("--values", file), secrets)

    for section, values in config.items():
        for key, value in values.items():
            expected = tuple(value) if isinstance(value, list) else value
            assert getattr(getattr(settings, section), key) == expected, key


@pytest.mark.promise("The chart puts no secret into a settings file and makes none.", "kubernetes")
def test_secrets_are_files(rendered: dict[str, list[Document]], secrets: Path) -> None:
    """Each Secret that is named is a file, where the settings look for it; certificates of clients too."""
    more = "tls.clientCaKey=ca.crt,upstreamTls.certificateKey=client.pem"
    found = template("--values", example("secured"), "--set", more)
    settings = settings_of(found, secrets)
    (projected,) = (v["projected"] for v in pod_specs(found)[0]["volumes"] if "projected" in v)
    files = {item["path"] for source in projected["sources"] for item in source["secret"]["items"]}

    named = [
        settings.admin.token_file,
        settings.auth.keys_file,
        settings.auth.secret_file,
        settings.upstream.api_key_file,
    ]
    named += [settings.listen.tls_certificate, settings.listen.tls_key, settings.listen.tls_client_ca]
    named += [settings.upstream.tls_ca, settings.upstream.tls_certificate]
    assert {str(secrets / file) for file in files} == {*named}
    assert projected["defaultMode"] == 0o440
    assert settings_text(rendered["secured"]).count(SECRETS) == len(named) - 2


# Lives


@pytest.mark.parametrize("name", [*EXAMPLES, "default", "sidecar"])
def test_grace_is_long_enough(name: str, everything: dict[str, list[Document]], secrets: Path) -> None:
    """A pod may take lame duck, drain and 15 s to end, by the very settings that it starts with."""
    listen = settings_of(everything[name], secrets).listen
    spec = next(spec for spec in pod_specs(everything[name]) if spec["containers"][0]["name"] != "test")
    assert spec["terminationGracePeriodSeconds"] == math.ceil(listen.lame_duck_s + listen.drain_s + 15)


def test_a_sleep_before_the_end_is_added() -> None:
    """Kubernetes counts preStop to the grace, so the grace grows with it; parts of a second are whole ones."""
    times = ("--set", "preStopSleepSeconds=7", "--set-json", "config.listen.drain_s=0.5")
    spec = only(template("--values", example("vllm"), *times), "Deployment")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 7 + 5 + 1 + 15
    assert spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}


def test_a_changed_setting_is_another_pod(rendered: dict[str, list[Document]]) -> None:
    """A rollout follows from each change of the settings, and from nothing that is none."""

    def pod(found: list[Document]) -> Document:
        made: Document = only(found, "Deployment")["spec"]["template"]
        return made

    values = ("--values", example("vllm"))
    assert pod(template(*values, "--set", "config.probe.interval_s=2")) != pod(rendered["vllm"])
    assert pod(template(*values, "--set", "replicaCount=5")) == pod(rendered["vllm"])


def test_a_rollout_takes_nobody_away_first(rendered: dict[str, list[Document]]) -> None:
    """A router goes only after another is ready, one at a time is evicted; an autoscaler alone counts them."""
    default, scaled = rendered["default"], rendered["many-models"]
    assert only(default, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert only(default, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert only(default, "Deployment")["spec"]["replicas"] == 2
    assert "replicas" not in only(scaled, "Deployment")["spec"]
    metrics = only(scaled, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["Resource", "Pods"]
    assert metrics[1]["pods"]["metric"]["name"] == "warmroute_in_flight_requests"


def test_probes_ask_where_somebody_answers(rendered: dict[str, list[Document]]) -> None:
    """Probes ask by the scheme of the port; where that wants certificates of its clients they ask the admin port."""
    mutual = template("--values", example("secured"), "--set", "tls.clientCaKey=ca.crt")
    for found, port, scheme in (
        (rendered["default"], "http", None),
        (rendered["secured"], "http", "HTTPS"),
        (mutual, "admin", None),
    ):
        (container,) = pod_specs([only(found, "Deployment")])[0]["containers"]
        for name, path in (("startupProbe", "/healthz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
            asked = container[name]["httpGet"]
            assert (asked["path"], asked["port"], asked.get("scheme")) == (path, port, scheme)


def test_memory_follows_the_settings(secrets: Path) -> None:
    """What is asked for grows with the index and the remembered tokens; its limit holds the bodies of
    requests, or a queue of them, and what replicas hold by their events."""
    index, tokens, queue, events = 1 << 30, 64 << 20, 100 << 20, 300 << 20
    sizes = f"config.routing.index_bytes_max={index},config.tokens.cache_bytes_max={tokens}"
    more = f"{sizes},config.admission.queue_bytes_max={queue}"
    more += f",config.events.index_bytes_max={events}"
    for bodies, held in ((100 << 20, 150), (200 << 20, 200)):
        flags = f"{more},config.limits.total_body_bytes_max={bodies}"
        spec = only(template("--values", example("vllm"), "--set", flags), "Deployment")["spec"]["template"]["spec"]
        resources = spec["containers"][0]["resources"]
        assert resources["requests"] == {"cpu": "500m", "memory": f"{192 + 1280 + 64}Mi"}
        assert resources["limits"] == {"memory": f"{192 + 1280 + 64 + held + 300}Mi"}


# helm test, and what is said after an installation


@pytest.mark.parametrize(
    ("ready", "models", "status", "said"),
    [
        (200, 200, 0, "ready; serves small, large"),
        (200, 401, 0, "ready; what it serves is told to those with a key"),
        (503, 200, 1, "not ready after 0 s: 503"),
        (200, 502, 1, "/v1/models: 502"),
    ],
)
async def test_the_test_pod(
    ready: int, models: int, status: int, said: str, rendered: dict[str, list[Document]]
) -> None:
    """The command of `helm test` ends well exactly when the router is ready and says what it serves."""

    async def answer(request: web.Request) -> web.Response:
        body = {"data": [{"id": "small"}, {"id": "large"}]}
        return web.json_response(body, status=ready if request.path == "/readyz" else models)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        (container,) = next(d for d in rendered["default"] if d["kind"] == "Pod")["spec"]["containers"]
        assert container["command"] == ["python", "-c"]
        script, url, seconds = container["args"]
        assert (url, seconds) == (f"http://{RELEASE}-warmroute.{NAMESPACE}.svc:80", "60")
        done = await run_async(sys.executable, "-c", script, f"http://{host}:{port}", "0" if ready != 200 else "10")
    finally:
        await runner.cleanup()
    assert said in done.stdout + done.stderr
    assert (done.returncode != 0) == bool(status)


async def run_async(*command: str) -> subprocess.CompletedProcess[str]:
    """A process beside the running loop."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_notes_give_the_first_curl(name: str) -> None:
    """After an installation stands what to type next, with the names, ports and scheme of this one."""
    done = helm("install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client", "--values", example(name))
    notes = done.stdout.split("NOTES:\n")[1]
    scheme, port = ("https", 443) if name == "secured" else ("http", 80)
    assert f"port-forward service/{RELEASE}-warmroute 8000:{port}" in notes
    assert f" {scheme}://{RELEASE}-warmroute.{NAMESPACE}.svc/v1\n" in notes
    assert f"{scheme}://127.0.0.1:8000/v1/chat/completions" in notes
    assert ("$KEY" in notes) is (name in {"secured", "gateway", PRODUCTION})
    assert f"helm test {RELEASE} -n {NAMESPACE}" in notes
