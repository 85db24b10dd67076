"""What an upgrade of a running release does: how many routers there are, how fast they go, which settings they have."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.k8s.tools import (
    CHART,
    HELM,
    NAMESPACE,
    NEEDED,
    NEEDED_OPTIONS,
    RELEASE,
    Document,
    documents,
    example,
    helm,
    in_tools,
    only,
    run,
    settings_text,
    template,
)

KINDS = {
    "v1": {"ConfigMap": "configmaps", "Service": "services", "ServiceAccount": "serviceaccounts", "Pod": "pods"},
    "apps/v1": {"Deployment": "deployments"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}


class Running:
    """The part of an API server that `lookup` asks: which kinds there are, and the one Deployment that runs."""

    def __init__(self, replicas: int | None) -> None:
        """`replicas` is what the Deployment has now; None: there is no Deployment yet."""
        self.replicas = replicas

    def answer(self, path: str) -> tuple[int, Any]:
        """Status and body."""
        if path == "/version":
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [
                {
                    "name": version.split("/")[0],
                    "versions": [{"groupVersion": version, "version": version.split("/")[1]}],
                    "preferredVersion": {"groupVersion": version, "version": version.split("/")[1]},
                }
                for version in KINDS
                if "/" in version
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in KINDS:
            kinds = [
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
                for kind, name in KINDS[version].items()
            ]
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": kinds}
        if path.endswith(f"/deployments/{RELEASE}-warmroute") and self.replicas is not None:
            owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
            meta: dict[str, Any] = {"name": f"{RELEASE}-warmroute", "namespace": NAMESPACE, "annotations": owner}
            meta["labels"] = {"app.kubernetes.io/managed-by": "Helm"}
            spec = {"replicas": self.replicas}
            return 200, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}
        return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    async def render(self, folder: Path, *options: str) -> list[Document]:
        """What Helm would send to this cluster."""

        async def handle(request: web.Request) -> web.Response:
            status, body = self.answer(request.path)
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {}}]
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": users}
        file.write_text(yaml.safe_dump(config | {"current-context": "c"}))
        words = [HELM, "template", RELEASE, CHART, "--namespace", NAMESPACE, *NEEDED_OPTIONS, *options]
        words += ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", file]
        try:
            done: subprocess.CompletedProcess[str] = await asyncio.to_thread(run, words)
        finally:
            await runner.cleanup()
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)


ON = ("--set", "autoscaling.enabled=true")


@pytest.mark.parametrize(
    ("running", "options", "replicas"),
    [(5, ON, 5), (1, ON, 2), (None, ON, None), (5, (), 2), (7, (*ON, "--set", "config.log.level=debug"), 7)],
)
async def test_an_autoscaler_takes_over_what_runs(
    running: int | None, options: tuple[str, ...], replicas: int | None, tmp_path: Path
) -> None:
    """Switched on, the autoscaler finds as many routers as ran before, and its least at least: a manifest without a
    number would be one router until it looks. Without it `replicaCount` counts; the first install has none to keep."""
    found = only(await Running(running).render(tmp_path, *options), "Deployment")["spec"].get("replicas")
    assert found == replicas


def test_a_rollout_waits_for_what_routers_learn(rendered: dict[str, list[Document]]) -> None:
    """Each new router is ready for half a minute before the next old one goes, and a rollout may wait for weights."""
    spec = only(rendered["default"], "Deployment")["spec"]
    assert (spec["minReadySeconds"], spec["progressDeadlineSeconds"]) == (30, 2400)
    quick = template(*NEEDED_OPTIONS, "--set", "minReadySeconds=5,progressDeadlineSeconds=60")
    spec = only(quick, "Deployment")["spec"]
    assert (spec["minReadySeconds"], spec["progressDeadlineSeconds"]) == (5, 60)


def test_settings_are_of_the_revision(rendered: dict[str, list[Document]]) -> None:
    """Whatever brings back an old pod template (`rollout undo`, a moved pod) brings its settings: they are in the
    template itself, where the pod reads them, and in no object that all revisions share."""
    found = rendered["vllm"]
    pod = only(found, "Deployment")["spec"]["template"]
    assert not [document for document in found if document["kind"] == "ConfigMap"]
    assert pod["metadata"]["annotations"]["warmroute/settings"] == settings_text(found)
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "settings")
    (item,) = volume["downwardAPI"]["items"]
    assert item == {"path": "warmroute.yaml", "fieldRef": {"fieldPath": "metadata.annotations['warmroute/settings']"}}
    (mount,) = (m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "settings")
    assert pod["spec"]["containers"][0]["args"][1:3] == ["--config", mount["mountPath"]]
    assert mount["subPath"] == item["path"]


@pytest.mark.parametrize(("routers", "taken"), [(4000, True), (8000, False)])
def test_settings_that_no_annotation_holds(routers: int, taken: bool, tmp_path: Path) -> None:
    """Settings up to what an API server takes as annotations are rendered; more is refused with both sizes."""
    replicas = [f"http://engine-{number:04}.example.com:8000" for number in range(routers)]
    file = tmp_path / "values.yaml"
    values = NEEDED | {"config": {"discovery": {"source": "static"}, "replicas": replicas}}
    file.write_text(yaml.safe_dump(values | {"networkPolicy": {"enabled": False}}))
    done = helm("template", RELEASE, CHART, "--values", file)
    assert (done.returncode == 0) is taken
    if taken:
        notes = only(documents(done.stdout), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        assert 100_000 < sum(len(key) + len(text) for key, text in notes.items()) < 256 * 1024
    else:
        assert "bytes; they become annotations of pods, which are limited to 229376 bytes in total" in done.stderr


@pytest.mark.parametrize("options", [(), ("--set", "replicaCount=1"), (*ON, "--set", "autoscaling.minReplicas=1")])
def test_there_is_always_a_budget(options: tuple[str, ...]) -> None:
    """However many routers there may be, one at a time is evicted: an autoscaler may have six where one is the least,
    and one that may be away never holds up the drain of a node."""
    budget = only(template(*NEEDED_OPTIONS, *options), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    off = template(*NEEDED_OPTIONS, *options, "--set", "podDisruptionBudget.enabled=false")
    assert not [document for document in off if document["kind"] == "PodDisruptionBudget"]


# Resources

LIBRARY = """
import json, sys, helm_python
with helm_python.Chart.load(sys.argv[1]) as chart:
    files = chart.render(json.load(sys.stdin), name="llm", namespace="serving")
    print(json.dumps([text for path, text in files.items() if path.endswith(".yaml")]))
"""
REQUESTS, LIMITS = {"cpu": "500m", "memory": "640Mi"}, {"memory": "2688Mi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"requests": REQUESTS, "limits": LIMITS}),
        ({"limits": {"cpu": 2}}, {"requests": REQUESTS, "limits": LIMITS | {"cpu": 2}}),
        ({"requests": {"cpu": "1"}}, {"requests": REQUESTS | {"cpu": "1"}, "limits": LIMITS}),
        ({"limits": {"memory": None}}, {"requests": REQUESTS}),
        ({"requests": {"cpu": None}}, {"requests": {"memory": "640Mi"}, "limits": LIMITS}),
        ({"requests": None}, {"limits": LIMITS}),
    ],
)
def test_resources_that_are_given_leave_the_others(given: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    """A quota that asks for a limit of CPU costs neither memory request nor memory limit; null takes one away. Under
    both Helms, for the routers and for the pod of `helm test`."""
    file = tmp_path / "values.yaml"
    values = NEEDED | {"resources": given, "test": {"resources": given}}
    file.write_text(yaml.safe_dump(values))
    texts = in_tools(LIBRARY, CHART, text=json.dumps(values))
    for found in (template("--values", file), [d for text in texts for d in documents(text)]):
        (container,) = only(found, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == expected
        (test,) = only(found, "Pod")["spec"]["containers"]
        assert ("limits" in test["resources"]) == ("limits" in expected)
        assert test["resources"].get("limits", {}).get("cpu") == expected.get("limits", {}).get("cpu")


def test_the_test_pod_goes_where_routers_go(tmp_path: Path) -> None:
    """The pod of `helm test` has the routers' affinity, priority and runtime class."""
    file = tmp_path / "values.yaml"
    terms = [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["cpu"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    file.write_text(yaml.safe_dump({"affinity": affinity, "priorityClassName": "high", "runtimeClassName": "gvisor"}))
    found = template("--values", example("vllm"), "--values", file)
    for spec in (only(found, "Pod")["spec"], only(found, "Deployment")["spec"]["template"]["spec"]):
        assert (spec["affinity"], spec["priorityClassName"], spec["runtimeClassName"]) == (affinity, "high", "gvisor")
