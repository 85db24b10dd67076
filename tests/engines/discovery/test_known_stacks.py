"""Pods of known stacks are found without a setting, each by the labels and on the port that its own router uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.core.types.disagg_types import Role
from router.engines.discovery.known_stacks import STACKS, stack_of
from tests.engines.discovery.followed import Followed
from tests.support.apiserver import ApiServer
from tests.support.podstore import merged, pod

# As the charts and controllers make them, sources in router/engines/discovery/known_stacks.py. Each: labels,
# containers, native sidecars, and the port that is right.
PRODUCTION_STACK = (
    {
        "model": "opt125m",
        "helm-release-name": "vllm",
        "app.kubernetes.io/name": "opt125m",
        "app.kubernetes.io/instance": "vllm",
        "app.kubernetes.io/component": "serving-engine",
        "app.kubernetes.io/part-of": "vllm-stack",
        "environment": "test",
    },
    {"vllm": {"container-port": 8000, "zmq-port": 55_555, "ucx-port": 9_999}},
    {},
    8000,
)
KSERVE = (
    {
        "app.kubernetes.io/name": "qwen",
        "app.kubernetes.io/part-of": "llminferenceservice",
        "kserve.io/component": "workload",
        "llm-d.ai/role": "both",
    },
    {"main": {"": 8000}},
    {},
    8000,
)
KSERVE_DECODE = (
    KSERVE[0] | {"llm-d.ai/role": "decode"},
    {"main": {"": 8001}},
    {"llm-d-routing-sidecar": {"": 8000}},
    8000,
)
LLM_D = (
    {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": "decode", "llm-d.ai/model": "qwen"},
    {"vllm": {"vllm": 8200, "metrics": 9090}},
    {"routing-proxy": {"sidecar": 8000}},
    8000,
)
LLM_D_OLDER = ({"llm-d.ai/inferenceServing": "true"}, {"vllm": {"modelserver": 8000, "nixl": 5600}}, {}, 8000)
LEADER = (
    {"leaderworkerset.sigs.k8s.io/name": "vllm", "leaderworkerset.sigs.k8s.io/worker-index": "0", "role": "leader"},
    {"vllm-leader": {"": 8080}},
    {},
    8080,
)
Made = tuple[dict[str, str], dict[str, dict[str, int]], dict[str, dict[str, int]], int]
KNOWN: dict[str, Made] = {
    "production-stack": PRODUCTION_STACK,
    "kserve": KSERVE,
    "kserve-decode": KSERVE_DECODE,
    "llm-d": LLM_D,
    "llm-d-older": LLM_D_OLDER,
    "leaderworkerset": LEADER,
}
UNKNOWN: dict[str, dict[str, str]] = {
    "web": {"app": "web"},
    "prefill": {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": "prefill"},
    "kserve-prefill": KSERVE[0] | {"llm-d.ai/role": "prefill"},
    "picker": {"app.kubernetes.io/part-of": "llminferenceservice", "kserve.io/component": "router"},
    "stack-router": {"app.kubernetes.io/component": "router", "app.kubernetes.io/instance": "vllm"},
    "worker": LEADER[0] | {"leaderworkerset.sigs.k8s.io/worker-index": "1"},
}


def made(name: str, address: int, labels: dict[str, str], own: Any = None, beside: Any = None) -> dict[str, Any]:
    """A pod with these labels alone, and these ports of containers and native sidecars."""
    what = pod(name, ip=f"10.0.1.{address}")
    what["metadata"]["labels"] = labels
    spec = {"containers": _containers(own or {"main": {"": 8000}}), "initContainers": _containers(beside or {})}
    for container in spec["initContainers"]:
        container["restartPolicy"] = "Always"
    return dict(merged(what, {"spec": spec}))


def _containers(ports: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "ports": [{"containerPort": port} | ({"name": called} if called else {}) for called, port in each.items()],
        }
        for name, each in ports.items()
    ]


async def test_pods_of_known_stacks_are_found(api: ApiServer, tmp_path: Path) -> None:
    """Without a selector the engines of each stack are replicas on their right port, and no other pod of the namespace
    is: no web server, router, endpoint picker, prefill pod or worker of a group."""
    for number, (name, (labels, own, beside, _)) in enumerate(KNOWN.items()):
        api.store.create(made(name, number, labels, own, beside))
    for number, (name, labels) in enumerate(UNKNOWN.items(), 100):
        api.store.create(made(f"other-{name}", number, labels))
    async with Followed(api, tmp_path, selector="") as view:
        await view.until_names(*KNOWN)
        found = {each.name.partition("/")[2]: int(each.url.rpartition(":")[2]) for each in view.sets[-1]}
        assert found == {name: port for name, (*_, port) in KNOWN.items()}


async def test_a_pod_that_loses_its_label_leaves(api: ApiServer, tmp_path: Path) -> None:
    """Without a selector the API server tells of every pod, so a label taken away makes the replica leave at once, and
    one given makes it join."""
    labels, own, beside, _ = PRODUCTION_STACK
    api.store.create(made("mine", 1, labels, own, beside))
    api.store.create(made("web", 2, {"app": "web"}))
    async with Followed(api, tmp_path, selector="") as view:
        await view.until_names("mine")
        api.store.patch("mine", {"metadata": {"labels": {"app.kubernetes.io/component": "old"}}})
        api.store.patch("web", {"metadata": {"labels": LLM_D_OLDER[0]}})
        await view.until_names("web")


async def test_a_port_that_is_set_goes_before_the_stacks(api: ApiServer, tmp_path: Path) -> None:
    """`discovery.port` and a pod's annotation are somebody's will and go before what is known of the stack."""
    labels, own, beside, _ = LLM_D
    api.store.create(made("mine", 1, labels, own, beside))
    asked = {"metadata": {"annotations": {"warmroute/port": "metrics"}}}
    api.store.create(dict(merged(made("web", 2, labels, own, beside), asked)))
    async with Followed(api, tmp_path, selector="", port="8200") as view:
        await view.until_names("mine", "web")
        assert {each.url for each in view.sets[-1]} == {"http://10.0.1.1:8200", "http://10.0.1.2:9090"}


async def test_workers_of_a_group_are_no_mistake(
    api: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A selector that takes in the workers of a LeaderWorkerSet brings the leaders alone, and no line in the log says
    that a worker has no port; a worker that has one, as with data parallelism over hosts, is a replica."""
    name = {"leaderworkerset.sigs.k8s.io/name": "vllm"}
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    api.store.create(made("leader", 1, name | {index: "0"}))
    api.store.create(made("worker", 2, name | {index: "1"}, {"main": {}}))
    api.store.create(made("rank", 3, name | {index: "2"}))
    async with Followed(api, tmp_path, selector="leaderworkerset.sigs.k8s.io/name=vllm") as view:
        await view.until_names("leader", "rank")
    assert "not usable" not in caplog.text


def test_each_stack_is_tried() -> None:
    """Every stack that is known has a pod in these tests, and none of the others' pods is taken for one."""
    found = {stack.name for labels, *_ in KNOWN.values() if (stack := stack_of(labels))}
    assert found == {stack.name for stack in STACKS}
    assert [name for name, labels in UNKNOWN.items() if stack_of(labels)] == []


async def test_pods_that_prefill_are_found_where_requests_are_split(api: ApiServer, tmp_path: Path) -> None:
    """Each pod has the role and the revision of its labels, of which ours goes before llm-d's; without a handshake in
    the settings no label means anything."""
    labels = LLM_D[0]
    roles = {
        "p": labels | {"llm-d.ai/role": "prefill", "disaggregatedset.x-k8s.io/revision": "r7"},
        "d": labels | {"llm-d.ai/role": "decode"},
        "b": labels | {"llm-d.ai/role": "prefill-decode"},
        "mine": labels | {"llm-d.ai/role": "decode", "warmroute.io/role": "prefill"},
        "odd": labels | {"llm-d.ai/role": "encode"},
        "sees": labels | {"llm-d.ai/role": "encode-prefill"},
        "all": labels | {"llm-d.ai/role": "encode-prefill-decode"},
    }
    for number, (name, each) in enumerate(roles.items()):
        api.store.create(made(name, number, each))
    async with Followed(api, tmp_path, selector="", split=True) as view:
        await view.until_names(*roles)
        found = {each.name.partition("/")[2]: (each.role, each.revision) for each in view.sets[-1]}
        assert found == {
            "p": (Role.PREFILL, "r7"),
            "d": (Role.DECODE, ""),
            "b": (Role.BOTH, ""),
            "mine": (Role.PREFILL, ""),
            "odd": (Role.BOTH, ""),
            "sees": (Role.PREFILL, ""),
            "all": (Role.BOTH, ""),
        }
    async with Followed(api, tmp_path, selector="") as view:
        await view.until_names("d", "b", "mine", "odd", "all")
        assert {(each.role, each.revision) for each in view.sets[-1]} == {(Role.BOTH, "")}
