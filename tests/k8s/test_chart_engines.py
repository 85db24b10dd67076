"""The chart of engines: what it makes of a list of models, what it refuses, and that it runs with the routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.k8s import tools
from tests.k8s.cluster import CHAT, MODEL, Gateway, cluster, gateway, until

IMAGE = "registry.example.com/warmroute"
MODELS: list[dict[str, Any]] = [
    {"name": "sim", "engine": "simulated", "image": f"{IMAGE}:demo"},
    {"name": "llama", "engine": "vllm", "model": "/models/llama", "claim": "models", "autoscaling": {"maxReplicas": 4}},
    {"name": "qwen", "engine": "sglang", "model": "org/qwen", "servedName": "org/qwen", "hubToken": {"secret": "hub"}},
    {"name": "big-vllm", "engine": "vllm", "model": "org/big", "kind": "LeaderWorkerSet", "gpus": 8},
    {"name": "big-sglang", "engine": "sglang", "model": "org/big", "kind": "LeaderWorkerSet", "gpus": 8},
]
# Custom resources, which have no schema among those of Kubernetes.
CUSTOM = {"LeaderWorkerSet", "ScaledObject", "PodMonitor"}
READY_S = 120.0


def options(*models: dict[str, Any]) -> list[str]:
    """Words for Helm that turn engines on with these models."""
    given = ["--set", f"image.repository={IMAGE}", "--set", "engines.enabled=true"]
    return [*given, "--set-json", f"engines.models={json.dumps(models)}"]


def refused(*models: dict[str, Any]) -> str:
    """What Helm says of models that it does not take."""
    done = tools.helm("template", tools.RELEASE, tools.CHART, "--namespace", tools.NAMESPACE, *options(*models))
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def named(found: list[tools.Document], kind: str, model: str) -> Any:
    """The object of a kind that a model has."""
    (one,) = (d for d in found if d["kind"] == kind and d["metadata"]["name"] == f"{tools.RELEASE}-{model}")
    return one


@pytest.fixture(scope="module")
def stack() -> list[tools.Document]:
    """The chart with an engine of each sort."""
    return tools.template(*options(*MODELS), "--set", "engines.monitor.enabled=true")


def groups(found: list[tools.Document]) -> dict[str, dict[str, Any]]:
    """Templates of leaders and workers, by name of the set and of the template."""
    sets = [d for d in found if d["kind"] == "LeaderWorkerSet"]
    parts = ("leaderTemplate", "workerTemplate")
    return {f"{d['metadata']['name']}/{part}": d["spec"]["leaderWorkerTemplate"][part] for d in sets for part in parts}


def test_objects_are_valid_strictly(stack: list[tools.Document]) -> None:
    """No field of an object or of a group's pods is misspelt, by the schemas of three Kubernetes versions."""
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": made["metadata"] | {"name": "pod"}, "spec": made["spec"]}
        for made in groups(stack).values()
    ]
    assert len(pods) == 4
    assert tools.invalid([d for d in stack if d["kind"] not in CUSTOM] + pods) == []


def test_nothing_is_made_unless_asked_for(rendered: dict[str, list[tools.Document]]) -> None:
    """Without `engines.enabled` the only Deployment is the router's."""
    names = {d["metadata"]["name"] for d in rendered["default"] if d["kind"] == "Deployment"}
    assert names == {"llm-warmroute", "llm-warmroute-valkey"}


@pytest.mark.parametrize(("engine", "model"), [("vllm", "llama"), ("sglang", "qwen")])
def test_pods_are_those_of_the_snippets(stack: list[tools.Document], engine: str, model: str) -> None:
    """Image, flags, ports, probes, pause and grace are what deploy/engines has, whatever the model is named."""
    path = tools.REPO / "deploy" / "engines" / f"{engine}.yaml"
    snippet = tools.only(tools.documents(path.read_text(encoding="utf-8")), "Deployment")["spec"]["template"]["spec"]
    made = named(stack, "Deployment", model)["spec"]["template"]["spec"]
    (theirs,), (ours,) = snippet["containers"], made["containers"]
    model_flags = ("--model", "--model-path", "--served-model-name")
    flags = [{arg for arg in each["args"] if arg.partition("=")[0] not in model_flags} for each in (theirs, ours)]
    assert flags[0] <= flags[1]
    assert {arg.partition("=")[0] for arg in theirs["args"]} <= {arg.partition("=")[0] for arg in ours["args"]}
    same = ("image", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    for key in ("terminationGracePeriodSeconds", "automountServiceAccountToken", "enableServiceLinks"):
        assert made[key] == snippet[key]


def test_scaling_is_that_of_the_snippet(stack: list[tools.Document]) -> None:
    """What KEDA is told differs from deploy/engines/keda.yaml in names and in the most replicas alone."""
    snippet = tools.only(tools.documents((tools.REPO / "deploy/engines/keda.yaml").read_text()), "ScaledObject")["spec"]
    made = named(stack, "ScaledObject", "llama")["spec"]
    text = json.dumps(snippet).replace('"vllm"', '"llm-llama"').replace("my-model", "llama")
    assert made == json.loads(text) | {"maxReplicaCount": 4}
    assert "replicas" not in named(stack, "Deployment", "llama")["spec"]


def test_scaling_from_zero_has_routers_that_are_ready_without_a_replica(stack: list[tools.Document]) -> None:
    """`minReplicas: 0` is no default of 1; what starts the first replica are requests that routers refused, which
    Kubernetes must let come. A setting that is given stays, and other models change nothing."""
    none = MODELS[1] | {"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}
    found = tools.template(*options(MODELS[0], none))
    spec = named(found, "ScaledObject", "llama")["spec"]
    assert spec["minReplicaCount"] == 0
    demand = spec["triggers"][-1]["metadata"]
    assert 'increase(warmroute_requests_total{status="503",model="llama"}[2m])' in demand["query"]
    assert 'model="none"' not in demand["query"], "another model's requests must not start this one"
    assert demand["activationThreshold"] == "0"
    assert len(spec["triggers"]) == len(named(stack, "ScaledObject", "llama")["spec"]["triggers"]) + 1
    given = tools.template(*options(none), "--set", "config.discovery.scale_from_zero=false")
    discovery = [yaml.safe_load(tools.settings_text(each))["discovery"] for each in (found, given, stack)]
    assert [each.get("scale_from_zero") for each in discovery] == [True, False, None]
    assert [each.get("models") for each in discovery] == [["llama"], ["llama"], None]


def test_discovery_finds_what_serves(stack: list[tools.Document]) -> None:
    """The router selects pods of Deployments and leaders; workers of a group have not the label."""
    settings = yaml.safe_load(tools.settings_text(stack))
    key, _, value = settings["discovery"]["selector"].partition("=")
    deployments = [
        d for d in stack if d["kind"] == "Deployment" and not d["metadata"]["name"].startswith("llm-warmroute")
    ]
    assert [d["spec"]["template"]["metadata"]["labels"].get(key) for d in deployments] == [value] * 3
    for name, made in groups(stack).items():
        assert (made["metadata"]["labels"].get(key) == value) == name.endswith("leaderTemplate")


def test_a_selector_that_is_given_stays() -> None:
    """`config.discovery.selector` goes before the label of the engines."""
    found = tools.template(*options(MODELS[0]), "--set", "config.discovery.selector=app=mine")
    assert yaml.safe_load(tools.settings_text(found))["discovery"]["selector"] == "app=mine"


def test_only_the_routers_of_the_release_reach_the_ports(stack: list[tools.Document]) -> None:
    """Each model's policy selects its pods and lets in the labels that the routers' pods have, to its ports; beside
    them what connects for a picker, to the port of requests alone."""
    router = named(stack, "Deployment", "warmroute")["spec"]["template"]["metadata"]["labels"]
    for model in ("sim", "llama", "qwen"):
        policy, deployment = (named(stack, kind, model)["spec"] for kind in ("NetworkPolicy", "Deployment"))
        assert policy["podSelector"] == deployment["selector"]
        rule, envoys = policy["ingress"]
        assert rule["from"][0]["podSelector"]["matchLabels"].items() <= router.items()
        (container,) = deployment["template"]["spec"]["containers"]
        assert not envoys["from"][0]["podSelector"]["matchLabels"].items() <= router.items()
        assert [port["port"] for port in envoys["ports"]] == [container["ports"][0]["containerPort"]]
        assert [port["port"] for port in rule["ports"]] == [port["containerPort"] for port in container["ports"]]


def test_a_group_is_one_engine(stack: list[tools.Document]) -> None:
    """Leaders serve with all GPUs of the group, workers join them, as the engines' own guides have it."""
    made = {name: each["spec"]["containers"][0] for name, each in groups(stack).items()}
    leader, worker = (made[f"llm-big-vllm/{part}Template"]["args"] for part in ("leader", "worker"))
    joined = {"--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"}
    assert {"--tensor-parallel-size=8", "--pipeline-parallel-size=2"} | joined <= set(leader)
    assert worker == [*leader, "--headless"]
    for part in ("leaderTemplate", "workerTemplate"):
        assert {"--tp=16", "--node-rank=$(LWS_WORKER_INDEX)"} <= set(made[f"llm-big-sglang/{part}"]["args"])
    assert "readinessProbe" not in made["llm-big-sglang/workerTemplate"]


def test_replicas_that_pull_reach_each_other() -> None:
    """Memory behind the GPU, its tier of peers, the port by which routers find it, and room for all of that; routers
    may look there, and replicas of the model talk on any port. Without `pulls` there is none of it."""
    model = MODELS[1] | {"pulls": {"memoryGiB": 100, "port": 6000}, "podAnnotations": {"mine": "1"}}
    ports = ("--set-json", 'networkPolicy.enginePorts=[{"port": 8000}]', "--set", "config.p2p.port=5710")
    found = tools.template(*options(model), *ports)
    assert tools.invalid([d for d in found if d["kind"] not in CUSTOM]) == []
    pod = named(found, "Deployment", "llama")["spec"]["template"]
    (container,), volumes = pod["spec"]["containers"], {each["name"]: each for each in pod["spec"]["volumes"]}
    (flag,) = [arg for arg in container["args"] if arg.startswith("--kv-transfer-config=")]
    extra = json.loads(flag.partition("=")[2])["kv_connector_extra_config"]
    assert (extra["cpu_bytes_to_use"], extra["secondary_tiers"]) == (100 << 30, [{"type": "p2p"}])
    env = {each["name"]: each for each in container["env"]}
    assert env["VLLM_P2P_SIDE_CHANNEL_HOST"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["VLLM_P2P_SIDE_CHANNEL_PORT"]["value"] == "6000"
    assert pod["metadata"]["annotations"] == {"mine": "1", "warmroute/p2p-port": "6000"}
    assert (volumes["shm"]["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"]) == ("108Gi", "164Gi")
    routers, _, peers = named(found, "NetworkPolicy", "llama")["spec"]["ingress"]
    assert [port["port"] for port in routers["ports"]] == [port["containerPort"] for port in container["ports"]]
    assert 6000 in [port["port"] for port in routers["ports"]]
    assert peers == {"from": [{"podSelector": named(found, "Deployment", "llama")["spec"]["selector"]}]}
    engines, *_ = named(found, "NetworkPolicy", "warmroute")["spec"]["egress"]
    assert [each["port"] for each in engines["ports"]] == [8000, 5710, 6000]
    plain = tools.template(*options(MODELS[1]))
    assert "p2p" not in json.dumps(plain).lower()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pulls": {"memoryGiB": 8}}, "pulls of 'sim' require engine vllm"),
        ({"image": ""}, "is simulated and requires an image"),
        ({"engine": "vllm"}, "requires model: its name on the hub or a folder"),
        ({"engine": "vllm", "model": "/models/a"}, "no volume is mounted at /models/a"),
        ({"nodesPerGroup": 2}, "requires kind LeaderWorkerSet"),
        ({"kind": "LeaderWorkerSet"}, "remove kind"),
        ({"autoscaling": {"minReplicas": 9}}, "maxReplicas is less than minReplicas"),
        ({"gpu": 2}, "gpu"),
        ({"engine": "tgi"}, "engine"),
        ({"name": "Not A Name"}, "name"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], said: str) -> None:
    """What cannot work is told before anything is installed, with what to do."""
    assert said in refused(MODELS[0] | change)


def test_no_model_and_two_of_a_name_are_refused() -> None:
    """Engines that are on have models, each of its own name."""
    assert "engines.models is required" in refused()
    assert "the name 'sim' is duplicated" in refused(MODELS[0], MODELS[0])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs all of 127.0.0.0/8")
@pytest.mark.timeout(180)
async def test_the_stack_answers(tmp_path: Path) -> None:
    """The rendered pods of three models, each a simulated engine, are found by the rendered settings file. Each model
    answers from its own pods, and a prompt that comes again goes where it was, by what the engine's events said."""
    without = [MODELS[0], MODELS[1], MODELS[2] | {"tokenizer": ""}]  # no hub here
    found = tools.template(*options(*without))
    file = tmp_path / "warmroute.yaml"
    file.write_text(tools.settings_text(found))
    templates = {name: named(found, "Deployment", name)["spec"]["template"] for name in ("sim", "llama", "qwen")}
    words = templates["sim"]["spec"]["containers"][0]["args"]
    assert words[words.index("--model") + 1] == MODEL
    served = {"sim": MODEL, "llama": "llama", "qwen": "org/qwen"}
    async with cluster({}) as made:
        wanted = [(f"{name}-{turn}", name) for name in templates for turn in (0, 1)]
        running = [made.run(pod, model=served[name], template=templates[name]) for pod, name in wanted]
        pods = await asyncio.gather(*running)
        kubeconfig = made.api.kubeconfig(tmp_path, tools.NAMESPACE)
        async with gateway(file, kubeconfig) as router, aiohttp.ClientSession() as session:
            await until(lambda: router.knows(*pods), READY_S, "the pods were not found")
            for name, model in served.items():
                first = await ask(session, router.url, model)
                assert first["x-warmroute-reason"] != "warm"
                where = first["x-warmroute-replica"]
                assert [pod.name.rpartition("-")[0] for pod in pods if pod.url == where] == [name]
                await until(partial(exact, router, where), READY_S, "events were not followed")
                second = await ask(session, router.url, model)
                assert (second["x-warmroute-reason"], second["x-warmroute-grade"]) == ("warm", "exact")
                assert second["x-warmroute-replica"] == where


async def exact(router: Gateway, url: str) -> bool:
    """Whether what a replica holds is known by its events."""
    return bool((await router.rows())[url]["grade"] == "exact")


async def ask(session: aiohttp.ClientSession, url: str, model: str) -> Mapping[str, str]:
    """The receipt of one answered request, its prompt the same each time."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello " * 200}]}
    async with asyncio.timeout(READY_S), session.post(url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers.copy()


def test_a_model_may_be_prefilled_apart() -> None:
    """Two entries of one name, each with a role: pods say which by label, SGLang is started so, and one engine may
    reach the other, which of models without roles none may."""
    apart = [
        {"name": "p", "engine": "sglang", "model": "org/qwen", "servedName": "org/qwen", "role": "prefill"},
        {"name": "d", "engine": "sglang", "model": "org/qwen", "servedName": "org/qwen", "role": "decode"},
        {"name": "v", "engine": "vllm", "model": "org/llama", "role": "both"},
        {"name": "other", "engine": "vllm", "model": "org/phi"},
    ]
    found = tools.template(*options(*apart), "--set", "config.disagg.kv_connector=sglang")
    pods = {name: named(found, "Deployment", name)["spec"]["template"] for name in ("p", "d", "v", "other")}
    roles = {name: pod["metadata"]["labels"].get("warmroute.io/role") for name, pod in pods.items()}
    assert roles == {"p": "prefill", "d": "decode", "v": "both", "other": None}
    words = {name: [w for w in pod["spec"]["containers"][0]["args"] if "disagg" in w] for name, pod in pods.items()}
    expected = {"p": ["--disaggregation-mode=prefill"], "d": ["--disaggregation-mode=decode"], "v": [], "other": []}
    assert words == expected
    for name in pods:
        rules = named(found, "NetworkPolicy", name)["spec"]["ingress"]
        peers = [rule for rule in rules if "ports" not in rule]
        assert len(peers) == (name != "other")
        assert ({"protocol": "TCP", "port": 8998} in rules[0]["ports"]) is (name != "other")


def test_every_node_of_a_group_comes_for_what_was_prefilled() -> None:
    """Workers of a group, which serve nobody, fetch blocks as their leader does; models without a role do not."""
    group = {"engine": "vllm", "model": "org/big", "servedName": "org/big", "kind": "LeaderWorkerSet"}
    models = [group | {"name": "p", "role": "prefill"}, group | {"name": "d", "role": "decode"}, MODELS[0]]
    found = tools.template(*options(*models), "--set", "config.disagg.kv_connector=nixl")
    assert tools.invalid([d for d in found if d["kind"] not in CUSTOM]) == []
    (rule,) = [r for r in named(found, "NetworkPolicy", "p")["spec"]["ingress"] if _by_expressions(r)]
    selector = rule["from"][0]["podSelector"]
    (expression,) = selector["matchExpressions"]
    pods = {name: made["metadata"]["labels"] for name, made in groups(found).items()}
    pods["sim"] = named(found, "Deployment", "sim")["spec"]["template"]["metadata"]["labels"]
    let_in = {
        name
        for name, labels in pods.items()
        if selector["matchLabels"].items() <= labels.items() and labels[expression["key"]] in expression["values"]
    }
    assert let_in == set(pods) - {"sim"}
    assert len(let_in) == 4


def _by_expressions(rule: dict[str, Any]) -> bool:
    return any("matchExpressions" in each.get("podSelector", {}) for each in rule["from"])


@pytest.mark.parametrize(
    ("split", "port"),
    [
        ({"kv_connector": "nixl"}, 0),
        ({"kv_connector": "mooncake"}, 8998),
        ({"kv_connector": "offloading", "port": 7000}, 7000),
    ],
)
def test_routers_reach_whoever_is_asked_for_blocks(split: dict[str, Any], port: int) -> None:
    """On the port of the handshake, or the one that is set, both out of their own pods and into the engines'."""
    ports = [8998, 5710, *([port] if port == 7_000 else [])]
    given = (f"networkPolicy.enginePorts={json.dumps([{'port': 8000}])}", f"config.disagg={json.dumps(split)}")
    words = [word for each in (*given, f"engines.networkPolicy.splitPorts={ports}") for word in ("--set-json", each)]
    found = tools.template(*options(MODELS[1] | {"role": "prefill"}), *words)
    engines, *_ = named(found, "NetworkPolicy", "warmroute")["spec"]["egress"]
    assert [each["port"] for each in engines["ports"]] == [8000, *([port] if port else [])]
    routers, *_ = named(found, "NetworkPolicy", "llama")["spec"]["ingress"]
    assert {each["port"] for each in routers["ports"]} >= set(ports)


def test_the_example_of_roles_is_a_fleet(tmp_path: Path) -> None:
    """Its routers split requests, its two Deployments serve one model and prefill or decode, and all that engines need
    for their handshake is there."""
    found = tools.template("--values", str(tools.CHART / "examples" / "engines" / "split.yaml"))
    assert tools.settings_of(found, tmp_path).disagg.kv_connector == "nixl"
    roles = {}
    for name in ("llama-prefill", "llama-decode"):
        pod = named(found, "Deployment", name)["spec"]["template"]
        (serving,) = pod["spec"]["containers"]
        words = [str(word) for word in (*serving.get("command", ()), *serving["args"])]
        assert "NixlConnector" in " ".join(words)
        assert "--served-model-name=llama" in words
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in {each["name"] for each in serving["env"]}
        roles[name] = pod["metadata"]["labels"]["warmroute.io/role"]
    assert roles == {"llama-prefill": "prefill", "llama-decode": "decode"}


def test_roles_that_make_no_sense_are_refused() -> None:
    """SGLang's servers of a role without their handshake would refuse every request, and a port that the engines'
    policies keep closed would let nobody prefill."""
    half = MODELS[2] | {"role": "decode"}
    assert "config.disagg.kv_connector: sglang is required for the role of 'qwen'" in refused(half)
    assert "config.disagg.kv_connector: a value for engine vllm is required for the role of 'llama'" in refused(
        MODELS[1] | {"role": "prefill"}
    )
    words = ("--set", "config.disagg.kv_connector=sglang", "--set", "config.disagg.port=9000")
    done = tools.helm("template", tools.RELEASE, tools.CHART, *options(half), *words)
    assert done.returncode != 0
    assert "engines.networkPolicy.splitPorts must include 9000" in " ".join(done.stderr.split())


def test_engines_that_nobody_gave_a_role_are_warned_of() -> None:
    """A handshake without a role is no mistake where other pods prefill; the notes say that these engines do not."""
    words = ("install", tools.RELEASE, tools.CHART, "--namespace", tools.NAMESPACE, "--dry-run=client")
    for role, warned in ((None, True), ("both", False)):
        model = MODELS[1] | ({"role": role} if role else {})
        done = tools.helm(*words, *options(model), "--set", "config.disagg.kv_connector=nixl")
        assert done.returncode == 0, done.stderr
        assert ("no entry of engines.models has a role" in done.stdout) is warned
    assert "has a role" not in tools.helm(*words, *options(MODELS[1])).stdout
