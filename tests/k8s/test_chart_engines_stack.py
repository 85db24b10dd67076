"""Engines of a release beside its routers: what their pods may do, who reaches them, when they scale, what routers know
of their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import router
from tests.k8s import tools
from tests.k8s.test_chart_engines import CUSTOM, IMAGE, MODELS, groups, named, options, refused
from tests.k8s.test_chart_pods import restricted

ALL = ("engines.monitor.enabled=true", "engines.keda.prometheus=http://prometheus:9090")
ON = [word for each in ALL for word in ("--set", each)]
MINUTES = 10


@pytest.fixture(scope="module")
def stack() -> list[tools.Document]:
    """The chart with an engine of each sort."""
    return tools.template(*options(*MODELS), *ON)


def engine_specs(found: list[tools.Document]) -> dict[str, Any]:
    """Pod specs of all engines, leaders and workers too, by the name of what makes them."""
    made = {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]
        for d in found
        if d["kind"] == "Deployment" and not d["metadata"]["name"].startswith("llm-warmroute")
    }
    return made | {name: each["spec"] for name, each in groups(found).items()}


def tokens_of(*words: str) -> tuple[list[str], dict[str, Any]]:
    """What routers have tokenizers from, and the router's container."""
    found = tools.template(*words)
    (container,) = named(found, "Deployment", "warmroute")["spec"]["template"]["spec"]["containers"]
    return yaml.safe_load(tools.settings_text(found)).get("tokens", {}).get("sources", []), container


# What pods may do


def test_pods_are_restricted_but_for_root(stack: list[tools.Document]) -> None:
    """Every pod of an engine meets the restricted Pod Security Standard, except that vLLM's and SGLang's own images run
    as root; simulated engines meet all of it."""
    specs = engine_specs(stack)
    assert len(specs) == 7
    for name, spec in specs.items():
        assert restricted(spec) == ([] if name == "llm-sim" else ["root"]), name
        (container,) = spec["containers"]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_an_image_that_does_not_run_as_root_is_restricted() -> None:
    """With the `securityContext` that the values name, pods of every engine meet the whole standard."""
    own = {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000}}
    for name, spec in engine_specs(tools.template(*options(*[each | own for each in MODELS]))).items():
        assert restricted(spec) == [], name
        assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_model_has_a_budget(stack: list[tools.Document]) -> None:
    """Of each model one pod at a time is evicted: its budget selects the pods that its policy selects, of a group
    leaders and workers; pods that are not ready hold no drain up."""
    budgets = {d["metadata"]["name"]: d["spec"] for d in stack if d["kind"] == "PodDisruptionBudget"}
    for model in (each["name"] for each in MODELS):
        budget = budgets[f"llm-{model}"]
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        assert budget["selector"] == named(stack, "NetworkPolicy", model)["spec"]["podSelector"]
        labels = [
            each["metadata"]["labels"] for name, each in groups(stack).items() if name.startswith(f"llm-{model}/")
        ]
        assert all(budget["selector"]["matchLabels"].items() <= each.items() for each in labels)
    off = tools.template(*options(*MODELS), "--set", "engines.podDisruptionBudget.enabled=false")
    assert [d["metadata"]["name"] for d in off if d["kind"] == "PodDisruptionBudget"] == ["llm-warmroute"]


# Who reaches them


@pytest.mark.parametrize("name", ["", "nameOverride=gateway", "fullnameOverride=front", "podLabels.team=llm"])
def test_routers_reach_engines_whatever_they_are_named(name: str) -> None:
    """The engines' policies let in the routers' pods under every name of the chart, and the routers' own policy lets
    them go to the engines' pods."""
    found = tools.template(*options(*MODELS), *(("--set", name) if name else ()))
    pods = [d["spec"]["template"] for d in found if d["kind"] == "Deployment"]
    (routers,) = (each for each in pods if each["spec"]["containers"][0]["name"] == "warmroute")
    policies = [d for d in found if d["kind"] == "NetworkPolicy" and d["spec"]["policyTypes"] == ["Ingress"]]
    assert len(policies) == len(MODELS)
    for policy in policies:
        peer = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert peer.items() <= routers["metadata"]["labels"].items()
        assert not any(peer.items() <= each["metadata"]["labels"].items() for each in pods if each is not routers)
    own = tools.only([d for d in found if d not in policies], "NetworkPolicy")
    (to,) = own["spec"]["egress"][0]["to"]
    assert to["podSelector"]["matchExpressions"] == [
        {"key": "warmroute/engine-of", "operator": "In", "values": [tools.RELEASE]}
    ]


def test_the_label_of_routers_is_the_charts_own() -> None:
    """Whoever would give routers another value of the label that engines let in by is told so."""
    words = (*options(*MODELS), "--set", "podLabels.warmroute/router-of=other")
    done = tools.helm("template", tools.RELEASE, tools.CHART, *words)
    assert "warmroute/router-of is reserved for the chart" in done.stderr


def test_engines_are_scraped_by_their_pods(stack: list[tools.Document]) -> None:
    """The PodMonitor has the structure of its definition, selects what serves, and asks a port that is there."""
    monitor = named(stack, "PodMonitor", "engines")
    assert tools.in_tools(tools.STRUCTURES, tools.CRDS, text=json.dumps([monitor])) == []
    for model in ("sim", "llama", "qwen"):
        template = named(stack, "Deployment", model)["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports


# When they scale


def said(name: str, values: str, **labels: str) -> dict[str, str]:
    """One series of Prometheus over the scene."""
    written = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{written}}}", "values": f"{values}x{MINUTES}"}


def test_each_model_scales_by_its_own_load(tmp_path: Path) -> None:
    """Of two models behind two routers each is scaled by what waits for it: the routers' queues are added up, the
    engine's own count is not counted twice, another model's load is none of it, and a model without a replica counts
    what is queued."""
    models = [MODELS[1] | {"name": name} for name in ("llama", "qwen", "none")]
    found = tools.template(*options(*models))
    triggers = {
        (model["name"], each["name"]): each["metadata"]["query"]
        for model in models
        for each in named(found, "ScaledObject", model["name"])["spec"]["triggers"]
    }
    scene = []
    for instance, queued, pending in (("a", 3, 0.5), ("b", 4, 0.25)):
        scene.append(said("warmroute_queued_requests", str(queued), instance=instance, model="llama", priority="high"))
        scene.append(said("warmroute_queued_requests", "9", instance=instance, model="none", priority="normal"))
        for number, model, waiting in ((1, "llama", 5), (2, "llama", 2), (3, "qwen", 50)):
            of = {"instance": instance, "replica": f"http://10.0.0.{number}:8000"}
            scene.append(said("warmroute_replica_info", "1", **of, model=model, pod=f"pod-{number}"))
            scene.append(said("warmroute_replica_waiting", str(waiting), **of))
            scene.append(said("warmroute_replica_pending_prefill_seconds", str(pending * number), **of))
    expected = {
        ("llama", "waiting"): 3 + 4 + 5 + 2,
        ("llama", "prefill"): 0.75 * (1 + 2),
        ("qwen", "waiting"): 50,
        ("qwen", "prefill"): 0.75 * 3,
        ("none", "waiting"): 18,
        ("none", "prefill"): 0,
    }
    assert triggers.keys() == expected.keys()
    checks = [
        {"expr": triggers[key], "eval_time": f"{MINUTES}m", "exp_samples": [{"labels": "{}", "value": value}]}
        for key, value in expected.items()
    ]
    file = tmp_path / "scaling.yaml"
    tests = [{"interval": "1m", "input_series": scene, "promql_expr_test": checks}]
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    done = tools.run(["promtool", "test", "rules", file])
    assert done.returncode == 0, done.stdout + done.stderr


# What routers know of their tokens


def test_tokenizers_come_with_the_models() -> None:
    """Routers have the tokenizer of each model that is on the hub, under the name that clients use, with its token and
    443 outwards, and what `tokenizer` names; none for weights of a claim, for simulated engines and where it is off."""
    big = MODELS[3] | {"servedName": "big", "tokenizer": "org/big@abc123"}
    folder = MODELS[1] | {"name": "local", "tokenizer": "/tokenizers/llama"}
    sources, container = tokens_of(*options(*MODELS[:3], big, folder, MODELS[4] | {"tokenizer": ""}))
    assert sources == ["org/qwen=org/qwen", "big=org/big@abc123", "local=/tokenizers/llama"]
    (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for model, opened in ((MODELS[2], True), (MODELS[2] | {"tokenizer": ""}, False), (folder, False)):
        policy = named(tools.template(*options(model)), "NetworkPolicy", "warmroute")["spec"]
        assert ({"ports": [{"port": 443, "protocol": "TCP"}]} in policy["egress"]) is opened
    sources, container = tokens_of(*options(MODELS[0], MODELS[1]))
    assert sources == []
    assert "env" not in container


def test_tokenizers_that_are_given_go_before() -> None:
    """A source for the model, or one for all, keeps out the model's own, and a Secret that is named its token."""
    qwen = options(MODELS[2])
    mine = ("--set", "tokenizers[0].model=org/qwen,tokenizers[0].path=/tokenizers/qwen")
    assert tokens_of(*qwen, *mine)[0] == ["org/qwen=/tokenizers/qwen"]
    assert tokens_of(*qwen, "--set", "config.tokens.sources={/tokenizers/all}")[0] == ["/tokenizers/all"]
    other = tokens_of(*qwen, "--set", "config.tokens.sources={llama=/t},huggingFace.existingSecret=mine")
    assert other[0] == ["llama=/t", "org/qwen=org/qwen"]
    assert [each["valueFrom"]["secretKeyRef"]["name"] for each in other[1]["env"] if each["name"] == "HF_TOKEN"] == [
        "mine"
    ]


# One chart


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("config.discovery.source=dns", "engines.models require source kubernetes, not dns"),
        ("config.discovery.namespaces={other}", "config.discovery.namespaces must include serving"),
    ],
)
def test_engines_that_nobody_would_find_are_refused(words: str, said: str) -> None:
    """Discovery that does not look where the release's own engines run is told before anything is installed."""
    done = tools.helm("template", tools.RELEASE, tools.CHART, "-n", tools.NAMESPACE, *options(*MODELS), "--set", words)
    assert done.returncode != 0
    assert said in done.stderr
    assert tools.template(*options(*MODELS), "--set", "config.discovery.namespaces={other,serving}")


def test_the_notes_ask_a_model_that_is_there() -> None:
    """The command that is shown after an installation asks the first of the release's own models by its served name."""
    done = tools.helm("install", tools.RELEASE, tools.CHART, "--dry-run=client", *options(MODELS[2], MODELS[0]))
    assert '-d \'{"model": "org/qwen", "messages"' in done.stdout


def test_both_helms_render_the_same(stack: list[tools.Document]) -> None:
    """Helm as a library and as a program, of two versions, make equal objects of routers and engines."""
    engines = {"enabled": True, "models": MODELS, "monitor": {"enabled": True}}
    engines |= {"keda": {"prometheus": "http://prometheus:9090"}}
    values = [{"image": {"repository": IMAGE}, "engines": engines}]
    (files,) = tools.in_tools(tools.LIBRARY, tools.CHART, tools.RELEASE, tools.NAMESPACE, text=json.dumps(values))
    texts = (text for path, text in files.items() if path.endswith(".yaml"))
    found = [document for text in texts for document in tools.documents(text)]
    assert tools.by_name(found) == tools.by_name(stack)
    assert {d["kind"] for d in found} >= CUSTOM


def test_versions_of_both_charts_are_in_step() -> None:
    """The engines' chart has the version of the chart around it, which asks for that very one."""
    about = yaml.safe_load((tools.CHART / "Chart.yaml").read_text())
    engines = yaml.safe_load((tools.CHART / "charts" / "engines" / "Chart.yaml").read_text())
    assert engines["version"] == engines["appVersion"] == about["version"] == router.__version__
    assert about["dependencies"] == [{"name": "engines", "version": router.__version__, "condition": "engines.enabled"}]
    assert engines["kubeVersion"] == about["kubeVersion"]


# Caches of models


@pytest.mark.parametrize("engine", [1, 2, 3])
def test_a_model_of_the_hub_is_kept(engine: int) -> None:
    """With `cache` the hub's files and compiled graphs are in a volume that all replicas share: a claim of the release
    by its size, or one that is there. Neither and both are refused."""
    model = MODELS[engine]
    for cache, claim in (
        ({"size": "10Gi", "storageClass": "shared"}, f"llm-{model['name']}-cache"),
        ({"claim": "mine"}, "mine"),
    ):
        found = tools.template(*options(model | {"cache": cache}))
        for spec in engine_specs(found).values():
            (volume,) = (each for each in spec["volumes"] if each["name"] == "cache")
            assert volume["persistentVolumeClaim"] == {"claimName": claim}
            (container,) = spec["containers"]
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == "cache")
            kept = [each["value"] for each in container["env"] if each["name"] in {"HF_HOME", "VLLM_CACHE_ROOT"}]
            assert len(kept) == (1 if model["engine"] == "sglang" else 2)
            assert all(path.startswith(mount["mountPath"] + "/") for path in kept)
        claims = [each for each in found if each["kind"] == "PersistentVolumeClaim"]
        assert tools.invalid(claims) == []
        assert [(each["metadata"]["name"], each["spec"]["accessModes"]) for each in claims] == (
            [(claim, ["ReadWriteMany"])] if "size" in cache else []
        )
    assert "cache of 'llama' requires either claim or size" in refused(MODELS[1] | {"cache": {"storageClass": "x"}})
    assert "cache of 'llama' requires" in refused(MODELS[1] | {"cache": {"claim": "mine", "size": "1Gi"}})
